import itertools

import numpy as np
import pytest

from tierstore import _io
from tierstore._checksum import crc32c
from tierstore._disk.key_index import KeyIndex
from tierstore._disk.keys import (
    Keys,
    indexed_keys,
    open_index,
    open_keys,
    write_index,
    write_keys,
)
from tierstore._keys.text import Texts
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


@pytest.mark.parametrize("length", [0, 3, 40, 300])
def test_texts_with_the_same_hash_are_told_apart(directory, monkeypatch, length):
    monkeypatch.setattr(Texts, "hashes", lambda texts: np.full(len(texts), 7, np.uint64))
    given = [("x" * length + end)[-length - 2 :] for end in ("ab", "cd", "e", "fg", "ab\0")]
    keys = keys_of(directory, given)
    assert keys.lookup(given[::-1]).tolist() == [4, 3, 2, 1, 0]
    with pytest.raises(UnknownNameError, match="xy'"):
        keys.lookup([given[0], "x" * length + "xy"])


def test_unknown_keys_get_a_number(directory):
    keys = keys_of(directory, TEXTS)
    assert keys.lookup([["a", "b"], ["漢字", "a\0"]], missing=-1).tolist() == [[0, -1], [3, -1]]
    keys = keys_of(directory, INTS)
    assert keys.lookup([5, 6, 2**70], missing=-7).tolist() == [0, -7, -7]


@pytest.mark.parametrize("given", [INTS, TEXTS, [*range(3), 2**64 - 1]], ids=["int", "str", "uint"])
def test_keys_are_a_sequence(directory, given):
    keys = keys_of(directory, given)
    assert all(key in keys and keys.index(key) == row for row, key in enumerate(given))
    for other in ("unknown", 4, 1.5, None, b"a", [given[0]], "\ud800", -5, 2**63 + 1):
        assert other not in keys
        assert keys.count(other) == 0
        with pytest.raises(ValueError, match="is not in"):
            keys.index(other)


def test_large_unsigned_keys(directory):
    given = np.array([2**64 - 1, 0, 2**63, 5], np.uint64)
    keys = keys_of(directory, given)
    assert keys.kind == "uint64"
    assert list(keys) == given.tolist()
    assert keys.lookup(given[::-1]).tolist() == [3, 2, 1, 0]
    assert keys.lookup([2**63, 5]).tolist() == [2, 3]
    assert keys.lookup(np.array([-1, 5]), missing=-1).tolist() == [-1, 3]
    small = keys_of(directory, given[[1, 3]])
    assert small.kind == "int64"
    assert small.lookup(given, missing=-1).tolist() == [-1, 0, -1, 1]


def test_repeated_keys_are_named_with_both_rows(directory):
    with pytest.raises(InvalidInputError, match="'b' occurs more than once: rows 1 and 3"):
        write_keys(directory, ["a", "b", "c", "b", "a"], 5)
    with pytest.raises(InvalidInputError, match="-7 occurs more than once: rows 0 and 2"):
        write_keys(directory, np.array([-7, 1, -7]), 3)


@pytest.mark.parametrize("given", [INTS, TEXTS], ids=["int64", "str"])
@pytest.mark.parametrize("change", ["cut", "flip", "gone", "other"])
def test_a_damaged_index_is_built_anew(directory, tmp_path, given, change):
    info = write_keys(directory, given, len(given))
    other = write_keys(directory, given[::-1], len(given))
    path = tmp_path / info.index
    sound = path.read_bytes()
    path.unlink()
    if change == "cut":
        path.write_bytes(sound[:-1])
    elif change == "flip":
        path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    elif change == "other":
        path.write_bytes((tmp_path / other.index).read_bytes())
    keys = indexed_keys(directory, info, len(given))
    assert bool(keys.index_damage()) == (change != "gone")
    assert keys.lookup(given).tolist() == list(range(len(given)))
    keys = Keys(
        open_keys(directory, info),
        info,
        len(given),
        index=lambda: open_index(directory, info),
        rewrite=lambda parts: write_index(directory, info, parts),
    )
    assert keys.lookup(given).tolist() == list(range(len(given)))
    assert path.read_bytes() == sound


@pytest.mark.parametrize("given", [INTS, TEXTS], ids=["int64", "str"])
def test_an_index_that_hides_a_key_is_damaged_though_its_checksum_is_right(
    directory, tmp_path, given
):
    info = write_keys(directory, given, len(given))
    path = tmp_path / info.index
    sound = path.read_bytes()
    data = np.frombuffer(sound, "u1").copy()
    places = data[64 : 64 + 4 * int.from_bytes(sound[24:32], "little")].view("<u4")
    first, second = np.flatnonzero(places)[:2]
    places[[first, second]] = places[[second, first]]
    data[60:64] = 0
    data[60:64].view("<u4")[0] = crc32c(data)
    path.write_bytes(data.tobytes())
    damage = indexed_keys(directory, info, len(given)).index_damage()
    assert damage.startswith("it does not find the key of row")


def test_a_sound_index_is_used(directory, monkeypatch):
    info = write_keys(directory, TEXTS, len(TEXTS))
    monkeypatch.setattr(KeyIndex, "of", None)
    keys = indexed_keys(directory, info, len(TEXTS))
    assert keys.lookup(TEXTS).tolist() == list(range(len(TEXTS)))


def test_a_missing_key_is_named(directory):
    with pytest.raises(UnknownNameError, match=r"no row has these 2 keys: 6, 8$"):
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
        ([1, 2, 2**64], InvalidInputError),
        ([-1, 2, 2**63], InvalidInputError),
        (["a", "b", "\ud800"], InvalidInputError),
        (["a", "b", "c" * (1 << 20)], InvalidInputError),
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
