"""Copies that are brought to newer versions: what is written, and what is refused."""

import contextlib
import shutil
from unittest import mock

import numpy as np
import pytest

import tierstore
from tierstore._disk import generation
from tierstore._io import directory
from tierstore._store.state import State
from tierstore._table.table import read_records
from tierstore.errors import (
    CommitFailedError,
    CorruptRowError,
    InvalidInputError,
    LockedError,
    VersionError,
)

ROWS, DIM = 400, 8


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def specs(**options):
    return {
        "item": tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=2), **options),
        "user": tierstore.TableSpec(50, 3, "bfloat16", init=tierstore.uniform(-1, 1, seed=3)),
    }


@pytest.fixture(params=["memmap", "zarr", "zstd"])
def options(request):
    kinds = {
        "memmap": {},
        "zarr": {"backend": "zarr"},
        "zstd": {"backend": "zarr", "compression": "zstd", "chunk_rows": 64},
    }
    return kinds[request.param]


@pytest.fixture
def store(tmp_path):
    with tierstore.create(tmp_path / "a.tier", specs(), keep=50) as store:
        yield store


@pytest.fixture
def copy(store, tmp_path):
    store.save(tmp_path / "b.tier")
    return tmp_path / "b.tier"


def write(store, rng, count=20, name="item", **options):
    table = store[name]
    ids = rng.choice(table.rows, count, replace=False)
    table.write(ids, rng.normal(size=(count, table.dim)).astype("f4"))
    return store.commit(step=store.version, **options)


def contents(path, version=None):
    """Everything that a version of a store holds."""
    with tierstore.open(path, version=version) as opened:
        rows = {
            name: np.concatenate([*table.scan(raw=True)] or [np.empty(0)]).tobytes()
            for name, table in opened.items()
        }
        keys = {
            name: None if table.keys is None else list(table.keys[:])
            for name, table in opened.items()
        }
        fields = {name: table.fields for name, table in opened.items()}
        scalars = {name: table.scalars for name, table in opened.items()}
        payload = {name: value.read() for name, value in opened.payload.items()}
        return rows, keys, fields, scalars, payload, opened.step


def check(store, copy):
    assert contents(copy) == contents(store.path, store.version)
    assert tierstore.verify(copy).ok


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
def test_a_copy_gets_the_rows_that_differ(tmp_path, rng, options, kept):
    with tierstore.create(tmp_path / "a.tier", specs(**options), keep=50 if kept else 1) as store:
        copy = tmp_path / "b.tier"
        for commits in (1, 3):
            done = store.update_copy(copy)
            check(store, copy)
            for name in ("item", "user", "item")[:commits]:
                write(store, rng, name=name)
            before, newest = done.to_version, contents(store.path, store.version)[0]
            old = contents(copy)[0]
            done = store.update_copy(copy)
            assert (done.from_version, done.to_version) == (before, store.version)
            assert not done.whole and not done.dropped
            for name, table in store.items():
                width = len(old[name]) // table.rows
                one, other = (
                    np.frombuffer(each[name], np.uint8).reshape(-1, width) for each in (old, newest)
                )
                assert done.rows.get(name, 0) == (one != other).any(1).sum()
            check(store, copy)
        assert store.update_copy(copy).rows == {}


def test_rows_are_read_by_deltas_where_the_version_is_kept(store, copy, rng):
    with mock.patch("tierstore._store.updating.read_records", _counted):
        _counted.rows = 0
        write(store, rng)
        store.update_copy(copy)
        few = _counted.rows
        shutil.rmtree(copy)
        store.save(copy)
        write(store, rng)
        store.fold()  # the version of the copy is no longer kept
        _counted.rows = 0
        store.update_copy(copy)
        assert few <= 40 < 800 <= _counted.rows
    check(store, copy)


def _counted(table, ids):
    _counted.rows += ids.size
    return read_records(table, ids)


def test_a_version_is_equal_to_that_of_the_original(store, copy, rng):
    for _ in range(3):
        write(store, rng, payload={"note": b"x"})
        store.update_copy(copy)
        with tierstore.open(copy, "r+") as opened:
            assert opened.parent == (store.uuid, store.version)
            opened.load_state_dict(store.state_dict())
            opened.keep(opened.version, "tonight")
            opened.release("tonight")
            opened.fold()
    check(store, copy)


def test_scalars_steps_and_payload(store, copy):
    store["item"].scalars["lr"] = 0.25
    store.commit(step=9, payload={"model": {"w": np.arange(6, dtype="f4")}, "note": b"abc"})
    assert store.update_copy(copy).payload
    check(store, copy)
    store["item"].write([1], np.ones((1, DIM), "f4"))
    store.commit()
    done = store.update_copy(copy)
    assert (done.payload, done.rows, done.bytes) == (False, {"item": 1}, DIM * 4)
    check(store, copy)
    store.commit(step=10, payload={})
    assert store.update_copy(copy).payload
    check(store, copy)


@pytest.mark.slow
def test_tables_of_another_shape_are_copied_whole(store, copy, rng):
    def update(**expected):
        write(store, rng)
        planned = store.update_copy(copy, dry_run=True)
        done = store.update_copy(copy)
        assert done == planned
        assert {name: getattr(done, name) for name in expected} == expected
        check(store, copy)

    store.grow("item", ROWS + 5)
    update(whole=["item"], dropped=[])
    store.create_table("tag", tierstore.TableSpec(9, 2, init=tierstore.normal(seed=3)))
    update(whole=["tag"], dropped=[])
    store.add_fields("user", {"age": tierstore.Field(1)})
    update(whole=["user"], dropped=[])
    store.drop("tag")
    update(whole=[], dropped=["tag"])
    store.rename("user", "person")
    update(whole=["person"], dropped=["user"])


def test_keys(store, copy, rng):
    for keys in (range(50), [f"k{n}" for n in range(50)], None):
        store.set_keys("user", keys if keys is None else list(keys))
        write(store, rng, name="user")
        done = store.update_copy(copy)
        assert (done.whole, done.rows) == ([], {"user": 20})
        check(store, copy)


@pytest.mark.variants(1, 3)
@pytest.mark.parametrize("kind", ["int64", "text"])
@pytest.mark.parametrize("rows", [None, 300])
def test_tables_by_key_get_new_keys(tmp_path, rng, kind, rows):
    name = (lambda n: f"k{n}") if kind == "text" else (lambda n: n * 7)
    spec = tierstore.TableSpec(rows=rows, dim=4, keys=kind, track_uses=True)
    with tierstore.create(tmp_path / "a.tier", {"user": spec}) as store:
        copy = tmp_path / "b.tier"

        def put(numbers):
            rows = rng.normal(size=(len(numbers), 4)).astype("f4")
            store["user"].write([name(n) for n in numbers], rows)
            store.commit()

        put(range(90))
        store.update_copy(copy)
        check(store, copy)
        put(range(80, 130))
        done = store.update_copy(copy)
        assert done.whole == [] and done.rows == {"user": 50}
        check(store, copy)
        put(range(5))
        gone = store["user"].rows
        for _ in store["user"].expire(keep_at_most=100):
            pass
        store.commit()
        assert store["user"].rows < gone
        assert store.update_copy(copy).whole == ["user"]
        check(store, copy)


@pytest.mark.parametrize("kind", ["int64", "text"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
def test_keys_of_a_version_that_is_kept_are_not_read(tmp_path, rng, kind, kept):
    names = [f"k{n}" for n in range(3)] if kind == "text" else [-1, 0, 7]
    spec = tierstore.TableSpec(dim=4, keys=kind)
    with tierstore.create(tmp_path / "a.tier", {"user": spec}, keep=9 if kept else 1) as store:
        store["user"].write(names, rng.normal(size=(3, 4)).astype("f4"))
        store.commit()
        store.update_copy(tmp_path / "b.tier")
        store["user"].write(names[1:2], np.ones((1, 4), "f4"))
        store.commit()
        if not kept:
            store.fold()
    loads = []
    load = generation.load_keys
    with (
        tierstore.open(tmp_path / "a.tier") as store,
        mock.patch.object(generation, "load_keys", lambda *given: loads.append(1) or load(*given)),
    ):
        assert store.update_copy(tmp_path / "b.tier").rows == {"user": 1}
    assert len(loads) == (0 if kept else 2)
    with tierstore.open(tmp_path / "a.tier") as store:
        check(store, tmp_path / "b.tier")


@pytest.mark.variants(1, 4)
@pytest.mark.parametrize("kind", ["int64", "text"])
@pytest.mark.parametrize("kept", [50, 1])
def test_keys_that_come_go_and_come_again(tmp_path, rng, kind, kept):
    name = (lambda n: f"k{n}" * (1 + n % 3)) if kind == "text" else (lambda n: n * 7 - 50)
    spec = tierstore.TableSpec(dim=2, keys=kind)
    with tierstore.create(tmp_path / "a.tier", {"user": spec}, keep=kept) as store:
        copy, wholes = tmp_path / "b.tier", []
        for _ in range(25):
            for _ in range(rng.integers(1, 3)):
                numbers = rng.choice(30, rng.integers(1, 6), replace=False)
                if rng.random() < 0.3:
                    store["user"].remove([name(n) for n in numbers])
                else:
                    rows = rng.normal(size=(numbers.size, 2)).astype("f4")
                    store["user"].write([name(n) for n in numbers], rows)
                store.commit()
                if kept > 1 and rng.random() < 0.2:
                    store.restore(int(rng.integers(max(1, store.version - 5), store.version + 1)))
            planned = store.update_copy(copy, dry_run=True)
            done = store.update_copy(copy)
            assert done == planned
            wholes.append("user" in done.whole)
            check(store, copy)
        assert any(wholes) and not all(wholes)


def test_a_table_that_was_dropped_goes_from_the_copy(store, copy, rng):
    store.drop("user")
    write(store, rng)
    done = store.update_copy(copy)
    assert done.dropped == ["user"]
    check(store, copy)
    with tierstore.open(copy) as opened:
        assert list(opened) == ["item"]


def test_a_dry_run_writes_nothing(store, copy, rng, tmp_path):
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}
    write(store, rng)
    planned = store.update_copy(copy, dry_run=True)
    assert planned.rows == {"item": 20} and planned.bytes == 20 * DIM * 4
    assert {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()} == before
    assert store.update_copy(copy) == planned
    new = store.update_copy(tmp_path / "c.tier", dry_run=True)
    assert new.from_version is None and new.whole == ["item", "user"]
    assert not (tmp_path / "c.tier").exists()
    assert store.update_copy(tmp_path / "c.tier") == new
    check(store, tmp_path / "c.tier")


def test_a_kept_version(store, copy, rng):
    versions = [write(store, rng, keep=f"night {number}") for number in range(3)]
    assert store.update_copy(copy, version="night 1").to_version == versions[1]
    assert contents(copy) == contents(store.path, versions[1])
    with pytest.raises(VersionError, match="newer"):
        store.update_copy(copy, version="night 0")
    with tierstore.open(store.path) as reader:
        reader.update_copy(copy)
    check(store, copy)


def test_readers_of_a_copy_go_on(store, copy, rng):
    old = contents(copy)[0]["item"]
    with tierstore.open(copy) as reader:
        write(store, rng)
        store.update_copy(copy)
        assert np.concatenate(list(reader["item"].scan(raw=True))).tobytes() == old
        assert reader.refresh()
        assert np.concatenate(list(reader["item"].scan(raw=True))).tobytes() != old
    check(store, copy)


def test_copies_that_are_refused(store, copy, rng, tmp_path):
    write(store, rng)
    with pytest.raises(InvalidInputError, match="the store itself"):
        store.update_copy(store.path)
    with pytest.raises(InvalidInputError, match="objects never change"):
        store.update_copy("memory://bucket/b.tier")
    tierstore.create(tmp_path / "c.tier", specs()).close()
    with pytest.raises(InvalidInputError, match="not a copy"):
        store.update_copy(tmp_path / "c.tier")
    with tierstore.open(copy) as opened:
        opened.save(tmp_path / "d.tier")
    with pytest.raises(InvalidInputError, match="is a copy of the store"):
        store.update_copy(tmp_path / "d.tier")
    with tierstore.open(copy, "r+"), pytest.raises(LockedError):
        store.update_copy(copy)
    tierstore.distributed.save(store.path, tmp_path / "f.tier", partitions=2)
    with pytest.raises(InvalidInputError, match="has partitions"):
        store.update_copy(tmp_path / "f.tier")
    store.save(tmp_path / "g.tier", damaged="skip")
    assert store.update_copy(tmp_path / "g.tier").rows == {}
    (tmp_path / "e.tier").mkdir()
    with pytest.raises(tierstore.errors.NotAStoreError):
        store.update_copy(tmp_path / "e.tier")


def test_a_copy_with_changes_of_its_own_is_refused_until_they_are_undone(store, copy, rng):
    with tierstore.open(copy, "r+") as opened:
        opened.keep(opened.version, "as saved")
        write(opened, rng)
    write(store, rng)
    own = contents(copy)
    for dry_run in (True, False):
        with pytest.raises(VersionError, match="would be lost"):
            store.update_copy(copy, dry_run=dry_run)
    assert contents(copy) == own
    with tierstore.open(copy, "r+") as opened:
        opened.restore("as saved")
    store.update_copy(copy)
    check(store, copy)


def test_copies_keep_as_many_versions_as_the_original(store, rng, tmp_path):
    copy = tmp_path / "new"
    for _ in range(2):
        write(store, rng)
        store.update_copy(copy)
    store.save(tmp_path / "saved")
    tierstore.repair(store.path, tmp_path / "repaired")
    tierstore.distributed.save(store.path, tmp_path / "parts", partitions=2)
    for place in (copy, tmp_path / "saved", tmp_path / "repaired", tmp_path / "parts"):
        with tierstore.open(place) as opened:
            assert opened.info().keep == 50, place


def test_after_a_patch(store, copy, rng, tmp_path):
    write(store, rng)
    store.write_patch(tmp_path / "x.patch", 1)
    with tierstore.open(copy, "r+") as opened:
        opened.apply_patch(tmp_path / "x.patch")
        assert opened.parent == (store.uuid, 2)
    write(store, rng)
    assert store.update_copy(copy).rows == {"item": 20}
    check(store, copy)


def test_a_store_that_was_restored(store, copy, rng):
    for _ in range(3):
        write(store, rng)
    store.update_copy(copy)
    store.restore(2)
    assert store.update_copy(copy).rows
    check(store, copy)


def test_damage_is_not_copied(store, copy, rng):
    write(store, rng)
    delta = next(store.path.rglob("delta-*"))
    data = bytearray(delta.read_bytes())
    data[5] ^= 1
    delta.write_bytes(data)
    before = contents(copy)
    with pytest.raises(CorruptRowError):
        store.update_copy(copy)
    assert contents(copy) == before


def test_a_copy_that_omits_damage_is_no_copy_to_bring_up_to_date(store, rng, tmp_path):
    write(store, rng)
    delta = next(store.path.rglob("delta-*"))
    data = bytearray(delta.read_bytes())
    data[5] ^= 1
    delta.write_bytes(data)
    assert store.save(tmp_path / "c.tier", damaged="skip")
    write(store, rng, ROWS)
    with pytest.raises(VersionError, match="not a whole copy"):
        store.update_copy(tmp_path / "c.tier")


def test_partitions_become_a_plain_copy(tmp_path, rng):
    path, copy = tmp_path / "p.tier", tmp_path / "b.tier"
    tierstore.distributed.create(path, {"item": specs()["item"]}, partitions=3).close()
    with tierstore.distributed.open(path, "r+", keep=9) as store:
        for _ in range(3):
            ids = rng.choice(ROWS, 20, replace=False)
            store["item"].write(ids, rng.normal(size=(20, DIM)).astype("f4"))
            store.commit()
            with tierstore.open(path) as reader:
                reader.update_copy(copy)
            assert contents(copy)[0] == contents(path)[0]


@pytest.mark.parametrize("protected", [True, False], ids=["", "negative control"])
@pytest.mark.parametrize("way", ["update", "patch"])
def test_a_version_whose_name_may_not_be_durable_keeps_its_files(
    tmp_path, rng, monkeypatch, way, protected
):
    """The manifest is there, and only the sync of its name failed: what it names must stay."""
    copy = tmp_path / "b.tier"
    with tierstore.create(
        tmp_path / "a.tier", {"user": tierstore.TableSpec(300, 4, keys="int64")}, keep=9
    ) as store:
        store["user"].write(np.arange(99), rng.normal(size=(99, 4)).astype("f4"))
        first = store.commit()
        store.save(copy)
        store["user"].write(np.arange(50), rng.normal(size=(50, 4)).astype("f4"))
        store.commit()
        store.write_patch(tmp_path / "x.patch", first)
        before, sync = len(list(copy.glob("manifest-*.json"))), directory.sync_descriptor

        def failing(fd, path):
            if path == str(copy) and len(list(copy.glob("manifest-*.json"))) > before:
                raise CommitFailedError(f"{path} could not be synced")
            sync(fd, path)

        def apply():
            with tierstore.open(copy, "r+") as opened:
                opened.apply_patch(tmp_path / "x.patch")

        def update():
            store.update_copy(copy)

        with monkeypatch.context() as patch:
            patch.setattr(directory, "sync_descriptor", failing)
            if not protected:
                patch.setattr(State, "unless_published", _always)
            with pytest.raises(CommitFailedError):
                {"update": update, "patch": apply}[way]()
        if protected:
            check(store, copy)
        else:
            with pytest.raises(tierstore.errors.CorruptStoreError):
                check(store, copy)


@contextlib.contextmanager
def _always(state, remove):
    try:
        yield
    except BaseException:
        remove()
        raise
