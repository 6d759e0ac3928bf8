"""Export: what a file holds is what the table held."""

import resource
import subprocess
import sys

import numpy as np
import pytest

import tierstore
from tests.every import every
from tests.formats.matrices import (
    random_matrix,
    random_uint64,
    random_words,
    read_file,
    read_keys_of,
)
from tests.reference.elements import BFLOAT16
from tierstore._dtypes import convert
from tierstore._formats import SINK_SUFFIXES, read_keys
from tierstore.errors import (
    ExistsError,
    InvalidInputError,
    RowIndexError,
    StoreFullError,
    UnknownNameError,
)
from tierstore.exporting import export_table
from tierstore.importing import import_table
from tierstore.spec import Field, TableSpec

ROWS, DIM = 700, 5


@pytest.fixture
def store(tmp_path):
    fields = {"weight": Field(DIM), "moment": Field(3, "bfloat16"), "wide": Field(2, "float64")}
    with tierstore.create(tmp_path / "s.tier", {"item": TableSpec(ROWS, fields=fields)}) as store:
        store["item"].write(np.arange(ROWS), values())
        store.commit()
        yield store


def values() -> dict[str, np.ndarray]:
    moment = BFLOAT16.decode(random_matrix(ROWS, 3, "bfloat16"))
    return {
        "weight": random_matrix(ROWS, DIM),
        "moment": moment,
        "wide": random_matrix(ROWS, 2, "float64"),
    }


@pytest.mark.variants(4, 14)
@pytest.mark.parametrize("suffix", SINK_SUFFIXES)
def test_every_format(store, tmp_path, suffix):
    result = export_table(store["item"], tmp_path / f"out{suffix}")
    assert read_file(result.path).tobytes() == values()["weight"].tobytes()
    files = [f for f in (result.path, *result.path.rglob("*")) if f.is_file()]
    assert result.bytes == sum(f.stat().st_size for f in files)
    assert (result.rows, result.dim, result.dtype, result.overflowed) == (ROWS, DIM, "float32", 0)


def test_numpy_maps_an_export(store, tmp_path):
    export_table(store["item"], tmp_path / "out.npy")
    mapped = np.load(tmp_path / "out.npy", mmap_mode="r", allow_pickle=False)
    assert mapped.tobytes() == values()["weight"].tobytes()


@every(
    suffix=[".npy", ".safetensors", ".tsv"],
    rows=[(0, ROWS), (0, 1), (17, 400), (ROWS - 1, ROWS), (5, 5)],
)
def test_a_range_of_rows(store, tmp_path, suffix, rows):
    start, stop = rows
    result = export_table(store["item"], tmp_path / f"out{suffix}", rows=rows, force=True)
    assert result.rows == stop - start
    assert read_file(result.path).tobytes() == values()["weight"][start:stop].tobytes()
    if suffix == ".tsv" and 0 < start < stop:
        assert list(read_keys_of(result.path)) == list(range(start, stop))


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ((-1, 5), RowIndexError),
        ((0, ROWS + 1), RowIndexError),
        ((ROWS + 1, ROWS + 2), RowIndexError),
        ((5, 3), InvalidInputError),
    ],
)
def test_ranges_that_are_none(store, tmp_path, rows, error):
    with pytest.raises(error, match=f"{rows[0]}:{rows[1]}"):
        export_table(store["item"], tmp_path / "out.npy", rows=rows)
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.variants(9)
@pytest.mark.parametrize("field", ["weight", "moment", "wide"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", None])
def test_fields_and_conversions(store, tmp_path, field, dtype, recwarn):
    stored = {"weight": "float32", "moment": "bfloat16", "wide": "float64"}[field]
    expected = values()[field]
    if field == "moment":
        expected = BFLOAT16.encode(expected)
    wanted = dtype or stored
    result = export_table(store["item"], tmp_path / "out.safetensors", field=field, dtype=dtype)
    assert result.dtype == wanted
    assert (
        read_file(tmp_path / "out.safetensors").tobytes()
        == convert(expected, stored, wanted).tobytes()
    )

    def infinities(matrix, dtype):
        return np.isinf(BFLOAT16.decode(matrix) if dtype == "bfloat16" else matrix).sum()

    more = infinities(convert(expected, stored, wanted), wanted) - infinities(expected, stored)
    assert result.overflowed == more
    assert [f"{more:,} value" in str(warning.message) for warning in recwarn] == [True] * bool(more)


def test_half_precision_goes_to_float32_where_there_is_none(store, tmp_path):
    result = export_table(store["item"], tmp_path / "out.npy", field="moment")
    assert result.dtype == "float32"
    assert read_file(result.path).tobytes() == values()["moment"].tobytes()
    with pytest.raises(InvalidInputError, match="float64"):
        export_table(store["item"], tmp_path / "out.bin", field="wide")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_several_fields_are_columns_of_one_file(store, tmp_path, suffix):
    pytest.importorskip("pyarrow")
    out = tmp_path / f"out{suffix}"
    result = export_table(store["item"], out, field=["moment", "weight"], rows=(100, 350))
    assert (result.rows, result.dim, result.dtype) == (250, 3 + DIM, "float32")
    for name in ("moment", "weight"):
        found = read_file(f"{out}:{name}")
        assert found.tobytes() == values()[name][100:350].astype(np.float32).tobytes()
    export_table(store["item"], out, field=list(values()), rows=[650, 3], force=True)
    for name, rows in values().items():
        assert read_file(f"{out}:{name}").tobytes() == rows[[650, 3]].astype("f8").tobytes()


def test_values_too_large_are_counted_in_all_fields(store, tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.warns(UserWarning, match="too large"):
        both = export_table(
            store["item"], tmp_path / "a.parquet", field=["weight", "wide"], dtype="float16"
        )
        each = [
            export_table(store["item"], tmp_path / f"{name}.parquet", field=name, dtype="float16")
            for name in ("weight", "wide")
        ]
    assert both.overflowed == sum(one.overflowed for one in each) > each[0].overflowed


def test_fields_that_no_file_holds_together(store, tmp_path):
    with pytest.raises(InvalidInputError, match=r"holds one field; several go into .*\.parquet"):
        export_table(store["item"], tmp_path / "out.npy", field=["weight", "wide"])
    for wrong in ([], ["weight", "weight"]):
        with pytest.raises(InvalidInputError, match="each field once"):
            export_table(store["item"], tmp_path / "out.parquet", field=wrong)
    with pytest.raises(UnknownNameError, match="nothing"):
        export_table(store["item"], tmp_path / "out.parquet", field=["weight", "nothing"])
    for names in ({"weight": "x", "wide": "x"}, {"weight": "wide"}):
        with pytest.raises(InvalidInputError, match="a name of its own"):
            export_table(
                store["item"], tmp_path / "out.parquet", field=["weight", "wide"], names=names
            )
    assert list(tmp_path.iterdir()) == [tmp_path / "s.tier"]


def test_what_is_not_committed_is_exported_too(store, tmp_path):
    row = random_matrix(1, DIM, seed=9)
    store["item"].write([3], row, field="weight")
    export_table(store["item"], tmp_path / "out.npy")
    assert read_file(tmp_path / "out.npy")[3].tobytes() == row.tobytes()
    store.rollback()


@pytest.mark.parametrize(
    "keys", [random_words(ROWS), np.arange(ROWS)[::-1] * 3], ids=["str", "int"]
)
def test_the_keys_of_the_table_go_along(store, tmp_path, keys):
    store.set_keys("item", keys)
    for suffix in (".npz", ".vec", ".parquet", ".safetensors", ".zarr", ".npy"):
        export_table(store["item"], tmp_path / f"out{suffix}")
        found = read_keys_of(tmp_path / f"out{suffix}")
        assert suffix == ".npy" if found is None else list(found) == list(keys)
    export_table(store["item"], tmp_path / "some.npz", rows=(10, 20))
    assert list(read_keys_of(tmp_path / "some.npz")) == list(keys[10:20])


@pytest.mark.variants(2)
@pytest.mark.parametrize("suffix", [".npz", ".csv", ".bin", ".parquet", ".safetensors", ".zarr"])
def test_a_table_with_keys_beyond_int64_goes_out_and_comes_back(store, tmp_path, suffix):
    keys = random_uint64(ROWS)
    store.set_keys("item", keys)
    export_table(store["item"], tmp_path / f"out{suffix}")
    weight = store["item"].read(np.arange(ROWS))
    import_table(tmp_path / "new.tier", tmp_path / f"out{suffix}", table="item")
    with tierstore.open(tmp_path / "new.tier") as new:
        assert new["item"].keys.kind == "uint64"
        assert new["item"].lookup(keys).tolist() == list(range(ROWS))
        assert new["item"].read(np.arange(ROWS)).tobytes() == weight.tobytes()


@pytest.mark.parametrize("kind", [np.asarray, np.ndarray.tolist], ids=["array", "list"])
def test_given_keys_are_uint64_only_if_one_of_all_needs_that(store, tmp_path, kind):
    keys = np.arange(ROWS, dtype=np.uint64)
    for last, dtype in [(2**63 - 1, np.int64), (2**63, np.uint64)]:
        keys[-1] = last
        export_table(store["item"], tmp_path / "out.npz", keys=kind(keys), rows=(0, 9), force=True)
        with np.load(tmp_path / "out.npz") as file:
            assert file["keys"].dtype == dtype
            assert file["keys"].tolist() == keys[:9].tolist()


def test_given_keys_of_some_rows_stay_whole_numbers(store, tmp_path):
    keys = [*range(ROWS - 1), 2**64 - 1]
    export_table(store["item"], tmp_path / "out.npz", rows=[ROWS - 1, 4], keys=keys)
    assert read_keys_of(tmp_path / "out.npz").tolist() == [2**64 - 1, 4]


def test_rows_of_a_list_have_their_ids_for_keys(store, tmp_path):
    export_table(store["item"], tmp_path / "out.vec", rows=[ROWS - 1, 4, 300])
    assert read_keys_of(tmp_path / "out.vec").tolist() == [ROWS - 1, 4, 300]


def test_ids_that_are_none(store, tmp_path):
    for wrong in (-1, ROWS, 2**62):
        with pytest.raises(RowIndexError, match=f"row {wrong} is outside the table's 0:{ROWS}"):
            export_table(store["item"], tmp_path / "out.npy", rows=[0, wrong])
    with pytest.raises(InvalidInputError, match="a list of ids cannot be skipped"):
        export_table(store["item"], tmp_path / "out.npy", rows=[0, 1], damaged="skip")
    assert not (tmp_path / "out.npy").exists()


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_damaged_rows_of_any_block_become_nan_in_their_place(tmp_path):
    dim = 1 << 18  # four rows in a block
    rows = random_matrix(11, dim)
    spec = TableSpec(11, dim, init=tierstore.from_array(rows))
    tierstore.create(tmp_path / "s.tier", {"t": spec}).close()
    (base,) = (tmp_path / "s.tier").glob("t/*/rows.npy")
    for row in (0, 6, 10):
        flip(base, 4096 + row * 4 * dim)
    with tierstore.open(tmp_path / "s.tier", budget=tierstore.Budget(host=0)) as store:
        done = export_table(store["t"], tmp_path / "out.npy", damaged="skip")
    assert done.skipped == [0, 6, 10]
    rows[done.skipped] = np.nan
    assert np.load(tmp_path / "out.npy").tobytes() == rows.tobytes()


def test_damaged_rows_of_whole_numbers_have_no_mark(tmp_path):
    tierstore.create(tmp_path / "s.tier", {"t": TableSpec(9, 4, "int8")}).close()
    (base,) = (tmp_path / "s.tier").glob("t/*/rows.npy")
    flip(base, 4096 + 5 * 16)
    with (
        tierstore.open(tmp_path / "s.tier", budget=tierstore.Budget(host=0)) as store,
        pytest.raises(InvalidInputError, match="first is row 5, and int8 has no NaN"),
    ):
        export_table(store["t"], tmp_path / "out.npy", damaged="skip")
    assert not (tmp_path / "out.npy").exists()


def test_given_words_go_with_the_rows_of_a_list(store, tmp_path):
    words = random_words(ROWS)
    export_table(store["item"], tmp_path / "out.tsv", rows=[ROWS - 1, 4, 300], keys=words)
    assert list(read_keys_of(tmp_path / "out.tsv")) == [words[ROWS - 1], words[4], words[300]]


def test_keys_that_are_given(store, tmp_path):
    words = random_words(ROWS)
    store.set_keys("item", list(range(ROWS, 2 * ROWS)))
    for name, rows, keys, expected in [
        ("all", None, words, words),
        ("cut", (10, 20), words, words[10:20]),
        ("fit", (10, 20), words[:10], words[:10]),
    ]:
        export_table(store["item"], tmp_path / f"{name}.tsv", rows=rows, keys=keys)
        assert list(read_keys_of(tmp_path / f"{name}.tsv")) == expected
    with pytest.raises(
        InvalidInputError, match=r"9 keys .* 700 rows of the table or of the 10 rows"
    ):
        export_table(store["item"], tmp_path / "out.tsv", rows=(10, 20), keys=words[:9])
    export_table(store["item"], tmp_path / "out.npy", keys=words)
    assert list(read_keys(tmp_path / "out.keys.npy")) == words


def test_targets_that_must_not_be_written(store, tmp_path):
    (tmp_path / "out.npy").write_bytes(b"precious")
    (tmp_path / "directory.npy").mkdir()
    (tmp_path / "link.npy").symlink_to("out.npy")
    (tmp_path / "inside").symlink_to(store.path / "item")
    for path, error in [
        ("out.npy", ExistsError),
        ("directory.npy", ExistsError),
        ("link.npy", ExistsError),
        ("missing/out.npy", InvalidInputError),
        ("s.tier/out.npy", InvalidInputError),
        ("s.tier/item/out.npy", InvalidInputError),
        ("inside/out.npy", InvalidInputError),
        ("out.pt", InvalidInputError),
    ]:
        with pytest.raises(error):
            export_table(store["item"], tmp_path / path)
    export_table(store["item"], tmp_path / "link.npy", force=True)  # not what the link points to
    assert not (tmp_path / "link.npy").is_symlink()
    assert (tmp_path / "out.npy").read_bytes() == b"precious"
    with pytest.raises(ExistsError):
        export_table(store["item"], tmp_path / "directory.npy", force=True)
    export_table(store["item"], tmp_path / "out.npy", force=True)
    assert read_file(tmp_path / "out.npy").shape == (ROWS, DIM)


def test_fields_that_are_none(store, tmp_path):
    with pytest.raises(UnknownNameError, match="weight, moment, wide"):
        export_table(store["item"], tmp_path / "out.npy", field="exp_avg")


@pytest.mark.variants(8)
@pytest.mark.parametrize("suffix", SINK_SUFFIXES)
def test_progress_and_interruption(store, tmp_path, suffix):
    seen = []
    export_table(store["item"], tmp_path / f"out{suffix}", progress=lambda *p: seen.append(p))
    assert seen[-1] == (ROWS, ROWS)
    assert seen == sorted(seen)

    def interrupt(done, total):
        raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        export_table(store["item"], tmp_path / f"new{suffix}", progress=interrupt)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.variants(9)
@pytest.mark.parametrize("suffix", SINK_SUFFIXES)
def test_a_full_disk_leaves_nothing(store, tmp_path, suffix):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = sorted(tmp_path.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    try:
        with pytest.raises(StoreFullError, match="no file was left"):
            export_table(store["item"], tmp_path / f"out{suffix}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.iterdir()) == before


MEASURE = """
import resource, sys
import numpy as np
from tierstore._formats import open_sink, open_source

first, second, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
block = np.random.default_rng(0).standard_normal((4096, 64), np.float32)

def there_and_back(path, rows):
    keys = None if path.endswith((".npy", ".fbin", ".fvecs")) else range(rows)
    with open_sink(path, rows=rows, dim=64, dtype="float32", keys=keys) as sink:
        for start in range(0, rows, 4096):
            sink.write(block[: rows - start])
    with open_source(path) as source:
        for found in source.blocks():
            pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

print(-there_and_back(first, 4096) + there_and_back(second, rows))
"""


@pytest.mark.parametrize("suffix", [s for s in SINK_SUFFIXES if s != ".txt"])
@pytest.mark.slow
@pytest.mark.nightly(".projector", ".csv", ".tsv", ".vec", ".bin", ".feather")
def test_memory_stays_flat(tmp_path, suffix):
    """The first file, of 1 MiB, takes what is only taken once; the second may add a few blocks."""
    mebibytes, limit = (72, 36) if suffix in (".vec", ".tsv", ".csv") else (240, 120)
    if suffix == ".projector":  # text, whose lines are shorter than those with a key
        mebibytes, limit = 120, 60
    paths = [tmp_path / f"{name}{suffix}" for name in ("first", "second")]
    command = [sys.executable, "-c", MEASURE, *paths, str(mebibytes << 12)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < limit


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".arrow", ".npz"])
def test_names_in_a_file_can_be_chosen(tmp_path, suffix):
    if suffix in (".parquet", ".arrow"):
        pytest.importorskip("pyarrow")
    path, out, values = tmp_path / "s.tier", tmp_path / f"f{suffix}", np.eye(3, dtype="f4")
    spec = tierstore.TableSpec(3, 3, init=tierstore.from_array(values))
    with tierstore.create(path, {"t": spec}) as store:
        store.set_keys("t", ["a", "b", "c"])
        if suffix != ".npz":
            names = {"weight": "f{}" if suffix in (".csv", ".tsv") else "v", "key": "item_id"}
            tierstore.export_table(store["t"], out, names=names)
            found = tierstore.importing.preview(out)
            first = "f0" if suffix in (".csv", ".tsv") else "v"
            assert found.keys == ["a", "b", "c"] and "item_id" in str(found.read_as)
            assert tierstore.importing.preview(out, key_column="item_id").dim == 3
            assert first in out.read_bytes().decode("latin1")
        else:
            with pytest.raises(tierstore.errors.InvalidInputError, match=r"\.csv .*have one"):
                tierstore.export_table(store["t"], out, names={"key": "item_id"})
            tierstore.export_table(store["t"], out, names={"weight": "vectors"})
            assert set(np.load(out)) == {"vectors", "keys"}
        for wrong in ({"nope": "x"}, {"weight": ""}, {"weight": "x", "key": "x"}):
            with pytest.raises((tierstore.errors.UnknownNameError, ValueError)):
                tierstore.export_table(store["t"], tmp_path / f"g{suffix}", names=wrong)
