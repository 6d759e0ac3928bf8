"""What may go wrong with a GPU and its memory: rows 56 to 63 of the faults to try."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.gpu.conftest import Place
from tests.gpu.emulator import EmulatedDevice
from tierstore import Budget, TableSpec
from tierstore.errors import (
    CapacityError,
    ClosedError,
    DeviceError,
    DeviceLostError,
    MissingExtraError,
)

torch = pytest.importorskip("torch")

ROWS, DIM = 2000, 16
SPEC = {"t": TableSpec(ROWS, DIM, init=tierstore.normal(seed=1))}
SMALL = Budget(host_rows=300, gpu_rows=100)


class OutOfMemoryError(Exception):
    """Named as CuPy's and torch's."""


class CUDARuntimeError(Exception):
    """Named as CuPy's."""


class Failing(EmulatedDevice):
    """An emulated device that refuses what it is told to."""

    refused: frozenset[str] = frozenset()

    def _refuse(self, what: str, error: Exception) -> None:
        if what in self.refused:
            raise error

    def allocate(self, size: int, dtype: Any) -> Any:
        self._refuse("memory", OutOfMemoryError(f"{size} are too many"))
        return super().allocate(size, dtype)

    def stage(self, nbytes: int) -> Any:
        self._refuse("pinned", CapacityError(f"cannot pin {nbytes} bytes of host memory"))
        return super().stage(nbytes)

    def enter(self) -> int:
        self._refuse("entry", CUDARuntimeError("an illegal memory access was encountered"))
        return super().enter()

    def leave(self, before: int) -> None:
        self._refuse("return", CUDARuntimeError("an illegal memory access was encountered"))
        super().leave(before)

    def synchronize(self, stream: int) -> None:
        self._refuse("everything", CUDARuntimeError("an illegal memory access was encountered"))
        super().synchronize(stream)


@pytest.fixture
def failing(place: Place) -> Failing:
    if place.kind != "pageable":
        pytest.skip("a real device fails in tests of its own")
    return Failing()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tierstore.create(tmp_path / "s.tier", SPEC).close()
    return tmp_path / "s.tier"


def rows_of(path: Path) -> np.ndarray:
    with tierstore.open(path) as store:
        return store["t"].read(np.arange(ROWS)).copy()


def as_torch(array: np.ndarray, place: Place) -> Any:
    return torch.from_numpy(array).to(place.device.torch_name)


# -- 56: no GPU


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
@pytest.mark.fault(56)
def test_the_command_line_needs_no_gpu(path: Path, tmp_path: Path, command: str) -> None:
    program = (
        "import sys; from tierstore_cli.main import cli; sys.argv[0] = 'tierstore'\n"
        "try: cli(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'cupy', 'torch'} & set(sys.modules)"
    )
    given = [command, str(path), *([str(tmp_path / "out.npy")] if command == "export" else [])]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program, *given], capture_output=True, text=True, env=hidden
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.fault(56)
def test_asking_for_a_gpu_that_is_not_there_is_an_error(path: Path) -> None:
    program = (
        "import sys, tierstore\n"
        "with tierstore.open(sys.argv[1]) as store: store['t'].read([1])\n"
        "try: tierstore.open(sys.argv[1], device='cuda')\n"
        "except tierstore.errors.TierStoreError as error: print(type(error).__name__)"
    )
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, env=hidden
    )
    expected = {DeviceError.__name__, MissingExtraError.__name__}
    assert done.stdout.strip() in expected, done.stderr


# -- 57: no memory left on the GPU


@pytest.mark.fault(57)
def test_no_memory_for_the_tier(path: Path, failing: Failing) -> None:
    failing.refused = frozenset({"memory"})
    with pytest.raises(CapacityError, match="no room for 100 slots"):
        tierstore.open(path, "r+", budget=SMALL, device=failing)
    failing.refused = frozenset()
    with tierstore.open(path, "r+", budget=SMALL, device=failing) as store:
        np.testing.assert_array_equal(store["t"].read(np.arange(ROWS)), rows_of(path))


@pytest.mark.fault(57)
def test_no_memory_for_a_batch(path: Path, failing: Failing) -> None:
    before = rows_of(path)
    with tierstore.open(path, "r+", budget=SMALL, device=failing) as store:
        table = store["t"]
        table.write([3, 4], before[[3, 4]] + 1)
        failing.refused = frozenset({"memory"})
        ids = np.random.default_rng(0).integers(0, ROWS, 5000)
        for call in (table.read, table.lease, lambda ids: table.write(ids, before[ids])):
            with pytest.raises(CapacityError, match="no memory left"):
                call(ids)
        failing.refused = frozenset()
        before[[3, 4]] += 1
        np.testing.assert_array_equal(table.read(ids), before[ids])
        store.commit()
    np.testing.assert_array_equal(rows_of(path), before)


@pytest.mark.gpu
@pytest.mark.fault(57)
def test_a_gpu_without_room(path: Path) -> None:
    import cupy

    before = rows_of(path)
    with tierstore.open(path, "r+", budget=SMALL, device="cuda") as store:
        store["t"].write(torch.tensor([3, 4], device="cuda"), torch.ones(2, DIM, device="cuda"))
        # More than the card has: memory held to fill it would be missed by tests beside this one.
        slots = cupy.cuda.runtime.memGetInfo()[1] // 4096 + 1
        wide = {"w": TableSpec(slots, 1024, sparse=True)}
        budget = Budget(host_rows=300, gpu_rows=slots)
        with pytest.raises(CapacityError, match=r"no room|cannot be placed"):
            tierstore.create(path.parent / "wide.tier", wide, budget=budget, device="cuda").close()
        before[[3, 4]] = 1
        np.testing.assert_array_equal(store["t"].read(np.arange(ROWS)), before)
        store.commit()
    np.testing.assert_array_equal(rows_of(path), before)


# -- 58: no pinned memory


@pytest.mark.fault(58)
def test_no_pinned_memory_for_the_tier(path: Path, failing: Failing) -> None:
    failing.refused = frozenset({"pinned"})
    with pytest.raises(CapacityError, match="cannot pin"):
        tierstore.open(path, "r+", budget=SMALL, device=failing)
    failing.refused = frozenset()
    with tierstore.open(path, "r+", budget=SMALL, device=failing) as store:
        np.testing.assert_array_equal(store["t"].read(np.arange(ROWS)), rows_of(path))


@pytest.mark.gpu
@pytest.mark.parametrize("call", ["hostRegister", "mallocManaged"])
@pytest.mark.fault(58)
def test_the_driver_gives_no_host_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    from cupy.cuda import runtime

    def refuse(*_: Any) -> None:
        raise runtime.CUDARuntimeError(2)

    monkeypatch.setattr(runtime, call, refuse)
    with pytest.raises(CapacityError, match="bytes"):
        tierstore.open(path, "r+", budget=SMALL, device="cuda")
    monkeypatch.undo()
    with tierstore.open(path, "r+", budget=SMALL, device="cuda") as store:
        np.testing.assert_array_equal(store["t"].read(np.arange(ROWS)), rows_of(path))


# -- 59: the device is late


@pytest.mark.gpu
@pytest.mark.parametrize("host_rows", [300, ROWS])
@pytest.mark.fault(59)
def test_nobody_takes_what_has_not_arrived(path: Path, host_rows: int) -> None:
    """Before every call the stream is busy for some milliseconds."""
    import cupy

    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long cycles) {'
        " const long long start = clock64(); while (clock64() - start < cycles); }",
        "spin",
    )
    turns = [cupy.cuda.Stream.null, *(cupy.cuda.Stream(non_blocking=True) for _ in range(2))]
    rng = np.random.default_rng(2)
    expected = rows_of(path)
    budget = Budget(host_rows=host_rows, gpu_rows=100)
    with tierstore.open(path, "r+", budget=budget, device="cuda") as store:
        table = store["t"]
        for step in range(60):
            ids = rng.permutation(ROWS)[: int(rng.choice([5, 90, 400]))]
            with turns[step % 3]:
                handle = cupy.cuda.get_current_stream().ptr
                default = torch.cuda.default_stream()
                current = torch.cuda.ExternalStream(handle) if handle else default
                with torch.cuda.stream(current):
                    spin((1,), (1,), (np.int64(5_000_000),))
                    rows = rng.standard_normal((ids.size, DIM)).astype(np.float32)
                    if step % 2:
                        table.write(torch.from_numpy(ids).cuda(), torch.from_numpy(rows).cuda())
                    else:
                        table.write(ids, rows)
                    expected[ids] = rows
                    spin((1,), (1,), (np.int64(5_000_000),))
                    asked = rng.integers(0, ROWS, 300)
                    np.testing.assert_array_equal(table.read(asked), expected[asked])
                    table.prefetch(rng.integers(0, ROWS, 30))
        store.commit()
    np.testing.assert_array_equal(rows_of(path), expected)


# -- 60: a device that is lost


@pytest.mark.fault(60)
def test_a_lost_device_commits_nothing(path: Path, failing: Failing) -> None:
    before = rows_of(path)
    store = tierstore.open(path, "r+", budget=SMALL, device=failing)
    store["t"].write(np.arange(50), before[:50] + 1)
    failing.refused = frozenset({"everything"})
    with pytest.raises(DeviceLostError, match=r"'t'.* the last commit is intact"):
        store.commit()
    with pytest.raises(ClosedError):
        store["t"].read([1])
    store.close()
    np.testing.assert_array_equal(rows_of(path), before)


@pytest.mark.fault(60)
@pytest.mark.parametrize("refused", ["entry", "return"])
def test_a_device_lost_between_calls_holds_nobody_up(
    path: Path, failing: Failing, refused: str
) -> None:
    store = tierstore.open(path, "r+", budget=SMALL, device=failing)
    store["t"].read([1])
    failing.refused = frozenset({refused})
    with pytest.raises(DeviceLostError, match=r"'t'"):
        store["t"].read([1])
    with ThreadPoolExecutor(1) as pool, pytest.raises(ClosedError):
        pool.submit(store["t"].read, [1]).result(timeout=60)
    failing.refused = frozenset()
    store.close()


LOST = """
import sys, cupy, numpy as np, tierstore
budget = tierstore.Budget(host_rows=300, gpu_rows=100)
store = tierstore.open(sys.argv[1], "r+", budget=budget, device="cuda")
store["t"].write(np.arange(50), np.ones((50, 16), np.float32))
stray = cupy.RawKernel('extern "C" __global__ void stray(int *p) { p[0] = 1; }', "stray")
stray((1,), (1,), (np.uint64(8),))
try:
    store.commit()
except tierstore.errors.DeviceLostError as error:
    print("lost:", error)
try:
    store.commit()
except tierstore.errors.ClosedError as error:
    print("closed:", error)
store.close()
"""


@pytest.mark.gpu
@pytest.mark.fault(60)
def test_a_stray_kernel_and_then_a_commit(path: Path) -> None:
    before = rows_of(path)
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", LOST, str(path)], capture_output=True, text=True, env=paths
    )
    assert "lost:" in done.stdout, done.stderr
    assert "the last commit is intact" in done.stdout
    assert "closed:" in done.stdout
    np.testing.assert_array_equal(rows_of(path), before)


# -- 61: several GPUs


@pytest.fixture
def two_gpus() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")


@pytest.mark.gpu
@pytest.mark.fault(61)
def test_a_gpu_that_there_is_not(path: Path) -> None:
    with pytest.raises(DeviceError, match="no CUDA device 99"):
        tierstore.open(path, device="cuda:99")


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("host_rows", [300, ROWS])
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.fault(61)
def test_two_tables_on_two_gpus(tmp_path: Path, host_rows: int, current: int) -> None:
    """In one process, whichever device is the current one."""
    rng = np.random.default_rng(current)
    budget = Budget(host_rows=host_rows, gpu_rows=100)
    paths = [tmp_path / f"{number}.tier" for number in range(2)]
    expected = []
    for path in paths:
        tierstore.create(path, SPEC).close()
        expected.append(rows_of(path))
    stores = [
        tierstore.open(path, "r+", budget=budget, device=f"cuda:{number}")
        for number, path in enumerate(paths)
    ]
    with torch.cuda.device(current):
        for _ in range(40):
            for number, store in enumerate(stores):
                table, here = store["t"], f"cuda:{number}"
                ids = rng.integers(0, ROWS, 150)
                on_device = torch.from_numpy(ids).to(here)
                found = table.read(on_device)
                assert str(found.device) == here
                np.testing.assert_array_equal(found.cpu().numpy(), expected[number][ids])
                with table.lease(on_device) as lease:
                    lease.write("weight", lease.read("weight") * 2)
                expected[number][np.unique(ids)] *= 2
                table.prefetch(ids[:20])
                np.testing.assert_array_equal(table.read(ids), expected[number][ids])
                with pytest.raises(DeviceError, match="move them"):
                    table.read(on_device.to(f"cuda:{1 - number}"))
    for number, (path, store) in enumerate(zip(paths, stores, strict=True)):
        store.commit()
        store.close()
        np.testing.assert_array_equal(rows_of(path), expected[number])


# -- 62: CUDA graphs


@pytest.mark.gpu
@pytest.mark.fault(62)
def test_a_graph_cannot_hold_a_batch(path: Path) -> None:
    """Replayed, it would read what lay in the slots when it was captured."""
    with tierstore.open(path, "r+", budget=SMALL, device="cuda") as store:
        table, ids = store["t"], torch.arange(10, device="cuda")
        expected = table.read(ids)
        graph = torch.cuda.CUDAGraph()
        out = torch.zeros(1, device="cuda")
        with torch.cuda.graph(graph):
            out += 1
            with pytest.raises(DeviceError, match="captured"):
                table.read(ids)
            with pytest.raises(DeviceError, match="captured"):
                table.lease(ids)
        assert torch.equal(table.read(ids), expected)


# -- 63: the end without a commit


@pytest.mark.fault(63)
def test_rows_that_only_the_gpu_has_are_counted(path: Path, place: Place) -> None:
    before = rows_of(path)
    store = tierstore.open(path, "r+", budget=SMALL, device=place.device)
    store["t"].write(as_torch(np.arange(50), place), as_torch(before[:50] + 1, place))
    with pytest.warns(UserWarning, match="50 uncommitted rows"):
        store.close()
    np.testing.assert_array_equal(rows_of(path), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tierstore.open(path, "r+", budget=SMALL, device=place.device).close()
