""".csv and .tsv: tables of numbers with and without headers and keys."""

import csv

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, random_words, read_file, read_keys_of, write_file
from tierstore._formats import open_sink, open_source
from tierstore.errors import FormatError, InvalidInputError


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


def test_numbers_in_a_column_without_a_name_are_values(tmp_path, matrix):
    write_table(tmp_path / "file.csv", matrix, keys=list(range(9)))
    assert read_file(tmp_path / "file.csv").shape == (9, 4)
    write_table(tmp_path / "file.csv", matrix, keys=list(range(9)), header=["x", "a", "b", "c"])
    assert read_file(tmp_path / "file.csv").shape == (9, 4)


def test_quoted_keys(tmp_path, matrix):
    keys = ['a,"b"', "line\nend", " space ", "", *random_words(5)]
    write_table(tmp_path / "file.csv", matrix, keys=keys)
    assert read_keys_of(tmp_path / "file.csv") == keys
    assert read_file(tmp_path / "file.csv", block_rows=2).tobytes() == matrix.tobytes()


def test_quotes_mean_nothing_in_tsv(tmp_path, matrix):
    keys = ['"open', '"a"', "''", 'x"y', "a,b", "", " ", "nan", "1e5"]
    write_file(tmp_path / "file.tsv", matrix, "float32", keys=keys)
    assert read_keys_of(tmp_path / "file.tsv") == keys
    assert read_file(tmp_path / "file.tsv").tobytes() == matrix.tobytes()


def test_empty_lines_and_a_mark_at_the_start_are_passed_over(tmp_path):
    (tmp_path / "file.csv").write_bytes(b"\xef\xbb\xbf1,2\r\n\r\n3,4\r\n\r\n")
    assert read_file(tmp_path / "file.csv").tolist() == [[1, 2], [3, 4]]


def test_what_is_written(tmp_path):
    matrix = np.array([[0.5, -1.0], [1 / 3, np.inf]], np.float32)
    write_file(tmp_path / "a.tsv", matrix, "float32", keys=["é x", "b"], field="exp_avg")
    expected = "key\texp_avg_0\texp_avg_1\né x\t0.5\t-1\nb\t0.333333343\tinf\n"
    assert (tmp_path / "a.tsv").read_text(encoding="utf-8") == expected
    write_file(tmp_path / "b.tsv", matrix, "float32")
    assert (tmp_path / "b.tsv").read_text().splitlines()[1] == "0\t0.5\t-1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("1,2\n3\n", "row 1 has 1 columns"),
        ("1,2\n3,4,5\n", "row 1 has 3 columns"),
        ("1,2\n3,\n", "row 1"),
        ("1,2\n3,x\n", "row 1"),
        ("a,b\nc,d\n", "row 0"),
        ("key\n", "1 to"),
        ("key\na\nb\n", "1 to"),
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
    with pytest.raises(FormatError, match="table"):
        open_source(tmp_path / "file.csv")


def test_csv_is_only_read(tmp_path):
    with (
        pytest.raises(InvalidInputError, match=r"\.tsv"),
        open_sink(tmp_path / "file.csv", rows=1, dim=1, dtype="float32"),
    ):
        pass
