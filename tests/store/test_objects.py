"""Stores as objects of a zarr store: saved there, read there, brought back; the same files."""

import pickle
import uuid

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tierstore import _io
from tierstore._disk import records as laid
from tierstore._disk.records import Files
from tierstore._table.table import records_in
from tierstore.errors import (
    CorruptRowError,
    CorruptStoreError,
    ExistsError,
    FormatError,
    InvalidInputError,
    MissingExtraError,
    NotAStoreError,
    StoreIOError,
)

ROWS = 5000
SPECS = {
    "plain": tierstore.TableSpec(rows=ROWS, dim=16, init=tierstore.normal(seed=1)),
    "chunks": tierstore.TableSpec(
        rows=ROWS, dim=16, init=tierstore.uniform(-1, 1, seed=2), backend="zarr", chunk_rows=1024
    ),
    "packed": tierstore.TableSpec(
        rows=ROWS, dim=8, init=tierstore.normal(seed=3), backend="zarr", compression="zstd"
    ),
    "sparse": tierstore.TableSpec(rows=ROWS, dim=16, backend="zarr", chunk_rows=1024, sparse=True),
    "state": tierstore.TableSpec(
        rows=300,
        fields={
            "weight": tierstore.Field(3, "bfloat16", init=tierstore.normal(seed=4)),
            "sum": tierstore.Field(1, "float64", init=tierstore.uniform(0, 1, seed=5)),
        },
    ),
}


@pytest.fixture
def store(tmp_path):
    with tierstore.create(tmp_path / "a.tier", SPECS) as store:
        store.set_keys("state", [f"schlüssel {row}" for row in range(300)])
        rng = np.random.default_rng(6)
        for name in ("plain", "sparse"):
            ids = rng.choice(ROWS, 300, replace=False)
            store[name].write(ids, rng.standard_normal((300, 16)).astype(np.float32))
        store["plain"].scalars["step"] = 12
        payload = {"model": {"w": rng.standard_normal(7)}, "raw": b"bytes", "none": b""}
        store.commit(step=5, payload=payload)
        yield store


@pytest.fixture(params=["memory", "local", "url", "part"])
def place(request, tmp_path):
    """Where objects are: what `open` and `save` are given."""
    if request.param == "memory":
        return zarr.storage.MemoryStore()
    if request.param == "local":
        return zarr.storage.LocalStore(tmp_path / "objects")
    if request.param == "part":
        return zarr.storage.StorePath(zarr.storage.MemoryStore(), "a/b")
    pytest.importorskip("fsspec")
    return f"memory://{uuid.uuid4().hex}/emb.tier"


@pytest.fixture
def saved(store):
    place = zarr.storage.MemoryStore()
    store.save(place)
    return place


def same(left, right):
    """Compare all that two stores hold, bit for bit."""
    assert (left.version, left.step) == (right.version, right.step)
    for name, table in left.items():
        other = right[name]
        assert table.fields == other.fields and table.scalars == other.scalars
        both = zip(records_in(table), records_in(other), strict=True)
        assert all(np.array_equal(a, b) for a, b in both)
        assert (table.keys is None) == (other.keys is None)
        assert table.keys is None or table.keys[:].tolist() == other.keys[:].tolist()
    for name, value in left.payload.items():
        assert value.read() == right.payload[name].read()


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("rows", [0, 200])
def test_what_is_saved_is_read_there_and_brought_back(store, place, tmp_path, rows):
    store.save(place)
    rng = np.random.default_rng(7)
    with tierstore.open(place, budget=tierstore.Budget(host_rows=rows)) as reader:
        same(store, reader)
        assert reader.parent == (store.uuid, store.version)
        for name, table in store.items():
            for size in (0, 1, 700):
                ids = rng.integers(0, table.rows, size)
                for field in table.fields:
                    assert np.array_equal(reader[name].read(ids, field), table.read(ids, field))
        assert reader["state"].lookup(["schlüssel 299"]).tolist() == [299]
        assert reader.verify().ok and not reader.refresh()
        assert reader.info().folded
        reader.save(tmp_path / "back.tier")
    with tierstore.open(tmp_path / "back.tier", "r+") as back:
        same(store, back)
        back["plain"].write([1], np.ones((1, 16), np.float32))
        back.commit()


def test_objects_are_the_files_of_a_store(store, tmp_path):
    """Any tool that copies files converts between stores on disk and in objects."""
    store.save(zarr.storage.LocalStore(tmp_path / "objects"))
    with tierstore.open(tmp_path / "objects", "r+") as on_disk:
        same(store, on_disk)
        on_disk["chunks"].write([4097], np.full((1, 16), 3, np.float32))
        on_disk.commit(step=6)  # a delta, which no fold has merged yet
        with tierstore.open(zarr.storage.LocalStore(tmp_path / "objects")) as reader:
            same(on_disk, reader)
            assert not reader.info().folded


def test_tables_there_are_arrays_of_zarr(store, saved):
    (key,) = {k.rpartition("/")[0] for k in saved._store_dict if k.startswith("plain/g")} & {
        k.removesuffix("/zarr.json") for k in saved._store_dict
    }
    array = zarr.open_array(saved, path=key, mode="r")
    assert np.array_equal(array[:], np.concatenate(list(store["plain"].scan())))


def test_a_kept_version_is_saved(store, saved):
    older = store.version
    store["plain"].write([0], np.full((1, 16), 9, np.float32))
    store.commit(step=6)
    place = zarr.storage.MemoryStore()
    store.save(place, version=older)
    with tierstore.open(saved) as one, tierstore.open(place) as two:
        same(one, two)


def test_a_reader_is_pickled(store, saved):
    with tierstore.open(saved) as reader:
        copy = pickle.loads(pickle.dumps(reader))
        same(reader, copy)
        copy.close()


@pytest.mark.variants(1, 3)
def test_a_save_that_breaks_off_leaves_nothing(store, place):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(place, progress=stop)
    with pytest.raises(NotAStoreError):
        tierstore.open(place)
    store.save(place)
    with tierstore.open(place) as reader:
        same(store, reader)


def test_what_is_there_is_never_written_over(store, saved):
    before = {key: value.to_bytes() for key, value in saved._store_dict.items()}
    with pytest.raises(ExistsError, match="is not empty"):
        store.save(saved)
    assert {key: value.to_bytes() for key, value in saved._store_dict.items()} == before


def test_what_a_killed_copy_left_is_named(store, saved):
    """The other objects are there, the manifest and what marks a store are not."""
    with pytest.raises(ExistsError) as whole:
        store.save(saved)
    assert "killed" not in str(whole.value)
    for key in [each for each in saved._store_dict if "manifest" in each or "STORE" in each]:
        del saved._store_dict[key]
    with pytest.raises(ExistsError, match="what a copy left that was killed, remove it"):
        store.save(saved)


def test_what_cannot_be_done_there_is_said(store, saved):
    with pytest.raises(InvalidInputError, match="can only be read; save it to a disk"):
        tierstore.open(saved, "r+")
    with pytest.raises(InvalidInputError, match="create the store on a disk"):
        tierstore.create("memory://somewhere/emb.tier", SPECS)
    with pytest.raises(InvalidInputError, match="not a path, a URL or a zarr store: 7"):
        tierstore.open(7)
    with pytest.raises(NotAStoreError):
        tierstore.open(zarr.storage.MemoryStore())


def test_urls_that_nothing_knows(store):
    pytest.importorskip("fsspec")
    with pytest.raises(InvalidInputError, match="cannot be reached"):
        tierstore.open("nothing://bucket/emb.tier")
    with pytest.raises(NotAStoreError):
        tierstore.open(f"memory://{uuid.uuid4().hex}/emb.tier")


def test_what_is_not_installed_is_named(monkeypatch):
    def missing(url, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(zarr.storage.FsspecStore, "from_url", missing)
    with pytest.raises(MissingExtraError, match="Install s3fs"):
        tierstore.open("s3://bucket/emb.tier")


def test_a_place_that_answers_wrongly_is_an_error_of_its_address(monkeypatch):
    """An old s3fs with a new botocore raises TypeError, a refused connection what it likes."""

    def old(url, **options):
        raise TypeError("unexpected keyword argument")

    monkeypatch.setattr(zarr.storage.FsspecStore, "from_url", old)
    with pytest.raises(StoreIOError, match=r"check the address, .* is recent"):
        tierstore.open("s3://bucket/emb.tier")


def rewrite(place, ending, change):
    (key,) = [key for key in place._store_dict if key.startswith("chunks/") and ending in key]
    data = change(bytearray(place._store_dict[key].to_bytes()))
    if data is None:
        del place._store_dict[key]
    else:
        prototype = zarr.core.buffer.default_buffer_prototype()
        place._store_dict[key] = prototype.buffer.from_bytes(bytes(data))


def flipped(data):
    data[100 * 64 + 5] ^= 4
    return data


def test_damage_there_is_found(saved):
    rewrite(saved, "rows.zarr/c.2.0", flipped)
    row = 2 * 1024 + 100
    with tierstore.open(saved) as reader:
        with pytest.raises(CorruptRowError, match=str(row)):
            reader["chunks"].read(np.arange(2000, 3000))
        assert np.isfinite(reader["chunks"].read(np.arange(2000))).all()
        assert reader.verify().bad_rows["chunks"] == [row]


@pytest.mark.variants(1, 5)
@pytest.mark.parametrize("ending", ["rows.zarr/c.2.0", "rows.crc", "rows.zarr/zarr.json"])
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: None], ids=["cut", "gone"])
def test_objects_that_are_cut_or_gone_are_refused(saved, ending, change):
    rewrite(saved, ending, change)
    with tierstore.open(saved) as store, pytest.raises(CorruptStoreError):
        store["chunks"]


def test_an_object_that_goes_while_it_is_read(saved):
    with tierstore.open(saved, budget=tierstore.Budget(host=0)) as reader:
        rewrite(saved, "rows.zarr/c.2.0", lambda data: data[:1000])
        with pytest.raises(CorruptStoreError, match="instead of"):
            reader["chunks"].read([2 * 1024 + 1000])
        assert np.isfinite(reader["chunks"].read([0])).all()


def test_a_store_that_cannot_be_reached_is_a_typed_error(saved, monkeypatch):
    with tierstore.open(saved, budget=tierstore.Budget(host=0)) as reader:

        async def fail(*given, **named):
            raise RuntimeError("no route to host")

        monkeypatch.setattr(saved, "get", fail)
        with pytest.raises(StoreIOError, match=r"rows\.zarr.*no route to host"):
            reader["plain"].read([1, 2, 3])


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\0"])
def test_names_are_single_components(name):
    directory = _io.Objects(zarr.storage.MemoryStore()).open(write=True)
    for call in (directory.open_file, directory.create, directory.exists, directory.directory):
        with pytest.raises(FormatError):
            call(name)


# Ranges


@given(
    rows=st.integers(1, 400),
    per_file=st.integers(1, 120),
    offset=st.sampled_from([0, 24]),
    wanted=st.lists(st.integers(0, 399), max_size=300),
    limits=st.tuples(st.integers(0, 300), st.integers(1, 2000), st.integers(1, 4000)),
    step=st.integers(1, 90),
)
@pytest.mark.slow
def test_records_in_ranges_are_those_that_were_written(
    rows, per_file, offset, wanted, limits, step
):
    width = 8
    if per_file < rows:
        offset = 0  # as of files of which there are several
    expected = np.random.default_rng(rows).integers(0, 256, (rows, width), np.uint8)
    place = zarr.storage.MemoryStore()
    directory = _io.Objects(place).open(write=True)
    layout = {"rows": rows, "record_bytes": width, "rows_per_file": min(per_file, rows)}
    nbytes = offset + layout["rows_per_file"] * width
    files = Files(directory, "part{}".format, nbytes, count=-(-rows // per_file))
    created = files.create(sparse=False)
    records = laid.record_files(files, created, offset=offset, **layout)
    for at in range(0, rows, step):
        ids = np.arange(at, min(at + step, rows))
        records.write(ids, expected[ids])
    records.sync()

    records = laid.record_files(files, offset=offset, **layout)
    ids = np.array(wanted, np.int64) % rows
    out = np.empty((ids.size, width), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("_GAP", "_RANGE_BYTES", "_HELD_BYTES"), limits, strict=True):
            patch.setattr(laid, name, value)
        records.read(ids, out)
    assert np.array_equal(out, expected[ids])
    assert records.damaged_files() == []
