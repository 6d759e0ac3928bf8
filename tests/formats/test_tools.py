"""Files of other tools are read right or refused, and those tools read what is written.

A tool that is not installed skips its cells of the matrix.
"""

import numpy as np
import pytest

from tests.formats.matrices import random_words, write_file
from tierstore._formats import open_source
from tierstore.errors import FormatError

MATRIX = np.random.default_rng(11).standard_normal((40, 5)).astype("f4")
WORDS = random_words(40)
IDS = list(range(1000, 1040))


def pandas_frame(keys):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(MATRIX, index=None if keys is None else pandas.Index(keys, name="item"))


def polars_frame(keys):
    polars = pytest.importorskip("polars")
    columns = {} if keys is None else {"item": list(keys)}
    return polars.DataFrame({**columns, **{str(n): MATRIX[:, n] for n in range(5)}})


def duckdb_csv(path, keys, options=""):
    duckdb = pytest.importorskip("duckdb")
    names = ["item", *"abcde"] if keys is not None else list("abcde")
    rows = [
        ([] if keys is None else [keys[n]]) + [float(x) for x in row]
        for n, row in enumerate(MATRIX)
    ]
    kind = "varchar" if keys is not None and isinstance(keys[0], str) else "bigint"
    types = [f"{n} {kind if n == 'item' else 'float'}" for n in names]
    with duckdb.connect() as base:
        base.execute(f"create table t ({', '.join(types)})")
        base.executemany(f"insert into t values ({', '.join('?' * len(names))})", rows)
        base.execute(f"copy t to '{path}' (format csv{options})")


def gensim_vectors(keys):
    models = pytest.importorskip("gensim.models")
    vectors = models.KeyedVectors(5)
    vectors.add_vectors([str(key) for key in keys], MATRIX)
    return vectors


def arrow_csv(path, keys):
    pyarrow, csv = map(pytest.importorskip, ("pyarrow", "pyarrow.csv"))
    columns = {} if keys is None else {"item": list(keys)}
    csv.write_csv(pyarrow.table({**columns, **{f"f{n}": MATRIX[:, n] for n in range(5)}}), path)


TEXT_WRITERS = {
    "pandas.csv": lambda path, keys: pandas_frame(keys).to_csv(path),
    "pandas.csv, quoted": lambda path, keys: pandas_frame(keys).to_csv(path, quoting=1),
    "pandas.tsv": lambda path, keys: pandas_frame(keys).to_csv(path, sep="\t"),
    "pandas.csv, German": lambda path, keys: pandas_frame(keys).to_csv(path, sep=";", decimal=","),
    "pandas.csv, no header": lambda path, keys: pandas_frame(keys).to_csv(
        path, header=False, index=keys is not None
    ),
    "pandas.csv, Excel": lambda path, keys: pandas_frame(keys).to_csv(path, encoding="utf-16"),
    "pandas.csv.gz": lambda path, keys: pandas_frame(keys).to_csv(path),
    "polars.csv": lambda path, keys: polars_frame(keys).write_csv(path),
    "duckdb.csv": duckdb_csv,
    "duckdb.csv, pipes": lambda path, keys: duckdb_csv(path, keys, ", delimiter '|'"),
    "pyarrow.csv": arrow_csv,
}


@pytest.mark.parametrize("writer", TEXT_WRITERS)
@pytest.mark.parametrize("keys", [None, IDS, WORDS], ids=["none", "ids", "words"])
def test_tables_of_other_tools(tmp_path, writer, keys):
    path = tmp_path / ("f." + writer.partition(".")[2].partition(",")[0])
    TEXT_WRITERS[writer](path, keys)
    with open_source(path) as source:
        assert np.concatenate(list(source.blocks())).tobytes() == MATRIX.tobytes(), source.read_as
        assert (None if source.keys is None else list(source.keys)) == keys


@pytest.mark.parametrize(("name", "binary"), [("f.vec", False), ("f.bin", True)])
def test_word_vectors_of_gensim_and_back(tmp_path, name, binary):
    path = tmp_path / name
    gensim_vectors(WORDS).save_word2vec_format(str(path), binary=binary)
    with open_source(path) as source:
        assert np.concatenate(list(source.blocks())).tobytes() == MATRIX.tobytes()
        assert list(source.keys) == WORDS
    models = pytest.importorskip("gensim.models")
    write_file(tmp_path / f"ours.{name}", MATRIX, "float32", keys=WORDS)
    ours = models.KeyedVectors.load_word2vec_format(str(tmp_path / f"ours.{name}"), binary=binary)
    assert ours.vectors.tobytes() == MATRIX.tobytes() and ours.index_to_key == WORDS


def test_a_missing_number_of_pandas_is_refused_with_a_sentence(tmp_path):
    frame = pandas_frame(WORDS)
    frame.iloc[3, 2] = None
    frame.to_csv(tmp_path / "f.csv")
    with (
        pytest.raises(FormatError, match=r'line 5, column 4 \("2"\).* --null'),
        open_source(tmp_path / "f.csv") as source,
    ):
        list(source.blocks())


CARE = ['"', '"hello', "the", 'say "hi"', "nan", "#x", *WORDS[:34]]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("tool", ["pandas", "polars", "duckdb"])
def test_other_tools_read_what_is_written(tmp_path, suffix, tool):
    path, sep = tmp_path / f"f{suffix}", {".csv": ",", ".tsv": "\t"}[suffix]
    matrix = MATRIX.copy()
    matrix[2, 1], matrix[5, 0], matrix[6, 0] = np.nan, np.inf, -np.inf
    write_file(path, matrix, "float32", keys=CARE)
    library = pytest.importorskip(tool)
    if tool == "pandas":
        found = library.read_csv(path, sep=sep, keep_default_na=False, na_values=["NaN"])
        keys, values = found["key"].tolist(), found.iloc[:, 1:].to_numpy()
    elif tool == "polars":
        found = library.read_csv(path, separator=sep)
        keys, values = found["key"].to_list(), found[:, 1:].to_numpy()
    else:
        with library.connect() as base:
            rows = base.execute(f"select * from '{path}'").fetchall()
        keys, values = [row[0] for row in rows], np.array([row[1:] for row in rows], float)
    assert keys == CARE
    assert np.array_equal(np.asarray(values, "f8").astype("f4"), matrix, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_duckdb_reads_parquet_of_every_type(tmp_path, dtype):
    duckdb = pytest.importorskip("duckdb")
    pytest.importorskip("pyarrow")
    write_file(tmp_path / "f.parquet", MATRIX.astype(dtype), dtype, keys=WORDS)
    with duckdb.connect() as base:
        rows = base.execute(f"select key, weight from '{tmp_path / 'f.parquet'}'").fetchall()
    assert [row[0] for row in rows] == WORDS
    assert np.array_equal(np.array([row[1] for row in rows]).astype(dtype), MATRIX.astype(dtype))


@pytest.mark.parametrize("keys", [None, IDS, WORDS], ids=["none", "ids", "words"])
def test_xarray_opens_zarr(tmp_path, keys):
    xarray = pytest.importorskip("xarray")
    write_file(tmp_path / "f.zarr", MATRIX, "float32", keys=keys)
    found = xarray.open_zarr(tmp_path / "f.zarr", consolidated=False)
    assert found["weight"].dims == ("row", "dim")
    assert found["weight"].to_numpy().tobytes() == MATRIX.tobytes()
