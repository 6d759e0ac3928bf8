""".csv and .tsv: tables of numbers with and without headers and keys."""

import csv
import random

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, random_words, read_file, read_keys_of, write_file
from tierstore._formats import open_source
from tierstore.errors import FormatError
from tierstore.importing import preview


@pytest.fixture
def matrix():
    return random_matrix(9, 3)


def write_table(path, matrix, *, header=None, keys=None, dialect="excel", **options):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, dialect, **options)
        if header:
            writer.writerow(header)
        for number, row in enumerate(matrix.tolist()):
            writer.writerow(row if keys is None else [keys[number], *row])


@pytest.mark.parametrize(("suffix", "dialect"), [(".csv", "excel"), (".tsv", "excel-tab")])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("dim", [1, 3])
def test_numbers_alone(tmp_path, suffix, dialect, end, dim):
    matrix, path = random_matrix(9, dim), tmp_path / f"file{suffix}"
    for header in (None, [f"dim{i}" for i in range(dim)]):
        write_table(path, matrix, header=header, dialect=dialect, lineterminator=end)
        assert read_file(path, block_rows=4).tobytes() == matrix.tobytes()
        assert read_keys_of(path) is None


@pytest.mark.parametrize("name", ["", "id", "Key", "word", "index", "item_id"])
@pytest.mark.parametrize("keys", [random_words(9), list(range(5, 14))], ids=["str", "int"])
def test_a_header_names_the_column_of_keys(tmp_path, matrix, name, keys):
    write_table(tmp_path / "file.csv", matrix, header=[name, "a", "b", "c"], keys=keys)
    assert read_file(tmp_path / "file.csv").tobytes() == matrix.tobytes()
    assert list(read_keys_of(tmp_path / "file.csv")) == keys


@pytest.mark.parametrize("header", [None, ["title", "a", "b", "c"]])
def test_words_in_the_first_column_are_keys(tmp_path, matrix, header):
    keys = random_words(9)
    write_table(tmp_path / "file.csv", matrix, header=header, keys=keys)
    assert read_file(tmp_path / "file.csv").tobytes() == matrix.tobytes()
    assert read_keys_of(tmp_path / "file.csv") == keys


@pytest.mark.parametrize("header", [["id", "a", "b", "c"], ["a", "b", "c", "user"]])
def test_whole_numbers_with_the_name_of_keys(tmp_path, matrix, header):
    keys, path = list(range(40, 49)), tmp_path / "file.csv"
    rows = [[key, *row] for key, row in zip(keys, matrix.tolist(), strict=True)]
    if header and header[-1] == "user":
        rows = [[*row[1:], row[0]] for row in rows]
    lines = [",".join(map(repr, row)) for row in rows]
    path.write_text("\n".join([",".join(header or []), *lines]))
    assert read_file(path).tobytes() == matrix.tobytes()
    assert list(read_keys_of(path)) == keys


def test_quoted_keys(tmp_path, matrix):
    keys = ['a,"b"', "line\nend", " space ", "", *random_words(5)]
    write_table(tmp_path / "file.csv", matrix, keys=keys)
    assert read_keys_of(tmp_path / "file.csv") == keys
    assert read_file(tmp_path / "file.csv", block_rows=2).tobytes() == matrix.tobytes()


def test_keys_with_quotes_in_tsv(tmp_path, matrix):
    keys = ['"open', '"a"', "''", 'x"y', "a,b", "", " ", "nan", "1e5"]
    write_file(tmp_path / "file.tsv", matrix, "float32", keys=keys)
    assert read_keys_of(tmp_path / "file.tsv") == keys
    assert read_file(tmp_path / "file.tsv").tobytes() == matrix.tobytes()


def test_empty_lines_and_a_mark_at_the_start_are_passed_over(tmp_path):
    (tmp_path / "file.csv").write_bytes(b"\xef\xbb\xbf1.5,2\r\n\r\n3,4.5\r\n\r\n")
    assert read_file(tmp_path / "file.csv").tolist() == [[1.5, 2], [3, 4.5]]


def test_what_is_written(tmp_path):
    matrix = np.array([[0.5, -1.0], [1 / 3, np.inf]], np.float32)
    write_file(tmp_path / "a.tsv", matrix, "float32", keys=["é x", "b"], field="exp_avg")
    expected = "key\texp_avg_0\texp_avg_1\né x\t0.5\t-1\nb\t0.333333343\tinf\n"
    assert (tmp_path / "a.tsv").read_text(encoding="utf-8") == expected
    quoted = np.array([[np.nan], [np.inf]], np.float32)
    write_file(tmp_path / "c.csv", quoted, "float32", keys=['say "hi"', "a,b"])
    expected = 'key,weight_0\n"say ""hi""",NaN\n"a,b",inf\n'
    assert (tmp_path / "c.csv").read_text() == expected
    write_file(tmp_path / "b.tsv", matrix, "float32")
    assert (tmp_path / "b.tsv").read_text().splitlines()[1] == "0\t0.5\t-1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("1.5,2\n3\n", "line 2 has 1 cell, but 2"),
        ("1.5,2\n3,4,5\n", "line 2 has 3 cells, but 2"),
        ("1.5,2.5\n3,\n", "line 2, column 2: '' is no number; .* --null ''"),
        ("1.5,2\n3,x\n", "line 2, column 2: 'x' is no number"),
        ("a,b\n1.5,2\n3,1_0\n", "line 3, column 2.*'1_0' is no number"),
        ("a,b\n1.5,2\n3,1\n4,\u0663\n", "line 4, column 2.*is no number"),
        ("a,b\nc,d\n", "line 1, column 1: 'a' is no number"),
        ("key\n", "no number"),
        ("key\na\nb\n", "line 1, column 1: 'key' is no number"),
        ("a,b\n", "line 1 holds texts alone, and no rows of numbers follow"),
        ('"open,1\n2,3\n', "table"),
        ('a"b"c,"d"e\n', "table"),
        ("1," * 3 + "x" * 200_000 + "\n", "table"),
    ],
)
def test_bad_tables_are_named_as_such(tmp_path, text, why):
    (tmp_path / "file.csv").write_text(text)
    with pytest.raises(FormatError, match=why):
        read_file(tmp_path / "file.csv")


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "file.csv").write_bytes(b"\xff\xfe1,2\n")
    with pytest.raises(FormatError):
        open_source(tmp_path / "file.csv")
    (tmp_path / "file.csv").write_bytes(b"1.5,2\n\xff,3\n")
    with pytest.raises(FormatError, match="line 2: byte 0xff is not UTF-8"):
        open_source(tmp_path / "file.csv")


@pytest.mark.parametrize("sep", ["\t", ",", ";", "|"])
def test_texts_that_the_csv_module_writes_are_read_back_or_refused(tmp_path, sep):
    """Quotes, separators and line ends in keys, in any column, with names above them or not."""
    rng, read = random.Random(sep), 0
    for number in range(60):
        ends = ["".join(rng.choices("ab\"\t,;|\n '", k=rng.randrange(4))) for _ in range(4)]
        names = [f"k{row}{end}" for row, end in enumerate(ends)]
        at, header = rng.randrange(3), rng.random() < 0.5
        rows = [[f"{row}.5", f"{row}.25"] for row in range(4)]
        for row, name in zip(rows, names, strict=True):
            row.insert(at, name)
        path = tmp_path / f"{number}.{'tsv' if sep == chr(9) else 'csv'}"
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter=sep, quoting=rng.choice(range(3)))
            writer.writerows([["a", "b", "c"], *rows] if header else rows)
        try:
            found = preview(path, rows=4)
        except FormatError:
            continue
        read += 1
        wanted = [[row + 0.5, row + 0.25] for row in range(4)]
        assert (found.first.tolist(), list(found.keys)) == (wanted, names), path.read_text()
    assert read > 6
