"""What a table of ranks lacks is refused on the rank that calls it, with the way on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.distributed.ranks import run, values
from tierstore import distributed
from tierstore._table.keyed import KeyedTable
from tierstore._table.table import Table
from tierstore.distributed import DistributedKeyedTable, DistributedTable
from tierstore.distributed.lacking import Lacking
from tierstore.errors import InvalidInputError

IDS = np.arange(3)
SPECS = {"item": tierstore.TableSpec(20, 4), "key": tierstore.TableSpec(dim=4, keys="int64")}
CALLS: dict[str, Callable[[Any], object]] = {
    "adapt()": lambda table: table.adapt(),
    "items()": lambda table: table.items(),
    "keys_of()": lambda table: table.keys_of(IDS),
    "lease()": lambda table: table.lease(IDS),
    "occupancy()": lambda table: table.occupancy(),
    "read_into()": lambda table: table.read_into(IDS, np.zeros((3, 4), np.float32)),
    "record()": lambda table: table.record(),
    "scan()": lambda table: table.scan("weight", block_rows=5),
    "stats()": lambda table: table.stats(),
    "topk()": lambda table: table.topk(np.zeros(4), 2),
    "warm()": lambda table: table.warm(),
    "an array of all rows": np.asarray,
    "table[...]": lambda table: table[IDS],
    "a read of several fields at once": lambda table: table.read(IDS, ["weight"]),
    "raw= of read()": lambda table: table.read(IDS, raw=True),
    "dtype= of read()": lambda table: table.read(IDS, dtype=np.float16),
    "out= of read()": lambda table: table.read(IDS, out=np.zeros((3, 4), np.float32)),
    "cache= of read()": lambda table: table.read(IDS, "weight", cache=False),
}


def refused(rank: int, path: Path) -> list[str]:
    """Make every call on one rank alone: none of them waits for the other."""
    told = []
    with distributed.open(path) as store:
        for name in SPECS:
            for what, call in CALLS.items() if rank else ():
                with pytest.raises(InvalidInputError, match=re.escape(what)) as caught:
                    call(store[name])
                told.append(str(caught.value))
            with pytest.raises(InvalidInputError, match=r"table\[\.\.\.\] = rows"):
                store[name][0] = np.zeros(4, np.float32)
            assert store[name].read(IDS).shape == (3, 4)  # the ranks go on together
    return told


def test_calls_are_refused_with_the_way_on(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    distributed.create(path, SPECS, partitions=2).close()
    none, told = values(run(2, refused, path))
    assert not none
    assert len(told) == len(SPECS) * len(CALLS)
    for text in told:
        assert "shard has it" in text
        assert f"tierstore.open({str(path)!r})" in text


@pytest.mark.parametrize(
    ("plain", "shared"), [(Table, DistributedTable), (KeyedTable, DistributedKeyedTable)]
)
def test_every_call_of_a_table_is_there_or_refused(plain: type, shared: type) -> None:
    calls = {name for name in dir(plain) if callable(getattr(plain, name, None))}
    public = {name for name in calls if not name.startswith("_")}
    missing = public - set(dir(shared)) - {"any_recorded"}
    assert not missing
    refused = {f"{name}()" for name in vars(Lacking) if not name.startswith("_")}
    tried = {what for what in CALLS if what.endswith("()") and "=" not in what}
    assert refused - {"refuse_options()"} == tried
