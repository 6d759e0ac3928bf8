"""What `versions()` and `tierstore log` say that each version changed or added."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tierstore import Field, TableSpec

DIM = 4
RECORD = 4 * DIM


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((count, DIM), np.float32)


def wrote(store: Any) -> list[tuple[int, int]]:
    """Return the rows and bytes of each kept version, oldest first."""
    return [(each.written_rows, each.written_bytes) for each in store.versions()]


def plain(path: Path, tables: dict[str, TableSpec]) -> Any:
    return tierstore.create(path, tables, keep=99)


def parts(path: Path, tables: dict[str, TableSpec]) -> Any:
    return tierstore.distributed.create(path, tables, partitions=4, keep=99)


def both(store: Any) -> None:
    store["t"].write(np.arange(2), rows(2))
    store["u"].write([1], rows(1))
    store.commit()


CHANGES: list[tuple[str, Callable[[Any], object], dict[str, int | None], int]] = [
    ("commit", lambda s: (s["t"].write(np.arange(3), rows(3)), s.commit()), {"t": 3}, -1),
    ("nothing", lambda s: s.commit(), {}, 0),
    ("create", lambda s: s.create_table("u", TableSpec(10, DIM)), {"u": 10}, 10 * RECORD),
    ("both", both, {"t": 2, "u": 1}, -1),
    ("append", lambda s: s.append("t", rows(7)), {"t": 7}, 37 * RECORD),
    ("grow", lambda s: s.grow("t", 50), {"t": 13}, 50 * RECORD),
    ("fields", lambda s: s.add_fields("t", {"a": Field(DIM)}), {"t": 50}, 50 * 2 * RECORD),
    ("rename", lambda s: s.rename("u", "v"), {"u": None, "v": 0}, 10 * RECORD),
    ("keys", lambda s: s.set_keys("v", list(range(10))), {"v": 0}, 0),
    ("scalars", lambda s: (s["v"].scalars.update(lr=0.5), s.commit()), {"v": 0}, 0),
    ("drop", lambda s: s.drop("v"), {"v": None}, 0),
]
"""Changes of a store with 30 rows, with the rows of each table and the bytes written."""


@pytest.mark.variants(1)
@pytest.mark.parametrize("make", [plain, parts])
def test_every_change_counts_its_rows(tmp_path: Path, make: Any) -> None:
    path, is_plain = tmp_path / "s.tier", make is plain
    with make(path, {"t": TableSpec(30, DIM, init=tierstore.normal(seed=1))}) as store:
        expected = [(30, 30 * RECORD)]
        for what, change, tables, nbytes in CHANGES:
            change(store)
            found = wrote(store)[-1]
            assert store.versions()[-1].tables == tables, what
            assert found[0] == sum(count or 0 for count in tables.values()), what
            if nbytes >= 0 and is_plain:  # partitions are of equal size
                assert found[1] == nbytes, what
            assert (found[1] > 0) == (nbytes != 0), what
            expected.append(found)
        store.restore(2)
        assert wrote(store) == [*expected, (0, 0)]
        store["t"].write([0], rows(1))
        store.commit()
        newest = wrote(store)[-1]
        assert newest[0] == 1
        store.fold()
        assert wrote(store) == [newest]
    with tierstore.open(path) as reader:
        assert wrote(reader) == [newest]
        assert reader.versions()[-1].tables == {"t": 1}


@pytest.mark.parametrize("make", [plain, parts])
def test_loads_and_upserts_count_rows_of_the_file(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "s.tier"
    make(path, {"t": TableSpec(1, DIM)}).close()

    def load(count: int, first: int, **options: Any) -> int:
        np.save(tmp_path / "rows.npy", rows(count))
        keys = np.arange(first, first + count)
        tierstore.import_table(path, tmp_path / "rows.npy", table="v", keys=keys, **options)
        with tierstore.open(path) as reader:
            return int(reader.versions()[-1].written_rows)

    assert load(20, 0) == 20
    assert load(20, 100) == 20
    assert load(8, 115, upsert=True) == 8  # five keys are there, three are new
    assert load(4, 100, upsert=True) == 4
    with tierstore.open(path) as reader:
        assert reader["v"].rows == 23


def test_rows_of_new_keys_are_those_of_the_commit(tmp_path: Path) -> None:
    for name, make in (("plain", plain), ("parts", parts)):
        with make(tmp_path / name, {"t": TableSpec(dim=DIM, keys="int64")}) as store:
            store["t"].write(np.arange(50), rows(50))
            store.commit()
            store["t"].write(np.arange(45, 60), rows(15))
            store.commit()
            assert [each for each, _ in wrote(store)] == [0, 50, 15]
            store.add_fields("t", {"a": Field(1)})
            assert wrote(store)[-1][0] == 60


def test_compactions_leave_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierstore._store import compaction

    monkeypatch.setattr(compaction, "_MOST_DELTAS", 2)
    with plain(tmp_path / "s.tier", {"t": TableSpec(30, DIM)}) as store:
        counts = [1 + n % 5 for n in range(40)]
        for count in counts:
            store["t"].write(np.arange(count), rows(count))
            store.commit()
        newest = store.versions()[-1]
        assert newest.delta_rows < sum(counts)  # rows of several versions were put together
        assert [each for each, _ in wrote(store)] == [30, *counts]


def test_a_copy_added_all_of_its_rows(tmp_path: Path) -> None:
    spec = {"t": TableSpec(30, DIM), "k": TableSpec(dim=DIM, keys="text")}
    with plain(tmp_path / "s.tier", spec) as store:
        store["k"].write(["a", "b"], rows(2))
        store.commit()
        store.save(tmp_path / "copy.tier")
        tierstore.distributed.save(tmp_path / "s.tier", tmp_path / "parts.tier", partitions=2)
        for name in ("copy.tier", "parts.tier"):
            with tierstore.open(tmp_path / name) as reader:
                assert wrote(reader) == [(32, 32 * RECORD)]
        store["t"].write([3, 4], rows(2))
        store.commit()
        store.update_copy(tmp_path / "copy.tier")
    with tierstore.open(tmp_path / "copy.tier") as reader:
        assert wrote(reader)[-1][0] == 2


def test_stores_have_the_entries_of_the_format_until_they_use_more(tmp_path: Path) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "file-format.md").read_text("utf-8")
    listed = page.split("| key of a manifest | |", 1)[1].split("\n\n", 1)[0]
    keys = [
        key
        for line in listed.splitlines()[2:]
        for key in re.findall(r"`(\w+)`", line.split(" | ", 1)[0])
    ]
    always = keys[: keys.index("tables") + 1]

    def newest() -> list[str]:
        text = max(path.glob("manifest-*.json")).read_text("utf-8")
        return list(json.loads(text)["body"])

    path = tmp_path / "s.tier"
    with tierstore.create(path, {"t": TableSpec(30, DIM)}) as store:
        assert newest() == always
        store["t"].write([1], rows(1))
        store.commit()
        assert newest() == always
        store.fold()
        assert newest() == always
        store.keep(store.version, "best")
        assert newest() == [*always, "names"]
    assert set(keys) == inside.entries() - {"time"}  # which earlier programs wrote
