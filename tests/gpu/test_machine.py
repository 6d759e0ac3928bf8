"""The state machine of stores, with tiers on a GPU of one slot and more."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.durability.test_machine import StoreMachine
from tests.gpu.conftest import cuda_device
from tests.gpu.emulator import EmulatedDevice
from tests.tries import tries


class OnAnEmulator(StoreMachine):
    @property
    def device(self) -> Any:  # type: ignore[override]
        return EmulatedDevice()


class OnAGpu(StoreMachine):
    @property
    def device(self) -> Any:  # type: ignore[override]
        return cuda_device()


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
class TestEmulated(OnAnEmulator.TestCase):  # type: ignore[misc]
    settings = tries(4, stateful_step_count=8)


@pytest.mark.gpu
class TestOnAGpu(OnAGpu.TestCase):  # type: ignore[misc]
    settings = tries(15, stateful_step_count=20)
