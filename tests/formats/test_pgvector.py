"""Lists of numbers in a cell, as pgvector writes them with COPY."""

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, random_words
from tierstore._formats import TextOptions, open_source
from tierstore.errors import AmbiguousFileError, FormatError

MATRIX = random_matrix(1200, 5)  # more than a sample
MATRIX[~np.isfinite(MATRIX)] = 1
LISTS = ["[" + ",".join(f"{x:.9g}" for x in row) + "]" for row in MATRIX.tolist()]
IDS = [7 + 3 * n for n in range(1200)]
WORDS = [word.replace('"', "'") for word in random_words(1200)]


def quoted(text):
    return f'"{text}"' if any(each in str(text) for each in ',"') else str(text)


def lines(*columns, sep=","):
    cell = quoted if sep == "," else str
    return "".join(sep.join(map(cell, row)) + "\n" for row in zip(*columns, strict=True))


def opened(path, text, **options):
    path.write_text(text)
    return open_source(path, text=TextOptions(**options))


@pytest.mark.variants(1, 3)
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("keys", [None, IDS, WORDS], ids=["none", "ids", "words"])
@pytest.mark.parametrize("sep", [",", "\t", ";"])
def test_a_list_is_a_row(tmp_path, header, keys, sep):
    columns = [LISTS] if keys is None else [keys, LISTS]
    head = ["embedding"] if keys is None else ["id", "embedding"]
    if sep == ";" and keys is WORDS:
        columns[0] = [word.replace(";", "") for word in WORDS]
    text = (sep.join(head) + "\n" if header else "") + lines(*columns, sep=sep)
    name = "f.tsv" if sep == "\t" else "f.csv"
    with opened(tmp_path / name, text, sep=None if keys else sep) as source:
        assert np.concatenate(list(source.blocks(100))).tobytes() == MATRIX.tobytes()
        assert (None if source.keys is None else list(source.keys)) == (keys and list(columns[0]))


@pytest.mark.slow
def test_only_the_numbers_of_the_list_are_values(tmp_path):
    text = "id,price,title,embedding\n" + lines(IDS, range(1200), WORDS, LISTS)
    with opened(tmp_path / "f.csv", text) as source:
        assert source.dim == 5 and list(source.keys) == IDS
        assert source.notes[0] == "columns not read: price, title"
    with opened(tmp_path / "f.csv", text, key_column="title") as source:
        assert list(source.keys) == WORDS
    with opened(tmp_path / "f.csv", text, key_column=False) as source:
        assert source.keys is None
    with pytest.raises(AmbiguousFileError, match="--key-column what"):
        opened(tmp_path / "f.csv", text.replace("id,", "what,", 1))


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("last", "why"),
    [
        ('7,""', r"line 1202, column 2 \(\"e\"\): '' is no number.*--null"),
        ('7,"[1,2]"', "line 1202 has a list of 2 numbers, but 5 were expected"),
        ('7,"[1,2,x,4,5]"', "'x' is no number"),
        ('7,"{1:2.5}/5"', "is no number"),
    ],
)
def test_other_cells_in_the_column_are_refused_by_line(tmp_path, last, why):
    text = "id,e\n" + lines(IDS, LISTS) + last + "\n"
    with pytest.raises(FormatError, match=why), opened(tmp_path / "f.csv", text) as source:
        list(source.blocks())


def test_rows_without_a_list_are_nan_where_it_is_said(tmp_path):
    text = "id,e\n" + lines(IDS, LISTS) + "7,\n"
    with opened(tmp_path / "f.csv", text, null=("",)) as source:
        found = np.concatenate(list(source.blocks()))
    assert found[:-1].tobytes() == MATRIX.tobytes() and np.isnan(found[-1]).all()
