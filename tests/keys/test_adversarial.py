"""Keys that somebody chose to do harm: each gets its own row, or an error says why it cannot."""

from __future__ import annotations

import numpy as np
import pytest

import tierstore
from tests.core.maps import hashed
from tests.keys.colliding import of_one_hash, texts_of_one_hash
from tierstore import Budget, TableSpec
from tierstore._keys.text import MAX_TEXT_BYTES, Texts
from tierstore.errors import InvalidInputError, InvalidTypeError, UnknownNameError

DIM = 2
INIT = tierstore.normal(std=0.1, seed=7)
MASK = (1 << 64) - 1


def signed(keys):
    return np.array([key - (1 << 64) if key >> 63 else key for key in keys], np.int64)


ONE_HASH = of_one_hash(0xABCD, 400).view(np.int64)
EQUAL_LOW = (np.arange(-400, 400, dtype=np.int64) << 48) | 5
EXTREME = signed([0, 1, MASK, 1 << 63, (1 << 63) - 1, (1 << 63) + 1, MASK - 1, 1 << 32])
SETS = {"one hash": ONE_HASH, "equal low bits": EQUAL_LOW, "extreme": EXTREME}
TEXTS = [
    *(
        "",
        "\0",
        "\0\0",
        "a",
        "a\0",
        "\0a",
        " ",
        "\n",
        "🙂",
        "🙂\0",
        "é",
        "e\u0301",
        "\ufeff",
        "\U0010ffff",
    ),
    *("x" * length for length in (7, 8, 9, 15, 16, 17, 255, 256, 257, 5000, MAX_TEXT_BYTES)),
    *("x" * 300 + end for end in "ab"),
    *("y" * at + "z" + "y" * (40 - at) for at in range(40)),
]


TEXTS_OF_ONE_HASH = texts_of_one_hash(6, 3)


def test_the_keys_have_one_hash():
    assert set(map(hashed, ONE_HASH.view(np.uint64).tolist())) == {0xABCD}


def test_the_texts_have_one_hash():
    assert len(set(TEXTS_OF_ONE_HASH)) == 729
    assert len(set(Texts.of(TEXTS_OF_ONE_HASH).hashes().tolist())) == 1


@pytest.mark.variants(1)
@pytest.mark.parametrize("name", [*SETS, "texts"])
def test_they_are_kept_apart(tmp_path, name):
    """Against a dict: written in batches with repeats, trained over, removed, opened again."""
    keys = TEXTS if name == "texts" else SETS[name].tolist()
    spec = TableSpec(
        dim=DIM, init=INIT, keys="text" if name == "texts" else "int64", track_uses=True
    )
    rng, truth = np.random.default_rng(3), {}
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=Budget(host_rows=64)) as store:
        table = store["t"]
        for _ in range(6):
            batch = [keys[at] for at in rng.integers(0, len(keys), 2 * len(keys) // 3)]
            rows = rng.standard_normal((len(batch), DIM), np.float32)
            table.write(batch, rows)
            truth |= dict(zip(batch, rows, strict=True))
            check(table, truth, keys)
            store.commit()
        for gone, _ in table.expire(keep_at_most=2 * len(truth) // 3):
            for key in gone.tolist():
                del truth[key]
        check(table, truth, keys)
        store.commit()
    with tierstore.open(tmp_path / "s", "r+") as store:
        check(store["t"], truth, keys)
        assert store.verify().ok


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("kind", ["int64", "text"])
def test_keys_of_one_hash_are_far_and_found_again(tmp_path, kind):
    """After additions, a rollback, an expiry, opening again, and as keys of a table by id."""
    keys = of_one_hash(77, 700).view(np.int64).tolist() if kind == "int64" else TEXTS_OF_ONE_HASH
    rows = np.random.default_rng(1).standard_normal((len(keys), DIM), np.float32)
    truth = dict(zip(keys, rows, strict=True))
    with tierstore.create(
        tmp_path / "s", {"t": TableSpec(dim=DIM, keys=kind, track_uses=True)}
    ) as store:
        table = store["t"]
        table.write(keys[:400], rows[:400])
        store.commit()
        table.write(keys, rows)
        check(table, truth, keys)
        assert table._map._map.far.size > 500
        store.rollback()
        check(table, dict(list(truth.items())[:400]), keys)
        table.write(keys, rows)
        for gone, _ in table.expire(keep_at_most=300):
            for key in gone.tolist():
                del truth[key]
        check(table, truth, keys)
        store.commit()
    with tierstore.open(tmp_path / "s") as store:
        check(store["t"], truth, keys)
    with tierstore.create(tmp_path / "ids", {"t": TableSpec(len(keys), 1)}) as store:
        store.set_keys("t", keys)
    with tierstore.open(tmp_path / "ids") as store:
        assert store["t"].lookup(keys).tolist() == list(range(len(keys)))
        assert store["t"].keys._index.map.far.size > 500
        assert store.verify().ok


def check(table, truth, keys):
    assert table.rows == len(truth)
    assert set(table.keys[:].tolist()) == set(truth)
    known = list(truth)
    assert np.array_equal(table.read(known), np.stack(list(truth.values())))
    assert table.contains(keys).tolist() == [key in truth for key in keys]
    assert table.keys_of(table.lookup(known)).tolist() == known


@pytest.mark.parametrize("name", SETS)
def test_tables_by_id_keep_them_apart(tmp_path, name):
    keys = SETS[name]
    with tierstore.create(tmp_path / "s", {"t": TableSpec(len(keys), DIM)}) as store:
        for each in (keys, keys.view(np.uint64)):
            store.set_keys("t", each)
            assert store["t"].lookup(each).tolist() == list(range(len(keys)))
            other = each ^ each.dtype.type(1 << 40)
            known = {key: row for row, key in enumerate(each.tolist())}
            wanted = [known.get(key, -1) for key in other.tolist()]
            assert store["t"].lookup(other, missing=-1).tolist() == wanted


def test_keys_of_all_64_bits(tmp_path):
    """Unsigned keys stand for signed ones of the same bits, in arrays and in lists."""
    with tierstore.create(tmp_path / "s", {"t": TableSpec(dim=1, keys="int64")}) as store:
        table, unsigned = store["t"], np.array([1 << 63, MASK, 5], np.uint64)
        table.write(unsigned, np.float32([[1], [2], [3]]))
        assert table.lookup([1 << 63, MASK, 5]).tolist() == [0, 1, 2]
        assert table.lookup([-(1 << 63), -1, 5]).tolist() == [0, 1, 2]
        assert table.lookup([MASK, -1]).tolist() == [1, 1]
        assert np.uint64(MASK) in table
        for key in (1 << 64, (1 << 64) + 5, -(1 << 63) - 1, 1 << 200):
            assert key not in table
            for call in (table.read, table.lookup, table.contains):
                with pytest.raises(InvalidInputError, match="64 bits"):
                    call([5, key])
            with pytest.raises(InvalidInputError, match="64 bits"):
                table.write([5, key], np.ones((2, 1), np.float32))
        assert table.read([5]).item() == 3
        store.rollback()


WRONG_INTEGERS = [
    *([None], [float("nan")], [1, None], [1.0], ["1"], [b"1"], [True], [1, "a"], [1 << 63, 0.5]),
    *(np.array([1.5]), np.array([True]), np.array(["1"]), np.array([1j])),
    *(np.array([1, None], object), np.array(["2020"], "M8[D]"), np.array([1.0], object)),
]
WRONG_TEXTS = [
    *([None], [1], [b"a"], ["a", None], [float("nan")], [["a"], ["b", "c"]]),
    *(np.array([1]), np.array(["a", None], object), np.array([b"a"])),
]


@pytest.mark.parametrize("kind", ["int64", "text"])
def test_what_is_no_key(tmp_path, kind):
    wrong = WRONG_INTEGERS if kind == "int64" else WRONG_TEXTS
    with tierstore.create(tmp_path / "s", {"t": TableSpec(dim=1, keys=kind)}) as store:
        table = store["t"]
        for keys in wrong:
            for call in (table.read, table.lookup, table.contains, table.prefetch, table.lease):
                with pytest.raises(InvalidTypeError, match="keys are"):
                    call(keys)
            with pytest.raises(InvalidTypeError, match="keys are"):
                table.write(keys, np.ones((len(keys), 1), np.float32))
        if kind == "int64":
            with pytest.raises(InvalidInputError, match="lists of one length"):
                table.read([[1], [2, 3]])
        else:
            with pytest.raises(
                InvalidTypeError, match=r"not int64; Table\.by_row takes row numbers"
            ):
                table.read(np.arange(2))
        assert table.rows == 0
        with pytest.raises(UnknownNameError):
            table.lookup([7] if kind == "int64" else ["7"])


def test_texts_of_a_megabyte_are_refused(tmp_path):
    text = "x" * (1 << 20)
    with tierstore.create(tmp_path / "s", {"t": TableSpec(dim=1, keys="text")}) as store:
        for call in (store["t"].read, store["t"].lookup, store["t"].contains):
            with pytest.raises(InvalidInputError, match=r"1048576 bytes; .* use a hash"):
                call(["a", text])
        with pytest.raises(InvalidInputError, match="1048576 bytes"):
            store["t"].write(["a", text], np.ones((2, 1), np.float32))
        assert text not in store["t"]
        assert store["t"].rows == 0


@pytest.mark.parametrize("kind", ["int64", "text"])
def test_of_repeats_in_a_batch_the_last_row_stays(tmp_path, kind):
    numbers = np.random.default_rng(5).integers(0, 50, 4000)
    keys = numbers if kind == "int64" else [f"key {number}" for number in numbers]
    rows = np.random.default_rng(6).standard_normal((4000, DIM), np.float32)
    with tierstore.create(tmp_path / "s", {"t": TableSpec(dim=DIM, keys=kind)}) as store:
        store["t"].write(keys, rows)
        last = {number: at for at, number in enumerate(numbers.tolist())}
        assert store["t"].rows == len(last)
        expected = rows[[last[number] for number in numbers.tolist()]]
        assert np.array_equal(store["t"].read(keys), expected)
        store.commit()
