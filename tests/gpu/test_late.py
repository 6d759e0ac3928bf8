"""Random work and programs on devices whose streams run at once, late, or in between."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import inside
from tests.gpu.conftest import Place
from tests.gpu.emulator import EmulatedDevice
from tests.gpu.late import LateDevice
from tests.gpu.model import Twin
from tests.gpu.programs import ROWS, Program
from tierstore._tiers.gpu import lease as gpu_lease
from tierstore._tiers.gpu import tier as gpu_tier
from tierstore.policy import lfu

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")

DEVICES: dict[str, Callable[[int], EmulatedDevice]] = {
    "at once": lambda seed: EmulatedDevice(seed=seed),
    "late": lambda seed: LateDevice(seed=seed),
    "beside late": lambda seed: LateDevice(late={LateDevice.beside}, seed=seed),
    "some haste": lambda seed: LateDevice(haste=0.4, seed=seed),
}
TIERS = {"direct": (ROWS, 12), "cache": (25, 20), "small cache": (9, 4)}
devices = pytest.mark.parametrize("device", DEVICES)


@devices
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
@pytest.mark.nightly("1", "2")
def test_random_programs(tmp_path: Path, device: str, tiers: str, seed: int) -> None:
    host, gpu = TIERS[tiers]
    Program(tmp_path / "s.tier", DEVICES[device](seed), seed, host=host, gpu=gpu).work(50)


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("seed", range(8))
def test_random_work_on_late_streams(seed: int) -> None:
    rng = np.random.default_rng(seed)
    device = LateDevice(haste=[0.0, 0.5][seed // 2 % 2], seed=seed)
    with Twin(
        Place(device, "pageable"),
        rows=int(rng.choice([5, 100, 300])),
        record_bytes=int(rng.choice([16, 48, 512])),
        slots=int(rng.choice([2, 10, 60])),
        host_slots=int(rng.choice([7, 50])) if seed % 2 else 300,
        chunk=int(rng.integers(1, 9)) if seed % 3 == 0 else None,
        policy=lfu(3) if seed % 4 == 3 else None,
        seed=seed,
    ) as twin:
        twin.work(40, sizes=(0, 1, 3, 33), discards=True)
        twin.check()


@pytest.mark.variants(1, 3)
@pytest.mark.parametrize(
    ("where", "what"),
    [
        (gpu_lease.GpuLease, "check"),
        (gpu_lease.GpuLease, "_write_through"),
        (gpu_lease.GpuLease, "_begin"),
        (gpu_tier.GpuTier, "await_fetches"),
    ],
    ids=["dead leases write", "copies stay behind", "copies are stale", "nothing waits"],
)
def test_random_programs_find_what_was_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: object, what: str
) -> None:
    monkeypatch.setattr(where, what, lambda *_, **__: None)
    for seed in range(20, 60):  # what needs most calls to fall together is found by the first
        late = {LateDevice.beside} if seed % 2 else None
        device = LateDevice(late=late, seed=seed)
        program = Program(tmp_path / f"{seed}.tier", device, seed, host=25, gpu=20)
        try:
            program.work(60)
        except (AssertionError, pytest.fail.Exception):
            return
        finally:
            if not inside.door(program.store).closed:
                program.store.rollback()
                program.store.close()
    pytest.fail("40 programs found nothing")
