"""Whatever happens to a table between the calls of a program, each call has its own row or none.

Every event that moves records or gives rows another meaning, with every kind of call that began
before it: reads and writes by the same table, a lease, and a gradient. A gradient whose rows still
mean the same is applied, wherever they are by then; any other is refused, and changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import tierstore
from tierstore import Budget, Field, TableSpec
from tierstore.errors import ClosedError
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

ROWS, DIM = 40, 3
NAMES = np.arange(5, 25)
"""Ids, or keys, of rows that are committed; those that a test uses are among them."""
USED = np.array([7, 11, 7, 19])


class Event(NamedTuple):
    """What happens, and what it is to the rows that a program holds.

    Attributes:
        happen: makes it happen, given the store and the dict that the table equals.
        keeps: whether a row means what it meant: a gradient of before is applied.
        kinds: of the tables to which it can happen.
        drops: whether it drops what is not committed, gradients that wait for a step among it.
        commits: whether it is refused where there are uncommitted rows.
    """

    happen: Callable[[Any, dict[int, Any]], object]
    keeps: bool
    kinds: tuple[str, ...] = ("id", "key")
    drops: bool = False
    commits: bool = True


def rolled_back(store: Any, rows: dict[int, Any]) -> None:
    store["t"].write(USED, np.full((4, DIM), 9, np.float32), "w")
    store.rollback()


def restored(store: Any, rows: dict[int, Any]) -> None:
    store.keep(store.version, "before")
    store["t"].write([8], np.full((1, DIM), 9, np.float32), "w")
    store.commit()
    store.restore("before")


def removed(store: Any, rows: dict[int, Any]) -> None:
    assert store["t"].remove([6, 24]) == 2
    del rows[6], rows[24]


def expired(store: Any, rows: dict[int, Any]) -> None:
    table, uses = store["t"], tierstore.spec.USES
    given = table.read(NAMES, uses)
    given[:, 0] = np.where(np.isin(NAMES, [6, 9]), 0, 5)
    table.write(NAMES, given, uses)
    gone = [key for keys, _ in table.expire(fewer_than=1) for key in keys.tolist()]
    assert sorted(gone) == [6, 9]
    del rows[6], rows[9]


def merged(store: Any, rows: dict[int, Any]) -> None:
    other = store.create_table("other", store["t"].spec)
    values = np.full((2, DIM), 4, np.float32)
    other.write([6, 90], values, "w")
    store.commit()
    store["t"].merge(other)
    rows[6], rows[90] = values


def grown(store: Any, rows: dict[int, Any]) -> None:
    store.grow("t", 4 * ROWS)


def more_keys(store: Any, rows: dict[int, Any]) -> None:
    """Grow in place or anew, as a table of keys without a capacity does by itself."""
    keys = np.arange(1000, 1400)
    values = np.full((400, DIM), 6, np.float32)
    store["t"].write(keys, values, "w")
    rows.update(zip(keys.tolist(), values, strict=True))


EVENTS = {
    "nothing": Event(lambda store, rows: None, keeps=True, commits=False),
    "commit": Event(lambda store, rows: store.commit(), keeps=True),
    "fold": Event(lambda store, rows: store.fold(), keeps=True),
    "other table": Event(lambda store, rows: store.create_table("u", SPECS["id"]), keeps=True),
    "growth": Event(grown, keeps=True, kinds=("id",)),
    "more keys": Event(more_keys, keeps=True, kinds=("key",), commits=False),
    "a field more": Event(
        lambda store, rows: store.add_fields("t", {"more": Field(2)}), keeps=True
    ),
    "a field less": Event(lambda store, rows: store.drop_fields("t", ["other"]), keeps=True),
    "another type": Event(
        lambda store, rows: store.alter_table("t", dtype={"other": "float16"}), keeps=True
    ),
    "merge": Event(merged, keeps=True, kinds=("key",)),
    "removal": Event(removed, keeps=False, kinds=("key",), commits=False),
    "expiry": Event(expired, keeps=False, kinds=("key",), commits=False),
    "rollback": Event(rolled_back, keeps=False, drops=True, commits=False),
    "restore": Event(restored, keeps=False, drops=True),
    "rename": Event(lambda store, rows: store.rename("t", "t2"), keeps=False),
    "drop": Event(lambda store, rows: (rows.clear(), store.drop("t")), keeps=False),
}
FIELDS = {"w": Field(DIM), "other": Field(5)}
SPECS = {
    "id": TableSpec(ROWS, fields=FIELDS),
    "key": TableSpec(fields=FIELDS, keys="int64", track_uses=True),
}
CASES = [
    (kind, name, slots)  # a cache of few rows, of some, and of all of them
    for slots, (kind, name) in zip(
        itertools.cycle((6, 16, 400)),
        ((kind, name) for name, event in EVENTS.items() for kind in event.kinds),
        strict=False,
    )
]


class Program:
    """A table in a store with a cache of some rows, and the dict that its field `w` equals."""

    def __init__(self, path: Path, kind: str, slots: int) -> None:
        self.store: Any = tierstore.create(
            path, {"t": SPECS[kind]}, budget=Budget(host_rows=slots), device="cpu"
        )
        self.table: Any = self.store["t"]
        self.kind = kind
        values = np.random.default_rng(1).integers(1, 9, (NAMES.size, DIM)).astype(np.float32)
        self.rows = dict(zip(NAMES.tolist(), values, strict=True))
        self.table.write(NAMES, values, "w")
        self.layer = TieredEmbedding(self.table, field="w")
        self.optimizer = TieredOptimizer(torch.optim.SGD, [self.layer], lr=1.0)
        self.store.commit()

    def check(self) -> None:
        """Compare all rows of the table that has them now, and that no key has another's."""
        name = next((each for each in ("t", "t2") if each in list(self.store)), None)
        if name is None:
            return
        table = self.store[name]
        asked = [*self.rows, 6, 24]
        zero = np.zeros(DIM, np.float32)
        wanted = np.array([self.rows.get(each, zero) for each in asked])
        assert np.array_equal(table.read(asked, "w"), wanted)
        if self.kind == "key":
            assert sorted(table.keys[:].tolist()) == sorted(self.rows)

    def happen(self, name: str) -> Event:
        event = EVENTS[name]
        if event.commits:  # the uses of keys
            self.store.commit()
        event.happen(self.store, self.rows)
        return event

    @property
    def gone(self) -> bool:
        return "t" not in list(self.store)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    made: list[Program] = []
    numbers = itertools.count()

    def program(kind: str, slots: int = 16) -> Program:
        made.append(Program(tmp_path / f"{next(numbers)}", kind, slots))
        return made[-1]

    yield program
    for each in made:
        each.store.rollback()
        each.store.close()


@pytest.mark.parametrize(("kind", "name", "slots"), CASES)
def test_calls_of_before_are_those_of_after(make: Any, kind: str, name: str, slots: int) -> None:
    """A table that a program holds reads and writes what its store has, or says it is gone."""
    program = make(kind, slots)
    program.table.read(USED, "w")
    program.happen(name)
    program.check()
    if program.gone:
        with pytest.raises(ClosedError, match="renamed or dropped"):
            program.table.read(USED, "w")
        with pytest.raises(ClosedError, match="renamed or dropped"):
            program.table.write(USED, np.ones((4, DIM), np.float32), "w")
        return
    assert np.array_equal(
        program.table.read(USED, "w"), [program.rows[each] for each in USED.tolist()]
    )
    given = np.full((4, DIM), 3, np.float32)
    program.table.write(USED, given, "w")
    program.rows.update(zip(USED.tolist(), given, strict=True))
    program.check()


@pytest.mark.parametrize(("kind", "name", "slots"), CASES)
def test_a_lease_of_before_has_its_rows_or_has_ended(
    make: Any, kind: str, name: str, slots: int
) -> None:
    program = make(kind, slots)
    lease = program.table.lease(USED)
    before = lease.read("w").copy()
    rows = dict(program.rows)
    program.happen(name)
    if lease.ended:
        for call in (lambda: lease.read("w"), lambda: lease.write("w", before + 1)):
            with pytest.raises(ClosedError, match="since this lease began"):
                call()
    else:
        assert EVENTS[name].keeps
        assert np.array_equal(lease.read("w"), before)
        lease.write("w", before + 1)
        for each in USED.tolist():
            program.rows[each] = rows[each] + 1
    lease.release()
    program.check()
    if not program.gone:
        with program.table.lease(USED) as again:
            found = again.read("w")[again.positions]
        assert np.array_equal(found, [program.rows[each] for each in USED.tolist()])


@pytest.mark.parametrize("late", [False, True], ids=["before backward", "after backward"])
@pytest.mark.parametrize(("kind", "name", "slots"), CASES)
def test_a_gradient_of_before_is_applied_or_refused(
    make: Any, kind: str, name: str, slots: int, late: bool
) -> None:
    program = make(kind, slots)
    loss = program.layer(torch.from_numpy(USED)).sum()
    if late:
        loss.backward()
    event = program.happen(name)

    def finish() -> None:
        if not late:
            loss.backward()
        program.optimizer.step()

    if event.keeps:
        finish()
        for each, times in zip(*np.unique(USED, return_counts=True), strict=True):
            program.rows[int(each)] = program.rows[int(each)] - np.float32(times)
    elif event.drops and late:
        finish()
    else:
        with pytest.raises(ClosedError, match=r"forward pass again|does not have|dropped"):
            finish()
    program.check()


@pytest.mark.parametrize("kind", ["id", "key"])
def test_a_reader_that_follows_has_the_rows_of_the_newest(make: Any, kind: str) -> None:
    """A refresh, with each kind of call of before it."""
    program = make(kind)
    with tierstore.open(program.store.path, budget=Budget(host_rows=8), device="cpu") as reader:
        table = reader["t"]
        lease = table.lease(USED)
        given = np.full((4, DIM), 3, np.float32)
        program.table.write(USED, given, "w")
        if kind == "key":
            program.table.remove([6])
        program.store.commit()
        assert reader.refresh()
        assert np.array_equal(table.read(USED, "w"), given)
        assert lease.ended
        with pytest.raises(ClosedError, match="refreshed"):
            lease.read("w")
        lease.release()
        with table.lease(USED) as again:
            assert np.array_equal(again.read("w")[again.positions], given)
