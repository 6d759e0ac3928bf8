import itertools

import numpy as np
import pytest

from tierstore import _io
from tierstore._disk.keys import Keys, open_keys, write_keys
from tierstore.errors import (
    CorruptStoreError,
    InvalidInputError,
    InvalidTypeError,
    UnknownNameError,
)

INTS = [5, -3, 2**63 - 1, -(2**63), 0, 77]
TEXTS = ["a", "", "zwei Wörter", "漢字", "🙂", "a\0b", "new\nline"]


@pytest.fixture
def directory(tmp_path):
    with _io.Directory.open(tmp_path) as opened:
        yield opened


def opened(directory, info, rows) -> Keys:
    return Keys(open_keys(directory, info), info, rows)


def keys_of(directory, keys) -> Keys:
    return opened(directory, write_keys(directory, keys, len(keys)), len(keys))


@pytest.mark.parametrize("given", [INTS, TEXTS], ids=["int64", "str"])
def test_keys_by_row_and_rows_by_key(directory, given):
    keys = keys_of(directory, given)
    assert len(keys) == len(given)
    assert list(keys) == given
    assert [keys[row] for row in range(len(given))] == given
    assert list(keys[1:4]) == given[1:4]
    assert list(keys[np.array([3, 0, 3])]) == [given[3], given[0], given[3]]
    assert keys[-1] == given[-1]
    assert type(keys[0]) is type(given[0])
    assert keys.lookup(given[::-1]).tolist() == list(range(len(given)))[::-1]
    assert keys.lookup([given[:2], given[2:4]]).tolist() == [[0, 1], [2, 3]]
    assert keys.lookup([]).tolist() == []
    assert keys.lookup(given[2]).shape == ()


def test_many_keys(directory):
    rng = np.random.default_rng(1)
    ints = rng.permutation(50_000).astype(np.int64) * 97 - 10**6
    keys = keys_of(directory, ints)
    rows = rng.integers(0, 50_000, 2000)
    assert np.array_equal(keys.lookup(ints[rows]), rows)
    assert np.array_equal(keys[rows], ints[rows])


def test_texts_with_the_same_hash_are_told_apart(directory, monkeypatch):
    monkeypatch.setattr(
        "tierstore._disk.keys._hashes",
        lambda texts: np.array([len(text) for text in texts], np.int64),
    )
    keys = keys_of(directory, ["ab", "cd", "e", "fg"])
    assert keys.lookup(["fg", "ab", "e", "cd"]).tolist() == [3, 0, 2, 1]
    with pytest.raises(UnknownNameError, match="'xy'"):
        keys.lookup(["ab", "xy"])


def test_a_missing_key_is_named(directory):
    with pytest.raises(UnknownNameError, match=r"no row has the key 6"):
        keys_of(directory, INTS).lookup([5, 6, 8])
    with pytest.raises(KeyError):
        keys_of(directory, TEXTS).lookup(["b"])


def test_keys_are_asked_for_in_their_own_type(directory):
    with pytest.raises(InvalidTypeError, match="int64"):
        keys_of(directory, INTS).lookup(["5"])
    with pytest.raises(InvalidTypeError, match="strings"):
        keys_of(directory, TEXTS).lookup([5])


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ([1, 2, 1], InvalidInputError),
        (["a", "b", "a"], InvalidInputError),
        ([1, 2], InvalidInputError),
        ([1, 2, 3, 4], InvalidInputError),
        ([1, 2, 2**63], InvalidInputError),
        ([1, "a", 2], InvalidTypeError),
        ([1.0, 2.0, 3.0], InvalidTypeError),
        ([True, False, 2], InvalidTypeError),
        ([b"a", b"b", b"c"], InvalidTypeError),
        ([None, None, None], InvalidTypeError),
    ],
)
def test_keys_that_cannot_be(directory, keys, error):
    with pytest.raises(error):
        write_keys(directory, keys, 3)
    assert directory.names() == []


@pytest.mark.parametrize("given", [INTS, TEXTS], ids=["int64", "str"])
@pytest.mark.parametrize("change", ["cut", "flip", "gone"])
def test_damaged_keys_are_refused(directory, tmp_path, given, change):
    info = write_keys(directory, given, len(given))
    for name in info.files:
        path = tmp_path / name
        content = path.read_bytes()
        path.unlink()
        if change == "cut":
            path.write_bytes(content[:-1])
        elif change == "flip":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CorruptStoreError, match=name):
            opened(directory, info, len(given))
        path.write_bytes(content)
    with pytest.raises(CorruptStoreError):
        opened(directory, info, len(given) + 1)


def test_numpy_reads_the_files(directory, tmp_path):
    (name,) = write_keys(directory, INTS, len(INTS)).files
    assert np.load(tmp_path / name).tolist() == INTS
    names = write_keys(directory, TEXTS, len(TEXTS)).files
    (blob,) = ((tmp_path / name).read_bytes() for name in names if name.endswith("utf8"))
    (offsets,) = (np.fromfile(tmp_path / n, "<i8") for n in names if n.endswith("offsets"))
    assert [blob[a:b].decode() for a, b in itertools.pairwise(offsets)] == TEXTS
