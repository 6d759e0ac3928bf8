""".vec, .txt and .bin: the files of word2vec, fastText, GloVe and gensim."""

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, random_words, read_file, read_keys_of, write_file
from tierstore._formats import open_source
from tierstore.errors import FormatError, InvalidInputError


def lines_of(words, matrix, end="\n") -> str:
    return "".join(
        f"{word} {' '.join(repr(float(x)) for x in row)}{end}"
        for word, row in zip(words, matrix, strict=True)
    )


@pytest.fixture
def matrix():
    return random_matrix(9, 4)


@pytest.mark.parametrize("suffix", [".vec", ".txt"])
@pytest.mark.parametrize("head", ["", "9 4\n", "9 4 \r\n"], ids=["GloVe", "word2vec", "dos"])
@pytest.mark.parametrize("end", ["\n", " \n", "\r\n", "\n\n"])
def test_reads_the_text_of_all_tools(tmp_path, matrix, suffix, head, end):
    words, path = random_words(9), tmp_path / f"file{suffix}"
    path.write_text(head + lines_of(words, matrix, end), encoding="utf-8", newline="")
    assert read_file(path, block_rows=4).tobytes() == matrix.tobytes()
    assert read_keys_of(path) == words


def test_the_last_line_may_lack_its_end(tmp_path, matrix):
    (tmp_path / "file.txt").write_text(lines_of(random_words(9), matrix)[:-1], encoding="utf-8")
    assert read_file(tmp_path / "file.txt").tobytes() == matrix.tobytes()


def test_words_of_glove_that_hold_spaces(tmp_path, matrix):
    words = ["the", ". . .", "at name@domain.com", *random_words(6)]
    (tmp_path / "file.txt").write_text(lines_of(words, matrix), encoding="utf-8")
    assert read_file(tmp_path / "file.txt").tobytes() == matrix.tobytes()
    assert read_keys_of(tmp_path / "file.txt") == words


def test_words_that_are_whole_numbers_are_integer_keys(tmp_path, matrix):
    path = tmp_path / "file.vec"
    for words, expected in [
        (range(9), None),
        (range(1, 10), list(range(1, 10))),
        ([*range(8), 2**63 - 1], [*range(8), 2**63 - 1]),
        ([*range(8), 2**63], [*range(8), 2**63]),
        ([*range(8), 2**64 - 1], [*range(8), 2**64 - 1]),
        ([*range(8), 2**64], [*map(str, range(8)), str(2**64)]),
        ([*range(7), -1, 2**63], [*map(str, range(7)), "-1", str(2**63)]),
        ([*range(8), "08"], [*map(str, range(8)), "08"]),
        ([*range(8), "-0"], [*map(str, range(8)), "-0"]),
        ([*range(8), "٣"], [*map(str, range(8)), "٣"]),
    ]:
        path.write_text(lines_of(words, matrix), encoding="utf-8")
        found = read_keys_of(path)
        assert (None if found is None else list(found)) == expected


def test_text_is_float32_unless_asked(tmp_path):
    matrix = random_matrix(9, 4, "float64")
    write_file(tmp_path / "file.vec", matrix, "float64")
    assert read_file(tmp_path / "file.vec", text_dtype="float64").tobytes() == matrix.tobytes()
    with np.errstate(over="ignore"):
        assert read_file(tmp_path / "file.vec").tobytes() == matrix.astype("f4").tobytes()


def test_every_float32_survives_text(tmp_path):
    rng = np.random.default_rng(3)
    matrix = rng.integers(0, 2**32, (2000, 8), np.uint32).view(np.float32)
    matrix[np.isnan(matrix)] = np.nan
    write_file(tmp_path / "file.vec", matrix, "float32")
    found = read_file(tmp_path / "file.vec")
    assert np.array_equal(found.view(np.uint32), matrix.view(np.uint32))


@pytest.mark.parametrize("end", [b"", b"\n"], ids=["gensim", "word2vec"])
def test_reads_the_binary_form_of_all_tools(tmp_path, matrix, end):
    words = random_words(9)
    rows = zip(words, matrix, strict=True)
    body = b"".join(word.encode() + b" " + row.tobytes() + end for word, row in rows)
    (tmp_path / "file.bin").write_bytes(b"9 4\n" + body)
    assert read_file(tmp_path / "file.bin", block_rows=4).tobytes() == matrix.tobytes()
    assert read_keys_of(tmp_path / "file.bin") == words


def test_binary_rows_full_of_spaces_and_newlines(tmp_path):
    matrix = np.frombuffer(b" \n" * 2 * 9 * 4, "<f4").reshape(9, 4)
    write_file(tmp_path / "file.bin", matrix, "float32", keys=random_words(9))
    assert read_file(tmp_path / "file.bin").tobytes() == matrix.tobytes()
    assert read_keys_of(tmp_path / "file.bin") == random_words(9)


def test_binary_rows_across_the_borders_of_reads(tmp_path):
    matrix, words = random_matrix(4_000, 333), random_words(4_000)
    words[1_777] = "w" * 16_000
    write_file(tmp_path / "file.bin", matrix, "float32", keys=words, block_rows=999)
    assert read_file(tmp_path / "file.bin", block_rows=777).tobytes() == matrix.tobytes()
    assert read_keys_of(tmp_path / "file.bin") == words


def test_a_read_may_end_anywhere_in_a_binary_row(tmp_path, monkeypatch):
    matrix, words = random_matrix(60, 3), random_words(60)
    write_file(tmp_path / "file.bin", matrix, "float32", keys=words)
    monkeypatch.setattr("tierstore._formats.words.MAX_WORD_BYTES", 64)
    for nbytes in range(64, 96):
        monkeypatch.setattr("tierstore._formats.words._READ_BYTES", nbytes)
        assert read_file(tmp_path / "file.bin").tobytes() == matrix.tobytes()
        assert read_keys_of(tmp_path / "file.bin") == words


@pytest.mark.parametrize("suffix", [".vec", ".bin"])
def test_words_have_a_largest_length(tmp_path, matrix, suffix):
    with pytest.raises(InvalidInputError, match="16384"):
        write_file(tmp_path / f"f{suffix}", matrix, "float32", keys=[*"abcdefgh", "w" * 16_385])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("\n", "empty"),
        ("word\n", "line 1, column 1: 'word' is no number"),
        ("word 1 2\nother 1\n", "line 2 has 2 cells, but 3"),
        ("word 1 2\nother 1 two\n", "line 2, column 3: 'two' is no number"),
        ("word 1 2\nother 1 2_e\n", "line 2, column 3: '2_e' is no number"),
        ("word 1 2\n 1 2\n", "line 2 has 2 cells, but 3"),
        ("2 2\nword 1 2\n", "cannot hold"),
        ("2 2\nword 1 2\n\n\n\n\n\n\n\n", "1 rows"),
        ("1 2\nword 1 2\nother 1 2\n", "2 or more rows"),
        ("1 2\nword 1 2 3\n\n" + "other 1 2\n", "line 2 has more than 2 numbers: 'word 1'"),
        ("5 3\nword 1 2 3 4\n", "line 1 announces rows of a word and 3 numbers, but line 2 has 5"),
        ("999999999999999 300\nword 1 2\n", "announces .* but line 2 has 3 cells"),
        ("999999999999999 2\nword 1 2\n", "cannot hold"),
        ("3 0\nw\nw\nw\n", "no column of numbers"),
        ("1 999999999\n", "announces 1 rows of 999999999, but none follow"),
        ("0 999999999\n", "none follow"),
    ],
)
def test_bad_text_is_named_as_such(tmp_path, text, why):
    (tmp_path / "file.vec").write_text(text)
    with pytest.raises(FormatError, match=why):
        read_file(tmp_path / "file.vec")


def test_words_that_are_no_text(tmp_path):
    (tmp_path / "file.vec").write_bytes(b"1 2\n\xff\xfe 1 2\n")
    (tmp_path / "file.bin").write_bytes(b"1 1\n\xff\xfe 1234")
    for name, where in (("file.vec", "line 2"), ("file.bin", "row 0 is not UTF-8")):
        with pytest.raises(FormatError, match=where):
            read_keys_of(tmp_path / name)


def test_lines_have_a_largest_length(tmp_path, monkeypatch):
    from tierstore._formats import _cells

    monkeypatch.setattr(_cells, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(_cells, "BLOCK_BYTES", 50)
    lines = "".join(f"w{n} 1 2\n" for n in range(2000))
    (tmp_path / "file.vec").write_text("2001 2\n" + lines + "w" * 200 + " 1 2\n")
    with pytest.raises(FormatError, match="line 2002 or one after it has 100 bytes or more"):
        read_file(tmp_path / "file.vec")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"word 1 2\n", "two counts"),
        (b"1 2", "two counts"),
        (b"\xba\x16O/\x0c\0\0\0", "fastText"),
        (b"1 2\nword 1234567", "row 0"),
        (b"1 2\n 12345678x", "row 0"),
        (b"1 2\nw 12345678x", "extra bytes follow"),
        (b"1 2\nw 12345678\nx", "extra bytes follow"),
        (b"2 2\nw 12345678\n", "cannot hold"),
        (b"999999999999999 300\nw 12345678", "cannot hold"),
        (b"1 0\nw \n", "1 to"),
        (b"1 1\n" + b"w" * 70_000 + b" 1234", "row 0"),
    ],
)
def test_bad_binaries_are_named_as_such(tmp_path, content, why):
    (tmp_path / "file.bin").write_bytes(content)
    with pytest.raises(FormatError, match=why):
        read_file(tmp_path / "file.bin")


@pytest.mark.parametrize("end", [b"\n", b""], ids=["word2vec", "gensim"])
@pytest.mark.parametrize("numbers", [[1.0, 2.0], [-0.1, 0.3]])
def test_a_word_with_a_blank_is_refused_and_named(tmp_path, end, numbers):
    words = [b"one", b"new york", b"two", b"three"]
    rows = [word + b" " + np.array(numbers, "<f4").tobytes() + end for word in words]
    (tmp_path / "file.bin").write_bytes(b"4 2\n" + b"".join(rows))
    for read in (read_file, read_keys_of):
        with pytest.raises(FormatError, match="that of row 1, 'new', hold a blank"):
            read(tmp_path / "file.bin")
    (tmp_path / "file.bin").write_bytes(b"4 2\n" + b"".join(rows).replace(b"new ", b"new_"))
    assert read_keys_of(tmp_path / "file.bin") == ["one", "new_york", "two", "three"]


def test_a_source_that_is_only_opened_reads_no_rows(tmp_path):
    (tmp_path / "file.bin").write_bytes(b"1 2\nw 12345678")
    with open_source(tmp_path / "file.bin") as source:
        assert (source.rows, source.dim, source.dtype) == (1, 2, "float32")
