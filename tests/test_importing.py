"""Load: what a table holds is what the file held."""

import numpy as np
import pytest

import tierstore
from tests.formats.matrices import random_integers, random_matrix, random_words, write_file
from tests.pairs import pairs
from tests.reference.elements import BFLOAT16
from tierstore._formats import SINK_SUFFIXES
from tierstore._formats.base import FORMATS
from tierstore.errors import (
    ExistsError,
    FormatError,
    InvalidInputError,
    ReadOnlyError,
    UnknownNameError,
)
from tierstore.exporting import export_table
from tierstore.importing import import_table, preview
from tierstore.spec import Field, TableSpec

ROWS, DIM = 700, 5


@pytest.fixture
def store(tmp_path):
    with tierstore.create(tmp_path / "s.tier", {}) as store:
        yield store


@pytest.fixture
def two_fields(store):
    """A store with a table of two fields, the rows of which are known."""
    spec = TableSpec(ROWS, fields={"weight": Field(DIM), "exp_avg": Field(3, "bfloat16")})
    table = store.create_table("item", spec)
    moment = BFLOAT16.decode(random_matrix(ROWS, 3, "bfloat16", seed=1))
    rows = {"weight": random_matrix(ROWS, DIM, seed=1), "exp_avg": moment}
    table.write(np.arange(ROWS), rows)
    store.commit()
    return table


def all_rows(table, field="weight"):
    return np.concatenate(list(table.scan(field, raw=True)))


@pytest.mark.variants(2, 9)
@pairs(together=1, suffix=SINK_SUFFIXES, dtype=["float16", "bfloat16", "float32"])
def test_a_missing_table_is_made(store, tmp_path, suffix, dtype):
    matrix, path = random_matrix(ROWS, DIM, dtype), tmp_path / f"file{suffix}"
    held = write_file(path, matrix, dtype, block_rows=99)
    seen = []
    result = import_table(store, path, dtype=dtype, progress=lambda *p: seen.append(p))
    table = store["embeddings"]
    assert (result.table, result.field, result.created) == ("embeddings", "weight", True)
    assert (result.rows, result.dim, result.dtype) == (ROWS, DIM, dtype)
    assert (table.rows, table.dim, table.spec.dtype) == (ROWS, DIM, dtype)
    assert all_rows(table).tobytes() == matrix.tobytes()
    assert seen[-1] == (ROWS, ROWS)
    assert result.version == store.version
    assert store.uncommitted_rows() == 0

    import_table(store, path, table="as-it-is")
    assert store["as-it-is"].spec.dtype == held


def test_it_is_there_when_opened_again(tmp_path):
    write_file(tmp_path / "file.npy", random_matrix(ROWS, DIM), "float32")
    with tierstore.create(tmp_path / "s.tier", {}) as store:
        import_table(store, tmp_path / "file.npy", table="item", field="vector")
    with tierstore.open(tmp_path / "s.tier") as store:
        assert all_rows(store["item"], "vector").tobytes() == random_matrix(ROWS, DIM).tobytes()
        assert store.verify().ok


@pytest.mark.variants(3, 12)
@pytest.mark.parametrize("suffix", [*SINK_SUFFIXES])
def test_one_field_of_a_table_is_replaced(store, two_fields, tmp_path, suffix):
    matrix = random_matrix(ROWS, DIM, seed=2)
    write_file(tmp_path / f"file{suffix}", matrix, "float32", block_rows=64)
    before = all_rows(two_fields, "exp_avg")
    result = import_table(store, tmp_path / f"file{suffix}", table="item", field="weight")
    assert not result.created
    assert store["item"] is two_fields
    assert all_rows(two_fields).tobytes() == matrix.tobytes()
    assert all_rows(two_fields, "exp_avg").tobytes() == before.tobytes()
    assert store.verify().ok


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_blocks_of_the_file_and_of_the_table_need_not_agree(store, tmp_path, suffix):
    rows = 450_001  # several blocks of either
    fields = {"other": Field(3, "float64"), "weight": Field(DIM)}
    table = store.create_table("item", TableSpec(rows, fields=fields))
    other, matrix = random_matrix(rows, 3, "float64"), random_matrix(rows, DIM)
    table.write(np.arange(rows), other, field="other")
    store.commit()
    write_file(tmp_path / f"file{suffix}", matrix, "float32", block_rows=40_000)
    import_table(store, tmp_path / f"file{suffix}", field="weight")
    assert all_rows(table, "weight").tobytes() == matrix.tobytes()
    assert all_rows(table, "other").tobytes() == other.tobytes()


def test_values_are_rounded_to_the_field(store, two_fields, tmp_path):
    matrix = random_matrix(ROWS, 3, "float64", seed=3)
    write_file(tmp_path / "file.npy", matrix, "float64")
    with pytest.warns(UserWarning, match="too large for bfloat16"):
        result = import_table(store, tmp_path / "file.npy", field="exp_avg")
    with np.errstate(over="ignore"):
        expected = BFLOAT16.encode(matrix.astype(np.float32))
    assert all_rows(two_fields, "exp_avg").tobytes() == expected.tobytes()
    infinite = np.isinf(BFLOAT16.decode(expected)).sum() - np.isinf(matrix).sum()
    assert result.overflowed == infinite > 0


def test_text_is_read_as_exactly_as_the_field_is(store, tmp_path):
    matrix = random_matrix(9, 2, "float64")
    write_file(tmp_path / "file.vec", matrix, "float64")
    import_table(store, tmp_path / "file.vec", table="wide", dtype="float64")
    assert all_rows(store["wide"]).tobytes() == matrix.tobytes()
    import_table(store, tmp_path / "file.vec", table="wide")
    assert all_rows(store["wide"]).tobytes() == matrix.tobytes()


def test_the_array_of_the_fields_name_is_read(store, two_fields, tmp_path):
    first, second = random_matrix(ROWS, 3, seed=5), random_matrix(ROWS, DIM, seed=6)
    np.savez(tmp_path / "file.npz", exp_avg=first, weight=second)
    import_table(store, tmp_path / "file.npz")
    assert all_rows(two_fields).tobytes() == second.tobytes()
    import_table(store, f"{tmp_path}/file.npz:weight", table="other")
    import_table(store, tmp_path / "file.npz", table="item", field="exp_avg")
    expected = BFLOAT16.encode(first)
    assert all_rows(two_fields, "exp_avg").tobytes() == expected.tobytes()


@pytest.mark.parametrize("keys", [random_words(ROWS), random_integers(ROWS)], ids=["str", "int"])
def test_keys_of_the_file_or_given_ones(store, tmp_path, keys):
    matrix = random_matrix(ROWS, DIM)
    write_file(tmp_path / "file.parquet", matrix, "float32", keys=keys)
    assert import_table(store, tmp_path / "file.parquet", table="own").keys
    assert list(store["own"].keys[:]) == list(keys)
    assert store["own"].lookup(keys[7:9]).tolist() == [7, 8]

    given = list(reversed(list(keys)))
    import_table(store, tmp_path / "file.parquet", table="given", keys=given)
    assert list(store["given"].keys[:]) == given

    write_file(tmp_path / "file.npy", matrix, "float32")
    assert not import_table(store, tmp_path / "file.npy", table="none").keys
    assert store["none"].keys is None
    import_table(store, tmp_path / "file.npy", table="own")
    assert list(store["own"].keys[:]) == list(keys)


def test_keys_of_a_table_with_other_fields_must_agree(store, two_fields, tmp_path):
    words = random_words(ROWS)
    write_file(tmp_path / "file.npz", random_matrix(ROWS, DIM), "float32", keys=words)
    import_table(store, tmp_path / "file.npz")
    assert list(two_fields.keys[:]) == words
    version, before = store.version, all_rows(two_fields)

    write_file(tmp_path / "moved.npz", random_matrix(ROWS, DIM), "float32", keys=words[::-1])
    with pytest.raises(InvalidInputError, match="order"):
        import_table(store, tmp_path / "moved.npz")
    assert store.version == version
    assert all_rows(two_fields).tobytes() == before.tobytes()
    import_table(store, tmp_path / "file.npz")


def test_keys_are_compared_to_the_last_one(store, tmp_path):
    rows = (1 << 16) + 2
    spec = TableSpec(rows, fields={"weight": Field(1), "exp_avg": Field(1)})
    table = store.create_table("item", spec)
    store.set_keys("item", np.arange(rows))
    moved = np.arange(rows)
    moved[-2:] = moved[:-3:-1]
    write_file(tmp_path / "moved.npz", random_matrix(rows, 1), "float32", keys=moved)
    before = all_rows(table)
    with pytest.raises(InvalidInputError, match="order of the table"):
        import_table(store, tmp_path / "moved.npz")
    assert all_rows(table).tobytes() == before.tobytes()


def test_a_loaded_table_takes_the_space_of_its_rows(store, tmp_path):
    """Or training would be the first to learn that the disk is full."""
    store.create_table("item", TableSpec(ROWS, DIM, sparse=True))
    write_file(tmp_path / "file.npy", random_matrix(ROWS, DIM), "float32")
    import_table(store, tmp_path / "file.npy")
    assert not store["item"].spec.sparse


def test_numbers_of_a_text_that_are_too_large_are_counted(store, tmp_path):
    """They are infinite before they are converted."""
    (tmp_path / "file.csv").write_text("a,b\n1e39,2\n-1e40,1e38\ninf,4\n")
    with pytest.warns(UserWarning, match="2 values are too large"):
        assert import_table(store, tmp_path / "file.csv").overflowed == 2
    assert np.isinf(store["embeddings"].read([0, 1, 2])).sum() == 3


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["a"] * ROWS, "1 of the 700 keys are distinct"),
        ([1, *range(1, ROWS)], "699 of the 700"),
        (["a", "b"], "2 keys for 700 rows"),
    ],
)
def test_keys_that_cannot_be(store, tmp_path, keys, why):
    write_file(tmp_path / "file.npy", random_matrix(ROWS, DIM), "float32")
    with pytest.raises(InvalidInputError, match=why):
        import_table(store, tmp_path / "file.npy", keys=keys)
    assert not list(store)


def test_shapes_that_do_not_fit(store, two_fields, tmp_path):
    for rows, dim in [(ROWS + 1, DIM), (ROWS - 1, DIM), (ROWS, DIM + 1), (0, DIM)]:
        write_file(tmp_path / "file.npy", random_matrix(rows, dim), "float32", force=True)
        with pytest.raises(InvalidInputError, match=f"{rows} rows of {dim}.*700 rows of 5"):
            import_table(store, tmp_path / "file.npy")


def test_requests_that_do_not_fit(store, two_fields, tmp_path):
    path = tmp_path / "file.npy"
    write_file(path, random_matrix(ROWS, DIM), "float32")
    with pytest.raises(InvalidInputError, match="cannot become float16"):
        import_table(store, path, dtype="float16")
    with pytest.raises(UnknownNameError, match="add_fields"):
        import_table(store, path, field="exp_avg_sq")
    with pytest.raises(InvalidInputError, match="not a table name"):
        import_table(store, path, table="../escape")
    with pytest.raises(InvalidInputError, match="not a field name"):
        import_table(store, path, table="new", field="a b")
    with pytest.raises(FormatError, match="no such file"):
        import_table(store, tmp_path / "file.absent")
    path.rename(tmp_path / "file.strange")
    with pytest.raises(InvalidInputError, match="files ending in"):
        import_table(store, tmp_path / "file.strange")
    path = tmp_path / "file.npy"
    write_file(tmp_path / "empty.npy", random_matrix(0, DIM), "float32")
    with pytest.raises(InvalidInputError, match="no rows"):
        import_table(store, tmp_path / "empty.npy", table="new")
    store.create_table("second", TableSpec(3, 2))
    with pytest.raises(InvalidInputError, match="item, second"):
        import_table(store, path)
    assert set(store) == {"item", "second"}


def test_uncommitted_rows_are_in_the_way(store, two_fields, tmp_path):
    write_file(tmp_path / "file.npy", random_matrix(ROWS, DIM), "float32")
    two_fields.write([1], random_matrix(1, DIM), field="weight")
    with pytest.raises(InvalidInputError, match="1 row is not committed"):
        import_table(store, tmp_path / "file.npy")
    store.rollback()
    import_table(store, tmp_path / "file.npy")


def test_a_file_that_breaks_off_changes_nothing(store, two_fields, tmp_path):
    rows = "".join(f"w{i} 1 2 3 4 5\n" for i in range(ROWS - 1))
    (tmp_path / "file.vec").write_text(f"{ROWS} 5\n{rows}last 1 2 3 4 x\n")
    before, version = all_rows(two_fields), store.version
    for table in ("item", "new"):
        with pytest.raises(FormatError, match="line 701, column 6"):
            import_table(store, tmp_path / "file.vec", table=table, keys=range(ROWS))
    assert store.version == version
    assert set(store) == {"item"}
    assert all_rows(two_fields).tobytes() == before.tobytes()
    assert store.verify().ok


def test_a_reader_cannot_load(store, two_fields, tmp_path):
    write_file(tmp_path / "file.npy", random_matrix(ROWS, DIM), "float32")
    with (
        tierstore.open(store.path) as reader,
        pytest.raises(ReadOnlyError),
    ):
        import_table(reader, tmp_path / "file.npy")


@pytest.mark.variants(1, 3)
@pytest.mark.parametrize("suffix", SINK_SUFFIXES)
def test_there_and_back_again(store, two_fields, tmp_path, suffix):
    two_fields.store.set_keys(two_fields.name, random_words(ROWS))
    path = tmp_path / f"out{suffix}"
    for field in ("weight", "exp_avg"):
        done = export_table(two_fields, path.with_stem(field), field=field)
        import_table(store, done.path, table=field, dtype=two_fields.fields[field].dtype)
        assert all_rows(store[field]).tobytes() == all_rows(two_fields, field).tobytes()
        if FORMATS[suffix].keys != "never":
            assert list(store[field].keys[:]) == random_words(ROWS)
    with pytest.raises(ExistsError):
        export_table(two_fields, path.with_stem("weight"))


def test_a_path_is_opened_or_made(tmp_path):
    path, first, second = (
        tmp_path / "s.tier",
        random_matrix(ROWS, DIM),
        random_matrix(ROWS, DIM, seed=2),
    )
    write_file(tmp_path / "first.npy", first, "float32")
    write_file(tmp_path / "second.npy", second, "float32")
    assert import_table(path, tmp_path / "first.npy", table="item").created
    result = import_table(str(path), tmp_path / "second.npy")
    assert (result.table, result.created) == ("item", False)
    with tierstore.open(path) as store:
        assert store.version == result.version
        assert all_rows(store["item"]).tobytes() == second.tobytes()


def test_a_failed_load_makes_no_store(tmp_path):
    write_file(tmp_path / "file.npy", random_matrix(ROWS, DIM), "float32")
    with pytest.raises(InvalidInputError, match="keys"):
        import_table(tmp_path / "s.tier", tmp_path / "file.npy", keys=range(ROWS - 1))
    assert [path.name for path in tmp_path.iterdir()] == ["file.npy"]


def test_keys_come_from_a_file(store, tmp_path):
    words = random_words(ROWS)
    write_file(tmp_path / "file.npy", random_matrix(ROWS, DIM), "float32")
    (tmp_path / "keys.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    assert import_table(store, tmp_path / "file.npy", keys=tmp_path / "keys.txt").keys
    assert list(store["embeddings"].keys[:]) == words
    with pytest.raises(FormatError, match="memory"):
        import_table(store, tmp_path / "file.npy", keys=str(tmp_path / "keys.txt"), memory=100)


def test_keys_beyond_int64_are_not_negative_without_a_word(tmp_path):
    keys = np.array([3, 2**64 - 1, 2**63], np.uint64)
    np.savez(tmp_path / "rows.npz", weight=np.random.rand(3, 2).astype(np.float32), keys=keys)
    with tierstore.create(tmp_path / "s.tier", {"t": TableSpec(dim=2, keys="int64")}) as store:
        done = import_table(store, tmp_path / "rows.npz")
        assert [note for note in done.notes if note.startswith("2 keys are above 2**63 - 1")]
        assert sorted(map(int, store["t"].keys)) == [-(2**63), -1, 3]
        fine = {"weight": np.random.rand(1, 2).astype(np.float32), "keys": np.array([5], np.uint64)}
        np.savez(tmp_path / "fine.npz", **fine)
        assert not import_table(store, tmp_path / "fine.npz").notes


def arrays(path, **given):
    """Write arrays of the names of fields, blocks of each in their own way where the format can."""
    if path.suffix == ".npz":
        np.savez_compressed(path, **given)
    elif path.suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy").save_file(given, path)
    elif path.suffix == ".zarr":
        group = pytest.importorskip("zarr").create_group(path)
        for name, array in given.items():
            chunks = (97 if name == "weight" else 31, *array.shape[1:])
            group.create_array(name, data=array, chunks=chunks)
    else:
        with pytest.importorskip("h5py").File(path, "w") as file:
            for name, array in given.items():
                file.create_dataset(name, data=array, chunks=True)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".zarr", ".h5"])
def test_several_fields_of_one_file(store, two_fields, tmp_path, suffix):
    weight, moment = random_matrix(ROWS, DIM, seed=3), random_matrix(ROWS, 3, seed=4)
    keys = np.arange(ROWS)[::-1] * 3
    path = tmp_path / f"f{suffix}"
    arrays(path, weight=weight, exp_avg=moment, more=np.ones(ROWS, np.float32), keys=keys)
    done = import_table(store, path, table="new", field=["exp_avg", "weight"])
    assert (done.field, done.rows, done.dim, done.keys) == ("exp_avg,weight", ROWS, DIM + 3, True)
    assert "more" in str(done.notes) and "exp_avg" not in str(done.notes)
    assert list(store["new"].fields) == ["exp_avg", "weight"]
    assert store["new"].read(range(ROWS), "weight").tobytes() == weight.tobytes()
    assert store["new"].read(range(ROWS), "exp_avg").tobytes() == moment.tobytes()
    assert store["new"].keys[:].tolist() == keys.tolist()

    done = import_table(store, path, table="item", field=["weight", "exp_avg"], key_column=False)
    rounded = BFLOAT16.decode(BFLOAT16.encode(moment))
    assert store["item"].read(range(ROWS), "weight").tobytes() == weight.tobytes()
    assert store["item"].read(range(ROWS), "exp_avg").tobytes() == rounded.tobytes()

    some = np.array([5, 2 * ROWS, 3, 4])  # the keys of three rows, and a new one
    arrays(tmp_path / f"g{suffix}", weight=weight[:4], exp_avg=moment[:4], keys=some * 3)
    options = {"table": "new", "field": ["weight", "exp_avg"], "upsert": True}
    assert import_table(store, tmp_path / f"g{suffix}", **options).added == 1
    ids = store["new"].lookup(some * 3)
    assert store["new"].read(ids, "weight").tobytes() == weight[:4].tobytes()
    assert store["new"].read(ids, "exp_avg").tobytes() == moment[:4].tobytes()
    assert store["new"].read(0, "weight").tobytes() == weight[0].tobytes()
    import_table(store, tmp_path / f"g{suffix}", **options)  # over rows alone
    assert store["new"].read(ids, "exp_avg").tobytes() == moment[:4].tobytes()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".arrows", ".feather"])
def test_several_fields_there_and_back_again(store, two_fields, tmp_path, suffix):
    path, fields = tmp_path / f"f{suffix}", ["weight", "exp_avg"]
    export_table(two_fields, path, field=fields, keys=random_words(ROWS))
    assert "exp_avg" in str(import_table(store, path, table="one").notes)
    done = import_table(store, path, table="again", field=fields)
    assert not any("not read" in note for note in done.notes)
    for name in fields:
        rows = two_fields.read(range(ROWS), name)
        assert store["again"].read(range(ROWS), name).tobytes() == rows.tobytes()
    assert list(store["again"].keys) == random_words(ROWS)
    found = preview(path, field=fields)
    assert (found.dim, found.first.shape) == (DIM + 3, (3, DIM + 3))
    assert found.keys == random_words(ROWS)[:3]


def test_several_fields_that_are_not_there(store, two_fields, tmp_path):
    path, fields = tmp_path / "f.npz", ["weight", "exp_avg"]
    np.savez(path, weight=random_matrix(ROWS, DIM), exp_avg=random_matrix(ROWS - 1, 3))
    np.savez(tmp_path / "one.npz", weight=random_matrix(ROWS, DIM))
    np.save(tmp_path / "one.npy", random_matrix(ROWS, DIM))
    before = all_rows(two_fields)
    for src, given, why in (
        (path, fields, "699 rows of 'exp_avg', but 700 of 'weight'"),
        (f"{path}:weight", fields, "leave :weight out"),
        (tmp_path / "one.npz", fields, "no 'exp_avg', only 'weight'"),
        (tmp_path / "one.npy", fields, "without a name"),
        (path, ["weight", "weight"], "once"),
        (path, [], "at least one"),
        (path, ["weight", "none"], "no field 'none'"),
    ):
        with pytest.raises((FormatError, InvalidInputError, UnknownNameError), match=why):
            import_table(store, src, table="item", field=given)
    assert all_rows(store["item"]).tobytes() == before.tobytes()


def test_a_preview_is_what_an_import_reads(tmp_path):
    """Of a directory of files of a few rows too, whose blocks are as long as they are."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rng = np.random.default_rng(5)
    for number in range(12):
        lengths = rng.integers(0, 4, 5)
        place = tmp_path / f"parts-{number}"
        place.mkdir()
        matrix = rng.standard_normal((int(lengths.sum()), 3)).astype("f4")
        first = 0
        for part, count in enumerate(lengths):
            rows = matrix[first : first + count]
            keys = [f"k{at}" for at in range(first, first + count)]
            columns = {"key": pyarrow.array(keys, "string"), "v": pyarrow.array(list(rows))}
            table = pyarrow.table(columns, pyarrow.schema(
                [("key", "string"), ("v", pyarrow.list_(pyarrow.float32(), 3))]
            ))  # fmt: skip
            parquet.write_table(table, place / f"{part}.parquet")
            first += count
        for wanted in (1, 3, 7, 100):
            found = preview(place, rows=wanted)
            assert found.rows == len(matrix)
            assert found.first.tobytes() == matrix[:wanted].tobytes()
            assert found.keys == [f"k{at}" for at in range(min(wanted, len(matrix)))]
