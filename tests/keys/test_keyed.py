"""Tables by key against a Python dict."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import tierstore
from tests import inside
from tests.pairs import pairs
from tests.tries import tries
from tierstore import Budget, Field, TableSpec, exporting
from tierstore._disk import generation, key_log, partitioned_keys
from tierstore._disk.tier import DiskTier
from tierstore._keys import growing as growing_keys
from tierstore._keys.hashmap import HashMap
from tierstore._keys.text import Texts
from tierstore._memory_table import MemoryTable
from tierstore._table import keyed
from tierstore._table.keyed import KeyedTable
from tierstore._tiers.space import Space
from tierstore.errors import (
    CapacityError,
    ClosedError,
    CorruptStoreError,
    ForkedStoreError,
    InvalidInputError,
    InvalidTypeError,
    NotExpiredWarning,
    ReadOnlyError,
    RowIndexError,
    StoreFullError,
    UncommittedRowsWarning,
    UnknownNameError,
)

DIM, CAPACITY = 3, 400
INIT = tierstore.normal(std=0.1, seed=7)
INTEGERS = st.sampled_from([*range(-4, 30), 2**63 - 1, -(2**63), *(n << 40 for n in range(1, 9))])
TEXTS = st.sampled_from(["", "\0", "a", "a\0", "🙂", "x" * 300, *(f"user {n}" for n in range(30))])
KEYS = {"int64": INTEGERS, "text": TEXTS}


def spec(kind: str, rows: int = CAPACITY) -> TableSpec:
    return TableSpec(rows, fields={"weight": Field(DIM, init=INIT), "age": Field(1)}, keys=kind)


def growing(kind: str, *, track_uses: bool = False) -> TableSpec:
    fields = {"weight": Field(DIM, init=INIT), "age": Field(1)}
    return TableSpec(fields=fields, keys=kind, track_uses=track_uses)


def grow(table: KeyedTable) -> None:
    """Add an extent, as if the keys were too many for the table."""
    with inside.owner(table).door.use(write=True):
        table._grow(table.capacity + 1)


def given(kind: str, keys: list) -> object:
    return np.array(keys, np.int64) if kind == "int64" else keys


def on_host(rows: object) -> np.ndarray:
    return rows.cpu().numpy() if hasattr(rows, "cpu") else np.asarray(rows)


class KeyedMachine(RuleBasedStateMachine):
    """Every key has its own row, through commits, rollbacks, restores and readers."""

    kind = "int64"
    spec = staticmethod(spec)
    device: Any = "cpu"
    budget = Budget(host_rows=8)

    @initialize()
    def make(self) -> None:
        self.path = Path(tempfile.mkdtemp()) / "s"
        options = {"budget": self.budget, "device": self.device, "keep": 5}
        self.store = tierstore.create(self.path, {"t": self.spec(self.kind)}, **options)
        self.truth: dict[object, np.ndarray] = {}
        self.versions = {self.store.version: ({}, [])}
        self.committed = self.store.version
        self.order: list[object] = []
        self.first: dict[object, bytes] = {}
        self.reader = self.opened("r")
        self.number = 0

    def opened(self, mode: str) -> tierstore.Store:
        keep = {"keep": 5} if mode == "r+" else {}
        return tierstore.open(self.path, mode, budget=self.budget, device=self.device, **keep)

    def given(self, keys: list) -> object:
        return given(self.kind, keys)

    @property
    def table(self) -> KeyedTable:
        return self.store["t"]

    def state(self) -> tuple[dict, list]:
        return {key: row.copy() for key, row in self.truth.items()}, list(self.order)

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(KEYS[self.kind], max_size=12))
        self.number += 1
        rows = np.random.default_rng(self.number).standard_normal((len(keys), DIM), np.float32)
        self.table.write(self.given(keys), rows)
        for key, row in zip(keys, rows, strict=True):
            if key not in self.truth:
                self.order.append(key)
            self.truth[key] = row

    @rule(data=st.data(), as_tensor=st.booleans())
    def read(self, data: st.DataObject, as_tensor: bool) -> None:
        keys = data.draw(st.lists(KEYS[self.kind], max_size=12))
        found = self.table.read(self.given(keys), as_tensor=as_tensor)
        for key, row in zip(keys, on_host(found), strict=True):
            if key in self.truth:
                assert np.array_equal(row, self.truth[key])
            else:
                assert row.tobytes() == self.first.setdefault(key, row.tobytes())
        known = [key in self.truth for key in keys]
        assert self.table.contains(self.given(keys)).tolist() == known

    @rule()
    def commit(self) -> None:
        self.committed = self.store.commit()
        self.versions[self.committed] = self.state()

    @rule()
    def roll_back(self) -> None:
        self.store.rollback()
        self.take(*self.versions[self.committed])

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.opened("r+")
        self.take(*self.versions[self.committed])

    @rule()
    def crash(self) -> None:
        """Go on with what a process that is killed leaves behind."""
        path = Path(tempfile.mkdtemp()) / "s"
        shutil.copytree(self.path, path)
        self.teardown()
        self.path = path
        self.store, self.reader = self.opened("r+"), self.opened("r")
        self.take(*self.versions[self.committed])

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        """Take a step over distinct keys; those that are new get a row."""
        if importlib.util.find_spec("torch") is None:
            return
        import torch

        import tierstore.nn
        import tierstore.optim

        keys = data.draw(st.lists(KEYS[self.kind], max_size=12, unique=True))
        before = np.asarray(self.table.read(given(self.kind, keys)))
        self.number += 1
        gradient = np.random.default_rng(self.number).standard_normal(before.shape, np.float32)
        layer = tierstore.nn.TieredEmbedding(self.table)
        optimizer = tierstore.optim.TieredOptimizer(torch.optim.SGD, [layer], lr=0.5)
        rows = layer(self.given(keys))
        assert np.array_equal(rows.detach().cpu(), before)
        rows.backward(torch.from_numpy(gradient).to(rows.device))
        optimizer.step()
        for key, row in zip(keys, before - gradient / 2, strict=True):
            if key not in self.truth:
                self.order.append(key)
            self.truth[key] = row

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(KEYS[self.kind], max_size=12))
        gone = set(keys) & set(self.order)
        assert self.table.remove(self.given(keys)) == len(gone)
        for key in gone:
            del self.truth[key]
        left = [key for key in self.order if key not in gone]
        self.order = list(self.table.keys)
        assert sorted(self.order, key=repr) == sorted(left, key=repr)

    @rule()
    def fold(self) -> None:
        if not self.store.uncommitted_rows():
            self.refresh()
            self.store.fold()

    @rule(back=st.integers(1, 3))
    def restore(self, back: int) -> None:
        kept = [each.version for each in self.store.versions()]
        older = kept[max(0, len(kept) - 1 - back)]
        self.store.rollback()
        self.store.restore(older)
        self.committed = self.store.version
        self.versions[self.committed] = self.versions[older]
        self.take(*self.versions[older])

    @rule()
    def refresh(self) -> None:
        self.reader.refresh()
        truth, order = self.versions[self.reader.version]
        table = self.reader["t"]
        assert table.rows == len(order)
        if order:
            assert np.array_equal(on_host(table.read(self.given(order))), [truth[k] for k in order])

    @rule(on_conflict=st.sampled_from(["newest", "mean", "keep"]))
    def merge(self, on_conflict: str) -> None:
        """Take the rows that a reader still has, of an older version."""
        others, order = self.versions[self.reader.version]
        new = self.table.merge(self.reader["t"], on_conflict=on_conflict)
        missing = [key for key in order if key not in self.truth]
        assert new == len(missing)
        self.order += missing
        for key, row in others.items():
            if key not in self.truth or on_conflict == "newest":
                self.truth[key] = row.copy()
            elif on_conflict == "mean":
                self.truth[key] = (row + self.truth[key]) / 2

    @rule()
    def verify(self) -> None:
        report = self.store.verify()
        assert not report.bad_files
        assert not any(report.bad_rows.values())

    def take(self, truth: dict, order: list) -> None:
        self.truth, self.order = {key: row.copy() for key, row in truth.items()}, list(order)

    @invariant()
    def every_key_has_its_row(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.table.rows == len(self.order)
        assert list(self.table.keys) == self.order
        if self.order:
            rows = self.table.by_row.read(np.arange(len(self.order)))
            assert np.array_equal(rows, [self.truth[key] for key in self.order])

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.reader.close()
            self.store.close()
            shutil.rmtree(self.path.parent)


class TextMachine(KeyedMachine):
    kind = "text"


def tracking(kind: str, *, tracked: bool = True) -> TableSpec:
    fields = {"weight": Field(DIM, init=INIT), "age": Field(1)}
    return TableSpec(CAPACITY, fields=fields, keys=kind, track_uses=tracked)


class ExpiringMachine(KeyedMachine):
    spec = staticmethod(tracking)

    @rule(count=st.integers(0, 15))
    def expire(self, count: int) -> None:
        before = {key: self.table.read(given(self.kind, [key]), "uses")[0] for key in self.order}
        ranked = sorted(self.order, key=lambda key: (*before[key], self.order.index(key)))
        goes = set(ranked[: max(0, len(ranked) - count)])
        archived = {}
        for keys, rows in self.table.expire(keep_at_most=count):
            archived |= dict(zip(keys.tolist(), rows["weight"], strict=True))
        assert archived.keys() == goes
        for key, row in archived.items():
            assert np.array_equal(row, self.truth.pop(key))
            assert key not in self.table
        left = [key for key in self.order if key not in goes]
        self.order = list(self.table.keys)
        assert sorted(self.order, key=repr) == sorted(left, key=repr)
        for key in left:
            assert np.array_equal(self.table.read(given(self.kind, [key]), "uses")[0], before[key])


class ExpiringTextMachine(ExpiringMachine):
    kind = "text"


class GrowingMachine(KeyedMachine):
    spec = staticmethod(growing)

    @rule(data=st.data())
    def write_more(self, data: st.DataObject) -> None:
        with self.table.lease([next(iter(self.truth), 0)]) as lease:
            if not self.truth:
                self.order.append(0)
            self.truth.setdefault(next(iter(self.truth), 0), np.asarray(lease.read("weight"))[0])
            grow(self.table)
            self.write(data)
            assert np.array_equal(lease.read("weight")[0], self.truth[next(iter(self.truth))])


def run(machine: type[KeyedMachine], examples: int = 12, steps: int = 25) -> None:
    run_state_machine_as_test(machine, settings=tries(examples, stateful_step_count=steps))


MACHINES = [KeyedMachine, TextMachine, GrowingMachine, ExpiringMachine, ExpiringTextMachine]


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.filterwarnings("ignore")
def test_a_table_by_key_is_a_dict(machine):
    run(machine)


@pytest.fixture(params=["int64", "text"])
def kind(request):
    return request.param


@pytest.fixture
def store(tmp_path, kind):
    budget = Budget(host_rows=9)
    with tierstore.create(tmp_path / "s", {"t": spec(kind)}, budget=budget, keep=9) as made:
        yield made


def some(kind: str, count: int, start: int = 0) -> object:
    numbers = np.arange(start, start + count) * 7919 - 5
    return numbers if kind == "int64" else [f"key {number}" for number in numbers]


def ones(count: int) -> np.ndarray:
    return np.ones((count, DIM), np.float32)


@pytest.mark.variants(1)
def test_first_rows_depend_on_seed_and_key_alone(tmp_path, kind):
    keys = some(kind, 50)
    found = []
    for number, order in enumerate([range(50), range(49, -1, -1), [7, *range(50)]]):
        budget = Budget(host_rows=[5, 100, 1][number])
        with tierstore.create(tmp_path / f"{number}", {"t": spec(kind)}, budget=budget) as store:
            table = store["t"]
            read = table.read(keys)
            for at in order:
                table.lease([keys[at]]).release()
            assert table.rows == 50
            store.commit()
            assert np.array_equal(table.read(keys), read)
            found.append(read)
    assert all(np.array_equal(each, found[0]) for each in found)
    assert len(np.unique(found[0], axis=0)) == 50
    assert 0.05 < found[0].std() < 0.2


@pytest.mark.variants(1, 1)
@pairs(together=1, kind=["int64", "text"], budget=[None, Budget(host=0), Budget(host_rows=999)])
@pytest.mark.slow("text")
def test_a_table_without_a_capacity_grows(tmp_path, kind, budget):
    rng, count = np.random.default_rng(3), 70_000
    rows = rng.standard_normal((3, count, DIM), np.float32)
    with tierstore.create(tmp_path / "s", {"t": growing(kind)}, budget=budget) as store:
        table, before = store["t"], [*tmp_path.glob("s/t/*")]
        assert table.capacity == 65536
        for number in range(3):
            table.write(some(kind, count, number * count), rows[number])
            if number == 1:
                store.commit()
                reader = tierstore.open(tmp_path / "s")
        assert (table.rows, table.capacity) == (210_000, 262_144)
        assert [*tmp_path.glob("s/t/*")] == before
        store.rollback()
        assert table.rows == 140_000
        table.write(some(kind, count, 2 * count), rows[2])
        store.commit()
        with reader:
            assert (reader["t"].rows, reader["t"].capacity) == (140_000, 196_608)
            reader.refresh()
            assert (reader["t"].rows, reader["t"].capacity) == (210_000, 262_144)
            assert np.array_equal(reader["t"].read(some(kind, 3 * count)), rows.reshape(-1, DIM))
        store.fold()
        grow(table)
        table.write(some(kind, 1, 3 * count), ones(1))
        store.commit()
    with tierstore.open(tmp_path / "s", "r+", budget=budget) as store:
        table = store["t"]
        assert store.verify().ok
        assert table.capacity == 327_680
        assert np.array_equal(table.read(some(kind, 3 * count)), rows.reshape(-1, DIM))
        store.fold()
        assert np.array_equal(table.read(some(kind, 3 * count)), rows.reshape(-1, DIM))
        file = np.load(next(tmp_path.glob("s/t/*/rows.npy")), mmap_mode="r")
        assert len(file) == table.capacity


def test_expiry(tmp_path, kind):
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((200, DIM), np.float32)
    with tierstore.create(tmp_path / "s", {"t": tracking(kind)}, budget=Budget(host_rows=9)) as s:
        table, keys = s["t"], some(kind, 200)
        table.write(keys, rows)
        s.commit()
        for _ in range(3):
            table.write(keys[:50], rows[:50])
            s.commit()
        table.lease(keys[150:]).release()
        s.commit()
        reader = tierstore.open(tmp_path / "s")
        assert table.read(keys[:1], "uses").tolist() == [[4, s.version - 1]]
        assert table.read(keys[150:151], "uses").tolist() == [[2, s.version]]
        assert not list(table.expire(unused_for=100, fewer_than=1, keep_at_most=200))
        next(iter(table.expire(keep_at_most=0)))
        assert table.rows == 200
        lease = table.lease(keys[:4])
        gone = list(table.expire(unused_for=3))
        assert lease.ended
        assert [each for found, _ in gone for each in found] == list(keys[50:150])
        assert np.array_equal(np.concatenate([each["weight"] for _, each in gone]), rows[50:150])
        assert table.rows == 100
        s.rollback()
        assert np.array_equal(table.read(keys), rows)
        assert table.rows == 200
        list(table.expire(fewer_than=3, unused_for=4))
        assert table.rows == 50
        table.write(some(kind, 20, 500), rows[:20])
        s.commit()
        assert reader["t"].rows == 200
        reader.refresh()
        for found in (table, reader["t"]):
            assert found.rows == 70
            assert np.array_equal(found.read(keys[:50]), rows[:50])
            assert np.array_equal(found.read(some(kind, 20, 500)), rows[:20])
            assert not found.contains(keys[50:]).any()
        coming = table.expire(keep_at_most=5)
        next(coming)
        s.rollback()
        with pytest.raises(ClosedError):
            next(coming)
        reader.close()
    with tierstore.open(tmp_path / "s", "r+") as s:
        assert s["t"].rows == 70
        assert s.verify().ok
        list(s["t"].expire(keep_at_most=0))
        assert s["t"].rows == 0
        s.commit()
        assert s["t"].rows == 0
    with tierstore.open(tmp_path / "s", "r+") as s:
        assert s["t"].rows == 0
        s["t"].write(keys, rows)
        assert np.array_equal(s["t"].read(keys), rows)
        s.rollback()


def test_expiry_without_a_loop_removes_nothing_and_warns(tmp_path, kind):
    with tierstore.create(tmp_path / "s", {"t": tracking(kind)}) as s:
        s["t"].write(some(kind, 10), np.ones((10, DIM), np.float32))
        s.commit()
        with pytest.warns(NotExpiredWarning, match=r"'t' expired: .*for keys, rows in") as found:
            s["t"].expire(keep_at_most=0)
        assert found[0].filename == __file__
        assert s["t"].rows == 10
        for _ in s["t"].expire(keep_at_most=0):
            break  # documented: removes nothing
        assert s["t"].rows == 10


@pytest.mark.parametrize("tracked", [False, True])
def test_keys_are_removed(tmp_path, kind, tracked):
    keys, rows = some(kind, 30), np.random.default_rng(1).standard_normal((30, DIM), np.float32)
    with tierstore.create(tmp_path / "s", {"t": tracking(kind, tracked=tracked)}) as s:
        table = s["t"]
        first = table.read(keys[:3])
        table.write(keys, rows)
        s.commit()
        lease = table.lease(keys[4:5])
        assert table.remove(some(kind, 2, 900)) == 0
        assert not lease.ended
        assert table.remove([*keys[:3], *some(kind, 1, 900), keys[0]]) == 3
        assert lease.ended
        assert np.array_equal(table.read(keys[:3]), first)
        assert not table.contains(keys[:3]).any()
        s.rollback()
        assert np.array_equal(table.read(keys), rows)
        assert table.remove(keys[:3]) == 3
        s.commit()
    with tierstore.open(tmp_path / "s") as s:
        assert s["t"].rows == 27
        assert np.array_equal(s["t"].read(keys[3:]), rows[3:])
        with pytest.raises(ReadOnlyError):
            s["t"].remove(keys[3:4])


def renumbered(how: str, store: Any, reader: Any, keys: Any) -> None:
    """Give rows other keys, as another thread might, that of the reader too."""
    if how == "rollback":
        store.rollback()
    else:
        store["t"].remove(keys[:2])
    if how == "refresh":
        store.commit()
        assert reader.refresh()


@pytest.mark.parametrize("suffix", ["npz", "parquet", "npy", "csv"])
@pytest.mark.parametrize("how", ["remove", "rollback", "refresh"])
def test_no_row_is_paired_with_the_key_of_another(tmp_path, kind, how, suffix, monkeypatch):
    monkeypatch.setattr(exporting, "block_rows_for", lambda nbytes: 7)
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    rows, keys = np.random.default_rng(3).standard_normal((40, DIM), np.float32), some(kind, 40)
    with tierstore.create(tmp_path / "s", {"t": growing(kind)}) as store:
        store["t"].write(keys[:30], rows[:30])
        store.commit()
        reader = tierstore.open(tmp_path / "s")
        store["t"].write(keys[30:], rows[30:])
        table = reader["t"] if how == "refresh" else store["t"]
        count, out = table.rows, tmp_path / f"out.{suffix}"
        pairs_of = table.items(block_rows=7)
        found, block = next(pairs_of)
        assert list(found) == list(keys[:7]) and np.array_equal(on_host(block), rows[:7])

        def interfere(done: int, total: int) -> None:
            assert total == count
            if not fired:
                fired.append(done)
                renumbered(how, store, reader, keys)

        fired: list[int] = []
        with pytest.raises(ClosedError, match=r"(removed|rolled back|refreshed) while this call"):
            tierstore.export_table(table, out, progress=interfere)
        assert fired == [7] and not out.exists()
        with pytest.raises(ClosedError, match=r"(removed|rolled back|refreshed) while this call"):
            next(pairs_of)
        reader.close()
        store.rollback()


def test_no_listed_row_is_paired_with_the_key_of_another(tmp_path, kind, monkeypatch):
    """The last rows take the places of those that go, which the list names later."""
    monkeypatch.setattr(exporting, "block_rows_for", lambda nbytes: 7)
    rows, keys = np.random.default_rng(3).standard_normal((30, DIM), np.float32), some(kind, 30)
    with tierstore.create(tmp_path / "s", {"t": growing(kind)}) as store:
        table = store["t"]
        table.write(keys, rows)

        def interfere(done: int, total: int) -> None:
            if done == 7:
                table.remove(keys[:2])

        with pytest.raises(ClosedError, match="removed while this call"):
            tierstore.export_table(
                table, tmp_path / "out.npz", rows=list(range(30))[::-1], progress=interfere
            )
        assert not (tmp_path / "out.npz").exists()
        store.rollback()


def test_keys_that_go_before_the_first_block_end_a_loop_over_them(tmp_path, kind, monkeypatch):
    """Between the count of the keys and the look at the rows, as another thread may remove them."""
    rows, keys = np.random.default_rng(3).standard_normal((40, DIM), np.float32), some(kind, 40)
    with tierstore.create(tmp_path / "s", {"t": growing(kind)}) as store:
        table = store["t"]
        table.write(keys, rows)
        real = KeyedTable.scan

        def scan(*given: Any, **options: Any) -> Any:
            patch.undo()
            table.remove(keys[:4])
            return real(*given, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KeyedTable, "scan", scan)
            with pytest.raises(ClosedError, match="keys were removed while this call"):
                list(table.items(block_rows=7))
        blocks = table.scan(block_rows=7)
        next(blocks)
        table.remove(keys[4:6])
        with pytest.raises(ClosedError, match="keys were removed while this call"):
            next(blocks)
        store.rollback()


def test_keys_that_come_meanwhile_are_left_out(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(exporting, "block_rows_for", lambda nbytes: 7)
    rows, keys = np.random.default_rng(3).standard_normal((90, DIM), np.float32), some(kind, 90)
    with tierstore.create(tmp_path / "s", {"t": growing(kind)}) as store:
        table = store["t"]
        table.write(keys[:40], rows[:40])
        found = []
        for number, (names, block) in enumerate(table.items(block_rows=10)):
            table.write(keys[40 + 5 * number :][:5], rows[40 + 5 * number :][:5])
            found.append((names, on_host(block)))
        assert list(np.concatenate([names for names, _ in found])) == list(keys[:40])
        assert np.array_equal(np.concatenate([block for _, block in found]), rows[:40])
        more = iter(range(60, 90))

        def add(done: int, total: int) -> None:
            assert total == 60
            table.write(keys[(each := next(more)) :][:1], rows[each : each + 1])

        tierstore.export_table(table, tmp_path / "out.npz", progress=add)
        with np.load(tmp_path / "out.npz", allow_pickle=False) as file:
            assert len(file["keys"]) == 60 and np.array_equal(file["weight"], rows[:60])
        store.rollback()


def test_the_other_table_of_a_merge_keeps_its_keys(tmp_path, kind):
    rows, keys = np.random.default_rng(4).standard_normal((20, DIM), np.float32), some(kind, 20)
    with tierstore.create(tmp_path / "s", {"t": growing(kind), "u": growing(kind)}) as store:
        store["t"].write(keys, rows)
        removed = []

        def remove(table: Any, *_: Any) -> Any:
            if not removed:
                removed.append(store["t"].remove(keys[:2]))
            return real(table, *_)

        real = KeyedTable.contains
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KeyedTable, "contains", remove)
            assert store["u"].merge(store["t"]) == 20
        assert np.array_equal(on_host(store["u"].read(keys)), rows)
        store.rollback()


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("partitions", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_what_changed_leads_from_one_version_to_the_next(tmp_path, kind, partitions, seed):
    """Of few different records, so that a key takes the place of another with an equal one."""
    rng = np.random.default_rng(seed)
    made: Any = tierstore.distributed.create if partitions else tierstore.create
    more = {"partitions": partitions} if partitions else {}
    before: dict[Any, Any] = {}
    with (
        made(tmp_path / "s", {"t": growing(kind)}, keep=2, **more) as s,
        tierstore.open(tmp_path / "s") as reader,
    ):
        for _ in range(12):
            written = np.unique(rng.integers(0, 30, rng.integers(1, 6)))
            values = rng.integers(0, 2, (written.size, 1)).repeat(DIM, 1).astype(np.float32)
            gone = rng.integers(0, 30, rng.integers(0, 6))
            s["t"].remove(named(kind, gone))
            if rng.random() < 0.7:
                s["t"].write(named(kind, written), values)
            old = s.version
            s.commit()
            after = {key: row.tolist() for key, row in pairs_in(s["t"])}
            with tierstore.open(tmp_path / "s") as again:
                found = again.changed(old)
                assert before == after or "t" in found
                rows = found.get("t", np.empty(0, np.int64))
                assert np.array_equal(rows, np.unique(rows))
                changed = dict(
                    zip(list(again["t"].keys_of(rows)), read_of(again, rows), strict=True)
                )
            for new in reader.follow(timeout=0):
                assert np.array_equal(new.rows.get("t", []), rows)
            kept = {key: row for key, row in before.items() if key in after}
            assert kept | changed == after
            before = after


def named(kind: str, numbers: Any) -> Any:
    return numbers * 7 - 9 if kind == "int64" else [f"key {number}" for number in numbers]


def pairs_in(table: Any) -> Any:
    keys = table.keys[:]
    return zip(list(keys), on_host(table.read(keys)), strict=True)


def read_of(store: Any, rows: Any) -> Any:
    return on_host(store["t"].by_row.read(rows)).tolist()


def test_other_keys_of_rows_that_stay_are_a_change(tmp_path):
    with tierstore.create(tmp_path / "s", {"t": TableSpec(4, 2)}, keep=9) as s:
        first = s.version
        s.set_keys("t", ["a", "b", "c", "d"])
        given = s.version
        s.set_keys("t", ["b", "a", "c", "z"])
        s["t"].write([2], np.ones((1, 2), np.float32))
        s.commit()
        assert s.changed(first)["t"].tolist() == [0, 1, 2, 3]
        assert s.changed(given)["t"].tolist() == [0, 1, 2, 3]
        s.set_keys("t", [5, 6, 7, 8])
        kinds = s.version
        s.set_keys("t", [5, 6, 9, 8])
        assert s.changed(given)["t"].tolist() == [0, 1, 2, 3]
        assert s.changed(kinds)["t"].tolist() == [2]


@pytest.mark.variants(4, 5)
@pytest.mark.parametrize(
    ("partitions", "call", "step"),
    [
        (0, "remove", 5),
        (3, "expire", 9),
        pytest.param(0, "remove", 1, marks=pytest.mark.slow),
        pytest.param(0, "expire", 1, marks=pytest.mark.slow),
        pytest.param(3, "remove", 1, marks=pytest.mark.slow),
        pytest.param(3, "expire", 1, marks=pytest.mark.slow),
    ],
)
def test_an_error_in_the_middle_of_a_removal_awaits_a_rollback(
    tmp_path, kind, partitions, call, step, monkeypatch
):
    """The disk is full at every `step`-th write: no key gets the row of another, in no version."""
    for module in (keyed, partitioned_keys):
        monkeypatch.setattr(module, "_BLOCK_ROWS", 3)
    rng, keys = np.random.default_rng(8), some(kind, 40)
    rows, later = rng.standard_normal((2, 40, DIM), np.float32)
    gone, kept = np.arange(0, 24, 2), np.setdiff1d(np.arange(40), np.arange(0, 24, 2))

    def remove(table: Any) -> None:
        if call == "remove":
            table.remove([keys[each] for each in gone])
        else:
            list(table.expire(fewer_than=2))

    failures = halves = 0
    for number in itertools.count(0, step):
        path = tmp_path / str(number)
        specs = {name: growing(kind, track_uses=True) for name in ("t", "other")}
        made: Any = tierstore.distributed.create if partitions else tierstore.create
        more = {"partitions": partitions} if partitions else {}
        with made(path, specs, budget=Budget(host_rows=2), **more) as s:
            table = s["t"]
            table.write(keys, rows)
            table.write([keys[each] for each in kept], rows[kept])  # used twice
            s.commit()
            with monkeypatch.context() as patch:
                full = FullAt(number, patch)
                try:
                    remove(table)
                except StoreFullError:
                    failures += 1
            other = s["other"]
            other.write(keys, rows)
            other.remove(keys[:3])  # which ends leases of all tables of the space
            if inside.generation(table).key_map.half_removed:
                halves += 1
                for refused in (s.commit, lambda table=table: table.read(keys[:1])):
                    with pytest.raises(ClosedError, match=r"halfway; store\.rollback\(\) brings"):
                        refused()
                s.rollback()
                assert (table.rows, s["other"].rows, s.uncommitted_rows()) == (40, 0, 0)
                assert np.array_equal(on_host(table.read(keys)), rows)
                remove(table)
            assert table.rows == kept.size
            fresh = some(kind, 9, 900)
            table.write(fresh, later[:9])
            s.commit()
        with tierstore.open(path) as s:
            table = s["t"]
            assert table.rows == kept.size + 9 and s.verify()
            assert np.array_equal(on_host(table.read([keys[each] for each in kept])), rows[kept])
            assert np.array_equal(on_host(table.read(fresh)), later[:9])
            assert not table.contains([keys[each] for each in gone]).any()
        if not full.reached:
            break
    assert failures > 3 / step and halves


class FullAt:
    """Make the call of that number that writes to a lowest tier find the disk full."""

    def __init__(self, number: int, patch: pytest.MonkeyPatch) -> None:
        self.left, self.reached = number, False
        for name in ("write", "collect"):
            patch.setattr(DiskTier, name, self.failing(getattr(DiskTier, name)))

    def failing(self, real: Any) -> Any:
        def call(tier: DiskTier, *arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                self.reached = True
                raise StoreFullError("no space left")
            return real(tier, *arguments, **options)

        return call


@pytest.mark.parametrize("gone", [slice(0, 3), slice(7, 10), slice(0, 10), slice(0, 0)])
def test_expiry_that_is_not_committed_is_dropped_with_a_warning(tmp_path, kind, gone):
    rows, keys = np.random.default_rng(5).standard_normal((10, DIM), np.float32), some(kind, 10)
    with tierstore.create(tmp_path / "s", {"t": tracking(kind)}) as s:
        s["t"].write(keys, rows)
        s.commit()
        s["t"].write([key for key in keys if key not in list(keys[gone])], np.delete(rows, gone, 0))
        s.commit()
        left = 10 - len(keys[gone])
        list(s["t"].expire(keep_at_most=left))
        assert (s.uncommitted_rows() > 0) == (left < 10)
        if left < 10:
            with pytest.raises(InvalidInputError, match="not committed"):
                s.fold()
            with pytest.raises(InvalidInputError, match="not committed"):
                s.state_dict()
        pending = s["t"].expire(keep_at_most=0)
        assert len(list(itertools.islice(pending, 1))) == (left > 0)
        with (
            pytest.warns(UncommittedRowsWarning, match="uncommitted rows")
            if left < 10
            else contextlib.nullcontext()
        ):
            s.close()
        with pytest.raises(ClosedError if left else StopIteration):
            next(pending)
    with tierstore.open(tmp_path / "s", "r+") as s:
        assert np.array_equal(s["t"].read(keys), rows)
        list(s["t"].expire(keep_at_most=left))
        s.commit()
        assert s.uncommitted_rows() == 0
        assert s["t"].rows == left


@pytest.mark.parametrize("kind", ["int64", "text"])
def test_keys_that_expire_are_not_loaded_again(tmp_path, kind, monkeypatch):
    """Another thread may ask for the map when keys are gone from it."""
    keys = some(kind, 50)
    with tierstore.create(tmp_path / "s", {"t": tracking(kind)}) as s:
        s["t"].write(keys, np.ones((50, DIM), np.float32))
        s.commit()
        generation = inside.generation(s["t"])
        known, asked = type(generation.key_map), []
        keep = known.keep

        def look_after(self, rows):
            keep(self, rows)
            asked.append(generation.key_map is self)

        monkeypatch.setattr(known, "keep", look_after)
        list(s["t"].expire(keep_at_most=20))
        s.commit()
        assert asked == [True]
        assert generation.key_count == 20


@pytest.mark.variants(2)
@pytest.mark.parametrize("tracked", [True, False])
def test_readers_and_writers_beside_removals(tmp_path, kind, tracked):
    """A key has its own row or none, whatever other threads remove."""
    rows = np.random.default_rng(6).standard_normal((2000, DIM), np.float32)
    keys = some(kind, 2000)
    spec = tracking(kind, tracked=tracked)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=Budget(host_rows=9)) as s:
        s.grow("t", 3000)
        table, wrong, done = s["t"], [], threading.Event()
        table.write(keys, rows)
        s.commit()

        def read() -> None:
            rng = np.random.default_rng(1)
            while not done.is_set():
                start = int(rng.integers(0, 1900))
                part = slice(start, start + 100)
                found = table.read(keys[part])
                known = (found == rows[part]).all(1)
                fresh = np.isin(found[~known].view(np.uint32)[:, 0], start_values)
                if not fresh.all():
                    wrong.append(part)

        def write() -> None:
            rng = np.random.default_rng(2)
            while not done.is_set():
                start = int(rng.integers(0, 1900))
                part = slice(start, start + 20)
                table.write(keys[part], rows[part])

        with tierstore.create(tmp_path / "o", {"t": tracking(kind)}) as other:
            start_values = other["t"].read(keys).view(np.uint32)[:, 0]
        threads = [threading.Thread(target=each) for each in (read, read, write)]
        for each in threads:
            each.start()
        try:
            for number in range(12):
                if tracked:
                    list(table.expire(keep_at_most=1500 - 100 * number))
                else:
                    table.remove(keys[100 * number : 100 * number + 150])
        finally:
            done.set()
            for each in threads:
                each.join()
        assert not wrong
        known = table.contains(keys)
        assert np.array_equal(table.read(keys)[known], rows[known])
        s.rollback()


def test_keys_are_asked_for_while_a_version_without_some_is_adopted(tmp_path, kind):
    """A thread that saw the old version and no removal would load keys that are gone."""
    keys, found, threads = some(kind, 50), [], []
    with tierstore.create(tmp_path / "s", {"t": tracking(kind)}) as store:
        store["t"].write(keys, ones(50), "weight")
        store.commit()
        list(store["t"].expire(keep_at_most=20))
        generation = inside.generation(store["t"])
        known = type(generation)

        def asked(self, name, value):
            known.__setattr__(self, name, value)
            ask = threading.Thread(target=lambda: found.append(len(self.key_map)), daemon=True)
            threads.append(ask)
            threads[-1].start()
            threads[-1].join(0.1)  # some wait for the end of this change

        generation.__class__ = type("Asked", (known,), {"__setattr__": asked})
        store.commit()
        generation.__class__ = known
        for thread in threads:
            thread.join(60)
        assert found == [20] * len(threads)
        assert store["t"].rows == 20 and np.count_nonzero(store["t"].contains(keys)) == 20
    with tierstore.open(tmp_path / "s") as store:
        assert store["t"].rows == 20


USED_BY = KeyedTable._used_by
"""What finds the rows of keys, which others may change before they are used."""


@pytest.mark.parametrize("way", ["write", "lease"])
def test_keys_that_a_rollback_takes_from_a_call_get_rows_anew(store, kind, monkeypatch, way):
    """Rows that were found before are those of other keys by then."""
    table, keys = store["t"], some(kind, 2)
    mine, theirs = keys[:1], keys[1:]
    calls = itertools.count()

    def found(self, *given):
        rows = USED_BY(self, *given)
        if next(calls) == 0:
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join(60)
        return rows

    def beside():
        store.rollback()
        table.write(theirs, 2 * ones(1), "weight")

    monkeypatch.setattr(KeyedTable, "_used_by", found)
    if way == "write":
        table.write(mine, ones(1), "weight")
    else:
        with table.lease(mine) as lease:
            lease.write("weight", ones(1))
    assert np.array_equal(table.read(mine, "weight"), ones(1))
    assert np.array_equal(table.read(theirs, "weight"), 2 * ones(1))
    assert table.rows == 2
    store.rollback()


def test_a_write_beside_a_removal_counts_each_key_once(tmp_path, kind, monkeypatch):
    """The removal waits for it: rows found before are those of other keys by then."""
    keys, threads = some(kind, 9), []
    with tierstore.create(tmp_path / "s", {"t": tracking(kind)}) as store:
        table = store["t"]
        table.write(keys, ones(9), "weight")

        def found(self, *given):
            rows = USED_BY(self, *given)
            if not threads:
                threads.append(threading.Thread(target=table.remove, args=(keys[:1],)))
                threads[0].start()
                threads[0].join(0.2)
            return rows

        monkeypatch.setattr(KeyedTable, "_used_by", found)
        table.write(keys[8:], 2 * ones(1), "weight")
        threads[0].join(60)
        monkeypatch.undo()
        assert table.read(keys[8:], "uses")[:, 0].tolist() == [2]
        assert np.array_equal(table.read(keys[8:], "weight"), 2 * ones(1))
        assert table.rows == 8
        store.rollback()


def test_a_reader_counts_no_uses(tmp_path, kind):
    keys = some(kind, 3)
    with tierstore.create(tmp_path / "s", {"t": tracking(kind)}) as store:
        store["t"].write(keys, ones(3), "weight")
        store.commit()
    with tierstore.open(tmp_path / "s") as reader:
        reader["t"].lease(keys).release()
        assert reader["t"].read(keys, "uses")[:, 0].tolist() == [1, 1, 1]


def test_a_read_beside_a_rollback_gives_the_first_row_of_a_key_that_goes(store, kind, monkeypatch):
    table, key, found = store["t"], some(kind, 1), []
    first = table.read(key, "weight")
    table.write(key, ones(1), "weight")

    def read():
        found.append(table.read(key, "weight"))

    reader, discard = threading.Thread(target=read), type(inside.state(store).spaces).discard

    def discarded(self):
        discard(self)
        reader.start()
        reader.join(0.2)  # it waits for the end of the rollback

    monkeypatch.setattr(type(inside.state(store).spaces), "discard", discarded)
    store.rollback()
    reader.join(60)
    assert np.array_equal(found[0], first)


@pytest.mark.parametrize("change", ["refresh", "rollback"])
def test_reads_beside_keys_that_get_other_rows(tmp_path, kind, monkeypatch, change):
    """Few rows in memory wait for no use of the store, but where their keys are about to move."""
    keys, found = some(kind, 40), []
    rows = np.random.default_rng(6).standard_normal((40, DIM)).astype(np.float32)
    fields = {"weight": Field(DIM)}
    tracked = TableSpec(100, fields=fields, keys=kind, track_uses=True)
    with contextlib.ExitStack() as stack:
        budget = Budget(host_rows=100)
        store = stack.enter_context(tierstore.create(tmp_path / "s", {"t": tracked}, budget=budget))
        store["t"].write(keys, rows)
        store["t"].write(keys[20:], rows[20:])
        store.commit()
        where = store
        if change == "refresh":
            where = stack.enter_context(tierstore.open(tmp_path / "s", budget=budget))
        table = where["t"]
        assert inside.access(table.by_row)._host is not None
        assert np.array_equal(table.read(keys), rows)
        list(store["t"].expire(fewer_than=2))  # the others get their rows
        if change == "refresh":
            store.commit()
        assert np.array_equal(table.read(keys[20:]), rows[20:])
        threads = []

        def beside(change_rows):
            def changed(*given):
                threads.append(threading.Thread(target=read))
                threads[-1].start()
                threads[-1].join(0.1)
                change_rows(*given)

            return changed

        def read():
            found.append(table.read(keys[20:]))

        for name in ("discard", "forget"):
            monkeypatch.setattr(Space, name, beside(getattr(Space, name)))
        assert where.refresh() if change == "refresh" else where.rollback() is None
        monkeypatch.undo()
        for thread in threads:
            thread.join(60)
        assert len(found) == 1 and np.array_equal(found[0], rows[20:])


def test_texts_of_one_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(Texts, "hashes", lambda self: np.full(len(self), 7, np.uint64))
    keys, rows = some("text", 60), np.random.default_rng(2).standard_normal((60, DIM), np.float32)
    with tierstore.create(tmp_path / "s", {"t": tracking("text")}) as store:
        table = store["t"]
        table.write(keys, rows)
        table.write(keys[10:30], rows[10:30])
        list(table.expire(keep_at_most=20))
        store.commit()
        table.write(keys[:5], rows[:5])
        store.commit()
    with tierstore.open(tmp_path / "s") as store:
        table = store["t"]
        known = [*range(10, 30), *range(5)]
        assert np.array_equal(table.read([keys[at] for at in known]), rows[known])
        assert table.rows == 25
        assert not table.contains(keys[30:]).any()


def test_what_cannot_expire(store, kind):
    with pytest.raises(InvalidInputError, match="track_uses"):
        store["t"].expire(unused_for=1)
    with pytest.raises(InvalidInputError, match="at least one"):
        store["t"].expire()
    with pytest.raises(InvalidTypeError):
        store["t"].expire(keep_at_most=1.5)
    with pytest.raises(InvalidInputError, match="at least 0"):
        store["t"].expire(keep_at_most=-1)
    with pytest.raises(InvalidInputError, match="by key"):
        TableSpec(5, 2, track_uses=True)
    with pytest.raises(InvalidInputError, match="by key"):
        TableSpec(5, 2, admit_after=2)
    with pytest.raises(InvalidInputError, match="its own field"):
        TableSpec(fields={"uses": Field(1)}, keys=kind, track_uses=True)


def test_a_small_budget_has_room_for_a_table_that_grows(tmp_path):
    spec = TableSpec(dim=8, keys="int64")
    with tierstore.create(tmp_path / "s", {"t": spec}, budget="1MiB") as store:
        tiers = store.info().tables[0].tiers
        assert 0 < tiers[0].nbytes <= 1 << 20
    with pytest.raises(CapacityError):
        tierstore.open(tmp_path / "s", "r+", budget="100B")


def test_what_cannot_grow():
    with pytest.raises(InvalidInputError, match="by key"):
        TableSpec(5, 2, grows=True)
    with pytest.raises(InvalidInputError, match="fixed number of rows"):
        TableSpec(dim=2, keys="int64", backend="zarr")
    with pytest.raises(InvalidTypeError):
        TableSpec(dim=2)
    assert TableSpec(70_000, 2, keys="text", grows=True).rows == 131_072


def test_reading_takes_no_place(store, kind):
    table = store["t"]
    table.read(some(kind, 20))
    assert table.rows == 0
    assert table.capacity == CAPACITY
    assert store.uncommitted_rows() == 0


def test_fields_and_shapes(store, kind):
    table, keys = store["t"], some(kind, 6)
    square = np.array(keys, object if kind == "text" else None).reshape(2, 3)
    table.write(square, np.arange(6.0, dtype=np.float32).reshape(2, 3, 1), "age")
    both = table.read(square, ["weight", "age"])
    assert both["age"].tolist() == [[[0], [1], [2]], [[3], [4], [5]]]
    assert np.array_equal(both["weight"], table.read(some(kind, 6)).reshape(2, 3, DIM))
    assert both["weight"].any()
    table.write(keys[0], {"weight": ones(1)[0], "age": np.float32([9])})
    assert table[keys[0]].tolist() == [1, 1, 1]
    assert keys[0] in table
    assert some(kind, 1, 99)[0] not in table
    store.rollback()


def test_what_cannot_be(store, kind):
    table, keys = store["t"], some(kind, CAPACITY + 1)
    with pytest.raises(InvalidTypeError):
        table.write([1.5], ones(1))
    with pytest.raises(InvalidTypeError):
        table.read(["a"] if kind == "int64" else [1])
    with pytest.raises(InvalidInputError, match=r"is \(3, 3\), not \(2, 3\)"):
        table.write(keys[:3], ones(2))
    assert table.rows == 0
    with pytest.raises(InvalidInputError, match=r"holds 400 keys.*grow"):
        table.write(keys, ones(CAPACITY + 1))
    assert table.rows == 0
    with pytest.raises(InvalidTypeError, match="no order"):
        table[0:3]
    with pytest.raises(UnknownNameError):
        table.lookup(keys[:1])
    with pytest.raises(RowIndexError):
        table.keys_of([0])
    with pytest.raises(InvalidInputError, match="by key"):
        store.set_keys("t", keys)
    with pytest.raises(InvalidInputError, match="by key"):
        store.grow("t", 500, keys=keys[:100])
    with pytest.raises(InvalidInputError, match="by key"):
        store.append("t", np.ones((1, DIM), np.float32))
    if kind == "text":
        with pytest.raises(InvalidInputError, match="at most"):
            table.write(["x" * (1 << 20)], ones(1))
    with pytest.raises(InvalidInputError, match="by row"):
        TableSpec(5, 2, init=tierstore.from_array(np.ones((5, 2))), keys=kind)
    with pytest.raises(InvalidInputError, match="int64"):
        TableSpec(5, 2, keys="float")


def test_schema_changes_leave_a_table_that_grows(tmp_path, kind):
    specs = {"t": growing(kind)}
    with tierstore.open_or_create(tmp_path / "s", specs) as store:
        grow(store["t"])
        store["t"].write(some(kind, 30), ones(30))
        store.commit()
        store.add_fields("t", {"state": Field(2)})
        store.rename("t", "u")
        store.rename("u", "t")
        store.save(tmp_path / "copy")
    for path in (tmp_path / "s", tmp_path / "copy"):
        with tierstore.open_or_create(path, specs) as store:
            table = store["t"]
            assert (table.spec.grows, table.capacity) == (True, 131_072)
            assert np.array_equal(table.read(some(kind, 30)), ones(30))
            grow(table)
            store.alter_table("t", backend="zarr")
            assert (store["t"].spec.grows, store["t"].capacity) == (False, 196_608)
    other = "text" if kind == "int64" else "int64"
    with pytest.raises(InvalidInputError, match="keys"):
        tierstore.open_or_create(tmp_path / "s", {"t": growing(other)})


def test_schema_changes_and_copies_keep_keys(store, kind, tmp_path):
    table, keys = store["t"], some(kind, 30)
    rows = np.random.default_rng(1).standard_normal((30, DIM), np.float32)
    table.write(keys, rows)
    store.commit()
    store.add_fields("t", {"state": Field(2, init=tierstore.constant(0.5))})
    assert np.array_equal(table.read(keys), rows)
    assert (table.read(keys, "state") == 0.5).all()
    more = some(kind, 5, 100)
    first = table.read(more)
    table.write(more, np.ones((5, 1), np.float32), "age")
    assert (table.read(more, "state") == 0.5).all()
    store.commit()
    store.grow("t", 500)
    assert table.capacity == 500
    renamed = store.rename("t", "u")
    store.save(tmp_path / "copy")
    with tierstore.open(tmp_path / "copy") as copy:
        for found in (renamed, copy["u"]):
            assert found.rows == 35
            assert found.capacity == 500
            assert np.array_equal(found.read(keys), rows)
            assert np.array_equal(found.read(more), first)
            assert list(found.keys) == [*keys, *more]
            assert found.read(more, "age").tolist() == [[1]] * 5
            assert [len(each) for each, _ in found.items(block_rows=20)] == [20, 15]


@pytest.mark.parametrize("change", ["cut", "flip", "gone"])
def test_damaged_keys_are_noticed(store, kind, change):
    table = store["t"]
    table.write(some(kind, 9), ones(9))
    store.commit()
    for path in sorted(store.path.glob("t/*/keys.*")):
        content = path.read_bytes()
        path.unlink()
        if change == "cut":
            path.write_bytes(content[:-1])
        elif change == "flip":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with (
            tierstore.open(store.path)
            if change != "gone"
            else pytest.raises(CorruptStoreError) as reader
        ):
            if change == "gone":
                tierstore.open(store.path)["t"]
            else:
                assert reader.verify().bad_files
                with pytest.raises(CorruptStoreError):
                    reader["t"].read(some(kind, 1))
        path.write_bytes(content)


def test_a_commit_appends_what_is_new(store, kind):
    table = store["t"]
    table.write(some(kind, 9), ones(9))
    store.commit()
    before = {path: path.read_bytes() for path in store.path.glob("t/*/keys.*")}
    table.write(some(kind, 3, 50), ones(3))
    store.commit()
    after = {path: path.read_bytes() for path in store.path.glob("t/*/keys.*")}
    assert before.keys() == after.keys()
    assert all(after[path].startswith(data) for path, data in before.items())
    assert all(len(after[path]) > len(data) for path, data in before.items())


def test_going_back_does_not_overwrite_the_keys_of_kept_versions(store, kind):
    table = store["t"]
    table.write(some(kind, 4), ones(4))
    old = store.commit()
    table.write(some(kind, 4, 50), ones(4))
    newer = store.commit(keep="newer")
    store.restore(old)
    table.write(some(kind, 4, 90), ones(4))
    store.commit()
    for version, start in ((newer, 50), (store.version, 90)):
        with tierstore.open(store.path, version=version) as reader:
            assert reader["t"].rows == 8
            assert reader["t"].contains(some(kind, 4, start)).all()
            assert not reader["t"].contains(some(kind, 4, 140 - start)).any()


def test_a_table_in_memory_has_no_keys(kind):
    with pytest.raises(InvalidInputError, match="needs a store on the disk"):
        MemoryTable(spec(kind))


def test_an_error_that_closes_the_store_while_keys_are_added_is_raised(tmp_path, kind, monkeypatch):
    with tierstore.create(tmp_path / "s", {"t": spec(kind)}) as store:

        def interrupted(*_):
            store.close()
            raise KeyboardInterrupt

        monkeypatch.setattr(tierstore.KeyedTable, "_write_first", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store["t"].write(some(kind, 3), ones(3))


@pytest.mark.parametrize("on_conflict", ["newest", "mean", "keep"])
def test_merging_tables(store, kind, tmp_path, on_conflict):
    rng = np.random.default_rng(8)
    mine, others = rng.standard_normal((2, 20, DIM), np.float32)
    table, shared = store["t"], slice(10, 20)
    table.write(some(kind, 20), mine)
    with tierstore.create(tmp_path / "o", {"o": spec(kind)}) as other:
        other["o"].write(some(kind, 20, 10), {"weight": others, "age": mine[:, :1]})
        other.commit()
        assert table.merge(other["o"], on_conflict=on_conflict) == 10
        with pytest.raises(InvalidInputError, match="itself"):
            table.merge(table)
        with pytest.raises(InvalidInputError, match="newest"):
            table.merge(other["o"], on_conflict="first")
        with pytest.raises(InvalidInputError, match=r"fields must be equal"):
            table.merge(other.create_table("p", TableSpec(9, 2, keys=kind)))
    store.commit()
    expected = {
        "newest": others[:10],
        "keep": mine[shared],
        "mean": (mine[shared] + others[:10]) / 2,
    }[on_conflict]
    whole = np.concatenate([mine[:10], expected, others[10:]])
    assert np.array_equal(table.read(some(kind, 30)), whole)
    assert np.array_equal(table.read(some(kind, 10, 20), "age"), mine[10:, :1])
    assert table.rows == 30


@pytest.mark.parametrize("on_conflict", ["newest", "mean"])
def test_merged_keys_expire_as_if_used_as_long_ago(tmp_path, kind, on_conflict):
    tracked = TableSpec(dim=DIM, keys=kind, track_uses=True)
    mine, fresh, shared, old = some(kind, 4)
    with (
        tierstore.create(tmp_path / "s", {"t": tracked}) as store,
        tierstore.create(tmp_path / "o", {"t": tracked}) as other,
    ):
        other["t"].write([old], ones(1))
        for _ in range(6):
            other.commit()
        other["t"].write([fresh], ones(1))
        other["t"].write([shared], ones(1))
        for _ in range(20):
            store.commit()
        other.commit()
        for _ in range(2):
            store["t"].write([mine, shared], ones(2))
        store.commit()
        assert store["t"].merge(other["t"], on_conflict=on_conflict) == 2
        store.commit()
        gone = [list(keys) for keys, _ in store["t"].expire(unused_for=5)]
        assert gone == [[old]]
        gone = [list(keys) for keys, _ in store["t"].expire(fewer_than=2)]
        assert gone == [[fresh]]
        store.commit()


@pytest.mark.variants(3)
@pytest.mark.parametrize("how", ["restored", "discarded"])
def test_keys_are_as_old_as_before_once_the_store_went_back(tmp_path, kind, how):
    """Versions that it went back from do not count: their numbers are only skipped."""
    path, (often, seldom) = tmp_path / "s", some(kind, 2)
    spec = TableSpec(dim=DIM, keys=kind, track_uses=True)
    with tierstore.create(path, {"t": spec}, keep=9) as store:
        store["t"].write([often, seldom], ones(2))
        good = store.commit(keep="good")
        for _ in range(20):
            store["t"].write([often], ones(1))
            store.commit()
        assert store.version == good + 20
        if how == "restored":
            store.restore("good")
    again = {"version": good, "discard_newer": True} if how == "discarded" else {}
    with tierstore.open(path, "r+", **again) as store:
        store["t"].write([often], ones(1))
        assert store.commit() > good + 20
        assert list(store["t"].expire(unused_for=5)) == []
        for _ in range(5):
            store.commit()
        store.release("good")
        store.fold()
        assert [list(keys) for keys, _ in store["t"].expire(unused_for=8)] == []
        store["t"].write([often], ones(1))
        store.commit()
        assert [list(keys) for keys, _ in store["t"].expire(unused_for=6)] == [[seldom]]
        store.commit()


@pytest.mark.variants(3, 5)
@pytest.mark.parametrize("how", ["saved", "updated", "patched"])
@pytest.mark.parametrize("went_back", [False, True])
def test_keys_are_as_old_in_a_copy(tmp_path, kind, how, went_back):
    """A copy takes several versions as one, with numbers of its own."""
    place, (often, seldom) = tmp_path / "copy", some(kind, 2)
    spec = TableSpec(dim=DIM, keys=kind, track_uses=True)
    with tierstore.create(tmp_path / "s", {"t": spec}, keep=9) as store:
        store["t"].write([often, seldom], ones(2))
        store.commit(keep="start")
        if how != "saved":
            store.save(place)
        for at in range(14):
            if went_back and at == 7:
                store.restore("start")
            store["t"].write([often], ones(1))
            store.commit()
        if how == "patched":
            store.write_patch(tmp_path / "p.patch", "start")
            with tierstore.open(place, "r+") as copy:
                copy.apply_patch(tmp_path / "p.patch")
        else:
            store.update_copy(place)
        age = 8 if went_back else 14  # the restored version is one, too
        with tierstore.open(place, "r+") as copy:
            for each in store, copy:
                assert list(each["t"].expire(unused_for=age + 1)) == []
                assert [list(keys) for keys, _ in each["t"].expire(unused_for=age)] == [[seldom]]
                each.commit()
            assert inside.owner(copy["t"]).commits == inside.owner(store["t"]).commits


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_mean_is_finite_where_the_sum_is_not(tmp_path, dtype):
    most = np.finfo(dtype).max
    narrow = TableSpec(dim=2, keys="int64", dtype=dtype)
    with tierstore.create(tmp_path / "s", {"t": narrow, "o": narrow}) as store:
        store["t"].write([1], np.array([[most, -most]], dtype))
        store["o"].write([1], np.array([[most, 0]], dtype))
        store["t"].merge(store["o"], on_conflict="mean")
        assert np.array_equal(store["t"].read([1]), np.array([[most, -most / 2]], dtype))
        store.rollback()


def test_keys_by_row(store, kind):
    table, keys = store["t"], some(kind, 5)
    table.write(keys, ones(5))
    store.commit()
    assert table.keys[2] == keys[2] == table.keys[-3]
    assert [*table.keys[1:3]] == [*keys[1:3]]
    assert [*table.keys[np.array([4, 0])]] == [keys[4], keys[0]]
    assert len(table.keys) == 5
    for outside in (5, -6):
        with pytest.raises(IndexError):
            table.keys[outside]
    with pytest.raises(RowIndexError):
        table.keys[np.array([5])]


def test_a_table_can_become_one_by_key_and_back(store, kind):
    store.create_table("u", TableSpec(5, DIM, init=INIT))
    plain, before = store["u"].read([0]), store.version
    store.drop("u")
    store.create_table("u", spec(kind))
    store["u"].write(some(kind, 3), ones(3))
    after = store.commit()
    store.restore(before)
    assert np.array_equal(store["u"].read([0]), plain)
    with tierstore.open(store.path, version=after) as reader:
        assert np.array_equal(reader["u"].read(some(kind, 3)), ones(3))
        reader.refresh()
        assert np.array_equal(reader["u"].read([0]), plain)


def test_a_refresh_reads_only_new_keys(store, kind, monkeypatch):
    table = store["t"]
    table.write(some(kind, 9), ones(9))
    store.commit()
    with tierstore.open(store.path) as reader:
        shown = reader["t"]
        assert shown.contains(some(kind, 9)).all()
        table.write(some(kind, 9, 30), ones(9))
        store.commit()
        before = inside.generation(shown).key_map
        reader.refresh()
        assert shown.contains(some(kind, 9, 30)).all()
        assert shown.contains(some(kind, 9)).all()
        assert inside.generation(shown).key_map is before


def test_a_refresh_while_keys_are_loaded(tmp_path, kind, monkeypatch):
    """Those of the version before are not taken for those of the new one, here nor later."""
    keys = some(kind, 40)
    rows = np.random.default_rng(6).standard_normal((40, DIM)).astype(np.float32)
    load, versions = generation.load_keys, []
    with tierstore.create(tmp_path / "s", {"t": tracking(kind)}) as store:
        table = store["t"]
        table.write(keys, rows)
        table.write(keys[20:], rows[20:])
        store.commit()

        def loaded(*given):
            load(*given)
            if not versions:
                list(table.expire(fewer_than=2))  # the others get their rows
                versions.append(store.commit())
                assert reader.refresh()

        with tierstore.open(tmp_path / "s") as reader:
            monkeypatch.setattr(generation, "load_keys", loaded)
            for _ in range(2):
                assert np.array_equal(reader["t"].read(keys[20:]), rows[20:])
            assert versions == [reader.version] and reader["t"].rows == 20


def test_a_refresh_that_is_interrupted_loses_no_key(store, kind, monkeypatch):
    table, put = store["t"], HashMap._put
    table.write(some(kind, 40), ones(40))
    store.commit()

    def interrupted(*_: object) -> None:
        monkeypatch.setattr(HashMap, "_put", put)
        raise KeyboardInterrupt

    with tierstore.open(store.path) as reader:
        shown = reader["t"]
        assert shown.contains(some(kind, 40)).all()
        table.write(some(kind, 260, 40), 2 * ones(260))
        store.commit()
        reader.refresh()
        monkeypatch.setattr(HashMap, "_put", interrupted)  # keys of a split are in no place then
        with pytest.raises(KeyboardInterrupt):
            shown.lookup(some(kind, 1))
        assert np.array_equal(shown.read(some(kind, 40)), ones(40))
        assert np.array_equal(shown.read(some(kind, 260, 40)), 2 * ones(260))


def test_a_child_of_a_fork_does_not_wait_for_the_thread_that_loads_keys(store, kind, monkeypatch):
    keys, load = some(kind, 9), generation.load_keys
    loading, go_on = threading.Event(), threading.Event()
    store["t"].write(keys, ones(9))
    store.commit()
    path = store.path
    store.close()

    def slow(*given: Any) -> None:
        loading.set()
        go_on.wait(30)
        load(*given)

    monkeypatch.setattr(generation, "load_keys", slow)
    monkeypatch.setattr(generation, "_FILLED_AHEAD", 1)
    with tierstore.open(path, mode="r+") as store:
        table = store["t"]
        assert loading.wait(30)
        child = os.fork()
        if not child:
            signal.alarm(20)
            try:
                table.lookup(keys)
            except ForkedStoreError:
                os._exit(7)
            finally:
                os._exit(8)
        go_on.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert np.array_equal(table.read(keys), ones(9))


def test_keys_of_a_closed_store_are_not_loaded(store, kind):
    store["t"].write(some(kind, 2), ones(2))
    store.commit()
    with tierstore.open(store.path) as reader:
        table = reader["t"]
    for call in (table.lookup, table.read, table.contains):
        with pytest.raises(ClosedError):
            call(some(kind, 2))
    with pytest.raises(ClosedError):
        table.keys_of([0])


def test_some_rows_are_exported_with_their_keys(store, kind, tmp_path):
    table, keys = store["t"], some(kind, 6)
    rows = np.random.default_rng(2).standard_normal((6, DIM), np.float32)
    table.write(keys, rows)
    store.commit()
    tierstore.export_table(table, tmp_path / "some.npz", rows=[4, 1])
    tierstore.export_table(table, tmp_path / "all.npz")
    for name, picked in (("some", [4, 1]), ("all", range(6))):
        source = tierstore.create(tmp_path / name, {"x": TableSpec(1, 1)})
        with source:
            tierstore.import_table(source, tmp_path / f"{name}.npz", table="t")
            assert np.array_equal(source["t"].read(range(len(picked))), rows[list(picked)])
            assert list(source["t"].keys) == [keys[row] for row in picked]


def test_patches_change_values_and_refuse_new_keys(store, kind, tmp_path):
    table, keys = store["t"], some(kind, 6)
    table.write(keys, ones(6))
    first = store.commit()
    store.save(tmp_path / "copy")
    rows = np.random.default_rng(2).standard_normal((2, DIM), np.float32)
    table.write(keys[2:4], rows)
    second = store.commit()
    store.write_patch(tmp_path / "values.patch", first, second)
    with tierstore.open(tmp_path / "copy", "r+") as copy:
        copy.apply_patch(tmp_path / "values.patch")
        assert np.array_equal(copy["t"].read(keys[2:4]), rows)
        assert np.array_equal(copy["t"].read(keys[:2]), ones(2))
    table.write(some(kind, 1, 50), ones(1))
    third = store.commit()
    with pytest.raises(InvalidInputError, match=r"other rows|other keys"):
        store.write_patch(tmp_path / "keys.patch", second, third)


@pytest.mark.variants(12)
@pytest.mark.parametrize(
    "options", [{}, {"backend": "zarr"}, {"backend": "zarr", "compression": "zstd"}]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_element_types_and_backends(kind, tmp_path, options, dtype):
    fields = {
        "weight": Field(DIM, dtype, INIT),
        "age": Field(1, "float64", tierstore.uniform(1, 2)),
    }
    made = TableSpec(50, fields=fields, keys=kind, **options)
    keys = some(kind, 20)
    with tierstore.create(tmp_path / "s", {"t": made}, budget=Budget(host_rows=4)) as store:
        table = store["t"]
        first = table.read(keys, ["weight", "age"])
        out = np.empty((20, 1))
        assert table.read(keys, "age", out=out) is out
        assert np.array_equal(out, first["age"])
        table.write(keys[:10], first["age"][:10] + 1, "age")
        store.commit()
        store.fold()
    with tierstore.open(tmp_path / "s", missing="init") as store:
        again = store["t"].read(keys, ["weight", "age"])
        assert np.array_equal(again["weight"], first["weight"])
        assert np.array_equal(again["age"][:10], first["age"][:10] + 1)
        assert np.array_equal(again["age"][10:], first["age"][10:])
        tensors = store["t"].read(keys, as_tensor=True)
        assert np.array_equal(tensors.float().numpy(), first["weight"].astype(np.float32))


@pytest.mark.parametrize("kind", ["int64", "text"])
def test_closing_before_the_first_key_is_loaded_loads_none(tmp_path, kind, monkeypatch):
    """The thread that fills the map may be anywhere when the store is closed."""
    monkeypatch.setattr(generation, "_FILLED_AHEAD", 50)
    with tierstore.create(tmp_path / "s", {"t": tracking(kind)}) as store:
        store["t"].write(some(kind, 60), ones(60))
        store.commit()
    began, go_on, new_map, added = threading.Event(), threading.Event(), generation.key_map, []

    def late(kind):
        began.set()
        assert go_on.wait(60)
        return new_map(kind)

    monkeypatch.setattr(generation, "key_map", late)
    monkeypatch.setattr(HashMap, "append", lambda *given, **options: added.append(given))
    reader = tierstore.open(tmp_path / "s")
    generation_ = inside.generation(reader["t"])
    assert began.wait(60)
    closer = threading.Thread(target=reader.close)
    closer.start()
    while not generation_._closing and closer.is_alive():
        time.sleep(0.001)
    go_on.set()
    closer.join(60)
    assert not closer.is_alive()
    assert not added


@pytest.mark.parametrize("kind", ["int64", "text"])
@pytest.mark.parametrize("at", [1, 2, 5, 20])
def test_loading_ends_soon_after_it_is_abandoned(tmp_path, kind, monkeypatch, at):
    """In the middle of reading the files, of checking texts, and of filling the map."""
    monkeypatch.setattr(key_log, "_CHECKED_BYTES", 100)
    monkeypatch.setattr(growing_keys, "_LOADED", 8)
    with tierstore.create(tmp_path / "s", {"t": tracking(kind)}) as store:
        store["t"].write(some(kind, 200), ones(200))
        store.commit()
    looked = []

    def check_wanted(self):
        looked.append(1)
        self.abandoned = len(looked) >= at
        check(self)

    check = growing_keys.KeyMap.check_wanted
    monkeypatch.setattr(growing_keys.KeyMap, "check_wanted", check_wanted)
    with tierstore.open(tmp_path / "s") as reader:
        with pytest.raises(ClosedError):
            reader["t"].lookup(some(kind, 3))
        assert len(looked) == at
        monkeypatch.setattr(growing_keys.KeyMap, "check_wanted", check)
        assert np.array_equal(reader["t"].read(some(kind, 200)), ones(200))


@pytest.mark.parametrize("end", ["read", "close", "damage"])
def test_the_map_of_many_keys_is_filled_ahead(store, kind, monkeypatch, end):
    """Rows are read by number, and counted, while keys are loaded; closing ends that."""
    monkeypatch.setattr(generation, "_FILLED_AHEAD", 50)
    keys, rows = some(kind, 60), np.arange(180, dtype=np.float32).reshape(60, 3)
    store["t"].write(keys, rows)
    store.commit()
    path = store.path
    store.close()
    if end == "damage":
        file = next(path.rglob("keys.*"))
        file.write_bytes(bytes(len(file.read_bytes())))
    began, go_on = threading.Event(), threading.Event()
    load = generation.load_keys

    def slowly(*args):
        began.set()
        assert go_on.wait(60)
        load(*args)

    monkeypatch.setattr(generation, "load_keys", slowly)
    with tierstore.open(path) as reader:
        table = reader["t"]
        assert began.wait(60)
        assert table.rows == 60
        assert np.array_equal(table.by_row.read(np.arange(60)), rows)
        if end == "close":
            closer = threading.Timer(0.2, go_on.set)
            closer.start()
            reader.close()
            assert inside.generation(table)._map is None
            closer.join()
            return
        go_on.set()
        if end == "damage":
            with pytest.raises(CorruptStoreError):
                table.read(keys)
        else:
            assert np.array_equal(table.read(keys), rows)
