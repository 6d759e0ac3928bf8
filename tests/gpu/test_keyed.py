"""Tables by key with a GPU tier: the device's map of keys, growth, expiry, training."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import tierstore
from tests import inside
from tests.gpu.conftest import Place
from tests.gpu.emulator import EmulatedDevice
from tests.keys.test_keyed import ExpiringMachine, GrowingMachine, KeyedMachine, grow, run
from tierstore import Budget, TableSpec
from tierstore._table.address import Ids
from tierstore._table.gpu import DeviceAccess
from tierstore._tiers.gpu.keys import DeviceKeys, Guess
from tierstore._tiers.gpu.launcher import Launcher
from tierstore.errors import CapacityError, ClosedError, InvalidTypeError, UnknownNameError

torch = pytest.importorskip("torch")

DIM, MOST_ROWS = 4, 1 << 20


@pytest.mark.variants(1)
@pytest.mark.parametrize("slots", [(9, 3), (300, 40)])
def test_growth_and_expiry(tmp_path: Path, place: Place, slots: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    spec = TableSpec(dim=DIM, keys="int64", init=tierstore.normal(seed=1), track_uses=True)
    budget = Budget(host_rows=slots[0], gpu_rows=slots[1])
    path = tmp_path / "s"
    with tierstore.create(path, {"t": spec}, budget=budget, device=place.device) as store:
        table = store["t"]
        keys = rng.integers(-(2**63), 2**63 - 1, 100)
        rows = rng.standard_normal((100, DIM)).astype(np.float32)
        first = table.read(keys[50:])
        table.write(keys[:50], rows[:50])
        lease = table.lease(keys[:3])
        with inside.owner(table).door.use(write=True):
            table._grow(table.capacity + 1)
        assert table.capacity == 131_072
        with pytest.raises(ClosedError):
            lease.read("weight")
        assert np.array_equal(table.read(keys[:50]), rows[:50])
        assert np.array_equal(table.read(keys[50:]), first)
        store.commit()
        table.write(keys, rows)
        assert table.read(keys[:1], "uses").tolist() == [[3, store.version + 1]]
        store.rollback()
        assert table.rows == 50
        table.write(keys[20:], rows[20:])
        gone = [key for found, _ in table.expire(fewer_than=2) for key in found.tolist()]
        assert sorted(gone) == sorted([*keys[3:20].tolist(), *keys[50:].tolist()])
        assert np.array_equal(table.read(keys[20:50]), rows[20:50])
        store.commit()
    with tierstore.open(path) as reader:
        assert reader["t"].rows == 33
        assert np.array_equal(reader["t"].read(keys[20:50]), rows[20:50])
        assert reader["t"].capacity == 131_072


class OutOfMemoryError(Exception):
    """Named as CuPy's and torch's."""


class WithoutRoomForKeys(EmulatedDevice):
    """An emulated device whose memory does not hold a map of keys beside a tier."""

    def allocate(self, size: int, dtype: Any) -> Any:
        if dtype == "u8":
            raise OutOfMemoryError(f"{size} are too many")
        return super().allocate(size, dtype)


def test_a_map_of_keys_without_memory_is_refused_on_opening(tmp_path: Path) -> None:
    budget = Budget(host_rows=100, gpu_rows=64)
    tierstore.create(tmp_path / "s", {"t": TableSpec(100, DIM, keys="int64")}).close()
    with pytest.raises(CapacityError, match="budget"):
        tierstore.open(tmp_path / "s", budget=budget, device=WithoutRoomForKeys())
    with tierstore.open(
        tmp_path / "s", budget=budget, device=EmulatedDevice(), missing="init"
    ) as store:
        table = store["t"]
        (reserved,) = inside.space(table).gpu._keys.values()
        table.read(torch.arange(7))
        assert inside.space(table).gpu.keys("t", table.capacity) is reserved


@pytest.mark.parametrize("most", [1, 40, 1000])
def test_the_device_map_against_a_dict(place: Place, most: int) -> None:
    rng = np.random.default_rng(most)
    keys = DeviceKeys(Launcher(place.device), place.device, most)
    universe = rng.integers(0, 2**64, 300, np.uint64)
    universe[:40] = np.arange(40, dtype=np.uint64) << np.uint64(40)
    oracle: dict[int, int] = {}
    for number in range(30):
        codes = rng.choice(universe, rng.integers(1, 90))
        rows = place.put(np.zeros(codes.size, np.int64))
        missing = keys.find(place.put(codes), rows)
        found = np.full(codes.size, -1)
        known = np.ones(codes.size, bool)
        if missing is not None:
            at, lacked = missing.on_host()
            assert (np.diff(at) > 0).all()
            assert np.array_equal(codes[at], lacked)
            known[at] = False
            answer = np.array([oracle.get(code, -1) for code in lacked.tolist()], np.int64)
            keys.fill(missing, answer, 0)
            found[at] = answer
        expected = np.array([oracle.get(code, -1) for code in codes.tolist()])
        assert (expected[known] >= 0).all()
        found[known] = place.get(rows)[known]
        assert np.array_equal(found, expected)
        assert np.array_equal(place.get(rows), expected)
        for code in rng.choice(universe, 20).tolist():
            oracle.setdefault(code, len(oracle))
        assert len(keys) <= most
        if number % 11 == 10:
            keys.clear()
            rows = place.put(np.zeros(codes.size, np.int64))
            lacking = keys.find(place.put(codes), rows)
            assert lacking is not None
            assert lacking.on_host()[0].size == codes.size
    keys.close()


def test_keys_that_were_asked_for_are_found_on_the_device(tmp_path: Path, place: Place) -> None:
    import torch

    rng = np.random.default_rng(2)
    where = torch.device(place.device.torch_name)
    spec = TableSpec(100, DIM, keys="int64", init=tierstore.normal(seed=1))
    budget = Budget(host_rows=100, gpu_rows=64)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=budget, device=place.device) as store:
        table = store["t"]
        keys = rng.integers(-(2**63), 2**63 - 1, 30)
        rows = rng.standard_normal((30, DIM)).astype(np.float32)
        table.write(keys, rows)
        given = torch.from_numpy(keys).to(where)
        asked = []
        find = table._map.find
        table._map.find = lambda batch: asked.append(batch.codes.size) or find(batch)
        for _ in range(2):
            assert np.array_equal(table.read(given[:20]).cpu(), rows[:20])
        assert np.array_equal(table.read(given.reshape(5, 6)).cpu(), rows.reshape(5, 6, DIM))
        assert asked == [20, 10]
        strangers = torch.arange(7, device=where)
        first = table.read(np.arange(7))
        assert np.array_equal(table.read(strangers).cpu(), first)
        assert np.array_equal(table.read(strangers.to(torch.uint8)).cpu(), first)
        assert asked == [20, 10, 7, 7, 7]
        table.write(strangers, torch.from_numpy(rows[:7]).to(where))
        assert table.rows == 37
        assert np.array_equal(table.read(np.arange(7)), rows[:7])
        store.rollback()
        assert table.rows == 0
        assert np.array_equal(table.read(strangers).cpu(), first)
        with pytest.raises(InvalidTypeError):
            table.read(given.double())
        gpu = inside.space(table).gpu
        assert gpu.nbytes >= gpu.memory.nbytes + gpu.slots * DeviceKeys.BYTES


class EmulatedArray(np.ndarray):
    """Stands for `cupy.ndarray` on the emulator."""

    def get(self) -> np.ndarray:
        return np.array(self)


@pytest.fixture
def cupy(place: Place, monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy, or on the emulator what stands for it."""
    if place.kind != "pageable":
        return pytest.importorskip("cupy")
    module: Any = types.ModuleType("cupy")
    stream = types.SimpleNamespace(ptr=0, synchronize=lambda: None)
    module.cuda = types.SimpleNamespace(get_current_stream=lambda: stream)
    module.ndarray, module.dtype, module.int64 = EmulatedArray, np.dtype, np.int64
    module.asarray = lambda array: np.asarray(array).view(EmulatedArray)
    module.ascontiguousarray = lambda *given: np.ascontiguousarray(*given).view(EmulatedArray)
    module.from_dlpack = lambda array: np.from_dlpack(array).view(EmulatedArray)
    module.empty = lambda *given: np.empty(*given).view(EmulatedArray)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(  # the emulator's device is none of CUDA's
        DeviceAccess, "_cupy_ids", lambda _, ids: Ids(ids.ravel(), ids.shape, "cupy")
    )
    return module


@pytest.mark.parametrize("device", [False, True])
def test_keys_in_cupy_arrays(tmp_path: Path, place: Place, cupy: Any, device: bool) -> None:
    rng = np.random.default_rng(5)
    spec = TableSpec(100, DIM, keys="int64", init=tierstore.normal(seed=1), track_uses=True)
    there: dict[str, Any] = {"device": place.device} if device else {}
    budget = Budget(host_rows=100, gpu_rows=64 if device else None)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=budget, **there) as store:
        table = store["t"]
        keys = rng.integers(-(2**63), 2**63 - 1, (6, 5))
        rows = rng.standard_normal((6, 5, DIM)).astype(np.float32)
        table.write(cupy.asarray(keys), cupy.asarray(rows))
        assert table.rows == 30
        assert np.array_equal(table.read(keys), rows)
        mixed, expected = keys.copy(), rows.copy()
        mixed[::2, 3] = rng.integers(0, 1000, 3)
        expected[::2, 3] = table.read(mixed[::2, 3])
        for bits in (mixed, mixed.view(np.uint64), mixed.T):
            found = table.read(cupy.asarray(bits))
            assert isinstance(found, cupy.ndarray)
            wanted = expected if bits.shape == (6, 5) else expected.swapaxes(0, 1)
            assert np.array_equal(found.get(), wanted)
        assert table.read(cupy.asarray(keys[:0])).shape == (0, 5, DIM)
        assert np.array_equal(table.lookup(cupy.asarray(keys)), table.lookup(keys))
        with pytest.raises(InvalidTypeError):
            table.read(cupy.asarray(rows[..., 0]))
        with pytest.raises(UnknownNameError):
            table.lookup(cupy.asarray(mixed))
        store.commit()


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("slots", [(60, 20), (400, 300)])
def test_training_by_key_is_training_by_id(
    tmp_path: Path, place: Place, slots: tuple[int, int], tracked: bool
) -> None:
    import torch

    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    where = torch.device(place.device.torch_name)
    generator = torch.Generator().manual_seed(4)
    fields = {name: tierstore.Field(DIM) for name in ("weight", "exp_avg", "exp_avg_sq")}
    fields["weight"] = tierstore.Field(DIM, init=tierstore.constant(0.5))
    budget = Budget(host_rows=slots[0], gpu_rows=slots[1])
    specs = {
        "ids": TableSpec(400, fields=fields),
        "keys": TableSpec(400, fields=fields, keys="int64", track_uses=tracked),
    }
    hashed = torch.randint(-(2**62), 2**62, (400,), generator=generator)
    with tierstore.create(tmp_path / "s", specs, budget=budget, device=place.device) as store:
        layers = {name: TieredEmbedding(store[name]) for name in specs}
        optimizers = {
            name: TieredOptimizer(torch.optim.Adam, [layer], lr=0.1)
            for name, layer in layers.items()
        }
        seen: dict[int, int] = {}
        for number in range(12):
            numbers = torch.randint(0, 400, (7, 5), generator=generator)
            gradient = torch.randn(7, 5, DIM, generator=generator).to(where)
            given = {"ids": numbers.to(where), "keys": hashed[numbers].to(where)}
            found = {}
            for name, layer in layers.items():
                found[name] = layer(given[name])
                found[name].backward(gradient)
                optimizers[name].step()
                optimizers[name].zero_grad()
            assert torch.equal(found["ids"], found["keys"])
            for each in numbers.unique().tolist():
                seen[each] = seen.get(each, 0) + 1
            if number == 5:
                store.commit()
        assert store["keys"].rows == len(seen)
        known = torch.tensor(sorted(seen))
        for field in fields:
            by_id, by_key = (
                store["ids"].read(known, field),
                store["keys"].read(hashed[known], field),
            )
            assert torch.equal(by_id.cpu(), by_key.cpu())
        if tracked:
            uses = store["keys"].read(hashed[known].to(where), "uses")
            assert uses[:, 0].tolist() == [seen[each] for each in sorted(seen)]
        store.rollback()


def test_rows_are_looked_up_before_the_device_has_told_which_keys_it_lacks(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose guess was wrong is dropped, with its lease, and looked up again."""
    import torch

    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    right, is_right = [], Guess.is_right
    monkeypatch.setattr(Guess, "is_right", lambda guess: right.append(is_right(guess)) or right[-1])
    spec = TableSpec(200, DIM, keys="int64", init=tierstore.normal(seed=2))
    budget = Budget(host_rows=60, gpu_rows=50)
    where = torch.device(place.device.torch_name)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=budget, device=place.device) as store:
        table = store["t"]
        plain = torch.nn.Embedding.from_pretrained(
            torch.as_tensor(table.read(np.arange(60) - 5)).cpu().clone(), freeze=False
        )
        layer = TieredEmbedding(table)
        optimizer = TieredOptimizer(torch.optim.SGD, [layer], lr=0.1)
        expected = torch.optim.SGD(plain.parameters(), lr=0.1)
        seen: set[int] = set()
        for number, first in enumerate([0, 0, 0, 1, 1, 1, 2, 30, 30, 30, 0, 0, 0]):
            numbers = torch.arange(first, first + 9).repeat(2)[:15].view(3, 5)
            for model, step, ids in (
                (layer, optimizer, (numbers - 5).to(where)),
                (plain, expected, numbers),
            ):
                step.zero_grad()
                out = model(ids)
                assert out.shape == (3, 5, DIM)
                out.square().sum().backward()
                step.step()
            seen.update(range(first, first + 9))
            assert table.rows == len(seen), number
        found = torch.as_tensor(table.read(np.arange(60) - 5)).cpu()
        torch.testing.assert_close(found, plain.weight.detach())
        store.commit()
    assert right.count(True) >= 3 and right.count(False) >= 2


class GrowsBetweenLeases(GrowingMachine):
    """Growth makes the tiers of a device anew, which ends its leases."""

    @precondition(lambda self: self.table.capacity < MOST_ROWS)  # each doubles it
    @rule(data=st.data())
    def write_more(self, data: st.DataObject) -> None:
        grow(self.table)
        self.write(data)


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("depth", [0, 1, 5])
def test_training_ahead_by_key_sees_every_update(tmp_path: Path, place: Place, depth: int) -> None:
    import torch

    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    rng = np.random.default_rng(7)
    numbers = [rng.integers(0, 4 * step + 5, 9) for step in range(20)]
    found = []
    for ahead in (None, depth):
        spec = TableSpec(200, DIM, keys="int64", init=tierstore.normal(seed=2))
        budget = Budget(host_rows=40, gpu_rows=25)
        path = tmp_path / str(ahead)
        with tierstore.create(path, {"t": spec}, budget=budget, device=place.device) as store:
            layer = TieredEmbedding(store["t"])
            optimizer = TieredOptimizer(torch.optim.Adagrad, [layer], lr=0.1)
            to = place.device.torch_name
            batches: Any = [torch.from_numpy(each * 0x9E3779B9).to(to) for each in numbers]
            if ahead is not None:
                batches = tierstore.lookahead(batches, {layer: lambda batch: batch}, depth=ahead)
            seen: set[int] = set()
            for number, batch in enumerate(batches):
                layer(batch).square().sum().backward()
                optimizer.step()
                seen.update(numbers[number].tolist())
                assert store["t"].rows == len(seen)
            found.append(store["t"].read(np.arange(90) * 0x9E3779B9))
            store.rollback()
    assert np.array_equal(*found)


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("machine", [KeyedMachine, ExpiringMachine, GrowsBetweenLeases])
@pytest.mark.filterwarnings("ignore")
def test_a_table_by_key_on_a_device_is_a_dict(place: Place, machine: type[KeyedMachine]) -> None:
    """Keys come from the device, in places of few slots, so that its map is emptied at times."""
    import torch

    class OnDevice(machine):  # type: ignore[misc, valid-type]
        device = place.device
        budget = Budget(host_rows=8, gpu_rows=5)

        def given(self, keys: list[int]) -> object:
            return torch.tensor(keys, dtype=torch.int64, device=place.device.torch_name)

    run(OnDevice, examples=6, steps=20)
