"""Matrices in zarr stores that are no directories: written, read back, refused if incomplete."""

import numpy as np
import pytest
import zarr

import tierstore
from tierstore.errors import ExistsError, FormatError
from tierstore.exporting import export_table
from tierstore.importing import import_table

SPEC = tierstore.TableSpec(
    rows=700,
    fields={
        "weight": tierstore.Field(6, init=tierstore.normal(seed=1)),
        "half": tierstore.Field(4, "bfloat16"),
    },
)


@pytest.fixture
def table(tmp_path):
    with tierstore.create(tmp_path / "s.tier", {"t": SPEC}) as store:
        ids = np.arange(700)
        values = np.random.default_rng(2).standard_normal((700, 4)).astype(np.float32)
        store["t"].write(ids, values, field="half")
        store.commit()
        store.set_keys("t", [f"word {row}" for row in range(700)])
        yield store["t"]


@pytest.fixture(params=["memory", "fsspec"])
def place(request, tmp_path):
    """A function that returns the same zarr store again, for writing or for reading."""
    if request.param == "memory":
        store = zarr.storage.MemoryStore()
        return lambda mode: store
    pytest.importorskip("fsspec")
    name = f"memory://{tmp_path.name}/vectors.zarr"
    return lambda mode: zarr.storage.FsspecStore.from_url(name, read_only=mode == "r")


@pytest.mark.variants(2)
@pytest.mark.parametrize("field", ["weight", "half"])
def test_what_is_written_is_read_back(table, place, tmp_path, field):
    written = place("w")
    done = export_table(table, written, field=field)
    written.close()
    item = table.fields[field]
    assert (done.rows, done.dim, done.dtype) == (700, item.dim, "float32")
    assert done.bytes == 700 * item.dim * 4
    with tierstore.create(tmp_path / "copy.tier", {"other": tierstore.TableSpec(3, 2)}) as copy:
        import_table(copy, place("r"), table="loaded", field=field)
        expected = np.concatenate(list(table.scan(field)))
        assert np.array_equal(np.concatenate(list(copy["loaded"].scan(raw=True))), expected)
        assert copy["loaded"].lookup(["word 699"]).tolist() == [699]
    array = zarr.open_group(place("r"), mode="r")[field]
    assert np.array_equal(array[:], expected)


def test_what_is_there_is_kept_unless_forced(table):
    store = zarr.storage.MemoryStore()
    export_table(table, store, rows=(0, 100))
    with pytest.raises(ExistsError, match="force"):
        export_table(table, store)
    assert zarr.open_group(store, mode="r")["weight"].shape == (100, 6)
    export_table(table, store, force=True)
    assert zarr.open_group(store, mode="r")["weight"].shape == (700, 6)


def test_what_was_broken_off_is_refused(table, tmp_path):
    store = zarr.storage.MemoryStore()

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_table(table, store, progress=stop)
    with (
        tierstore.create(tmp_path / "copy.tier", {"other": tierstore.TableSpec(3, 2)}) as copy,
        pytest.raises(FormatError, match="was interrupted"),
    ):
        import_table(copy, store, table="loaded")
    export_table(table, store, force=True)


def test_an_empty_store_holds_nothing(tmp_path):
    with (
        tierstore.create(tmp_path / "copy.tier", {"other": tierstore.TableSpec(3, 2)}) as copy,
        pytest.raises(FormatError, match="not a readable zarr"),
    ):
        import_table(copy, zarr.storage.MemoryStore(), table="loaded")
