"""Reads in CUDA graphs: captured once, replayed with other ids, faults told once."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.gpu.conftest import cuda_device
from tests.gpu.emulator import EmulatedDevice
from tierstore import Budget, Field, Scale, TableSpec
from tierstore._table.split import _Choice, _Move
from tierstore._table.values import Scales, _Scaled
from tierstore._tiers.gpu.abi import BatchArgument, TierArgument
from tierstore.errors import (
    DeviceError,
    InvalidInputError,
    InvalidTypeError,
    NotPrefetchedError,
    RowIndexError,
)

torch = pytest.importorskip("torch")

from tierstore.nn import FrozenEmbedding  # noqa: E402

ROWS, DIM = 90, 8
ARGUMENTS = {"unscale": (_Scaled, Scales), "spread": (_Move, _Choice)}
FIELDS = {
    "weight": Field(DIM, "float32", tierstore.normal(seed=3)),
    "half": Field(5, "bfloat16", tierstore.normal(seed=4)),
}


class CapturingDevice(EmulatedDevice):
    """Records launches, with copies of their arguments as a driver makes them, and runs them."""

    def __init__(self) -> None:
        super().__init__(seed=5)
        self.graph: list[Callable[[], None]] | None = None

    def capturing(self, stream: int) -> bool:
        return self.graph is not None

    def allocate(self, size: int, dtype: Any) -> Any:
        assert self.graph is None, "a capture allocates nothing"
        return super().allocate(size, dtype)

    def synchronize(self, stream: int) -> None:
        assert self.graph is None, "a capture waits for nothing"
        super().synchronize(stream)

    def record(self, event: Any, stream: int) -> None:
        assert self.graph is None, "a capture holds no marker that others follow"

    def follow(self, stream: int, event: Any) -> None:
        assert self.graph is None, "a capture follows no marker outside of it"

    def _loaded(self, *given: Any, **how: bool) -> Any:
        kernel, blocks = super()._loaded(*given, **how)

        def launch(blocks: int, arguments: int, stream: int) -> None:
            if self.graph is None:
                kernel(blocks, arguments, stream)
                return
            pointers = (ctypes.c_void_p * 2).from_address(arguments)
            kinds = ARGUMENTS.get(given[1], (TierArgument, BatchArgument))
            copies = [
                ctypes.create_string_buffer(ctypes.string_at(pointer, ctypes.sizeof(kind)))
                for pointer, kind in zip(pointers, kinds, strict=True)
            ]
            copied = (ctypes.c_void_p * 2)(*map(ctypes.addressof, copies))

            def run(_kept: Any = copies) -> None:
                kernel(blocks, ctypes.addressof(copied), stream)

            self.graph.append(run)

        return launch, blocks


@dataclass
class Place:
    """A device on which a function can be captured; `capture` returns what replays it."""

    device: Any
    torch: str
    stores: list[Any] = field(default_factory=list)

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        if isinstance(self.device, CapturingDevice):
            self.device.graph, pool, empty = [], [], torch.empty

            def from_pool(*given: Any, **options: Any) -> Any:
                pool.append(empty(*given, **options))
                return pool[-1]

            torch.empty = from_pool
            try:
                work()
            finally:
                made, self.device.graph = self.device.graph, None
                torch.empty = empty

            def replay(_pool: Any = pool) -> None:
                for launch in made:
                    launch()

            return replay
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()

        def replay_there() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return replay_there

    def ids(self, *rows: int) -> Any:
        return torch.tensor(rows, device=self.torch)

    def out(self, count: int, dim: int = DIM, dtype: Any = None) -> Any:
        return torch.zeros(count, dim, device=self.torch, dtype=dtype or torch.float32)

    def store(self, folder: Path, tables: int = 1, **budget: int) -> Any:
        specs = {f"t{number}": TableSpec(ROWS, fields=FIELDS) for number in range(tables)}
        path = folder / "s.tier"
        tierstore.create(path, specs).close()
        store = tierstore.open(path, "r+", device=self.device, budget=Budget(**budget))
        self.stores.append(store)
        return store


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "cuda":
        made = Place(cuda_device(), "cuda:0")
    else:
        if shutil.which("g++") is None:
            pytest.skip("the emulator needs g++")
        made = Place(CapturingDevice(), "cpu")
    yield made
    for store in made.stores:
        if not inside.door(store).closed:
            store.rollback()
            store.close()


def rows_of(table: Any, ids: Any, name: str = "weight") -> Any:
    return table.read(ids.cpu().numpy(), name)


@pytest.mark.parametrize("gpu", [1, 7, ROWS])
def test_replays_read_the_ids_that_are_there_then(tmp_path: Path, place: Place, gpu: int) -> None:
    table = place.store(tmp_path, host_rows=ROWS, gpu_rows=gpu)["t0"]
    expected = {name: np.concatenate(list(table.scan(name))) for name in FIELDS}
    ids, out, halves = place.ids(*range(20)), place.out(20), place.out(20, 5, torch.bfloat16)
    table.read_into(ids, out)
    np.testing.assert_array_equal(out.cpu().numpy(), expected["weight"][:20])

    def work() -> None:
        table.read_into(ids, out)
        table.read_into(ids, halves, "half")

    replay = place.capture(work)
    rng = np.random.default_rng(1)
    for _ in range(5):
        drawn = rng.integers(0, ROWS, 20)
        ids.copy_(torch.from_numpy(drawn))
        replay()
        np.testing.assert_array_equal(out.cpu().numpy(), expected["weight"][drawn])
        np.testing.assert_array_equal(halves.float().cpu().numpy(), expected["half"][drawn])
        table.adapt()
        table.read(torch.from_numpy(rng.integers(0, ROWS, 9)).to(place.torch))


def test_replays_see_what_was_written(tmp_path: Path, place: Place) -> None:
    store = place.store(tmp_path, tables=2, host_rows=2 * ROWS, gpu_rows=8)
    table = store["t1"]
    before = np.concatenate(list(table.scan()))
    ids, out = place.ids(3, 60, 61), place.out(3)
    table.read_into(ids, out)
    replay = place.capture(lambda: table.read_into(ids, out))
    table.write(ids, torch.full((3, DIM), 7.0))
    for _ in range(3):  # their slots go to others, and they to host memory
        table.read(torch.randint(0, 60, (8,)).to(place.torch))
    replay()
    assert (out == 7).all()
    store.rollback()
    replay()
    np.testing.assert_array_equal(out.cpu().numpy(), before[[3, 60, 61]])


def test_rows_of_a_cache_are_prefetched_or_missed(tmp_path: Path, place: Place) -> None:
    table = place.store(tmp_path, host_rows=30, gpu_rows=4)["t0"]
    expected = np.concatenate(list(table.scan()))
    ids, out = place.ids(*range(10)), place.out(10)
    table.read_into(ids, out)
    replay = place.capture(lambda: table.read_into(ids, out))
    rng = np.random.default_rng(2)
    for _ in range(4):
        drawn = rng.permutation(ROWS)[:10]
        ids.copy_(torch.from_numpy(drawn))
        table.prefetch(ids)
        replay()
        np.testing.assert_array_equal(out.cpu().numpy(), expected[drawn])
        table.adapt()
    gone = np.arange(ROWS)
    while True:  # some row is in neither, whatever the policy kept
        ids.copy_(torch.from_numpy(gone[:10]))
        replay()
        found = out.cpu().numpy()
        lost = np.isnan(found).all(1)
        np.testing.assert_array_equal(found[~lost], expected[gone[:10]][~lost])
        if lost.any():
            break
        gone = gone[10:]
    first = gone[:10][lost]
    with pytest.raises(NotPrefetchedError, match=r"row (\d+) of table 't0'.* read NaN") as error:
        table.adapt()
    assert int(str(error.value).split()[1]) in first
    table.adapt()  # which admits what was found, and says no more
    table.prefetch(ids)
    replay()
    np.testing.assert_array_equal(out.cpu().numpy(), expected[gone[:10]])


def test_a_cache_waits_for_replays_before_it_changes(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    drained: list[int] = []

    class Counting(CapturingDevice):
        def drain(self) -> None:
            drained.append(1)
            super().drain()

    place = Place(Counting(), "cpu")
    store = place.store(tmp_path, host_rows=30, gpu_rows=4)
    table = store["t0"]
    table.read(place.ids(*range(30)))
    assert not drained
    table.read_into(place.ids(1), place.out(1))
    table.prefetch(place.ids(*range(60, 70)))
    assert drained
    store.close()


@pytest.mark.parametrize("bad", [-1, ROWS, 2**62, -(2**63)])
def test_bad_ids_are_named_once(tmp_path: Path, place: Place, bad: int) -> None:
    store = place.store(tmp_path, tables=2, host_rows=2 * ROWS, gpu_rows=8)
    table = store["t1"]
    ids, out = place.ids(1, 2, 3), place.out(3)
    table.read_into(ids, out)
    expected = out.clone()
    replay = place.capture(lambda: table.read_into(ids, out))
    ids[1] = bad
    replay()
    assert torch.isnan(out[1]).all() and torch.equal(out[::2], expected[::2])
    with pytest.raises(RowIndexError, match=rf"row {bad} at position 1 .*outside table 't1'"):
        table.adapt()
    table.adapt()
    ids[1] = 2
    replay()
    assert torch.equal(out, expected)
    store.commit()


def test_rows_that_are_read_get_slots(tmp_path: Path, place: Place) -> None:
    table = place.store(tmp_path, host_rows=ROWS, gpu_rows=6)["t0"]
    ids, out = place.ids(0, 1, 2), place.out(3)
    table.read_into(ids, out)
    replay = place.capture(lambda: table.read_into(ids, out))
    ids.copy_(place.ids(70, 71, 72))
    replay()
    before = table.stats()["gpu"].bytes_promoted
    table.adapt()
    middle = table.stats()["gpu"].bytes_promoted
    assert middle > before
    table.read(ids)
    assert table.stats()["gpu"].bytes_promoted == middle


def test_a_prefetch_before_the_first_capture_is_over(tmp_path: Path, place: Place) -> None:
    table = place.store(tmp_path, host_rows=ROWS, gpu_rows=40)["t0"]
    expected = np.concatenate(list(table.scan()))
    ids, out = place.ids(*range(50, 60)), place.out(10)
    table.prefetch(ids)
    table.read_into(place.ids(0), place.out(1))
    replay = place.capture(lambda: table.read_into(ids, out))
    table.prefetch(ids)
    replay()
    np.testing.assert_array_equal(out.cpu().numpy(), expected[50:60])


def test_what_no_graph_can_read_is_refused(tmp_path: Path, place: Place) -> None:
    table = place.store(tmp_path, host_rows=ROWS, gpu_rows=6)["t0"]
    ids, out, other = place.ids(0, 1, 2, 3), place.out(4), place.out(1)

    def refused(error: type[Exception], match: str, ids: Any, out: Any, name: Any = None) -> None:
        def attempt() -> None:
            other.add_(1)  # torch warns of graphs that hold nothing
            with pytest.raises(error, match=match):
                table.read_into(ids, out, name)

        place.capture(attempt)

    refused(DeviceError, "once before the capture", ids, out)
    table.read_into(ids, out)
    refused(DeviceError, "contiguous int64", ids.int(), out)
    refused(DeviceError, "contiguous int64", ids[::2], out[::2])
    refused(InvalidInputError, "weight for these ids", ids, out[:2])
    refused(InvalidInputError, "weight for these ids", ids, out.double())
    refused(InvalidTypeError, "read as a tensor", ids, np.zeros((4, DIM), np.float32))
    refused(KeyError, "no field", ids, out, "other")
    refused_read = pytest.raises(DeviceError, match="read_into")

    def plain() -> None:
        other.add_(1)
        with refused_read:
            table.read(ids)

    place.capture(plain)


def test_a_layer_is_captured(tmp_path: Path, place: Place) -> None:
    table = place.store(tmp_path, host_rows=ROWS, gpu_rows=6)["t0"]
    layer = FrozenEmbedding(table)
    ids, total = place.ids(4, 5), place.out(1)
    layer(ids)
    found: list[Any] = []
    replay = place.capture(lambda: found.append(layer(ids)))
    ids.copy_(place.ids(80, 3))
    replay()
    expected = rows_of(table, ids)
    np.testing.assert_array_equal(found[0].cpu().numpy(), expected)
    del total


@pytest.mark.variants(2, 3)
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
def test_scaled_rows_are_floats(tmp_path: Path, place: Place, kind: str, to: Any) -> None:
    elements = torch.randn(ROWS, 32).mul(50).to(getattr(torch, kind))
    scales = torch.rand(ROWS, 2)
    files = tmp_path / "rows.safetensors"
    save = pytest.importorskip("safetensors.torch").save_file
    save({"elements": elements, "scales": scales}, files)
    both = (f"{files}:elements", f"{files}:scales")
    budget = Budget(host_rows=ROWS, gpu_rows=5)
    tables = tierstore.attach({"ple": both}, budget=budget, device=place.device)
    layer = FrozenEmbedding(tables["ple"]).to(to)
    ids, out = place.ids(*range(7)), place.out(7, 32, to)
    expected = (elements.float() * scales.repeat_interleave(16, 1)).to(to)
    assert torch.equal(layer(ids).cpu(), expected[:7])
    replay = place.capture(lambda: tables["ple"].read_into(ids, out))
    for _ in range(3):
        ids.copy_(torch.randint(0, ROWS, (7,)))
        replay()
        assert torch.equal(out.cpu(), expected[ids.cpu()])
        tables["ple"].adapt()
    ids[3] = ROWS
    replay()
    assert torch.isnan(out[3]).all() and not torch.isnan(out[:3]).any()
    with pytest.raises(RowIndexError, match=rf"row {ROWS} at position 3"):
        layer.adapt()

    def wide() -> None:
        with pytest.raises(InvalidInputError, match="in a CUDA graph is float32"):
            tables["ple"].read_into(ids, place.out(7, 32, torch.float64))

    place.capture(lambda: (out.add_(1), wide()))
    tables.close()


@pytest.mark.gpu
def test_two_layers_in_a_graph_with_more(tmp_path: Path) -> None:
    place = Place(cuda_device(), "cuda:0")
    store = place.store(tmp_path, tables=2, host_rows=2 * ROWS, gpu_rows=9)
    layers = [FrozenEmbedding(store[name]) for name in ("t0", "t1")]
    ids, head = place.ids(*range(12)), torch.nn.Linear(DIM, 3, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            head(sum(layer(ids) for layer in layers))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = head(sum(layer(ids) for layer in layers))
    for _ in range(20):
        ids.copy_(torch.randint(0, ROWS, (12,)))
        graph.replay()
        with torch.no_grad():
            expected = head(sum(layer.table.read(ids) for layer in layers))
        torch.testing.assert_close(out, expected)
        store["t0"].adapt()
    store.close()


@pytest.mark.gpu
def test_rows_with_scales_are_read_as_floats(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    spec = TableSpec(ROWS, fields={"weight": Field(24, "int8", scale=Scale("float32", 8))})
    with tierstore.create(tmp_path / "s.tier", {"t": spec}) as made:
        made["t"].write(np.arange(ROWS), rng.standard_normal((ROWS, 24)).astype(np.float32))
        made.commit()
    place, budget = Place(cuda_device(), "cuda:0"), Budget(host_rows=ROWS, gpu_rows=7)
    with tierstore.open(tmp_path / "s.tier", device=place.device, budget=budget) as store:
        table = store["t"]
        layer, ids = FrozenEmbedding(table), place.ids(*range(20))
        assert layer(ids).dtype == torch.float32
        found: list[Any] = []
        replay = place.capture(lambda: found.append(layer(ids)))
        for _ in range(5):
            drawn = rng.integers(0, ROWS, 20)
            ids.copy_(torch.from_numpy(drawn))
            replay()
            np.testing.assert_array_equal(found[0].cpu().numpy(), table.read(drawn))
            table.adapt()
