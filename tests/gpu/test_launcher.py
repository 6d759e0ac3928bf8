"""The launcher picks grids, checks arguments, and compiles a kernel once."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.gpu.abi import STEP
from tests.gpu.emulator import EmulatedDevice
from tierstore import Budget, TableSpec
from tierstore._tiers.gpu.abi import TIER, Arguments, BatchArgument, BatchArguments, TierArgument
from tierstore._tiers.gpu.launcher import OWN, Kernel, Launcher, as_large_as_the_work, strided
from tierstore.errors import DeviceError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")


class Noting(EmulatedDevice):
    """Notes what is loaded and how many blocks a launch has, and runs nothing."""

    def __init__(self) -> None:
        super().__init__(processors=5)
        self.loaded: list[str] = []
        self.blocks: list[int] = []

    def load(self, source: str, name: str, macros: Any, *, cooperative: bool = False) -> Any:
        self.loaded.append(name)
        return lambda blocks, arguments, stream: self.blocks.append(blocks), 40


def test_every_kernel_of_the_tier_has_a_grid() -> None:
    own = [kernel for kernel in vars(OWN).values() if isinstance(kernel, Kernel)]
    assert {kernel.name for kernel in own} == set(TIER.kernels)
    together = {kernel.name for kernel in own if kernel.cooperative}
    assert together == {"promote", "complete", "abandon"}, "those that meet at grid_barrier"


@pytest.mark.parametrize(
    ("kernel", "items", "blocks"),
    [
        (OWN.PROBE, 257, 2),
        (OWN.PROBE, 256_000, 1000),
        (OWN.FENCE, 1, 1),
        (OWN.PROMOTE, 1, 40),
        (OWN.PROMOTE_BESIDE_COPIES, 1, 35),
        (OWN.SWAP_CHUNK, 1, 40),
        (OWN.MOVE, 1, 32),
        (OWN.RELEASE, 33, 2),
        (OWN.RELEASE, 100_000, 40),
        (OWN.RELEASE, 0, 1),
    ],
)
def test_grids(kernel: Kernel, items: int, blocks: int) -> None:
    device = Noting()
    arguments = BatchArguments(TierArgument(), BatchArgument())
    Launcher(device).start(kernel, arguments, 0, items)
    assert device.blocks == [blocks]


def test_no_grid_is_larger_than_cuda_allows() -> None:
    assert as_large_as_the_work(2**45, 40, 5) == 2**31 - 1
    assert strided(2**45, 40, 5) == 40


def test_a_kernel_is_loaded_once() -> None:
    device = Noting()
    launcher = Launcher(device)
    arguments = Arguments(STEP.structure("Rows")(), STEP.structure("Step")())
    kernel = Kernel(STEP, "step", macros={"VECTOR": 1})
    for _ in range(3):
        launcher.launch(kernel, arguments, 5)
    assert device.loaded.count("step") == 1
    assert device.loaded.count("probe") == 1


def test_arguments_of_other_structures_are_refused() -> None:
    launcher = Launcher(Noting())
    arguments = Arguments(STEP.structure("Rows")(), STEP.structure("Step")())
    with pytest.raises(
        TypeError, match=r"release takes \('Tier', 'Batch'\), not \('Rows', 'Step'\)"
    ):
        launcher.launch(OWN.RELEASE, arguments, 5)


def test_a_kernel_that_the_source_lacks_is_refused() -> None:
    with pytest.raises(KeyError):
        Kernel(TIER, "no_such_kernel")


def test_a_lease_on_the_host_has_no_device(tmp_path: Any) -> None:
    path = tmp_path / "s.tier"
    tierstore.create(path, {"t": TableSpec(50, 4)}).close()
    kernel = Kernel(STEP, "step")
    with tierstore.open(path, "r+", budget=Budget(host_rows=20)) as store:
        lease = store["t"].lease(np.arange(5))
        assert lease.device is None
        with pytest.raises(DeviceError, match="on the host"):
            lease.launch(kernel, STEP.structure("Step")(), 5)
    device = EmulatedDevice()
    with tierstore.open(path, "r+", budget=Budget(gpu_rows=20), device=device) as store:
        assert store["t"].lease(np.arange(5)).device is device
