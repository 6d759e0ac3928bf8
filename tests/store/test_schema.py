"""Schema changes, which live on the store, and the store as a mapping of its tables."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.oracle import values
from tests.store.conftest import Logged
from tierstore import Budget, Field, TableSpec
from tierstore._table.address import rows_to_warm
from tierstore.checkpoint import Checkpoint
from tierstore.errors import (
    ClosedError,
    CorruptStoreError,
    ExistsError,
    InvalidInputError,
    InvalidTypeError,
    UncommittedRowsWarning,
    UnknownNameError,
)

ROWS, DIM = 300, 5
EVERY = np.arange(ROWS)
SMALL = Budget(host_rows=7)


@pytest.fixture
def truth() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {"weight": values(rng, (ROWS, DIM)), "sum": rng.standard_normal((ROWS, 2))}


@pytest.fixture
def store(tmp_path: Path, truth: dict[str, np.ndarray]) -> Iterator[tierstore.Store]:
    fields = {"weight": Field(DIM), "sum": Field(2, "float64")}
    specs = {"item": TableSpec(ROWS, fields=fields), "user": TableSpec(9, 3)}
    with tierstore.create(tmp_path / "s.tier", specs, budget=SMALL) as made:
        made["item"].write(EVERY, truth)
        made["item"].scalars["step"] = 3
        made.commit(step=7, payload={"model": {"bias": np.ones(3)}})
        yield made


def check(store: tierstore.Store, truth: Mapping[str, np.ndarray], name: str = "item") -> None:
    """Compare a table, as it is and as a reader sees it, with NumPy, bit for bit."""
    with tierstore.open(store.path, budget=SMALL) as reader:
        for table in (store[name], reader[name]):
            assert list(table.fields) == list(truth)
            for field, expected in truth.items():
                found = table.read(np.arange(len(expected)), field)
                assert found.tobytes() == np.asarray(expected).tobytes()
            assert table.rows == len(next(iter(truth.values())))
            assert table.scalars == {"step": 3}
    assert store.step == 7
    assert np.array_equal(store.payload["model"].tree()["bias"], np.ones(3))


# A mapping


def test_a_store_is_a_mapping(store: tierstore.Store, tmp_path: Path) -> None:
    assert isinstance(store, Mapping)
    assert list(store) == ["item", "user"] and len(store) == 2
    assert "item" in store and "nothing" not in store and 3 not in store
    assert store.get("nothing") is None and store.get("user") is store["user"]
    assert dict(store.items()) == {"item": store["item"], "user": store["user"]}
    assert store != {"item": store["item"]} and len({store}) == 1
    with pytest.raises(UnknownNameError, match="item, user"):
        store["nothing"]
    with tierstore.create(tmp_path / "empty.tier", {}) as empty:
        assert empty and not list(empty)


def test_a_damaged_table_is_in_the_mapping(store: tierstore.Store) -> None:
    store.close()
    (base,) = Path(store.path).glob("user/*/rows.npy")
    base.unlink()
    with tierstore.open(store.path) as reader:
        assert list(reader) == ["item", "user"] and "user" in reader
        with pytest.raises(CorruptStoreError, match="user"):
            reader["user"]
    with tierstore.open(store.path, "r+") as writer:
        writer.drop("user")
        assert list(writer) == ["item"] and not writer.damaged


def test_what_a_store_prints(store: tierstore.Store) -> None:
    assert repr(store) == f"Store({str(store.path)!r}, version=2, tables=['item', 'user'])"
    text = str(store.info())
    assert "version 2, step 7" in text and "item" in text and max(map(len, text.split("\n"))) < 120
    assert "item" in store._repr_html_()
    store.set_keys("item", [f"item {row}" for row in range(store["item"].rows)])
    assert repr(store["item"].keys) == f"Keys({store['item'].rows} of str)"
    store.commit(payload={"note": b"seven"})
    assert repr(store.payload["note"]) == "Payload(bytes, 5 B)"
    store.close()
    assert repr(store).endswith(", closed)")


# Other fields, types and backends


def test_fields_come_and_go(store: tierstore.Store, truth: dict[str, np.ndarray]) -> None:
    store.add_fields("item", {"more": Field(3, init=tierstore.constant(2))})
    check(store, {**truth, "more": np.full((ROWS, 3), 2, np.float32)})
    store.drop_fields("item", ["weight"])
    check(store, {"sum": truth["sum"], "more": np.full((ROWS, 3), 2, np.float32)})
    with pytest.raises(UnknownNameError, match="no field 'weight'"):
        store.drop_fields("item", ["weight"])
    with pytest.raises(InvalidInputError, match="at least one field"):
        store.drop_fields("item", ["sum", "more"])
    with pytest.raises(ExistsError, match="'more'"):
        store.add_fields("item", {"more": Field(1)})
    assert store.version == 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_elements_are_converted(
    store: tierstore.Store, truth: dict[str, np.ndarray], dtype: str
) -> None:
    store.alter_table("item", dtype=dtype)
    if dtype == "bfloat16":
        bits = truth["weight"].view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        expected = rounded.astype(np.uint32).view(np.float32)
    else:
        expected = truth["weight"].astype(dtype)
    check(store, {**truth, "weight": expected})
    assert store["item"].fields["weight"].dtype == dtype
    store.alter_table("item", dtype={"weight": "float32", "sum": "float32"})
    sums = truth["sum"].astype(np.float32)
    check(store, {"weight": expected.astype(np.float32), "sum": sums})


def test_a_value_that_does_not_fit_is_refused(store: tierstore.Store) -> None:
    store["item"].write([3, 5], np.full((2, DIM), 1e6, np.float32), "weight")
    store["item"].write([7], np.full((1, DIM), np.inf, np.float32), "weight")
    store.commit()
    version, before = store.version, store["item"].read(EVERY)
    with pytest.raises(InvalidInputError, match=r"10 values .* float16, the largest is 1e\+06"):
        store.alter_table("item", dtype="float16")
    assert store.version == version
    assert np.array_equal(store["item"].read(EVERY), before)
    assert len(list(Path(store.path).glob("item/*"))) == 1


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_backend_is_converted(
    store: tierstore.Store, truth: dict[str, np.ndarray], compression: str | None
) -> None:
    keys = [f"word {row}" for row in range(ROWS)]
    store.set_keys("item", keys)
    chunk_rows = ROWS if compression is None else 64  # a raw chunk fills whole pages
    store.alter_table("item", backend="zarr", compression=compression, chunk_rows=chunk_rows)
    check(store, truth)
    spec = store["item"].spec
    assert (spec.backend, spec.compression, spec.chunk_rows) == ("zarr", compression, chunk_rows)
    store.alter_table("item", dtype="float64")
    assert store["item"].spec.compression == compression
    store.alter_table("item", backend="memmap", dtype="float32")
    check(store, truth)
    assert store["item"].keys is not None and store["item"].keys[:].tolist() == keys
    store.set_keys("item", None)
    assert store["item"].keys is None


def test_several_tables_change_in_one_commit(
    store: tierstore.Store, truth: dict[str, np.ndarray]
) -> None:
    seen: list[tuple[int, int]] = []
    store.alter_tables(
        {"item": {"drop": ["sum"]}, "user": {"add": {"age": Field(1)}, "dtype": "float16"}},
        progress=lambda done, total: seen.append((done, total)),
    )
    assert store.version == 3 and seen[-1] == (ROWS + 9, ROWS + 9)
    check(store, {"weight": truth["weight"]})
    assert list(store["user"].fields) == ["weight", "age"]
    with pytest.raises(InvalidInputError, match="unknown change 'bakend'"):
        store.alter_tables({"user": {"bakend": "zarr"}})


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_tables_change_together_or_not_at_all(
    store: tierstore.Store, truth: dict[str, np.ndarray], failing: int
) -> None:
    """An error before the commit leaves no generation of any of them, and can be tried again."""
    from tierstore._store import alter, ledger

    create, calls = alter.generations.create, iter(range(9))

    def create_or_fail(*given: Any) -> Any:
        if next(calls) == failing:
            raise tierstore.errors.StoreFullError("no space")
        return create(*given)

    names = set(Path(store.path).rglob("*"))
    publish = mock.patch.object(ledger, "_encoded", side_effect=InvalidInputError("no space"))
    changes = {"item": {"dtype": "float64"}, "user": {"dtype": "float16"}}
    with (
        publish if failing == 2 else mock.patch.object(alter.generations, "create", create_or_fail),
        pytest.raises((InvalidInputError, tierstore.errors.StoreFullError), match="no space"),
    ):
        store.alter_tables(changes)
    assert set(Path(store.path).rglob("*")) == names
    check(store, truth)
    store.alter_tables(changes)
    check(store, {**truth, "weight": truth["weight"].astype(np.float64)})


# More rows, other names


@pytest.mark.parametrize("keyed", [False, True])
def test_rows_are_appended(
    store: tierstore.Store, truth: dict[str, np.ndarray], keyed: bool
) -> None:
    rng = np.random.default_rng(8)
    new = {"weight": values(rng, (4, DIM)), "sum": rng.standard_normal((4, 2))}
    keys = [f"new {row}" for row in range(4)] if keyed else None
    if keyed:
        store.set_keys("item", [f"word {row}" for row in range(ROWS)])
        with pytest.raises(InvalidInputError, match="keys= for the 4 new rows"):
            store.append("item", new)
    assert store.append("item", new, keys=keys) == range(ROWS, ROWS + 4)
    check(store, {name: np.concatenate([truth[name], new[name]]) for name in truth})
    if keyed:
        assert store["item"].lookup(["new 3", "word 1"]).tolist() == [ROWS + 3, 1]


def test_one_field_is_appended(store: tierstore.Store, truth: dict[str, np.ndarray]) -> None:
    new = values(np.random.default_rng(3), (2, DIM))
    store.append("item", new)
    both = [
        np.concatenate([truth["weight"], new]),
        np.concatenate([truth["sum"], np.zeros((2, 2))]),
    ]
    check(store, dict(zip(truth, both, strict=True)))
    store.append("user", [[1, 2, 3]])
    assert store["user"].read([9]).tolist() == [[1, 2, 3]]
    version = store.version
    for wrong in ({"weight": new, "sum": np.zeros((3, 2))}, {}, np.zeros(DIM, np.float32)):
        with pytest.raises(InvalidInputError):
            store.append("item", wrong)
    assert store.version == version


def test_growing_takes_any_whole_number(store: tierstore.Store) -> None:
    store.grow("user", np.int64(12), init=tierstore.constant(4))
    assert store["user"].read([8, 11]).tolist() == [[0] * 3, [4] * 3]
    with pytest.raises(InvalidTypeError, match="rows must be an int"):
        store.grow("user", 12.5)  # type: ignore[arg-type]


def test_a_table_gets_another_name(store: tierstore.Store, truth: dict[str, np.ndarray]) -> None:
    store.set_keys("item", list(range(ROWS)))
    before = store.version
    with pytest.raises(ExistsError, match="'user'"):
        store.rename("item", "user")
    thing = store.rename("item", "thing")
    assert list(store) == ["user", "thing"] and store["thing"] is thing and thing.name == "thing"
    check(store, truth, "thing")
    assert store["thing"].lookup([17]).tolist() == [17]
    with tierstore.open(store.path, version=before) as older:
        assert np.array_equal(older["item"].read(EVERY), truth["weight"])
    store.commit()
    store.commit()
    assert not (Path(store.path) / "item").exists()
    check(store, truth, "thing")


def test_a_table_is_dropped(store: tierstore.Store, truth: dict[str, np.ndarray]) -> None:
    reader = tierstore.open(store.path)
    store.drop("user")
    assert list(store) == ["item"]
    check(store, truth)
    for gone in (store.drop, store.__getitem__):
        with pytest.raises(UnknownNameError):
            gone("user")
    store["item"].write([0], np.zeros((1, DIM), np.float32), "weight")
    store.commit()
    store.commit()
    assert reader["user"].read([0]).shape == (1, 3)
    assert reader.refresh() and list(reader) == ["item"]
    reader.close()
    store.commit()
    assert not (Path(store.path) / "user").exists()
    assert store.verify()


@pytest.mark.parametrize("budget", [Budget(host=0), SMALL, Budget(host_rows=ROWS)], ids=str)
@pytest.mark.parametrize("end", ["renamed", "dropped"])
def test_a_table_object_that_is_gone_says_so_and_the_store_stays_open(
    store: tierstore.Store, truth: dict[str, np.ndarray], budget: Budget, end: str
) -> None:
    path = store.path
    store.close()
    with tierstore.open(path, "r+", budget=budget) as store:
        gone = store["item"]
        begun, lease = gone.scan(block_rows=7), gone.lease([3])
        next(begun)
        store.rename("item", "thing") if end == "renamed" else store.drop("item")
        calls = [
            lambda: gone.read([3]),
            lambda: gone.write([3], np.ones((1, DIM), np.float32)),
            lambda: gone.lease([3]),
            lambda: lease.read("weight"),
            lambda: list(gone.scan()),
            lambda: next(begun),
            gone.stats,
            gone.occupancy,
        ]
        for call in calls if budget.host == 0 else [*calls, gone.warm]:
            with pytest.raises(ClosedError, match="renamed or dropped"):
                call()
        gone.prefetch([3])
        assert store["user"].read([0]).shape == (1, 3)
        if end == "renamed":
            check(store, truth, "thing")


@pytest.mark.parametrize("raw", [False, True])
def test_a_scan_mixes_no_two_shapes_of_a_table(
    store: tierstore.Store, truth: dict[str, np.ndarray], raw: bool
) -> None:
    """The bytes that a field had before are another field's, or none, afterwards."""
    item = store["item"]
    begun = item.scan("sum", block_rows=7, raw=raw)
    assert np.array_equal(next(begun), truth["sum"][:7])
    store.add_fields("item", {"more": Field(1)})
    store.drop_fields("item", ["weight"])
    with pytest.raises(ClosedError, match="other fields or rows"):
        next(begun)
    assert np.array_equal(np.concatenate(list(item.scan("sum"))), truth["sum"])


def test_warming_by_counts_of_another_shape_leaves_the_store_open(
    store: tierstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table grows while the call that has checked its counts waits for its turn."""
    item = store["item"]

    def rows_then_growth(*args: Any) -> Any:
        monkeypatch.undo()
        found = rows_to_warm(*args)
        store.grow("item", 2 * ROWS)
        return found

    monkeypatch.setattr("tierstore._table.table.rows_to_warm", rows_then_growth)
    with pytest.raises(ClosedError, match="other fields or rows"):
        item.warm(counts=np.arange(ROWS))
    assert item.rows == 2 * ROWS and item.warm() == SMALL.host_rows
    with pytest.raises(ClosedError, match="other fields or rows"):
        item.warm(progress=lambda *_: store.add_fields("item", {"more": Field(1)}))
    assert item.warm() == SMALL.host_rows


def test_no_row_is_dropped_unasked(store: tierstore.Store, truth: dict[str, np.ndarray]) -> None:
    with pytest.raises(InvalidInputError, match="reinitialize=True"):
        store.replace_table("item", TableSpec(ROWS, DIM, "float16"))
    check(store, truth)
    store.replace_table("item", TableSpec(ROWS, DIM, "float16"), reinitialize=True)
    assert not store["item"].read(EVERY).any()


# Step and payload


def test_a_commit_keeps_step_and_payload_unless_given(store: tierstore.Store) -> None:
    names = sorted(Path(store.path).glob("payload-*"))
    for row in range(4):  # more versions than are kept
        store["user"].write([row], np.ones((1, 3), np.float32))
        store.commit_async().result() if row % 2 else store.commit()
    assert store.step == 7 and list(store.payload) == ["model"]
    assert np.array_equal(store.payload["model"].tree()["bias"], np.ones(3))
    assert sorted(Path(store.path).glob("payload-*")) == names
    store.commit(payload={"other": b"text"})
    assert store.step == 7 and list(store.payload) == ["other"]
    store.commit(step=7)
    assert list(store.payload) == ["other"]
    store.commit(payload={})
    assert store.step == 7 and not store.payload
    store.commit(payload={"other": b"text"})
    store.commit(step=np.int64(8))
    assert store.step == 8 and type(store.step) is int and not store.payload
    for wrong in (True, 1.5, "8"):
        with pytest.raises(InvalidTypeError, match="step must be an int"):
            store.commit(step=wrong)  # type: ignore[arg-type]


def test_a_commit_that_fails_keeps_the_payload_of_the_version_before(
    store: tierstore.Store,
) -> None:
    from tierstore._store import ledger

    store["user"].write([1], np.ones((1, 3), np.float32))
    with (
        mock.patch.object(ledger, "_encoded", side_effect=InvalidInputError("too large")),
        pytest.raises(InvalidInputError),
    ):
        store.commit()
    assert np.array_equal(store.payload["model"].tree()["bias"], np.ones(3))
    assert store.commit() == 3
    assert np.array_equal(store.payload["model"].tree()["bias"], np.ones(3))


# What is told


def test_a_report_of_damage_is_false(store: tierstore.Store) -> None:
    assert store.verify()
    store.close()
    (base,) = Path(store.path).glob("user/*/rows.npy")
    data = bytearray(base.read_bytes())
    data[-40] ^= 1
    base.write_bytes(data)
    assert not tierstore.verify(store.path)


def test_folds_in_threads_are_logged(store: tierstore.Store, logged: Logged) -> None:
    logged.setLevel(logging.INFO)
    with mock.patch("tierstore._store.compaction._MOST_DELTAS", 1):
        for row in range(5):
            store["user"].write([row], np.ones((1, 3), np.float32))
            store.commit()
        store.close()
    assert any("starts in a thread" in message for message in logged.messages)
    assert any("is published" in message or "is stopped" in message for message in logged.messages)
    assert {record.name for record in logged.records} == {"tierstore"}


def test_keys_can_be_part_of_a_commit(store):
    table, rows = store["item"], np.full((1, DIM), 7, np.float32)
    store.set_keys("item", [f"old {row}" for row in range(ROWS)])
    version = store.version
    table.write([3], rows)
    store.set_keys("item", range(ROWS), commit=False)
    store.set_keys("item", range(100, 100 + ROWS), commit=False)
    assert store.version == version
    assert table.lookup([103]).tolist() == [3]
    with tierstore.open(store.path) as reader:
        assert reader["item"].keys[3] == "old 3"
    with pytest.raises(InvalidInputError, match=r"1 row is not committed"):
        store.add_fields("item", {"age": Field(1)})
    store.rollback()
    assert table.keys[3] == "old 3"
    files = sorted(path.name for path in store.path.rglob("keys.*"))
    assert len(files) == 3
    table.write([3], rows)
    store.set_keys("item", range(100, 100 + ROWS), commit=False)
    store.commit()
    with tierstore.open(store.path) as reader:
        assert reader["item"].lookup([103]).tolist() == [3]
        assert np.array_equal(reader["item"].read([3]), rows)
    store.set_keys("item", None, commit=False)
    assert table.keys is None
    store.commit()
    assert table.keys is None
    with tierstore.open(store.path) as reader:
        assert reader["item"].keys is None


def test_keys_that_were_not_committed_are_not_there(store):
    path = store.path
    store.set_keys("item", range(ROWS), commit=False)
    with pytest.warns(UncommittedRowsWarning, match="keys of table 'item'"):
        store.close()
    with tierstore.open(path, "r+") as again:
        assert again["item"].keys is None
    assert not list(path.rglob("keys.*"))


def test_a_state_points_to_no_version_without_the_keys(store):
    pointer = store.state_dict()
    store.set_keys("item", range(ROWS), commit=False)
    with pytest.raises(InvalidInputError, match=r"keys of table .item. .* not committed"):
        store.state_dict()
    store.load_state_dict(pointer)
    assert store["item"].keys is None
    store.set_keys("item", range(100, 100 + ROWS), commit=False)
    Checkpoint(store).commit(1)
    assert store.state_dict()["version"] == store.version
    with tierstore.open(store.path) as reader:
        assert reader["item"].lookup([103]).tolist() == [3]
        assert Checkpoint(reader).resume() == 1


def test_keys_for_new_rows_of_a_table_without_keys_are_refused(tmp_path):
    spec = tierstore.TableSpec(10, 4, init=tierstore.normal(seed=1))
    with tierstore.create(tmp_path / "plain.tier", {"thing": spec}) as store:
        rows = np.random.default_rng(4).normal(size=(2, 4)).astype("f4")
        version = store.version
        for keys in (["a", "b"], ["a"], []):
            with pytest.raises(InvalidInputError, match="'thing' has no keys; set_keys first"):
                store.append("thing", rows, keys=keys)
            with pytest.raises(InvalidInputError, match="'thing' has no keys; set_keys first"):
                store.grow("thing", 12, keys=keys)
        assert (store["thing"].rows, store.version) == (10, version)
        store.set_keys("thing", range(100, 110))
        store.append("thing", rows, keys=[7, 8])
        table = store["thing"]
        assert table.contains([[7, 99], [109, 8]]).tolist() == [[True, False], [True, True]]
        with pytest.raises(UnknownNameError, match=r"these 4 keys: 1, 2, 3, …$"):
            table.lookup([7, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda store: store.grow("item", 2 * ROWS), "grow table 'item'"),
        (
            lambda store: store.append("item", {"sum": np.zeros((1, 2))}),
            "append to table 'item'",
        ),
        (lambda store: store.rename("item", "new"), "rename table 'item'"),
        (lambda store: store.drop("item"), "drop table 'item'"),
        (lambda store: store.create_table("new", TableSpec(9, 3)), "create table 'new'"),
        (lambda store: store.add_fields("item", {"age": Field(1)}), "add fields to table 'item'"),
        (lambda store: store.alter_table("item", dtype="float16"), "alter table 'item'"),
        (lambda store: store.set_keys("item", range(ROWS)), "set keys of table 'item'"),
    ],
)
def test_a_change_says_what_is_in_its_way_and_what_it_is(store, change, told):
    version = store.version
    store["item"].write([3, 5], np.ones((2, DIM), np.float32))
    with pytest.raises(
        InvalidInputError,
        match=rf"^2 rows are not committed, of table 'item'; call .* before you {told}$",
    ):
        change(store)
    store.rollback()
    assert store.version == version


def test_a_table_that_shares_tiers_stays_when_another_is_dropped(tmp_path: Path) -> None:
    specs = {name: tierstore.TableSpec(20, 3) for name in ("one", "other")}
    rows = np.random.default_rng(2).standard_normal((20, 3)).astype(np.float32)
    with tierstore.create(tmp_path / "s", specs) as store:
        assert inside.space(store["one"]) is inside.space(store["other"])
        store["one"].write(np.arange(20), rows)
        store.commit()
        store.drop("other")
        assert np.array_equal(store["one"].read(np.arange(20)), rows)
        store["one"].write([4], rows[:1])
        store.commit()
        store.rename("one", "more")
        assert np.array_equal(store["more"].read([4, 5]), rows[[0, 5]])
