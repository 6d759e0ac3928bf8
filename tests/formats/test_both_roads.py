"""Numbers and keys of text are the same with pyarrow and without it, and so are errors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore._formats import _arrow, open_source
from tierstore._formats._cells import first_cells
from tierstore._formats.delimited import format_rows
from tierstore.errors import FormatError

KEYS = ("a", "b c", 'q"u', "x,y", "é", "7", "", "\ttab", "'", "-1", "NA", "a\nb", "0x1")
MARKS = '",;\n\r\t a7.\\\x00é'


def read(path: Path) -> tuple[Any, ...]:
    try:
        with open_source(path) as source:
            keys = source.keys
            rows = b"".join(block.tobytes() for block in source.blocks())
            return (source.rows, source.dim, None if keys is None else list(keys), rows)
    except FormatError as error:
        return ("error", str(error))


def made(seed: int) -> tuple[str, bytes]:
    """Return the suffix and the text of a file, half of them with one character changed."""
    chance = random.Random(seed)
    suffix, sep = chance.choice([(".csv", ","), (".tsv", "\t"), (".vec", " ")])
    quotes = sep != " " and chance.random() < 0.7
    some = [key for key in KEYS if sep != " " or key.split() == [key]]
    lines = [sep.join(["key", "f0", "f1"])] if chance.random() < 0.5 and sep != " " else []
    for row in range(chance.randrange(2, 12)):
        key = f"k{row}" if chance.random() < 0.8 else chance.choice(some)
        needs = any(each in key for each in f'"\n{sep}')
        if quotes or needs:
            key = '"' + key.replace('"', '""') + '"' if sep != " " else key.replace('"', "")
        numbers = [chance.choice(["1.5", "-2", "1e5", "nan", " 3.25"]) for _ in range(2)]
        lines.append(sep.join([key, *(n.strip() if sep == " " else n for n in numbers)]))
    end = chance.choice(["\n", "\r\n"])
    text = end.join(lines) + end
    if chance.random() < 0.5:
        at = chance.randrange(len(text))
        text = text[:at] + chance.choice(MARKS) + text[at + chance.randrange(2) :]
    return suffix, text.encode()


def test_both_roads_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow.csv")
    monkeypatch.setattr(_arrow, "MIN_BYTES", 0)
    taken = 0
    parse = pyarrow.read_csv

    def counting(*given: Any, **named: Any) -> Any:
        nonlocal taken
        taken += 1
        return parse(*given, **named)

    monkeypatch.setattr(pyarrow, "read_csv", counting)
    for seed in range(120):
        suffix, text = made(seed)
        path = tmp_path / f"f{suffix}"
        path.write_bytes(text)
        with monkeypatch.context() as without:
            without.setattr(_arrow, "MIN_BYTES", 1 << 40)
            expected = read(path)
        assert read(path) == expected, (seed, text)
    assert taken > 40


def test_keys_in_quotes_are_as_long_as_their_lines() -> None:
    for block, simple in [
        (b'"a",1\n"b",2\n', True),
        (b'"a,b",1\n"",2\n', True),
        (b'"abc\n"d",",1\n', False),
        (b'"a",1\nb,2\n', False),
        (b'"a""b",1\n"c",2\n', False),
        (b'"a",1\n"b","2"\n', False),
        (b'"a";1\n', False),
        (b"a,1\n", False),
    ]:
        assert _arrow.only_keys_are_quoted(block, ",") is simple, block


def test_digits_that_pyarrow_writes_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow.csv")
    monkeypatch.setattr(_arrow, "MIN_BYTES", 0)
    chance = np.random.default_rng(7)
    for kind, bits in ((np.float32, np.uint32), (np.float64, np.uint64)):
        block = chance.integers(0, np.iinfo(bits).max, (2000, 5), bits).view(kind)
        block[:6] = np.array([0, -0.0, np.inf, -np.inf, np.nan, 2.0**-20])[:, None]
        text = _arrow.lines_of((), block, b";") or b""
        found = np.array([[float(n) for n in row.split(b";")] for row in text.splitlines()])
        assert np.array_equal(found.astype(kind), block, equal_nan=True), kind
        zeros = found == 0
        assert np.array_equal(np.signbit(found[zeros]), np.signbit(block[zeros])), kind


def test_digits_that_would_be_rounded_twice_are_written_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pyarrow.csv")
    monkeypatch.setattr(_arrow, "MIN_BYTES", 0)
    halfway = np.array([[0x15AE43FD, 0x3F800000]], np.uint32).view(np.float32)
    assert np.float32(float(str(halfway[0, 0]))) != halfway[0, 0], "no longer a case"
    assert _arrow.lines_of((), halfway, b",") is None
    (text,) = format_rows([b"k"], halfway, b",").splitlines()
    assert np.array_equal(np.array(text.split(b",")[1:], np.float64).astype("f4"), halfway[0])


def test_words_stand_before_their_numbers_on_all_roads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow.csv")
    monkeypatch.setattr(_arrow, "MIN_BYTES", 0)
    block = np.array([[0.5, 1.5], [np.nan, -2]], np.float32)
    for words in ([b"nan", b"e"], [b'"a""b"', b"nan"], ["é".encode(), b""], None):
        for nan in (b"nan", b"NaN"):
            numbers = [b"0.5,1.5\n", nan + b",-2\n"]
            lines = [word + b"," + row for word, row in zip(words or (), numbers, strict=False)]
            expected = b"".join(lines or numbers)
            assert format_rows(words, block, b",", nan=nan) == expected
            with monkeypatch.context() as plain:
                plain.setattr(_arrow, "MIN_BYTES", 1 << 40)
                assert format_rows(words, block, b",", nan=nan) == expected


def test_first_cells_are_those_of_plain_lines_alone() -> None:
    long = b"k" * 100
    packed = first_cells(b"a,1\n" + long + b",2\n,3\n", ",", 2)
    assert packed is not None
    cells, bounds = packed
    assert (cells, bounds.tolist()) == (b"a" + long, [0, 1, 101, 101])
    for block in (b"a,1\n\nb,2\n", b"a,1\nb\nc,2\n", b"a,1\nb\n", b'a,1\n"b",2\n', b"a,1\r\nb,2\n"):
        assert first_cells(block, ",", 2) is None, block
    for block in (b"a 1\n 2\n", b"a 1\nb c 2\n", b"a\t1\nb 2\n"):
        assert first_cells(block, " ", 2) is None, block
