"""Where the GPU tier's tests run: on an emulator everywhere, on CUDA where there is a device."""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.gpu.emulator import EmulatedDevice


@dataclass
class Place:
    """A device, and the way NumPy arrays get there and back."""

    device: Any
    kind: str

    def put(self, array: np.ndarray) -> Any:
        if self.kind == "pageable":
            return self.device.upload(array)
        import cupy

        return cupy.asarray(np.ascontiguousarray(array))

    def get(self, array: Any) -> np.ndarray:
        if self.kind == "pageable":
            self.device.finish()
            return np.asarray(array)
        return array if isinstance(array, np.ndarray) else array.get()

    def noise(self, *shape: int) -> Any:
        return self.put(np.random.default_rng(0).integers(0, 256, shape, np.uint8))


@functools.cache
def cuda_device() -> Any:
    from tierstore._tiers.gpu.device import CudaDevice

    return CudaDevice(0)


@pytest.fixture(
    params=[
        "pageable",
        pytest.param("pinned", marks=pytest.mark.gpu),
        pytest.param("managed", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    if request.param != "pageable":
        return Place(cuda_device(), request.param)
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    return Place(EmulatedDevice(seed=sum(map(ord, request.node.name))), "pageable")
