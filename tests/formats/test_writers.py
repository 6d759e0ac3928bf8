"""Files of other tools are read right or refused, and those tools read what is written.

Plain text is emitted as a tool writes it where the tool is no library of Python. A library that is
not installed skips its cells of the matrix.
"""

import csv
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.formats.matrices import random_words, write_file
from tierstore._formats import TextOptions, open_source
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


def lines_of(keys, sep, *, end="\n", decimal="."):
    """Rows of numbers as C prints them, each after its key."""
    rows = [[f"{x:.9g}".replace(".", decimal) for x in row] for row in MATRIX.tolist()]
    named = rows if keys is None else [[str(k), *row] for k, row in zip(keys, rows, strict=True)]
    return "".join(sep.join(row) + end for row in named)


def r_table(path, keys):
    """write.table(m, sep="\t"): quoted row names, and a header that is one name short."""
    names = range(1, 41) if keys is None else keys
    quoted = [f'"{str(name).replace(chr(34), chr(39))}"' for name in names]
    header = "\t".join(f'"V{n}"' for n in range(1, 6))
    path.write_text(header + "\n" + lines_of(quoted, "\t"))


def excel_text(path, keys):
    """Unicode text of Excel in a country of decimal commas: UTF-16, tabs, CRLF."""
    header = "\t".join([*(["item"] if keys is not None else []), *"abcde"]) + "\r\n"
    text = header + lines_of(keys, "\t", end="\r\n", decimal=",")
    path.write_bytes(text.encode("utf-16"))


def hugging_face(keys):
    datasets = pytest.importorskip("datasets")
    columns = {} if keys is None else {"key": list(keys)}
    kinds = {name: datasets.Value("int64" if keys is IDS else "string") for name in columns}
    kinds["v"] = datasets.Sequence(datasets.Value("float32"))
    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict({**columns, "v": MATRIX.tolist()}, datasets.Features(kinds))


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
    "datasets.csv, wide": lambda path, keys: hugging_face_wide(keys).to_csv(path),
    "Excel.txt": excel_text,
    "Excel.csv": excel_text,
}


def hugging_face_wide(keys):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    return datasets.Dataset.from_pandas(pandas_frame(keys), preserve_index=keys is not None)


@pytest.mark.variants(5, 16)
@pytest.mark.parametrize("writer", TEXT_WRITERS)
@pytest.mark.parametrize("keys", [None, IDS, WORDS], ids=["none", "ids", "words"])
def test_tables_of_other_tools(tmp_path, writer, keys):
    path = tmp_path / ("f." + writer.partition(".")[2].partition(",")[0])
    TEXT_WRITERS[writer](path, keys)
    # Whole numbers without a name may be keys or numbers of the row.
    text = TextOptions(key_column=1 if (writer, keys) == ("pandas.csv, no header", IDS) else None)
    with open_source(path, text=text) as source:
        assert np.concatenate(list(source.blocks())).tobytes() == MATRIX.tobytes(), source.read_as
        assert (None if source.keys is None else list(source.keys)) == keys


@pytest.mark.variants(0, 1)
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_duckdb_reads_parquet_of_tables_of_narrow_types(tmp_path, dtype):
    duckdb = pytest.importorskip("duckdb")
    pytest.importorskip("pyarrow")
    np.save(tmp_path / "f.npy", MATRIX)
    tierstore.import_table(tmp_path / "s.tier", tmp_path / "f.npy", dtype=dtype)
    with tierstore.open(tmp_path / "s.tier") as store:
        tierstore.export_table(store["embeddings"], tmp_path / "f.parquet")
        expected = store["embeddings"][:]
    with duckdb.connect() as base:
        rows = base.execute(f"select weight from '{tmp_path / 'f.parquet'}'").fetchall()
    assert np.array_equal(np.array([row[0] for row in rows], expected.dtype), expected)


@pytest.mark.parametrize("keys", [None, IDS, WORDS], ids=["none", "ids", "words"])
def test_xarray_opens_zarr(tmp_path, keys):
    xarray = pytest.importorskip("xarray")
    write_file(tmp_path / "f.zarr", MATRIX, "float32", keys=keys)
    found = xarray.open_zarr(tmp_path / "f.zarr", consolidated=False)
    assert found["weight"].dims == ("row", "dim")
    assert found["weight"].to_numpy().tobytes() == MATRIX.tobytes()


def read_back(place, **options):
    with open_source(place, **options) as source:
        keys = source.keys
        return np.concatenate(list(source.blocks(7))), None if keys is None else list(keys)


# R numbers rows that have no names from 1, so that keys are never absent.
@pytest.mark.parametrize("keys", [None, IDS, WORDS], ids=["none", "ids", "words"])
def test_tables_of_r(tmp_path, keys):
    r_table(tmp_path / "f.tsv", keys)
    names = range(1, 41) if keys is None else [str(k).replace('"', "'") for k in keys]
    names = list(map(str, names)) if keys is WORDS else list(names)
    names = [int(name) for name in names] if keys is IDS else names
    found, stored = read_back(tmp_path / "f.tsv")
    assert found.tobytes() == MATRIX.tobytes() and stored == names


WORD_WRITERS = {
    "fastText.vec": lambda keys: "40 5\n" + lines_of(keys, " ", end=" \n"),
    "word2vec.vec": lambda keys: "40 5\n" + lines_of(keys, " "),
    "GloVe.txt": lambda keys: lines_of(keys, " "),
    "GloVe.vec": lambda keys: lines_of(keys, " "),
    "StarSpace.tsv": lambda keys: lines_of(keys, "\t"),
}


@pytest.mark.parametrize("writer", WORD_WRITERS)
@pytest.mark.parametrize("packed", ["", ".gz", ".bz2"])
def test_word_vectors(tmp_path, writer, packed):
    import bz2
    import gzip

    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[packed]
    path = tmp_path / (writer + packed)
    path.write_bytes(pack(WORD_WRITERS[writer](WORDS).encode()))
    found, keys = read_back(path)
    assert found.tobytes() == MATRIX.tobytes() and keys == WORDS


@pytest.mark.parametrize("options", [{}, {"fmt": "%.9g"}, {"delimiter": ","}], ids=str)
def test_matrices_of_numpy_savetxt(tmp_path, options):
    path = tmp_path / ("f.csv" if "delimiter" in options else "f.txt")
    np.savetxt(path, MATRIX, **options)
    found, keys = read_back(path)
    assert found.tobytes() == MATRIX.tobytes() and keys is None


def columns_of(keys, vectors):
    return {**({} if keys is None else {"key": list(keys)}), "v": vectors}


def pandas_lists(keys):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(columns_of(keys, list(MATRIX)))


def pandas_wide(keys):
    frame = pandas_frame(None).rename(columns=str)
    if keys is not None:
        frame.insert(0, "key", list(keys))
    return frame


def polars_lists(keys, kind="List"):
    polars = pytest.importorskip("polars")
    of = polars.List(polars.Float32) if kind == "List" else polars.Array(polars.Float32, 5)
    frame = polars.DataFrame(columns_of(keys, MATRIX.tolist()))
    return frame.with_columns(polars.col("v").cast(of))


def duckdb_parquet(path, keys, kind="float[]"):
    duckdb = pytest.importorskip("duckdb")
    types = {} if keys is None else {"key": "bigint" if keys is IDS else "varchar"}
    rows = [[*([] if keys is None else [keys[n]]), row] for n, row in enumerate(MATRIX.tolist())]
    with duckdb.connect() as base:
        named = ", ".join(f"{name} {of}" for name, of in {**types, "v": kind}.items())
        base.execute(f"create table t ({named})")
        base.executemany(f"insert into t values ({', '.join('?' * (len(types) + 1))})", rows)
        base.execute(f"copy t to '{path}' (format parquet)")


def arrow_parts(path, keys):
    pyarrow, dataset = map(pytest.importorskip, ("pyarrow", "pyarrow.dataset"))
    vectors = pyarrow.array(list(MATRIX), pyarrow.list_(pyarrow.float32()))
    table = pyarrow.table(columns_of(keys, vectors))
    options = {"max_rows_per_file": 3, "max_rows_per_group": 3}  # 14 files
    dataset.write_dataset(table, path, format="parquet", **options)


def torch_save(path, keys):
    torch = pytest.importorskip("torch")
    keyed = {"keys": torch.tensor(keys)} if keys is IDS else {}
    torch.save({"weight": torch.from_numpy(MATRIX), **keyed}, path)


def safetensors_save(path, keys):
    numpy = pytest.importorskip("safetensors.numpy")
    keyed = {"keys": np.array(keys)} if keys is IDS else {}
    numpy.save_file({"weight": MATRIX, **keyed}, path)


def h5py_file(path, keys):
    with pytest.importorskip("h5py").File(path, "w") as file:
        file["model/weight"] = MATRIX
        if keys is not None:
            file["keys"] = keys


def xarray_zarr(path, keys):
    xarray = pytest.importorskip("xarray")
    keyed = {"keys": ("row", np.array(keys))} if keys is IDS else {}
    data = xarray.Dataset({"weight": (("row", "dim"), MATRIX)}, coords=keyed)
    data.to_zarr(path, zarr_format=3, consolidated=False)


def arrow_file(path, keys):
    pyarrow, ipc = map(pytest.importorskip, ("pyarrow", "pyarrow.ipc"))
    vectors = pyarrow.array(list(MATRIX), pyarrow.list_(pyarrow.float32(), 5))
    table = pyarrow.table(columns_of(keys, vectors))
    with ipc.new_file(path, table.schema) as file:
        file.write_table(table)


def faiss_file(path, keys):
    """As faiss and big-ann-benchmarks write them: fvecs has the length before each row."""
    if path.suffix == ".fbin":
        path.write_bytes(np.array(MATRIX.shape, "<u4").tobytes() + MATRIX.tobytes())
    else:
        lengths = np.full((len(MATRIX), 1), MATRIX.shape[1], "<i4").view("f4")
        path.write_bytes(np.hstack([lengths, MATRIX]).tobytes())


def sharded_model(path, keys):
    """As Hugging Face's save_pretrained does with a model of several files."""
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"weight": MATRIX}, path.with_name("model-00001-of-00002.safetensors"))
    numpy.save_file({"bias": MATRIX[0]}, path.with_name("model-00002-of-00002.safetensors"))
    files = {
        "weight": "model-00001-of-00002.safetensors",
        "bias": "model-00002-of-00002.safetensors",
    }
    path.write_text(json.dumps({"metadata": {"total_size": 820}, "weight_map": files}))


BINARY_WRITERS = {
    "pandas.parquet": lambda path, keys: pandas_lists(keys).to_parquet(path),
    "pandas.parquet, wide": lambda path, keys: pandas_wide(keys).to_parquet(path),
    "pandas.feather": lambda path, keys: pandas_lists(keys).to_feather(path),
    "pandas.feather, wide": lambda path, keys: pandas_wide(keys).to_feather(path),
    "polars.parquet": lambda path, keys: polars_lists(keys).write_parquet(path),
    "polars.parquet, array": lambda path, keys: polars_lists(keys, "Array").write_parquet(path),
    "polars.arrow": lambda path, keys: polars_lists(keys).write_ipc(path, compression="zstd"),
    "polars.jsonl": lambda path, keys: polars_lists(keys).write_ndjson(path),
    "duckdb.parquet": duckdb_parquet,
    "duckdb.parquet, array": lambda path, keys: duckdb_parquet(path, keys, "float[5]"),
    "pyarrow.parts": arrow_parts,
    "pyarrow.arrow": arrow_file,
    "numpy.npy, alone": lambda path, keys: np.save(path, MATRIX),
    "faiss.fvecs, alone": faiss_file,
    "big-ann.fbin, alone": faiss_file,
    "transformers.safetensors.index.json, alone": sharded_model,
    "datasets.saved": lambda path, keys: hugging_face(keys).save_to_disk(path, num_shards=3),
    "datasets.parquet": lambda path, keys: hugging_face(keys).to_parquet(path),
    "datasets.jsonl": lambda path, keys: hugging_face(keys).to_json(path),
    "numpy.npz": lambda path, keys: np.savez(
        path, weight=MATRIX, **({} if keys is None else {"keys": keys})
    ),
    "h5py.h5": h5py_file,
    "torch.pt, ids": torch_save,
    "torch.pth, ids": torch_save,
    "safetensors.safetensors, ids": safetensors_save,
    "xarray.zarr, ids": xarray_zarr,
}


@pytest.mark.slow
@pytest.mark.parametrize("writer", BINARY_WRITERS)
@pytest.mark.parametrize("keys", [None, IDS, WORDS], ids=["none", "ids", "words"])
def test_binary_files_of_other_tools(tmp_path, writer, keys):
    if writer.endswith(", ids") and keys is WORDS:
        pytest.skip("the format has whole numbers only")
    if writer.endswith(", alone") and keys is not None:
        pytest.skip("the format has no keys")
    path = tmp_path / ("f." + writer.partition(".")[2].partition(",")[0])
    BINARY_WRITERS[writer](path, keys)
    found, stored = read_back(path)
    assert found.tobytes() == MATRIX.tobytes() and stored == keys


def test_models_of_gensim_and_pandas_in_pickles_are_refused(tmp_path):
    import pickle

    gensim_vectors(WORDS).save(str(tmp_path / "f.pt"))
    (tmp_path / "g.npy").write_bytes(pickle.dumps(MATRIX))
    for name in ("f.pt", "g.npy"):
        with pytest.raises(FormatError):
            open_source(tmp_path / name)


def read_frame(frame):
    return np.stack(frame["weight"].to_list()), frame["key"].to_list()


def read_safetensors(path):
    found = pytest.importorskip("safetensors.numpy").load_file(path)
    ends, text = found["keys_offsets"].tolist(), found["keys"].tobytes()
    return found["weight"], [text[a:b].decode() for a, b in pairwise(ends)]


def read_hugging_face(path):
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(path.parent)
    )
    return np.array(found["weight"], "f4"), list(found["key"])


def read_duckdb(path):
    with pytest.importorskip("duckdb").connect() as base:
        rows = base.execute(f"select key, weight from '{path}'").fetchall()
    return np.array([row[1] for row in rows], "f4"), [row[0] for row in rows]


def read_npz(path):
    with np.load(path, allow_pickle=False) as found:
        return found["weight"], found["keys"].tolist()


def read_beside(path):
    keys = np.load(path.with_name(path.stem + ".keys.npy"), allow_pickle=False)
    return np.load(path, mmap_mode="r", allow_pickle=False), keys.tolist()


def read_projector(path):
    labels = (path / "metadata.tsv").read_text().splitlines()
    return np.loadtxt(path / "vectors.tsv", delimiter="\t", dtype="f4"), labels


def read_faiss(path):
    """As the scripts of faiss and big-ann-benchmarks do."""
    data = np.fromfile(path, "<i4")
    return data.reshape(-1, data[0] + 1)[:, 1:].copy().view("<f4"), None


def read_arrow_columns(table):
    return np.stack(table["weight"].to_numpy()), table["key"].to_pylist()


def read_torch(path):
    """Keys are bytes and offsets, as strings are no tensors."""
    found = pytest.importorskip("safetensors.torch").load_file(path)
    ends, text = found["keys_offsets"].tolist(), bytes(found["keys"].tolist())
    return found["weight"].numpy(), [text[a:b].decode() for a, b in pairwise(ends)]


def read_glove(path):
    """As scripts read GloVe and fastText: a line is a word and numbers, after counts."""
    _, *lines = path.read_text().splitlines()
    rows = [line.rsplit(" ", 5) for line in lines]
    return np.array([row[1:] for row in rows], "f4"), [row[0] for row in rows]


def read_r(path):
    """As read.table(header = TRUE, sep = "\\t") does: quotes, and doubled ones within."""
    _, *rows = csv.reader(path.read_text().splitlines(), delimiter="\t")
    return np.array([row[1:] for row in rows], "f4"), [row[0] for row in rows]


def library(name):
    return pytest.importorskip(name)


FOREIGN_READERS = {
    "numpy.npy": read_beside,
    "numpy.npz": read_npz,
    "pandas.parquet": lambda path: read_frame(library("pandas").read_parquet(path)),
    "pandas.feather": lambda path: read_frame(library("pandas").read_feather(path)),
    "polars.parquet": lambda path: read_frame(library("polars").read_parquet(path)),
    "polars.arrow": lambda path: read_frame(library("polars").read_ipc(path)),
    "duckdb.parquet": read_duckdb,
    "datasets.parquet": read_hugging_face,
    "safetensors.safetensors": read_safetensors,
    "TensorBoard.projector": read_projector,
    "faiss.fvecs": read_faiss,
    "pyarrow.parquet": lambda path: read_arrow_columns(library("pyarrow.parquet").read_table(path)),
    "pyarrow.feather": lambda path: read_arrow_columns(library("pyarrow.feather").read_table(path)),
    "torch.safetensors": read_torch,
    "GloVe.vec": read_glove,
    "fastText.txt": read_glove,
    "R.tsv": read_r,
}

TOOLS = {
    *(
        "pandas",
        "polars",
        "duckdb",
        "pyarrow",
        "datasets",
        "torch",
        "safetensors",
        "numpy",
        "xarray",
    ),
    *("gensim", "fastText", "GloVe", "Excel", "R", "h5py", "faiss"),
}
READ_ONLY = {"h5py", "Excel"}
"""Tools whose files are read, and for whose own formats there is no writer."""


def test_the_matrix_has_every_tool_on_both_sides():
    def tools(cells):
        return {name.partition(".")[0] for name in cells}

    here = {"gensim", "R", "xarray"}  # which have tests of their own above
    assert tools({**TEXT_WRITERS, **WORD_WRITERS, **BINARY_WRITERS}) | here >= TOOLS
    assert tools(FOREIGN_READERS) | here >= TOOLS - READ_ONLY


@pytest.mark.parametrize("reader", FOREIGN_READERS)
def test_other_tools_read_binary_files(tmp_path, reader):
    path = tmp_path / ("f" + Path(reader).suffix)
    if path.suffix in (".parquet", ".feather", ".arrow"):
        pytest.importorskip("pyarrow")
    write_file(path, MATRIX, "float32", keys=WORDS)
    found, keys = FOREIGN_READERS[reader](path)
    assert np.ascontiguousarray(found, "f4").tobytes() == MATRIX.tobytes()
    assert keys is None or keys == WORDS
