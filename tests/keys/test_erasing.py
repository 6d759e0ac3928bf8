"""A person who was removed is in no file of the store after a commit and a fold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tierstore import Field, TableSpec

DIM = 6


def files(root: Path) -> list[bytes]:
    """Return what is in each file, with long runs of zeros made short: most of them are those."""
    every = [path.read_bytes() for path in root.rglob("*") if path.is_file()]
    return [re.sub(rb"\0{64,}", bytes(64), each) for each in every]


def spec(keys: Any, backend: str = "memmap") -> TableSpec:
    options: dict[str, Any] = {} if backend == "memmap" else {"backend": "zarr", "rows": 4096}
    fields = {"value": Field(DIM), "state": Field(DIM, "bfloat16")}
    return TableSpec(fields=fields, keys=keys, track_uses=True, **options)


def made(path: Path, partitions: int, table: TableSpec) -> Any:
    if partitions:
        return tierstore.distributed.create(path, {"t": table}, partitions=partitions, keep=1)
    return tierstore.create(path, {"t": table}, keep=1)


def records(table: Any, keys: list[Any]) -> list[bytes]:
    """Return what each key has, as bytes that nothing else has."""
    return [row.tobytes() for row in table.read(keys, "value")]


KINDS = [
    (0, "int64", "memmap"),
    (0, "text", "memmap"),
    (3, "int64", "memmap"),
    (0, "text", "zarr"),
    (3, "text", "memmap"),
]


@pytest.mark.variants(2, 4)
@pytest.mark.parametrize(("partitions", "keys", "backend"), KINDS)
def test_no_file_holds_what_was_removed(
    tmp_path: Path, partitions: int, keys: str, backend: str
) -> None:
    """Whoever it is, the last one or all, before and after a fold put them into the base."""
    path, rng = tmp_path / "s.tier", np.random.default_rng(5)
    every = [(7 << 40) + n * 1_000_003 for n in range(40)]
    of = (lambda n: f"person {n} of the file") if keys == "text" else int
    with made(path, partitions, spec(keys, backend)) as store:
        table = store["t"]
        people = [of(each) for each in every]
        for round_, gone in enumerate((people[:1], people[-1:], people[3:30:2], people)):
            left = [each for each in people if np.all(table.contains([each]))]
            table.write(people, rng.normal(size=(len(people), DIM)).astype("f4"), "value")
            store.commit()
            if round_ % 2 == 0:
                store.fold()
            wanted = dict(zip(people, records(table, people), strict=True))
            assert any(wanted[gone[0]] in file for file in files(path))
            assert table.remove(gone) == len(gone)
            store.commit()
            store.fold()
            found = files(path)
            for each in gone:
                name = each.encode() if isinstance(each, str) else int(each).to_bytes(8, "little")
                assert not any(wanted[each] in file for file in found), (round_, each, len(left))
                assert not any(name in file for file in found), (round_, each)
            stay = [each for each in people if each not in gone]
            assert records(table, stay) == [wanted[each] for each in stay]
            assert tierstore.verify(path).ok
            table.write(gone[:1], np.ones((1, DIM), np.float32), "value")
            assert (table.read(gone[:1], "value") == 1).all()
            assert not table.read(gone[:1], "state").any()
            store.rollback()
    assert tierstore.verify(path).ok


def test_a_removal_alone_is_taken_back(tmp_path: Path) -> None:
    """By a rollback, and by an older version."""
    for partitions in (0, 3):
        with made(tmp_path / str(partitions), partitions, spec("int64")) as store:
            table, rng = store["t"], np.random.default_rng(1)
            table.write(np.arange(30), rng.normal(size=(30, DIM)).astype("f4"), "value")
            version = store.commit(keep="all")
            before = table.read(np.arange(30), "value")
            table.remove([3, 29])
            assert store.uncommitted_rows() >= 2
            store.rollback()
            assert np.array_equal(table.read(np.arange(30), "value"), before)
            table.remove([3, 29])
            store.commit()
            store.restore(version)
            assert np.array_equal(table.read(np.arange(30), "value"), before)
