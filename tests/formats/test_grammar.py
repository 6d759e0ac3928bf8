"""The grammar of text files: files made from it load as made, changed ones as a second reader says.

The second reader (plain_reader.py) was written from docs/text-files.md alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.plain_reader import Refused, read
from tierstore._formats import TextOptions, open_source
from tierstore.errors import FormatError

ALPHABET = [*"0123456789.,;|:\t -+e#xyid\n[]_", ". ", "id", "nan"]


def loaded(path: Path, **options: Any) -> tuple[Any, Any]:
    with open_source(path, text_dtype="float64", text=TextOptions(**options)) as source:
        blocks = list(source.blocks())
        rows = np.concatenate(blocks) if blocks else np.empty((0, source.dim))
        keys = source.keys
        if keys is None and source.numbering:
            keys = np.arange(source.rows)
        return rows, None if keys is None else [str(key) for key in keys]


def made(rng: np.random.Generator) -> tuple[str, str, list[list[float]], list[str] | None]:
    """A file from the grammar that has one reading: its name, text, rows and keys."""
    suffix = str(rng.choice(["csv", "tsv", "txt", "vec"]))
    rows, dim = int(rng.integers(2, 7)), int(rng.integers(2, 5))
    matrix = (rng.standard_normal((rows, dim)) * 10.0 ** rng.integers(-3, 4)).round(3) + 0.0005
    words = [f"{rng.choice(['a', 'né', '漢', 'x-'])}{n}w" for n in range(rows)]
    ids = [str(int(each)) for each in rng.permutation(rows * 3)[:rows] + 5]
    sep = {"csv": ",", "tsv": "\t"}.get(suffix, " ")
    decimal, header, keys, lists = ".", None, None, False
    style = int(rng.integers(0, 6))
    if suffix in ("txt", "vec"):
        if style == 0 and suffix == "txt":
            keys = None
        elif style in (1, 2):
            keys, header = (words, ids)[style - 1], f"{rows} {dim}"
        else:
            keys = words
    else:
        if suffix == "csv" and style in (0, 1):
            sep = str(rng.choice([";", "|", "\t"]))
            decimal = str(rng.choice([".", ","]))
        lists = style == 2
        names = ["vector"] if lists else [f"x{n}" for n in range(dim)]
        if style in (3, 4):
            keys = (words, ids)[style - 3]
            header = sep.join([str(rng.choice(["id", "key", "item_id"])), *names])
        elif style == 5:
            keys = words
        elif lists:
            keys = (words, ids)[int(rng.integers(2))]
    lines = [] if header is None else [header]
    for n, row in enumerate(matrix.tolist()):
        cells = [repr(round(value, 4)).replace(".", decimal) for value in row]
        if lists:
            cells = [f"[{';'.join(cells)}]"]
        lines.append(sep.join(cells if keys is None else [keys[n], *cells]))
    values = [[float(repr(round(value, 4))) for value in row] for row in matrix.tolist()]
    return f"f.{suffix}", "\n".join(lines) + "\n", values, keys


def changed(text: str, rng: np.random.Generator) -> str:
    """The text with one character changed, added or removed."""
    at = int(rng.integers(len(text)))
    new = str(rng.choice(ALPHABET))
    return (
        text[:at] + new + text[at + 1 :],
        text[:at] + new + text[at:],
        text[:at] + text[at + 1 :],
    )[int(rng.integers(3))]


def compare(path: Path, text: str) -> bool:
    """Whether the file loads; it must be as the second reader says, which may refuse it."""
    path.write_text(text, encoding="utf-8", newline="")
    try:
        expected: Any = read(path.name, text)
    except Refused as error:
        expected = error
    try:
        rows, keys = loaded(path)
    except FormatError as error:
        assert isinstance(expected, Refused), (text, expected, str(error))
        return False
    assert not isinstance(expected, Refused), (text, rows.tolist(), keys, str(expected))
    assert np.array_equal(rows, np.array(expected[0]), equal_nan=True), (text, rows, expected)
    assert keys == expected[1], (text, keys, expected)
    return True


def check(tmp_path: Path, first: int, count: int) -> None:
    kept = 0
    for case in range(first, first + count):
        rng = np.random.default_rng([5, case])
        name, text, values, keys = made(rng)
        (tmp_path / name).write_text(text, encoding="utf-8")
        rows, found = loaded(tmp_path / name)
        assert rows.tolist() == values and found == keys, (case, text)
        assert read(name, text) == (values, keys), (case, text)
        for _ in range(3):
            kept += compare(tmp_path / name, changed(text, rng))
    assert count / 2 < kept < 3 * count


def test_files_of_the_grammar_and_files_one_character_away(tmp_path: Path) -> None:
    check(tmp_path, 0, 120)


@pytest.mark.slow
@pytest.mark.nightly
def test_many_files_of_the_grammar(tmp_path: Path) -> None:
    check(tmp_path, 1_000, 20_000)
