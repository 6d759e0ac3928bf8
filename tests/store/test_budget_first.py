"""A budget that cannot be is refused before the first byte is written, whatever would write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tierstore import Budget, Field, TableSpec, _io
from tierstore.errors import CapacityError
from tierstore.importing import import_table

ROWS = 500
GROWN = 40_000
RNG = np.random.default_rng(7)
IMPOSSIBLE = {
    "smaller than the maps": Budget(host=64),
    "of one table, smaller than its maps": Budget(host={"t": 64}),
    "larger than any memory": Budget(host_rows=2**40),
}
HUGE = TableSpec(2**36, 1024, sparse=True)
"""Its records fill more than the address space of a process."""


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is made or written in a directory meanwhile."""
    found: list[str] = []
    for name in ("create", "make_directory", "put_if_absent"):
        real = getattr(_io.Directory, name)

        def noted(self: Any, first: str, *rest: Any, _real: Any = real, **more: Any) -> Any:
            found.append(f"{self.path}/{first}")
            return _real(self, first, *rest, **more)

        monkeypatch.setattr(_io.Directory, name, noted)
    yield found


@pytest.mark.parametrize("budget", IMPOSSIBLE.values(), ids=list(IMPOSSIBLE))
@pytest.mark.parametrize("make", ["create", "open_or_create", "distributed"])
def test_creating(tmp_path: Path, writes: list[str], make: str, budget: Budget) -> None:
    """Nothing appears, and nothing was written to be removed again."""
    tables = {"t": HUGE if budget.host_rows else TableSpec(GROWN, 8, sparse=True)}
    if make == "distributed":
        pytest.importorskip("torch")
        call: Callable[..., Any] = tierstore.distributed.create
        more: dict[str, Any] = {"partitions": 3}
    else:
        call, more = getattr(tierstore, make), {}
    with pytest.raises(CapacityError, match="table 't' cannot be placed"):
        call(tmp_path / "s.tier", tables, budget=budget, **more)
    assert writes == []
    assert os.listdir(tmp_path) == []


def least_host(open_again: Callable[..., Any], path: Path) -> int:
    """Return the smallest host budget with which a store opens for writing."""
    low, high = 1, 1 << 20
    while low < high:
        middle = (low + high) // 2
        try:
            open_again(path, "r+", budget=Budget(host=middle), policy="lfu").close()
            high = middle
        except CapacityError:
            low = middle + 1
    return low


def rows_of(count: int, dim: int = 8) -> Any:
    return RNG.standard_normal((count, dim), np.float32)


def records_of(count: int) -> Any:
    return rows_of(count).view(np.uint8)


def _file(store: Any) -> str:
    name = str(store.path) + ".npy"
    np.save(name, rows_of(GROWN))
    return name


CHANGES: dict[str, Callable[[Any], object]] = {
    "create_table": lambda s: s.create_table("u", TableSpec(GROWN, 8)),
    "replace_table": lambda s: s.replace_table(
        "t", TableSpec(GROWN, 8), blocks=[records_of(GROWN)]
    ),
    "grow": lambda s: s.grow("t", GROWN),
    "append": lambda s: s.append("t", rows_of(GROWN)),
    "add_fields": lambda s: s.add_fields("t", {"wide": Field(4096)}),
    "alter_tables": lambda s: s.alter_tables({"t": {"add": {"wide": Field(4096)}}}),
    "import_table": lambda s: import_table(s, _file(s), table="v"),
    "restore": lambda s: s.restore("large"),
}


@pytest.mark.parametrize("partitions", [0, 3], ids=["plain", "partitions"])
def test_changing(tmp_path: Path, writes: list[str], partitions: int) -> None:
    """What would not fit its budget is refused; the store goes on, as it was.

    Maps take no memory by row, but what `lfu` keeps does.
    """
    path = tmp_path / "s.tier"
    create, open_again = tierstore.create, tierstore.open
    more: dict[str, Any] = {}
    if partitions:
        pytest.importorskip("torch")
        create, open_again = tierstore.distributed.create, tierstore.distributed.open
        more = {"partitions": partitions}
    with create(path, {"t": TableSpec(GROWN, 8)}, **more) as made:
        made.keep(made.version, "large")
        made.replace_table("t", TableSpec(ROWS, 8), blocks=[records_of(ROWS)])
    small, large = Budget(host=least_host(open_again, path) + 512), Budget(host_rows=2**40)
    tries = [(change, small, work) for change, work in CHANGES.items()]
    tries.append(("larger than memory", large, lambda s: s.create_table("u", HUGE)))
    for change, budget, work in tries:
        with open_again(path, "r+", budget=budget, policy="lfu") as store:
            before, version = np.asarray(store["t"].read(np.arange(ROWS))), store.version
            writes.clear()
            with pytest.raises(CapacityError):
                work(store)
            assert (change, writes) == (change, [])
            assert (change, store.version) == (change, version)
            np.testing.assert_array_equal(np.asarray(store["t"].read(np.arange(ROWS))), before)
            store["t"].write([1], rows_of(1))
            assert store.commit() == version + 1
