"""Stores through the public interface: versions, payload, copies, new shapes and budgets."""

import json
import os
import pickle
import warnings
from copy import copy as shallow_copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.oracle import values
from tierstore.errors import (
    CapacityError,
    ClosedError,
    CommitFailedError,
    CorruptStoreError,
    ExistsError,
    InvalidInputError,
    InvalidTypeError,
    LockedError,
    NotAStoreError,
    ReadOnlyError,
    StoreFullError,
    UncommittedRowsWarning,
    UnknownNameError,
    UpkeepWarning,
    VersionError,
)

ROWS, DIM = 40, 6
SPECS = {
    "item": tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=1)),
    "user": tierstore.TableSpec(
        ROWS // 2,
        fields={"weight": tierstore.Field(3), "sum": tierstore.Field(1, "float64")},
        backend="zarr",
    ),
}
SMALL = tierstore.Budget(host_rows=5)
EVERY = np.arange(ROWS)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "emb.tier"


@pytest.fixture
def store(path):
    """An open store of two tables; closed in the end, quietly."""
    made = tierstore.create(path, SPECS, budget=SMALL)
    yield made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.close()


def change(store: tierstore.Store, seed: int, count: int = 15) -> np.ndarray:
    """Write random rows to `item`; return all its rows afterwards."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(ROWS)[:count]
    store["item"].write(rows, values(rng, (count, DIM)))
    return store["item"].read(EVERY)


def reopened(path: Path, mode: str = "r", **options: Any) -> tierstore.Store:
    return tierstore.open(path, mode, **{"budget": SMALL, **options})


# Making and opening


def test_a_new_store_holds_its_first_values(path, store):
    assert store.version == 1
    assert store.step is None
    assert list(store) == ["item", "user"]
    assert abs(store["item"].read(EVERY).std() - 1) < 0.2
    assert not store["user"].read([0, 1, 19], field="sum").any()
    assert store.path == path
    assert len(store.uuid) == 32
    assert store.parent is None


def test_first_values_are_the_same_in_every_backend(tmp_path):
    found = []
    for number, options in enumerate(
        [{}, {"backend": "zarr"}, {"backend": "zarr", "compression": "lz4", "chunk_rows": 7}]
    ):
        fields = {
            "weight": tierstore.Field(3, "bfloat16", tierstore.uniform(-1, 1, seed=3)),
            "m": tierstore.Field(2, "float64", tierstore.xavier_uniform(seed=4)),
        }
        spec = tierstore.TableSpec(5000, fields=fields, **options)
        with tierstore.create(tmp_path / f"{number}.tier", {"t": spec}) as store:
            read = store["t"].read(np.arange(5000), ["weight", "m"])
            found.append(read["weight"].tobytes() + read["m"].tobytes())
    assert found[0] == found[1] == found[2]


def test_progress_counts_the_rows_of_all_tables(path):
    seen: list[tuple[int, int]] = []
    specs = {"a": tierstore.TableSpec(10_000, 2), "b": tierstore.TableSpec(100, 2)}
    tierstore.create(path, specs, progress=lambda *at: seen.append(at)).close()
    assert seen == sorted(seen)
    assert seen[-1] == (10_100, 10_100)


def test_no_store_is_made_inside_a_store(path, store):
    """A table of that name could not be made, and what removes the store removes both."""
    inside = path / "copy"
    for make in (
        lambda: store.save(inside),
        lambda: store.update_copy(inside),
        lambda: tierstore.repair(path, inside),
        lambda: tierstore.create(inside, {"t": tierstore.TableSpec(2, 4)}),
    ):
        before = sorted(os.listdir(path))
        with pytest.raises(InvalidInputError, match="copy is inside "):
            make()
        assert sorted(os.listdir(path)) == before


def test_a_path_with_nul_is_refused_by_name(store):
    for call in (
        lambda path: tierstore.open(path),
        lambda path: tierstore.create(path, {"t": tierstore.TableSpec(2, 4)}),
        lambda path: tierstore.open_or_create(path, {"t": tierstore.TableSpec(2, 4)}),
        tierstore.verify,
    ):
        with pytest.raises(InvalidInputError, match="no path has a NUL"):
            call("a\0b")


def test_nothing_that_exists_is_replaced(path, store):
    with pytest.raises(ExistsError):
        tierstore.create(path, SPECS)
    (path.parent / "file").write_text("precious")
    with pytest.raises(ExistsError):
        tierstore.create(path.parent / "file", SPECS)
    assert (path.parent / "file").read_text() == "precious"


@pytest.mark.parametrize(
    ("tables", "error"),
    [
        ({"bad name": tierstore.TableSpec(1, 1)}, InvalidInputError),
        ({"item": {"rows": 1, "dim": 1}}, InvalidTypeError),
        (
            {"item": tierstore.TableSpec(5, 2, init=tierstore.from_array(np.zeros((4, 2))))},
            InvalidInputError,
        ),
    ],
)
def test_a_store_that_cannot_be_made_leaves_nothing(path, tables, error):
    with pytest.raises(error):
        tierstore.create(path, tables)
    assert list(path.parent.iterdir()) == []


def test_paths_that_hold_no_store(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()
    for name in ("missing", "file", "directory"):
        with pytest.raises(NotAStoreError, match=name):
            tierstore.open(tmp_path / name)


@pytest.mark.parametrize(
    "options", [{"mode": "w"}, {"keep": 0}, {"mode": "r+", "version": 1}, {"device": "gpu"}]
)
def test_ways_to_open_that_cannot_be(path, store, options):
    store.close()
    with pytest.raises(InvalidInputError):
        tierstore.open(path, **options)


def test_names_that_are_not_there(store):
    with pytest.raises(UnknownNameError, match=r"no table 'items'.*item, user"):
        store["items"]
    with pytest.raises(KeyError):
        store.payload["model"]
    assert "item" in repr(store)


# Commits and versions


def test_what_was_committed_is_there_again(path, store):
    expected = change(store, 1)
    store["user"].write([3], {"sum": [[2.5]]})
    assert store.commit(step=100) == 2
    store.close()
    with reopened(path) as again:
        assert (again.version, again.step) == (2, 100)
        assert np.array_equal(again["item"].read(EVERY), expected)
        assert again["user"].read([3], field="sum") == 2.5


def test_what_was_not_committed_is_dropped_with_a_warning(path, store):
    expected = change(store, 1)
    store.commit()
    change(store, 2, count=4)
    store["user"].write([3], np.ones((1, 3), np.float32))
    assert store.uncommitted_rows() == 5
    with pytest.warns(UserWarning, match="5 uncommitted rows"):
        store.close()
    with reopened(path) as again:
        assert np.array_equal(again["item"].read(EVERY), expected)


def test_rollback_takes_back_every_table(store):
    expected = change(store, 1)
    store.commit()
    change(store, 2)
    store["user"].write([3], np.ones((1, 3), np.float32))
    store["item"].scalars["step"] = 7
    store.rollback()
    assert np.array_equal(store["item"].read(EVERY), expected)
    assert not store["user"].read([3]).any()
    assert store["item"].scalars == {}
    assert store.uncommitted_rows() == 0
    assert store.commit() == 3


def test_commits_under_names_keep_those_before(path, store):
    for number, name in enumerate(("first", "second", "third")):
        store["item"].write([number], store["item"].read([9]))
        store.commit(keep=name)
    names = [each.names for each in store.versions() if each.names]
    assert names == [("first",), ("second",), ("third",)]
    store.restore("first")


def test_versions_that_are_not_confirmed_stay_so_when_one_is_restored(path, store):
    """A model that is saved elsewhere may still need one of them."""
    for number in range(4):
        store["item"].write([number], store["item"].read([9]))
        store.commit(confirm=False)
    store.restore(3)
    for number in range(4):
        store["item"].write([number], store["item"].read([8]))
        store.commit(confirm=False)
    assert [each.version for each in store.versions()] == [*range(1, 11)]
    store.confirm(10)


def test_a_scalar_of_another_type_is_another_one(path, store):
    for value in (1, 1.0, True, 0, False, 0.0, -0.0):
        store["item"].scalars["a"] = value
        store.commit()
        with tierstore.open(path) as again:
            found = again["item"].scalars["a"]
            assert (type(found), repr(found)) == (type(value), repr(value))


def test_a_payload_of_a_commit_that_fails_is_removed(path, store, monkeypatch):
    store["item"].write([1], store["item"].read([2]))
    before = sorted(path.glob("payload-*"))

    def full(*_):
        raise StoreFullError("no space")

    with monkeypatch.context() as failing:
        failing.setattr("tierstore._store.store.flush", full)
        with pytest.raises(StoreFullError):
            store.commit(payload={"note": b"x" * 99})
    assert sorted(path.glob("payload-*")) == before
    store.commit(payload={"note": b"y"})
    assert store.payload["note"].read() == b"y"


@pytest.mark.parametrize("error", [MemoryError("no memory"), OSError(5, "no disk")])
def test_work_after_a_version_is_safe_does_not_fail_its_commit(path, store, monkeypatch, error):
    def fail(*_):
        raise error

    store["item"].write([1], store["item"].read([2]))
    with monkeypatch.context() as failing:
        failing.setattr("tierstore._store.state.State.sweep", fail)
        with pytest.warns(UpkeepWarning, match="version 2 is committed; .* is postponed"):
            assert store.commit() == 2
    store["item"].write([1], store["item"].read([3]))
    assert store.commit() == 3


def test_a_sync_that_fails_after_a_version_is_safe_closes_the_store(path, store, monkeypatch):
    """What the kernel has of the files is not what the disk has: nothing more may be written."""

    def fail(*_):
        raise CommitFailedError("a sync failed")

    store["item"].write([1], store["item"].read([2]))
    with monkeypatch.context() as failing:
        failing.setattr("tierstore._store.state.State.sweep", fail)
        with pytest.warns(UpkeepWarning, match="version 2 is committed"):
            assert store.commit() == 2
    with pytest.raises(ClosedError, match="a sync failed"):
        store["item"].read([1])
    with tierstore.open(path) as again:
        assert again.version == 2


def test_scalars_are_committed_with_the_rows(path, store):
    store["item"].scalars.update(step=3, beta=[0.9, 0.999], name="adam")
    store.commit()
    store.close()
    with reopened(path) as again:
        assert again["item"].scalars == {"step": 3, "beta": [0.9, 0.999], "name": "adam"}


def test_kept_versions_can_be_read_and_others_not(path):
    states = {}
    with tierstore.create(path, SPECS, budget=SMALL, keep=3) as store:
        for seed in range(5):
            rows = change(store, seed)
            states[store.commit(step=10 * seed)] = rows
        kept = store.versions()
        assert [(each.version, each.step) for each in kept] == [(4, 20), (5, 30), (6, 40)]
        for each in kept:
            with reopened(path, version=each.version) as older:
                assert np.array_equal(older["item"].read(EVERY), states[each.version])
                assert older.step == each.step
        with pytest.raises(VersionError, match="there are: 4, 5, 6"):
            reopened(path, version=3)


def test_a_reader_stays_at_its_version_until_it_refreshes(path, store):
    first = change(store, 1)
    store.commit()
    with reopened(path) as reader:
        second = change(store, 2)
        assert not reader.refresh()
        store.commit(step=5)
        assert np.array_equal(reader["item"].read(EVERY), first)
        assert reader.refresh()
        assert np.array_equal(reader["item"].read(EVERY), second)
        assert (reader.version, reader.step) == (3, 5)
        assert not reader.refresh()
    assert not store.refresh()


def test_a_refresh_after_a_fold_opens_its_files_and_changes_no_version(path, store):
    expected = change(store, 1)
    store.commit()
    with reopened(path) as reader:
        version = reader.version
        store.fold()
        assert not reader.info().folded
        assert reader.refresh() is False
        assert reader.version == version and reader.info().folded
        assert np.array_equal(reader["item"].read(EVERY), expected)


def test_a_payload_of_no_such_name(path, store):
    store.commit(step=1, payload={"model": b"abc"})
    with reopened(path) as reader:
        for opened in (store, reader):
            with pytest.raises(UnknownNameError, match="no payload 'x'; it has model"):
                opened.payload["x"]
            assert opened.payload.get("x") is None and "x" not in opened.payload
            assert opened.payload["model"].read() == b"abc"


def test_info_names_the_policy_of_each_tier(tmp_path):
    spec = tierstore.TableSpec(1000, 4, init=tierstore.normal(seed=1))
    tierstore.create(tmp_path / "p.tier", {"a": spec, "b": spec}).close()
    budget = tierstore.Budget(host_rows=100)
    with tierstore.open(tmp_path / "p.tier", budget=budget, policy={"a": "lfu"}) as reader:
        tables = reader.info().tables
        assert {each.name: each.tiers[0].policy for each in tables} == {"a": "lfu", "b": "lru"}
        assert " lfu" in str(reader.info()) and " lru" in str(reader.info())


def test_an_array_in_place_of_a_specification(tmp_path):
    with pytest.raises(InvalidTypeError, match="from_array") as raised:
        tierstore.create(tmp_path / "a.tier", {"a": np.ones((100, 8), "f4")})
    assert "TableSpec(100, 8" in str(raised.value) and len(str(raised.value)) < 200


def test_going_on_from_an_older_version(path, store):
    older = change(store, 1)
    store.commit(step=1)
    change(store, 2)
    store.commit(step=2)
    store.close()
    with reopened(path, "r+", version=2, discard_newer=True) as store:
        assert np.array_equal(store["item"].read(EVERY), older)
        assert store.step == 1
        newer = change(store, 3)
        store.commit(step=3)
    with reopened(path) as again:
        assert np.array_equal(again["item"].read(EVERY), newer)
        assert [each.step for each in again.versions()] == [1, 3]


def test_versions_after_the_last_confirmed_one_stay(path, store):
    for seed in range(5):
        change(store, seed)
        store.commit(confirm=False)
    assert [each.version for each in store.versions()] == [1, 2, 3, 4, 5, 6]
    store.confirm(4)
    assert [each.version for each in store.versions()] == [4, 5, 6]
    with pytest.raises(InvalidInputError, match="version 2 is not kept"):
        store.confirm(2)


def test_a_payload_is_that_of_its_step(store):
    store.commit(step=1, payload={"note": b"one"})
    store.commit()
    assert (store.step, store.payload["note"].read()) == (1, b"one")
    store.commit(step=1)
    assert store.payload["note"].read() == b"one"
    store.commit(step=2)
    assert (store.step, dict(store.payload)) == (2, {})


@pytest.mark.parametrize("step", [1.0, "1", True])
def test_steps_are_whole_numbers(store, step):
    with pytest.raises(InvalidTypeError, match="step must be an int"):
        store.commit(step=step)


def test_one_writer_at_a_time(path, store):
    with pytest.raises(LockedError, match="open for writing"):
        reopened(path, "r+")
    store.close()
    reopened(path, "r+").close()


@pytest.mark.filterwarnings("error")
def test_a_warning_made_an_error_hides_no_error_of_the_body(path):
    mine = KeyError("mine")
    with pytest.raises(UncommittedRowsWarning) as caught, tierstore.create(path, SPECS) as store:
        change(store, 1)
        raise mine
    assert caught.value.__context__ is mine


def test_a_closed_store_says_so(store):
    item = store["item"]
    store.close()
    store.close()
    assert store.closed
    calls = (store.commit, store.info, store.verify, lambda: store["item"], lambda: item.read([1]))
    for call in calls:
        with pytest.raises(ClosedError, match="it was closed"):
            call()


def test_readers_change_nothing(path, store):
    with reopened(path) as reader:
        for call in (reader.commit, reader.rollback, reader.fold, lambda: reader.confirm(1)):
            with pytest.raises(ReadOnlyError):
                call()
        with pytest.raises(ReadOnlyError):
            reader.add_fields("item", {"m": tierstore.Field(1)})


# Folding, copying, verifying


def test_a_fold_changes_no_row(path, store):
    change(store, 1)
    store.commit(step=1)
    expected = change(store, 2)
    store.commit(step=2)
    assert not store.info().folded
    assert store.fold() == [2]
    assert store.info().folded
    assert np.array_equal(store["item"].read(EVERY), expected)
    assert [each.version for each in store.versions()] == [3]
    store.close()
    assert list(path.rglob("delta-*")) == []
    with reopened(path) as again:
        assert (again.version, again.step) == (3, 2)
        assert np.array_equal(again["item"].read(EVERY), expected)


def test_a_fold_waits_for_older_readers_and_for_what_is_uncommitted(path, store):
    expected = change(store, 1)
    with pytest.raises(InvalidInputError, match="15 rows are not committed"):
        store.fold()
    store.commit()
    with reopened(path) as reader:
        newer = change(store, 2)
        store.commit()
        with pytest.raises(LockedError, match="version 2 is open for reading"):
            store.fold()
        assert np.array_equal(reader["item"].read(EVERY), expected)
        reader.refresh()
        store.fold()
        assert store.info().folded
        assert np.array_equal(reader["item"].read(EVERY), newer)


def test_many_commits_fold_by_themselves(path, store):
    for seed in range(220):
        expected = change(store, seed, count=2)
        store.commit()
    assert len(list(path.rglob("delta-*"))) <= 3 * 64 + 3  # however slow the thread is
    assert np.array_equal(store["item"].read(EVERY), expected)
    store.close()
    with reopened(path) as again:
        assert np.array_equal(again["item"].read(EVERY), expected)
        assert again.verify().ok


def test_a_copy_is_a_store_of_its_own(path, store, tmp_path):
    expected = change(store, 1)
    store.commit(step=7, payload={"note": b"seven"})
    change(store, 2)
    store.save(tmp_path / "copy.tier")
    with tierstore.open(tmp_path / "copy.tier", "r+") as copy:
        assert copy.uuid != store.uuid
        assert copy.parent == (store.uuid, 2)
        assert (copy.version, copy.step) == (2, 7)
        assert copy.info().folded
        assert copy.payload["note"].read() == b"seven"
        assert np.array_equal(copy["item"].read(EVERY), expected)
        copy["item"].write([0], np.zeros((1, DIM), np.float32))
        assert copy.commit() == 3
    with pytest.raises(ExistsError):
        store.save(tmp_path / "copy.tier")


def test_an_older_version_can_be_copied(store, tmp_path):
    older = change(store, 1)
    store.commit()
    change(store, 2)
    store.commit()
    store.save(tmp_path / "older.tier", version=2)
    with tierstore.open(tmp_path / "older.tier") as copy:
        assert np.array_equal(copy["item"].read(EVERY), older)
    with pytest.raises(VersionError):
        store.save(tmp_path / "none.tier", version=9)
    assert not (tmp_path / "none.tier").exists()


def test_verify_names_what_is_damaged(path, store):
    change(store, 1)
    store.commit(payload={"model": b"x" * 100})
    assert store.verify().ok
    assert store.verify().rows_checked == ROWS + ROWS // 2
    assert store.verify(sample=7).rows_checked == 14
    store.fold()
    store.close()
    (rows,) = path.glob("item/*/rows.npy")
    content = bytearray(rows.read_bytes())
    content[4096 + 32 * 11 + 3] ^= 1
    rows.write_bytes(content)
    with reopened(path) as damaged:
        report = damaged.verify()
        assert not report.ok
        assert report.bad_rows == {"item": [11]}  # not the table that is whole
        with pytest.raises(CorruptStoreError, match="row 11"):
            damaged["item"].read(EVERY)


# Payload


TREE = {
    "model": {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), 0: np.float64(0.5)},
    "numbers": [1, 2.5, True, None, "text", float("inf")],
    "pair": (np.zeros((0, 3), np.int16), {"nested": [{}]}),
}


def test_trees_come_back_as_they_were(path, store):
    store.commit(payload={"state": TREE, "raw": b"\0bytes", "empty": {}})
    store.close()
    with reopened(path) as again:
        assert set(again.payload) == {"state", "raw", "empty"}
        found = again.payload["state"].tree()
        assert np.array_equal(found["model"]["weight"], TREE["model"]["weight"])
        assert found["model"][0] == 0.5
        assert found["numbers"] == TREE["numbers"]
        assert found["pair"][0].shape == (0, 3)
        assert found["pair"][0].dtype == np.int16
        assert found["pair"][1] == {"nested": [{}]}
        assert isinstance(found["pair"], tuple)
        assert again.payload["empty"].tree() == {}
        assert again.payload["raw"].read() == b"\0bytes"
        assert (again.payload["raw"].kind, again.payload["raw"].nbytes) == ("bytes", 6)
        with pytest.raises(InvalidTypeError, match="not a tree"):
            again.payload["raw"].tree()


def test_the_state_of_a_model_and_its_optimizer(path, store):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(4, 2).bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    optimizer.step()
    store.commit(payload={"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    store.close()
    with reopened(path) as again:
        other = torch.nn.Linear(4, 2).bfloat16()
        other.load_state_dict(again.payload["model"].state_dict())
        assert torch.equal(other.weight, model.weight)
        fresh = torch.optim.Adam(other.parameters())
        fresh.load_state_dict(again.payload["optimizer"].state_dict())
        for old, new in zip(
            optimizer.state_dict()["state"].values(),
            fresh.state_dict()["state"].values(),
            strict=True,
        ):
            assert all(torch.equal(torch.as_tensor(old[k]), torch.as_tensor(new[k])) for k in old)


def test_files_are_copied_in_and_out(store, tmp_path):
    content = np.random.default_rng(1).bytes(100_000)
    (tmp_path / "log.txt").write_bytes(content)
    store.commit(payload={"log": tmp_path / "log.txt", "again": tmp_path / "log.txt"})
    (tmp_path / "log.txt").unlink()
    store.payload["log"].save(tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_bytes() == content
    with pytest.raises(ExistsError):
        store.payload["again"].save(tmp_path / "out.txt")


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ({"model": object()}, InvalidTypeError),
        ({"model": {"a": [{1, 2}]}}, InvalidTypeError),
        ({"model": {(1, 2): 3}}, InvalidTypeError),
        ({"model": np.array(["a"])}, InvalidTypeError),
        ({"log": Path("no/such/file")}, InvalidInputError),
        ({"bad name": b""}, InvalidInputError),
    ],
)
def test_a_payload_that_cannot_be_stored_stops_the_commit(path, store, payload, error):
    expected = change(store, 1)
    with pytest.raises(error):
        store.commit(payload={"fine": b"fine", **payload})
    assert store.version == 1
    assert list(path.glob("payload-*")) == []
    assert store.commit() == 2
    assert np.array_equal(store["item"].read(EVERY), expected)


# New shapes


def test_more_tables(path, store):
    store.create_table("word", tierstore.TableSpec(9, 2, "float16", init=tierstore.constant(2)))
    assert store.version == 2
    assert (store["word"].read([0, 8]) == 2).all()
    with pytest.raises(ExistsError, match="'word'"):
        store.create_table("word", tierstore.TableSpec(9, 2))
    store.close()
    with reopened(path) as again:
        assert list(again) == ["item", "user", "word"]


def test_more_fields(path, store):
    expected = change(store, 1)
    with pytest.raises(InvalidInputError, match="not committed"):
        store.add_fields("item", {"m": tierstore.Field(1)})
    store.commit()
    item = store["item"]
    store.add_fields(
        "item",
        {
            "exp_avg": tierstore.Field(DIM, "bfloat16"),
            "sum": tierstore.Field(1, init=tierstore.constant(0.5)),
        },
    )
    assert item is store["item"]
    assert list(item.fields) == ["weight", "exp_avg", "sum"]
    assert np.array_equal(item.read(EVERY), expected)
    assert (item.read(EVERY, field="sum") == 0.5).all()
    assert not item.read(EVERY, field="exp_avg").any()
    with pytest.raises(ExistsError):
        store.add_fields("item", {"sum": tierstore.Field(1)})
    with reopened(path, version=2) as older:
        assert list(older["item"].fields) == ["weight"]


@pytest.mark.parametrize("table", ["item", "user"])
def test_more_rows(path, store, table):
    grown = store[table]
    grown.write([3], np.ones((1, grown.dim), np.float32))
    store.commit()
    before = grown.read(np.arange(grown.rows))
    store.grow(table, 100, init=tierstore.constant(3))
    assert grown.rows == 100
    assert np.array_equal(grown.read(np.arange(len(before))), before)
    assert (grown.read(np.arange(len(before), 100)) == 3).all()
    with pytest.raises(InvalidInputError, match=r"cannot shrink.*in all"):
        store.grow(table, 99)
    grown.write([99], np.zeros((1, grown.dim), np.float32))
    store.commit()
    store.close()
    with reopened(path) as again:
        assert again[table].rows == 100
        assert not again[table].read([99]).any()
        assert again.verify().ok


def test_a_table_can_be_written_anew(store):
    rng = np.random.default_rng(1)
    blocks = [rng.integers(0, 256, (n, 16), np.uint8) for n in (5, 20)]
    store.replace_table("item", tierstore.TableSpec(25, 4), blocks=blocks)
    expected = np.concatenate(blocks).view("<f4")
    assert store["item"].read(np.arange(25)).tobytes() == expected.tobytes()
    assert store.version == 2


def test_blocks_that_do_not_fit_change_nothing(path, store):
    expected = store["item"].read(EVERY)
    for blocks in ([np.zeros((3, 16), np.uint8)], [np.zeros((25, 15), np.uint8)]):
        with pytest.raises(InvalidInputError):
            store.replace_table("item", tierstore.TableSpec(25, 4), blocks=blocks)
    assert store.version == 1
    assert np.array_equal(store["item"].read(EVERY), expected)
    assert len(list(path.glob("item/*"))) == 1


def test_keys_stay_with_their_rows(path, store, tmp_path):
    words = [f"word {row}" for row in range(ROWS)]
    store.set_keys("item", words)
    assert store["item"].keys[7] == "word 7"
    assert store["item"].lookup(["word 3", "word 0"]).tolist() == [3, 0]
    store.add_fields("item", {"sum": tierstore.Field(1)})
    assert list(store["item"].keys[:2]) == ["word 0", "word 1"]
    store.fold()
    store.save(tmp_path / "copy.tier")
    for place in (path, tmp_path / "copy.tier"):
        with reopened(place) as again:
            assert list(again["item"].keys) == words
    with pytest.raises(InvalidInputError, match="40 rows needs 40 keys"):
        store.set_keys("item", words[:-1])


# Budgets and information


@pytest.mark.parametrize(
    ("budget", "slots"),
    [
        (tierstore.Budget(host=0), {"item": 0, "user": 0}),
        (tierstore.Budget(host_rows=3), {"item": 6, "user": 6}),  # which they share
        (tierstore.Budget(host_rows={"item": 0, "user": 999}), {"item": 0, "user": ROWS // 2}),
        (tierstore.Budget(host="1MiB"), {"item": ROWS + ROWS // 2, "user": ROWS + ROWS // 2}),
        (None, {"item": ROWS + ROWS // 2, "user": ROWS + ROWS // 2}),
    ],
)
def test_budgets_decide_the_slots(path, store, budget, slots):
    store.close()
    with tierstore.open(path, budget=budget) as again:
        for table in again.info().tables:
            assert sum(tier.slots for tier in table.tiers) == slots[table.name]
            named = budget is not None and isinstance(budget.host_rows, dict)
            tables = (table.name,) if named else ("item", "user")
            assert all(tier.tables == tables for tier in table.tiers)


def test_a_budget_in_bytes_is_kept(path):
    spec = tierstore.TableSpec(200_000, 16)
    with tierstore.create(path, {"item": spec}, budget=tierstore.Budget(host="4MiB")) as store:
        (table,) = store.info().tables
        (tier,) = table.tiers
        assert tier.nbytes + table.index_bytes <= 4 << 20
        assert 15_000 < tier.slots < 50_000
        assert tier.kind == "pageable"


def test_a_budget_that_cannot_hold_the_map_says_what_can(path, store):
    store.close()
    with pytest.raises(CapacityError, match=r"100 bytes .*40 rows"):
        tierstore.open(path, budget=tierstore.Budget(host={"item": 100}))


def test_inspect_has_stable_keys(store):
    change(store, 1)
    store.commit(step=3)
    data = store.info().to_dict()
    assert json.loads(json.dumps(data)) == data
    keys = ["store", "format", "uuid", "version", "step", "folded", "tables", "spaces"]
    keys += ["keep", "names", "payload", "writer", "allocated_bytes"]
    assert list(data) == keys
    item, user = data["tables"]
    assert item.pop("allocated_bytes") > 0
    assert item == {
        "name": "item",
        "rows": ROWS,
        "dim": DIM,
        "dtype": "float32",
        "fields": [
            {
                "name": "weight",
                "dim": DIM,
                "dtype": "float32",
                "init": SPECS["item"].bound("item").fields["weight"].init.text,
            }
        ],
        "backend": "memmap",
        "record_bytes": 32,
        "disk_bytes": ROWS * (32 + 4),
        "delta_rows": 15,
        "delta_bytes": 15 * (32 + 12) + 64,
        "keys": None,
        "sparse": False,
        "compression": None,
        "capacity": None,
        "added": None,
    }
    assert [field["name"] for field in user["fields"]] == ["weight", "sum"]


def test_readers_can_be_pickled_and_writers_not(path, store):
    change(store, 1)
    store.commit()
    with reopened(path) as reader, pickle.loads(pickle.dumps(reader)) as other:
        assert other.version == reader.version
        assert np.array_equal(other["item"].read(EVERY), reader["item"].read(EVERY))
    with pytest.raises(InvalidTypeError, match="cannot be pickled"):
        pickle.dumps(store)


def test_tables_of_a_reader_can_be_pickled_and_share_its_copy(path, store):
    change(store, 1)
    store.commit()
    with reopened(path) as reader:
        data = pickle.dumps([reader["item"], reader["user"], reader["item"]])
        expected = reader["item"].read(EVERY)
    change(store, 2)
    store.commit()
    item, user, again = pickle.loads(data)
    with item.store as opened:
        assert again is item and user.store is opened and item.name == "item"
        assert opened.version == store.version - 1
        assert np.array_equal(item.read(EVERY), expected)
    with pytest.raises(InvalidTypeError, match="open it for reading"):
        pickle.dumps(store["item"])
    assert shallow_copy(store["item"]) is store["item"]


def test_a_pointer_stands_for_the_store(path, store, tmp_path):
    state = store.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert str(path) in state.values()
    store.load_state_dict(state)
    with (
        tierstore.create(tmp_path / "other.tier", SPECS) as other,
        pytest.raises(InvalidInputError),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_a_file_that_another_program_replaces_is_noticed_before_anything_is_lost(tmp_path, backend):
    path = tmp_path / "s.tier"
    spec = tierstore.TableSpec(3000, 16, backend=backend, init=tierstore.uniform(-1, 1, seed=1))
    rows = np.random.default_rng(2).standard_normal((50, 16)).astype(np.float32)
    with (
        pytest.warns(RuntimeWarning, match="postponed"),  # closing would fold, and may not either
        tierstore.create(path, {"t": spec}, budget=tierstore.Budget(host=0)) as store,
    ):
        store["t"].write(np.arange(0, 500, 10), rows)
        store.commit()
        (file,) = (each for each in path.rglob("*") if each.name in ("rows.npy", "c.0.0"))
        (tmp_path / "other").write_bytes(file.read_bytes())
        os.replace(tmp_path / "other", file)
        with pytest.raises(tierstore.errors.CorruptStoreError, match="replaced by another"):
            store.fold()
    with tierstore.open(path, "r+", budget=tierstore.Budget(host=0)) as store:
        assert np.array_equal(store["t"].read(np.arange(0, 500, 10)), rows)
        assert store.verify().ok
        store.fold()
        assert np.array_equal(store["t"].read(np.arange(0, 500, 10)), rows)


def test_a_value_that_cannot_be_stored_is_named(tmp_path):
    with tierstore.create(tmp_path / "s.tier", {"t": tierstore.TableSpec(3, 4)}) as store:
        for value, name in [(object(), "['x']"), ({"y": [object()]}, "['x']['y'][0]")]:
            with pytest.raises(InvalidTypeError, match="cannot be stored, of type object") as found:
                store.commit(payload={"x": value})
            assert str(found.value).startswith(f"payload{name} ")
