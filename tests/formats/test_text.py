"""The reader of text: what it decides, from what other tools write, and what it refuses."""

import bz2
import csv
import gzip
import io
import lzma
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from tests.every import every
from tests.formats.matrices import random_matrix, random_words, read_file, write_file
from tierstore._formats import TextOptions, open_sink, open_source
from tierstore._formats import _arrow as arrow
from tierstore.errors import AmbiguousFileError, FormatError, InvalidInputError
from tierstore.importing import import_table, preview

MATRIX = np.random.default_rng(5).standard_normal((7, 4)).astype("f4")
ROWS = MATRIX.tolist()


def table(rows, *, header=None, index=None, sep=",", decimal=".", end="\n", quoting=0) -> str:
    """Lines as csv writes them, from a header, an index of keys and rows of floats."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=sep, lineterminator=end, quoting=quoting)
    if header is not None:
        writer.writerow(header)
    for number, row in enumerate(rows):
        cells = [v if isinstance(v, str) else repr(v).replace(".", decimal) for v in row]
        writer.writerow(cells if index is None else [index[number], *cells])
    return text.getvalue()


def indexed(rows, index=None):
    """Rows behind an index that has become a column, as of a table saved before."""
    return [[n if index is None else index[n], *row] for n, row in enumerate(rows)]


def plain(rows, *, index=None, sep=" ", header=None) -> str:
    lines = [sep.join(map(repr, row)) for row in rows]
    if index is not None:
        lines = [f"{key}{sep}{line}" for key, line in zip(index, lines, strict=True)]
    return "\n".join([header, *lines] if header else lines) + "\n"


def saved(form: str) -> str:
    """What numpy.savetxt writes."""
    text = io.StringIO()
    np.savetxt(text, MATRIX, fmt=form)
    return text.getvalue()


LINES = plain(ROWS).splitlines(keepends=True)
WORDS = [f"w{n}" for n in range(7)]
TENS = list(range(10, 17))
NAMES = ["a", "b", "c", "d"]
DIGITS = ["0", "1", "2", "3"]

# What tools write by default: file, text, keys, and what is said about it.
READ = {
    "pandas": ("f.csv", table(ROWS, header=["", *DIGITS], index=range(7)), None, "from column 1"),
    "pandas, named": ("f.csv", table(ROWS, header=["item", *NAMES], index=TENS), TENS, '"item"'),
    "pandas, no index": ("f.csv", table(ROWS, header=DIGITS), None, "header yes, no keys, 4"),
    "pandas, saved twice": (
        "f.csv", table(ROWS, header=["Unnamed: 0", *NAMES], index=TENS), TENS, '"Unnamed: 0"'
    ),
    "pandas, saved twice with a column of ids": (
        "f.csv",
        table(
            indexed(indexed(ROWS, TENS)), header=["", "Unnamed: 0", "id", *NAMES], index=range(7)
        ),
        TENS, 'keys from "id", 4 numbers',
    ),
    "pandas, words beside its index": (
        "f.csv", table(indexed(ROWS, WORDS), header=["", "word", *NAMES], index=range(7)),
        WORDS, 'keys from "word", 4 numbers',
    ),
    "pandas, index reset twice": (
        "f.csv", table(indexed(ROWS), header=["level_0", "index", *NAMES], index=range(7)),
        None, 'keys from "index", 4 numbers',
    ),
    "pandas, quoted": (
        "f.csv", table(ROWS, header=["", *NAMES], index=WORDS, quoting=csv.QUOTE_ALL), WORDS, "yes"
    ),
    "pandas, quoted tsv": (
        "f.tsv", table(ROWS, header=["w", *NAMES], index=WORDS, sep="\t", quoting=1), WORDS, "yes"
    ),
    "polars, row index": ("f.csv", table(ROWS, header=["index", *DIGITS], index=TENS), TENS, "yes"),
    "savetxt": ("f.txt", saved("%.18e"), None, "header no, no keys"),
    "savetxt, aligned": ("f.txt", saved("%26.18e"), None, "header no, no keys"),
    "savetxt in csv": ("f.csv", plain(ROWS), None, "no keys, 4 numbers, separator blanks"),
    "R": (
        "f.txt", plain(ROWS, index=[f'"{w}"' for w in WORDS], header='"V1" "V2" "V3" "V4"'),
        WORDS, "yes",
    ),
    "R, tsv": (
        "f.tsv", "V1\tV2\tV3\tV4\n" + table(ROWS, index=[f"{n}" for n in range(1, 8)], sep="\t"),
        list(range(1, 8)), "yes",
    ),
    "Excel, German": (
        "f.csv", table(ROWS, header=["id", *NAMES], index=WORDS, sep=";", decimal=",", end="\r\n"),
        WORDS, 'separator ";", decimal ","',
    ),
    "Excel, German, numbers": ("f.csv", table(ROWS, sep=";", decimal=","), None, 'decimal ","'),
    "old Mac": ("f.csv", table(ROWS, header=["id", *NAMES], index=WORDS, end="\r"), WORDS, "yes"),
    "GloVe": ("f.txt", plain(ROWS, index=WORDS), WORDS, "header no, keys from column 1, 4"),
    "word2vec": ("f.vec", plain(ROWS, index=WORDS, header="7 4"), WORDS, "header counts"),
    "StarSpace": (
        "f.txt", "".join(f"{w}\t{line}" for w, line in zip(WORDS, LINES, strict=True)), WORDS, "4"
    ),
    "ids last": (
        "f.csv",
        table([[*row, n] for n, row in zip(TENS, ROWS, strict=True)], header=[*NAMES, "user"]),
        TENS, 'keys from "user"',
    ),
    "words last": (
        "f.csv",
        "".join(f"{','.join(line.split())},{w}\n" for w, line in zip(WORDS, LINES, strict=True)),
        WORDS, "keys from column 5",
    ),
}  # fmt: skip


@every(tool=READ, encoding=["utf-8", "utf-8-sig", "utf-16"])
def test_what_tools_write(tmp_path, tool, encoding):
    name, text, keys, said = READ[tool]
    (tmp_path / name).write_bytes(text.encode(encoding))
    assert read_file(tmp_path / name).tobytes() == MATRIX.tobytes()
    with open_source(tmp_path / name) as source:
        assert (None if source.keys is None else list(source.keys)) == keys
        assert said in source.read_as


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zip", lambda data: zipped(("some.vec", data))),
        (".zst", None),
    ],
)
def test_packed_text(tmp_path, suffix, pack):
    if pack is None:
        pack = pytest.importorskip("pyarrow").Codec("zstd").compress
    path = tmp_path / f"f.vec{suffix}"
    packed = bytes(pack(plain(ROWS, index=WORDS, header="7 4").encode()))
    path.write_bytes(packed)
    assert read_file(path).tobytes() == MATRIX.tobytes()
    path.write_bytes(packed[:-9])
    with pytest.raises(FormatError):
        read_file(path)
    path.write_bytes(b"noise" * 9)
    with pytest.raises(FormatError, match=r"packed|zip file"):
        read_file(path)


def zipped(*members) -> bytes:
    """A zip archive of files with these names and contents."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return held.getvalue()


GLOVE = plain(ROWS, index=WORDS).encode()
"""Text as GloVe is published: in a zip archive whose own name has no suffix of text."""


def test_an_archive_of_one_file_is_read_by_the_name_of_that(tmp_path):
    path = tmp_path / "glove.840B.300d.zip"
    path.write_bytes(zipped(("glove.840B.300d.txt", GLOVE), ("__MACOSX/._glove", b"")))
    with open_source(path) as source:
        assert list(source.keys) == WORDS
        assert np.concatenate(list(source.blocks())).tobytes() == MATRIX.tobytes()


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([("a.txt", GLOVE), ("b.txt", GLOVE)], r"of 2 files \(a.txt, b.txt\), .*f.zip:a.txt"),
        ([], "of 0 files, of which"),
        ([("a.png", b"1")], "cannot be read; take the file out of the archive"),
    ],
)
def test_other_archives_say_what_they_hold(tmp_path, members, match):
    (tmp_path / "f.zip").write_bytes(zipped(*members))
    with pytest.raises((FormatError, InvalidInputError), match=match):
        open_source(tmp_path / "f.zip")


def test_zip_files_are_not_written(tmp_path):
    with pytest.raises(InvalidInputError, match="read, not written"):
        write_file(tmp_path / "f.csv.zip", MATRIX, "float32")
    assert list(tmp_path.iterdir()) == []


def test_xz_in_several_streams_and_within_memory(tmp_path):
    halves = [plain(ROWS[:3], index=WORDS[:3]), plain(ROWS[3:], index=WORDS[3:])]
    packed = [lzma.compress(half.encode()) for half in halves]
    (tmp_path / "f.txt.xz").write_bytes(packed[0] + bytes(8) + packed[1] + bytes(4))
    assert read_file(tmp_path / "f.txt.xz").tobytes() == MATRIX.tobytes()
    large = lzma.compress(GLOVE, preset=9)  # whose dictionary takes 64 MiB
    (tmp_path / "f.txt.xz").write_bytes(large)
    with pytest.raises(FormatError, match=r"(?i)memory"):
        read_file(tmp_path / "f.txt.xz", memory=32 << 20)
    assert read_file(tmp_path / "f.txt.xz").tobytes() == MATRIX.tobytes()


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".vec", ".txt"])
def test_text_is_packed_as_it_is_written(tmp_path, suffix, packing):
    if packing == ".zst":
        pytest.importorskip("pyarrow")
    words = [f"w{n}" for n in range(len(MATRIX))]
    for name in ("a", "b"):
        write_file(tmp_path / f"{name}{suffix}{packing}", MATRIX, "float32", keys=words)
    write_file(tmp_path / f"plain{suffix}", MATRIX, "float32", keys=words)
    packed = (tmp_path / f"a{suffix}{packing}").read_bytes()
    assert packed == (tmp_path / f"b{suffix}{packing}").read_bytes()
    unpack = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}.get(packing)
    if unpack is not None:
        assert unpack(packed) == (tmp_path / f"plain{suffix}").read_bytes()
    assert read_file(tmp_path / f"a{suffix}{packing}").tobytes() == MATRIX.tobytes()


def test_a_packed_file_that_breaks_off_leaves_nothing(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        open_sink(tmp_path / "f.csv.gz", rows=7, dim=4, dtype="float32") as sink,
    ):
        sink.write(MATRIX[:3])
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".vec", ".txt"])
def test_text_without_a_header(tmp_path, suffix):
    words = [f"w{n}" for n in range(len(MATRIX))]
    write_file(tmp_path / f"f{suffix}", MATRIX, "float32", keys=words, header=False)
    lines = (tmp_path / f"f{suffix}").read_text().splitlines()
    assert len(lines) == len(MATRIX) and lines[0].startswith("w0")
    with open_source(tmp_path / f"f{suffix}") as source:
        assert list(source.keys) == words and source.read_as.startswith("header no")
        assert np.concatenate(list(source.blocks())).tobytes() == MATRIX.tobytes()
    with pytest.raises(InvalidInputError, match="only files in text"):
        write_file(tmp_path / "f.npy", MATRIX, "float32", header=False)


# What can be read in two ways: file, text, and what decides it.
OPEN = {
    "digits above two columns": ("f.csv", "0,1\n0.5,0.25\n", {"header": False}),
    "whole numbers": ("f.txt", "5 7\n4 9\n3 8\n", {"key_column": False}),
    "numbers above whole numbers": ("f.csv", "0,1,2\n5,5,5\n5,5,5\n", {"header": True}),
    "two columns of texts": ("f.csv", "i,t,a\nx,y,0.5\nz,w,0.25\n", {"key_column": "i"}),
    "two ids": ("f.csv", "u,i,a\n1,7,0.5\n2,9,0.25\n", {"key_column": "u"}),
    "an index of ids in front of ids": (
        "f.csv",
        ",Unnamed: 0,a\n4,7,0.5\n9,8,0.25\n",
        {"key_column": "Unnamed: 0"},
    ),
    "whole numbers beside fractions": ("f.csv", "7,0.5\n9,1.5\n", {"key_column": 1}),
    "whole numbers with a name": ("f.csv", "z,a\n7,0.5\n9,1.5\n", {"key_column": "z"}),
    "one of them twice": ("f.csv", "z,a\n7,0.5\n7,1.5\n", {"key_column": False}),
    "years above words": ("f.csv", "x,2020,2021\na,0.5,0.25\n", {"header": True}),
    "words that are fractions": ("f.vec", "0.5 1.5\n2.5 3.5\n", {"key_column": False}),
    "words that are whole numbers": ("f.txt", "5 1.5\n2 3.5\n", {"key_column": 1}),
    "names after #": ("f.txt", "# a b\n0.5 1.5\n2.5 3.5\n", {"comment": "#"}),
    "a comment as long as a row": ("f.txt", "# a b\n0.5 1.5 2\n2.5 3.25 4.5\n", {"comment": "#"}),
    "an index of ids in front of an index": (
        "f.csv",
        ",Unnamed: 0,a\n0,7,0.5\n1,8,0.25\n",
        {"key_column": "Unnamed: 0"},
    ),
    "a number beside numbered ones": (
        "f.csv",
        "s,x0,x1\n0.5,0.25,0.5\n",
        {"vector": ("x0..x1",)},
    ),
    "counts of one number": ("f.txt", "3 1\n5 0.5\n6 1.5\n", {"skip_lines": 1, "key_column": 1}),
    "a key with a colon": ("f.csv", "a:1,0.5\nb:2,1.5\n", {"key_column": 1}),
    "a key that is a list": ("f.csv", "1 2,0.5,1\n3 4,1.5,2\n", {"key_column": 1}),
    "two indexes without names": ("f.csv", "0,0,0.5\n1,1,1.5\n2,2,2.5\n", {"key_column": 1}),
    "thousands": ("f.csv", "a;b\n1,234;0\n2,345;1\n", {"decimal": ",", "key_column": False}),
    "thousands as keys": ("f.csv", 'a,b\n"1,234",0.5\n"2,345",1.5\n', {"key_column": 1}),
    "an id with a letter": ("f.csv", "1,0.5\n2,0.25\n3x,0.125\n", {"key_column": 1}),
    "a line of whole numbers": ("f.csv", "4,5,7\n", {"header": False, "key_column": False}),
    "a float in the header": ("f.csv", "a,0.5\n1.5,0.25\n2,0.75\n", {"header": True}),
    "years above fractions": ("f.csv", "2010,2015\n0.5,0.25\n1.5,2.5\n", {"header": True}),
    "ids with a point": ("f.csv", "id,a\n7.0,0.5\n9.0,1.5\n", {"key_column": "id"}),
    "a year above one column": ("f.csv", "2019\n0.5\n1.5\n", {"header": True}),
    "a year beside a name": ("f.tsv", "day\t2019\nmon\t-2.5\ntue\t0.5\n", {"header": True}),
    "a German row": ("f.csv", "0;2;0,2470\n", {"sep": ";", "key_column": 1}),
    "half a header": ("f.csv", "0.5,b,c\n1.5,2.5,0.1\n2.5,0.5,0.2\n", {"header": True}),
}


@pytest.mark.parametrize("case", OPEN)
def test_what_can_be_read_in_two_ways_is_refused(tmp_path, case):
    name, text, decided = OPEN[case]
    (tmp_path / name).write_text(text)
    with pytest.raises(AmbiguousFileError, match=r": say .* or .*") as raised:
        open_source(tmp_path / name)
    assert "\n  --" in str(raised.value)  # the first rows as an option reads them
    with open_source(tmp_path / name, text=TextOptions(**decided)) as source:
        assert sum(map(len, source.blocks())) == source.rows > 0


@pytest.mark.parametrize("chosen", [False, "Unnamed: 0", 1])
def test_an_index_beside_the_keys_is_left_out_with_a_note(tmp_path, chosen):
    text = table(indexed(ROWS), header=["", "Unnamed: 0", *NAMES], index=range(7))
    (tmp_path / "f.csv").write_text(text)
    with open_source(tmp_path / "f.csv", text=TextOptions(key_column=chosen)) as source:
        assert source.keys is None
        (note,) = [each for each in source.notes if each.startswith("columns not read")]
        left_out = {False: "1, Unnamed: 0", "Unnamed: 0": "1", 1: "Unnamed: 0"}
        assert note == f"columns not read, as they number or name the rows: {left_out[chosen]}"
        assert np.concatenate(list(source.blocks())).tobytes() == MATRIX.tobytes()


@pytest.mark.parametrize("ranks", [[1, 2, 3], [2, 2, 9]])
def test_whole_numbers_beside_words_are_numbers(tmp_path, ranks):
    lines = [f"{word},{rank},0.5" for word, rank in zip("xyz", ranks, strict=True)]
    (tmp_path / "f.csv").write_text("\n".join(["w,r,a", *lines]))
    with open_source(tmp_path / "f.csv") as source:
        assert list(source.keys) == ["x", "y", "z"] and source.notes == ()
        assert np.concatenate(list(source.blocks()))[:, 0].tolist() == ranks
    with open_source(tmp_path / "f.csv", text=TextOptions(key_column="r")) as source:
        assert list(source.keys) == ranks
        assert source.dim == 1 and source.notes == ("columns not read: w",)


@pytest.mark.parametrize("chosen", [None, "word"])
@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
@pytest.mark.parametrize("index", [[0, 1, 2, 3], [5, 9, 7, 6], [0, 0, 1, 1]])
def test_an_index_of_pandas_is_no_number_beside_whole_numbers(tmp_path, index, name, chosen):
    rows = [[word, n, 3 * n] for n, word in enumerate(WORDS[:4])]
    (tmp_path / "f.csv").write_text(table(rows, header=[name, "word", "0", "x"], index=index))
    with open_source(tmp_path / "f.csv", text=TextOptions(key_column=chosen)) as source:
        assert list(source.keys) == WORDS[:4]
        assert source.notes == (f"columns not read, as they number or name the rows: {name or 1}",)
        assert np.concatenate(list(source.blocks())).tolist() == [[n, 3 * n] for n in range(4)]


def test_an_index_of_pandas_is_no_number_of_rows_without_keys(tmp_path):
    (tmp_path / "f.csv").write_text(table([[1, 2], [3, 4]], header=["", "a", "b"], index=[7, 9]))
    with open_source(tmp_path / "f.csv", text=TextOptions(key_column=False)) as source:
        assert source.keys is None and source.dim == 2
        assert source.notes == ("columns not read, as they number or name the rows: 1",)


@pytest.mark.parametrize("ids", [[11, 25, 33], [1, 2, 3], [7, 7, 8]])
@pytest.mark.parametrize("values", [[[1.5, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [5, 7]]])
@pytest.mark.parametrize("last", [False, True])
def test_a_column_with_the_name_of_keys_is_the_keys(tmp_path, last, values, ids):
    header, rows = ["name", "x", "y"], indexed(values, WORDS)
    if last:
        text = table([[*row, n] for row, n in zip(rows, ids, strict=True)], header=[*header, "id"])
    else:
        text = table(rows, header=["id", *header], index=ids)
    (tmp_path / "f.csv").write_text(text)
    with open_source(tmp_path / "f.csv") as source:
        assert list(source.keys) == ids
        assert np.concatenate(list(source.blocks())).tolist() == values
        assert source.notes == ("columns not read: name",)
    with open_source(tmp_path / "f.csv", text=TextOptions(key_column="name")) as source:
        assert list(source.keys) == WORDS[:3]
        assert np.concatenate(list(source.blocks())).tolist() == values
        (note,) = source.notes
        assert note == (
            "columns not read, as they number or name the rows: id; for keys from it say "
            "--key-column id (key_column='id')"
        )


def test_ids_beside_an_index_without_a_name_are_the_keys(tmp_path):
    (tmp_path / "f.csv").write_text(",id,a\n4,70,0.5\n9,80,0.25\n")
    with open_source(tmp_path / "f.csv") as source:
        assert (list(source.keys), source.dim) == ([70, 80], 1)
        assert source.notes == ("columns not read, as they number or name the rows: 1",)
    with open_source(tmp_path / "f.csv", text=TextOptions(key_column=1)) as source:
        assert (list(source.keys), source.dim) == ([4, 9], 1)


def test_an_id_alone_is_no_row(tmp_path):
    (tmp_path / "f.csv").write_text("word,id\nx,4\ny,9\n")
    with pytest.raises(FormatError, match="no column of numbers"):
        open_source(tmp_path / "f.csv")


TEXTS = "\nx,y,0.5\nz,w,0.25\n"
NONE = "--key-column none (key_column=False)"

# Files that ask for the column of keys, and the two ways that they advise.
ADVICE = {
    "no name": ("t,,a" + TEXTS, "--key-column t (key_column='t')", "--key-column 2 (key_column=2)"),
    "a blank": (
        "my word,it's,a" + TEXTS,
        "--key-column 'my word' (key_column='my word')",
        """--key-column 'it'"'"'s' (key_column="it's")""",
    ),
    "one name twice": (
        "t,t,a" + TEXTS,
        "--key-column t (key_column='t')",
        "--key-column 2 (key_column=2)",
    ),
    "a name that says none": (
        "none,b,a" + TEXTS,
        "--key-column 1 (key_column=1)",
        "--key-column b (key_column='b')",
    ),
    "a number that names another": (
        "none,b,a,1\nx,y,0.5,1\nz,w,0.25,1\n",
        "key_column=1 (in Python)",
        "--key-column b (key_column='b')",
    ),
    "whole numbers": (
        "the u,i,a\n1,7,0.5\n2,9,0.25\n",
        "--key-column 'the u' (key_column='the u')",
        NONE,
    ),
    "ids with a point": (
        "the id,a\n7.0,0.5\n9.0,1.5\n",
        "--key-column 'the id' (key_column='the id')",
        NONE,
    ),
    "a list": (
        'the k,t,v\nx,y,"[1,2]"\nz,w,"[3,4]"\n',
        "--key-column 'the k' (key_column='the k')",
        NONE,
    ),
    "a list beside columns without names": (
        ',,v\nx,y,"[1,2]"\nz,w,"[3,4]"\n',
        "--key-column 1 (key_column=1)",
        "--key-column 2 (key_column=2)",
    ),
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice_can_be_typed(tmp_path, case):
    text, one, other = ADVICE[case]
    (tmp_path / "f.csv").write_text(text)
    with pytest.raises(AmbiguousFileError) as raised:
        open_source(tmp_path / "f.csv")
    assert str(raised.value).partition("\n")[0].endswith(f": say {one} or {other}")


def test_powers_too_large_for_ids_are_numbers(tmp_path):
    (tmp_path / "f.csv").write_text("0.12,1e300\n0.25,2e300\n")
    with open_source(tmp_path / "f.csv", text_dtype="float64") as source:
        assert source.keys is None
        assert np.concatenate(list(source.blocks())).tolist() == [[0.12, 1e300], [0.25, 2e300]]


THOUSANDS = "its points divide thousands: write numbers without them, as 1234,5"


def test_thousands_of_german_sheets_are_refused_with_a_sentence(tmp_path):
    (tmp_path / "f.csv").write_text(";a;b\nx;1.234,5;2,5\ny;1,5;2,5\n")
    for options in ({}, {"sep": ";", "decimal": ","}):
        with pytest.raises(FormatError, match=f"line 2, column 2: '1.234,5' is no.*{THOUSANDS}"):
            read_file(tmp_path / "f.csv", text=TextOptions(**options))
    lines = "".join(f"w{n};1,5;{n},25\n" for n in range(2000))
    (tmp_path / "f.csv").write_text(f";a;b\n{lines}x;1.234,5;2,5\n")
    with pytest.raises(FormatError, match=f"line 2002, column 2.*1.234,5.*{THOUSANDS}"):
        read_file(tmp_path / "f.csv")
    (tmp_path / "f.csv").write_text(";a;b\nx;1234,5;2,5\ny;1,5;2,5\n")
    for options in ({}, {"sep": ";", "decimal": ","}):
        found = read_file(tmp_path / "f.csv", text=TextOptions(**options))
        assert found.tolist() == [[1234.5, 2.5], [1.5, 2.5]]


@pytest.mark.parametrize("cell", ["1_000", "0x10", "1,000"])
def test_numbers_of_other_notations_are_not_read_as_numbers(tmp_path, cell):
    for row in (0, 1):
        rows = [["0.5", "1.5"], ["2.5", "3.5"], ["4.5", "5.5"]]
        for column in (0, 1):
            rows[row][column] = f'"{cell}"' if "," in cell else cell
            (tmp_path / "f.csv").write_text("".join(",".join(each) + "\n" for each in rows))
            with pytest.raises(FormatError):
                read_file(tmp_path / "f.csv")


def test_whole_keys_that_were_written_as_fractions(tmp_path):
    """As pandas writes a column of ids once one was missing."""
    (tmp_path / "f.csv").write_text("id,a,b\n7.0,0.5,1\n-9.0,1.5,2\n123456789012.0,2.5,3\n")
    with open_source(tmp_path / "f.csv", text=TextOptions(key_column="id")) as source:
        assert source.keys.tolist() == [7, -9, 123456789012]
        assert np.concatenate(list(source.blocks())).tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
    with open_source(tmp_path / "f.csv", text=TextOptions(key_column=False)) as source:
        assert source.keys is None and source.dim == 3


def test_rows_that_look_like_names_of_columns(tmp_path):
    """A first row of zeros, or of numbers with a sign, is one of numbers."""
    for first in ("0,0,0", "3,-1,2", "5,5,7"):
        (tmp_path / "f.csv").write_text(f"{first}\n0.5,1.5,2.5\n1.5,2.5,3.5\n")
        assert read_file(tmp_path / "f.csv")[0].tolist() == [float(x) for x in first.split(",")]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_hundred_thousand_columns(tmp_path):
    rows = np.random.default_rng(3).standard_normal((3, 100_000)).astype("f4")
    header = ["id", *(f"f{n}" for n in range(100_000))]
    (tmp_path / "f.csv").write_text(table(rows.tolist(), header=header, index=list("abc")))
    assert read_file(tmp_path / "f.csv").tobytes() == rows.tobytes()


def test_errors_of_sheets_are_missing_numbers(tmp_path):
    (tmp_path / "f.csv").write_text("id,a\nx,0.5\ny,#DIV/0!\nz,1.5\n")
    with (
        pytest.raises(FormatError, match=r"line 3, column 2.*--null '#DIV/0!'"),
        open_source(tmp_path / "f.csv") as source,
    ):
        list(source.blocks())
    with open_source(tmp_path / "f.csv", text=TextOptions(null=("#DIV/0!",))) as source:
        assert np.isnan(np.concatenate(list(source.blocks()))[1, 0])


def test_latin_1_is_named_before_anything_else(tmp_path):
    """Whatever the separators would make of it."""
    text = 'Name;a\n"x, y";0,5\n\xe4;1,5\n"=""1""";2,5\n'
    (tmp_path / "f.csv").write_bytes(text.encode("latin1"))
    with pytest.raises(FormatError, match="line 3: byte 0xe4 is not UTF-8"):
        open_source(tmp_path / "f.csv")


def test_texts_beside_chosen_keys_are_left_out_with_a_note(tmp_path):
    (tmp_path / "f.csv").write_text("i,t,a\nx,y,0.5\nz,w,0.25\n")
    with open_source(tmp_path / "f.csv", text=TextOptions(key_column="t")) as source:
        assert source.notes == ("columns not read: i",)
        assert (source.dim, source.keys) == (1, ["y", "w"])


@pytest.mark.parametrize("where", [0, 3])
def test_missing_numbers_are_errors_that_name_the_cell_unless_asked_for(tmp_path, where):
    rows = [list(map(repr, row)) for row in ROWS]
    for text in ("", "NA", "NULL"):
        rows[where][1] = text
        (tmp_path / "f.csv").write_text("\n".join(map(",".join, rows)))
        with pytest.raises(FormatError, match=f"line {where + 1}, column 2: '{text}' is no number"):
            read_file(tmp_path / "f.csv")
        found = read_file(tmp_path / "f.csv", text=TextOptions(null=(text,)))
        expected = MATRIX.copy()
        expected[where, 1] = np.nan
        assert np.array_equal(found, expected, equal_nan=True)


def test_forms_of_nan_and_infinity(tmp_path):
    (tmp_path / "f.csv").write_text("0.5,nan\n1,NaN\n2,-nan\n3,inf\n4,-Infinity\n5,+1.5\n")
    column = read_file(tmp_path / "f.csv")[:, 1]
    assert np.isnan(column[:3]).all() and column[3:].tolist() == [np.inf, -np.inf, 1.5]


@pytest.mark.parametrize("large", ["1e300", "-1e39", "1e999"])
def test_values_too_large_are_counted(tmp_path, large):
    (tmp_path / "f.csv").write_text(f"0.5,inf\n1.5,{large}\n")
    with open_source(tmp_path / "f.csv") as source:
        for _ in range(2):
            assert np.isinf(next(iter(source.blocks()))[1, 1])
            assert source.overflowed == 1


def test_digits_that_float32_does_not_keep_are_noted(tmp_path):
    shortest = [[float(str(x)) for x in row] for row in MATRIX]
    nine = [[float(f"{x:.9g}") for x in row] for row in MATRIX.tolist()]
    few = [[float(f"{x:.4e}") for x in row] for row in (MATRIX / np.float64(3)).tolist()]
    for values, noted in (
        (MATRIX.astype(float).tolist(), False),
        (shortest, False),
        (nine, False),
        (few, False),
        ((MATRIX / np.float64(3)).tolist(), True),
    ):
        (tmp_path / "f.csv").write_text(table(values))
        with open_source(tmp_path / "f.csv") as source:
            assert any("--dtype float64" in note for note in source.notes) == noted
        with open_source(tmp_path / "f.csv", text_dtype="float64") as source:
            assert source.notes == ()


@pytest.mark.parametrize(
    "wrong",
    [{"header": 3}, {"key_column": True}, {"sep": ""}, {"sep": "ab"}, {"sep": "\n"},
     {"decimal": ";"}, {"decimal": ",", "sep": ","}],
)  # fmt: skip
def test_options_that_say_nothing(wrong):
    with pytest.raises(InvalidInputError):
        TextOptions(**wrong)


@pytest.mark.parametrize("key_column", ["nope", 6, 0])
def test_a_column_that_is_not_there(tmp_path, key_column):
    (tmp_path / "f.csv").write_text(table(ROWS, header=["id", *NAMES], index=WORDS))
    with pytest.raises(InvalidInputError, match="no column"):
        open_source(tmp_path / "f.csv", text=TextOptions(key_column=key_column))


def test_options_for_text_are_refused_elsewhere(tmp_path):
    np.save(tmp_path / "f.npy", MATRIX)
    with pytest.raises(InvalidInputError, match="no text"):
        open_source(tmp_path / "f.npy", text=TextOptions(header=True))


def spoiled(text: str, rng: np.random.Generator) -> str:
    """Put what one parser may take in another way at a random place."""
    odd = [
        "\r",
        "\t",
        " ",
        "  ",
        '"',
        '""',
        "_",
        "nan",
        "inf",
        "1e999",
        "+",
        ",",
        "\n\n",
        "\0",
        "٣",
    ]
    for _ in range(int(rng.integers(0, 3))):
        at = int(rng.integers(len(text) // 2, len(text)))
        text = text[:at] + str(rng.choice(odd)) + text[at:]
    return text


def outcome(path):
    """What reading gives: bits, overflow and keys, or the error."""
    try:
        with open_source(path) as source:
            blocks = [block.tobytes() for block in source.blocks()]
            keys = source.keys
            listed = None if keys is None else list(keys)
            return b"".join(blocks), source.overflowed, listed, source.read_as
    except FormatError as error:
        return str(error)


@pytest.mark.parametrize("cell", ["1e999", "-nan", "nan(1)", "inf", "-1e999", "1_0", "+1", ""])
def test_what_pyarrow_may_take_in_another_way_is_read_by_the_plain_reader(
    tmp_path, monkeypatch, cell
):
    pytest.importorskip("pyarrow")
    text = table(ROWS, index=WORDS)
    (tmp_path / "f.csv").write_text(text + f"last,1.5,2.5,3.5,{cell}\n")
    outcomes = []
    for least in (0, 1 << 60):
        monkeypatch.setattr(arrow, "MIN_BYTES", least)
        outcomes.append(outcome(tmp_path / "f.csv"))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("name", ["f.csv", "f.tsv", "f.vec", "f.txt"])
def test_pyarrow_and_the_plain_reader_read_the_same(tmp_path, monkeypatch, name):
    pytest.importorskip("pyarrow")
    path, parsed = tmp_path / name, 0
    for case in range(60):
        rng = np.random.default_rng([case, len(name), ord(name[-1])])
        rows, dim = int(rng.integers(3, 30)), int(rng.integers(2, 6))
        matrix = random_matrix(rows, dim, seed=case)
        if case % 2:
            matrix[~np.isfinite(matrix)] = 0.5
        sep = {"csv": ",", "tsv": "\t"}.get(name[2:], " ")
        end = str(rng.choice(["\n", "\r\n", f"{sep}\n"[-2 if sep == " " else -1 :]]))
        head = f"{rows} {dim}{end}" if name == "f.vec" else ""
        unfit = "" if sep == " " else '[",]'
        words = [re.sub(unfit, "", word) if unfit else word for word in random_words(rows)]
        if sep == " " and case % 4 == 1:
            words[rows // 2] = ". . ."
        lines = zip(words, matrix.astype("f8").tolist(), strict=True)
        text = head + "".join(f"{w}{sep}{sep.join(map(repr, row))}{end}" for w, row in lines)
        path.write_text(spoiled(text, rng) if case % 3 else text, encoding="utf-8", newline="")

        monkeypatch.setattr(arrow, "MIN_BYTES", 0)
        calls = []
        original = arrow.BlockParser.__call__

        def counted(self, block, original=original, calls=calls):
            found = original(self, block)
            calls.append(found is not None)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(arrow.BlockParser, "__call__", counted)
            fast = outcome(path)
        monkeypatch.setattr(arrow, "MIN_BYTES", 1 << 60)
        assert fast == outcome(path), (case, text[:200])
        parsed += any(calls)
    assert parsed > 5, "pyarrow was never used"


def test_no_thread_of_pyarrow_holds_a_block(tmp_path, monkeypatch):
    """It would release it without the interpreter, perhaps after its end: the process aborts."""
    pytest.importorskip("pyarrow")
    held = []
    original = arrow.BlockParser.__call__

    def counted(self, block):
        before = sys.getrefcount(block)
        found = original(self, block)
        held.append((found is not None, sys.getrefcount(block) - before))
        return found

    monkeypatch.setattr(arrow, "MIN_BYTES", 0)
    monkeypatch.setattr(arrow.BlockParser, "__call__", counted)
    np.savetxt(
        tmp_path / "f.csv", np.random.default_rng(0).standard_normal((3_000, 8)), delimiter=","
    )
    for _ in range(8):
        with open_source(tmp_path / "f.csv") as source:
            assert sum(len(block) for block in source.blocks()) == 3_000
    assert len(held) >= 8
    assert set(held) == {(True, 0)}


IMPORTS = """
import sys
from tierstore._formats import open_source
with open_source(sys.argv[1]) as source:
    for block in source.blocks():
        pass
print(" ".join(sys.modules))
"""


def test_text_is_read_without_pandas(tmp_path):
    """Which pyarrow imports by itself in many of its methods: half a second."""
    pytest.importorskip("pyarrow")
    np.savetxt(
        tmp_path / "f.csv", np.random.default_rng(0).standard_normal((3_000, 8)), delimiter=","
    )
    command = [sys.executable, "-c", IMPORTS, str(tmp_path / "f.csv")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = done.stdout.split()
    assert "pyarrow.csv" in modules
    assert "pandas" not in modules


def test_words_that_number_the_rows_are_left_out_with_a_note(tmp_path):
    (tmp_path / "f.csv").write_text(table(ROWS, header=["", *NAMES], index=range(len(ROWS))))
    with open_source(tmp_path / "f.csv") as source:
        assert source.keys is None
        assert (source.notes, source.numbering) == ((), "column 1")
    note = "column 1 numbers the rows from 0, as ids do: no keys are stored"
    assert preview(tmp_path / "f.csv").notes == (note,)
    assert import_table(tmp_path / "s.tier", tmp_path / "f.csv").notes == (note,)
    (tmp_path / "g.csv").write_text(table(ROWS, header=["", *NAMES], index=range(1, len(ROWS) + 1)))
    with open_source(tmp_path / "g.csv") as source:
        assert list(source.keys) == list(range(1, len(ROWS) + 1)) and source.notes == ()


def test_bytes_of_another_encoding_are_named(tmp_path):
    (tmp_path / "f.csv").write_bytes("word,a\ncafé,0.5\nthé,1.5\n".encode("latin-1"))
    with pytest.raises(FormatError, match=r"line 2: byte 0xe9 is not UTF-8.* iconv"):
        open_source(tmp_path / "f.csv")


def test_a_list_behind_a_key_loses_no_number(tmp_path):
    """KEY and v1,v2,… with two kinds of marks, as Hive and Spark write them: right or refused."""
    for name in ("f.txt", "f.tsv", "f.csv", "f.vec"):
        for outer in "\t:| ;,":
            for inner in ",; ":
                for key in ("u{}", "7{}"):
                    lines = [f"{key.format(n)}{outer}0.5{inner}1.5{inner}-2.5" for n in range(3)]
                    (tmp_path / name).write_text("\n".join(lines) + "\n")
                    try:
                        with open_source(tmp_path / name) as source:
                            rows = np.concatenate(list(source.blocks()))
                            keys = list(map(str, () if source.keys is None else source.keys))
                    except FormatError:
                        continue
                    assert rows.tolist() == [[0.5, 1.5, -2.5]] * 3, (name, lines)
                    assert keys == [key.format(n) for n in range(3)]


@pytest.mark.parametrize("ids", [[500, 501, 502], [500, 501, 500], [7, 7, 7]])
@pytest.mark.parametrize("name", ["id", "item_id", "word", "key", "user"])
def test_ids_are_keys_however_often_they_come(tmp_path, name, ids):
    (tmp_path / "f.csv").write_text(table([[0.5, 1.5]] * 3, header=[name, "a", "b"], index=ids))
    with open_source(tmp_path / "f.csv") as source:
        assert source.keys.tolist() == ids and source.dim == 2
    if len(set(ids)) < 3:
        with pytest.raises(InvalidInputError, match=r"distinct.*--duplicates"):
            import_table(tmp_path / "s.tier", tmp_path / "f.csv")
        done = import_table(tmp_path / "s.tier", tmp_path / "f.csv", duplicates="first")
        assert (done.dim, done.keys, done.rows) == (2, True, len(set(ids)))


@pytest.mark.parametrize("cell", ["[0.5 1.5]", "[0.5, 1.5]", "{0.5,1.5}", "(0.5, 1.5)", "0.5 1.5",
                                  "[0.5\n 1.5]", "0.5;1.5"])  # fmt: skip
def test_a_cell_that_is_a_vector_is_no_key(tmp_path, cell):
    (tmp_path / "f.csv").write_text(table([[cell]] * 3, header=["id", "v"], index=[7, 8, 9]))
    with open_source(tmp_path / "f.csv") as source:
        assert source.keys.tolist() == [7, 8, 9]
        assert np.concatenate(list(source.blocks())).tolist() == [[0.5, 1.5]] * 3
    (tmp_path / "f.tsv").write_text("uid:token\temb:float_seq\n7\t0.5 1.5\n8\t2.5 3.5\n")
    with pytest.raises(AmbiguousFileError, match=r"--key-column uid:token: '7' → 0.5 1.5"):
        open_source(tmp_path / "f.tsv")


def test_lines_can_be_left_out(tmp_path):
    rows = "a 0.5 1.5\nb 2.5 3.5\n"
    for text, options in [
        (f"2 2 9 8\n{rows}", {"skip_lines": 1}),
        (f"made by x and y\n\n{rows}", {"skip_lines": 1}),
        (f"# one\n# two words\n{rows}# end\n", {"comment": "#"}),
        ("%\n" + rows.replace("b", "% 5 6 7 8\nb"), {"comment": "%"}),
    ]:
        (tmp_path / "f.txt").write_text(text)
        with pytest.raises(FormatError):
            read_file(tmp_path / "f.txt")
        with open_source(tmp_path / "f.txt", text=TextOptions(**options)) as source:
            assert np.concatenate(list(source.blocks())).tolist() == [[0.5, 1.5], [2.5, 3.5]]
            assert list(source.keys) == ["a", "b"]
    (tmp_path / "f.txt").write_text(f"# one\n# two words\n{rows}c 1 x\n")
    with (
        pytest.raises(FormatError, match="line 5, column 3: 'x'"),
        open_source(tmp_path / "f.txt", text=TextOptions(comment="#")) as source,
    ):
        list(source.blocks())


def test_the_columns_of_the_row_can_be_named(tmp_path):
    text = table([[1.5, 2.5, 0.5, "t"]] * 2, header=["id", "x", "y", "z", "title"], index=[7, 8])
    (tmp_path / "f.csv").write_text(text)
    for vector, columns in [(("x", "z"), [0, 2]), (("x..y",), [0, 1]), ((4,), [2])]:
        with open_source(tmp_path / "f.csv", text=TextOptions(vector=vector)) as source:
            found = np.concatenate(list(source.blocks()))
            assert found.tolist() == [[[1.5, 2.5, 0.5][at] for at in columns]] * 2
            assert source.keys.tolist() == [7, 8]
            assert "columns not read: " in source.notes[0] and "title" in source.notes[0]
    done = import_table(tmp_path / "s.tier", tmp_path / "f.csv", vector="y,z")
    assert done.dim == 2
    for vector in [("title",), ("x", "x"), ("none",), ("z", "x"), ("id",), (9,)]:
        with pytest.raises(InvalidInputError):
            open_source(tmp_path / "f.csv", text=TextOptions(vector=vector, key_column="id"))


def test_numbered_columns_are_the_row(tmp_path):
    """A column of whole numbers beside them is none of its elements."""
    text = "item_id,dim_0,dim_1,label\n5,0.5,1,1\n6,2.5,3,1\n"
    (tmp_path / "f.csv").write_text(text)
    with open_source(tmp_path / "f.csv") as source:
        assert np.concatenate(list(source.blocks())).tolist() == [[0.5, 1], [2.5, 3]]
        assert source.notes == ("columns not read: label",) and source.keys.tolist() == [5, 6]


def test_a_number_in_another_notation_is_no_header(tmp_path):
    (tmp_path / "f.csv").write_text("0x1p-3\n0.5\n")
    with pytest.raises(AmbiguousFileError, match="another notation"):
        open_source(tmp_path / "f.csv")
