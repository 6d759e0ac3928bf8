"""Upsert: rows of a file by key over those of a table, new ones behind them, in one version."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tests.formats.matrices import random_matrix, write_file
from tests.reference.elements import BFLOAT16
from tests.tries import tries
from tierstore._formats.base import Source
from tierstore._upsert import Incoming, merged
from tierstore.errors import (
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    RowIndexError,
)
from tierstore.importing import import_table
from tierstore.spec import Field, TableSpec

ROWS, DIM = 500, 5
WORDS = [f"w{row}" for row in range(ROWS)]
RNG = np.random.default_rng(7)


def made(path, keys, dtype="float32"):
    fields = {"weight": Field(DIM, dtype), "sum": Field(2)}
    with tierstore.create(path, {"item": TableSpec(ROWS, fields=fields)}) as store:
        held = "float16" if dtype == "float16" else "float32"
        rows = {
            "weight": random_matrix(ROWS, DIM, held, seed=1),
            "sum": random_matrix(ROWS, 2, seed=2),
        }
        store["item"].write(np.arange(ROWS), rows)
        store.commit()
        if keys is not None:
            store.set_keys("item", keys)
    return rows


def held(path, field="weight"):
    with tierstore.open(path) as store:
        table = store["item"]
        assert store.verify().ok
        keys = None if table.keys is None else list(table.keys[:])
        return keys, table.read(np.arange(table.rows), field)


def expected(rows, keys, file_keys, matrix):
    """Return keys and rows as a dict would have them: replaced in place, new ones at the end."""
    found = dict(zip(keys, rows, strict=True)) | dict(zip(file_keys, matrix, strict=True))
    return list(found), np.stack(list(found.values()))


@pytest.mark.parametrize("kind", ["str", "int"])
@pytest.mark.parametrize("new", [0, 40])
def test_rows_are_replaced_and_new_ones_appended(tmp_path, kind, new):
    names = WORDS if kind == "str" else [7 * row - 100 for row in range(ROWS)]
    rows = made(tmp_path / "s.tier", names)
    more = [f"new{n}" for n in range(new)] if kind == "str" else [10_000 + n for n in range(new)]
    chosen = RNG.permutation([*RNG.choice(names, 90, replace=False).tolist(), *more]).tolist()
    chosen = chosen if kind == "str" else list(map(int, chosen))
    matrix = random_matrix(len(chosen), DIM, seed=5)
    write_file(tmp_path / "f.parquet", matrix, "float32", keys=chosen, block_rows=17)

    result = import_table(tmp_path / "s.tier", tmp_path / "f.parquet", upsert=True)
    assert (result.rows, result.added, result.created) == (len(chosen), new, False)
    keys, weight = expected(rows["weight"], names, chosen, matrix)
    assert held(tmp_path / "s.tier")[0] == keys
    assert held(tmp_path / "s.tier")[1].tobytes() == weight.tobytes()
    others = held(tmp_path / "s.tier", "sum")[1]
    assert others[:ROWS].tobytes() == rows["sum"].tobytes()
    assert not others[ROWS:].any()  # initial values


def test_it_is_one_version(tmp_path):
    made(tmp_path / "s.tier", WORDS)
    with tierstore.open(tmp_path / "s.tier") as store:
        before = store.version
    write_file(tmp_path / "f.npz", random_matrix(3, DIM), "float32", keys=["w3", "x", "w1"])
    result = import_table(tmp_path / "s.tier", tmp_path / "f.npz", upsert=True)
    assert result.version == before + 1


def test_rows_of_a_table_without_keys_go_by_id(tmp_path):
    rows = made(tmp_path / "s.tier", None)
    matrix = random_matrix(3, DIM, seed=9)
    write_file(tmp_path / "f.parquet", matrix, "float32", keys=[4, 499, 0])
    import_table(tmp_path / "s.tier", tmp_path / "f.parquet", upsert=True)
    rows["weight"][[4, 499, 0]] = matrix
    keys, weight = held(tmp_path / "s.tier")
    assert keys is None
    assert weight.tobytes() == rows["weight"].tobytes()

    write_file(tmp_path / "g.parquet", matrix, "float32", keys=[4, 500, 0])
    with pytest.raises(RowIndexError, match=r"row 500 is outside .* 500 rows and no keys; grow"):
        import_table(tmp_path / "s.tier", tmp_path / "g.parquet", upsert=True)
    write_file(tmp_path / "h.parquet", matrix, "float32", keys=["a", "b", "c"])
    with pytest.raises(InvalidInputError, match="has no keys"):
        import_table(tmp_path / "s.tier", tmp_path / "h.parquet", upsert=True)
    assert held(tmp_path / "s.tier")[1].tobytes() == rows["weight"].tobytes()


@pytest.mark.parametrize("kind", ["i8", "U1", "f8"])
@pytest.mark.parametrize(
    "held_keys", [None, WORDS, list(range(7, ROWS + 7))], ids=["none", "str", "int"]
)
def test_no_rows_change_nothing(tmp_path, held_keys, kind):
    """Nor do keys of a type that no key has: `np.array([])` is float64."""
    rows = made(tmp_path / "s.tier", held_keys)
    np.savez(tmp_path / "f.npz", weight=np.empty((0, DIM), "f4"), keys=np.empty(0, kind))
    with tierstore.open(tmp_path / "s.tier") as store:
        version = store.version
    result = import_table(tmp_path / "s.tier", tmp_path / "f.npz", upsert=True)
    assert (result.rows, result.added, result.version) == (0, 0, version)
    keys, weight = held(tmp_path / "s.tier")
    assert (None if keys is None else list(keys)) == held_keys
    assert weight.tobytes() == rows["weight"].tobytes()


@pytest.mark.parametrize("kind", ["U1", "f8"])
def test_no_rows_change_no_table_by_key(tmp_path, kind):
    with tierstore.create(tmp_path / "s.tier", {"item": TableSpec(8, DIM, keys="int64")}) as store:
        store["item"].write([5], random_matrix(1, DIM))
        store.commit()
    np.savez(tmp_path / "f.npz", weight=np.empty((0, DIM), "f4"), keys=np.empty(0, kind))
    with tierstore.open(tmp_path / "s.tier") as store:
        version = store.version
    result = import_table(tmp_path / "s.tier", tmp_path / "f.npz", upsert=True)
    assert (result.rows, result.added, result.version) == (0, 0, version)


@pytest.mark.parametrize("size", [-1, DIM], ids=["any length", "fixed size"])
def test_lists_without_rows_are_as_long_as_the_field_is_wide(tmp_path, size):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows, kind = made(tmp_path / "s.tier", WORDS), pa.list_(pa.float32(), size)
    table = pa.table({"key": pa.array([], pa.string()), "weight": pa.array([], kind)})
    (tmp_path / "parts.parquet").mkdir()
    for name in ("f.parquet", "parts.parquet/1.parquet", "parts.parquet/2.parquet"):
        pq.write_table(table, tmp_path / name)
    for name in ("f.parquet", "parts.parquet"):
        result = import_table(tmp_path / "s.tier", tmp_path / name, upsert=True)
        assert (result.rows, result.added, result.dim) == (0, 0, DIM)
        with pytest.raises(InvalidInputError, match="0 rows"):
            import_table(tmp_path / "s.tier", tmp_path / name)
        if size < 0:
            with pytest.raises(FormatError, match=f"{name}: has no rows, and lists of any length"):
                import_table(tmp_path / "new.tier", tmp_path / name)
    assert held(tmp_path / "s.tier")[1].tobytes() == rows["weight"].tobytes()


def test_a_table_by_key_gets_new_keys_up_to_its_capacity(tmp_path):
    path, matrix = tmp_path / "s.tier", random_matrix(6, DIM, seed=4)
    spec = TableSpec(8, DIM, keys="int64")
    with tierstore.create(path, {"item": spec}) as store:
        store["item"].write([5, -3], matrix[:2])
        store.commit()
    write_file(tmp_path / "f.parquet", matrix[2:], "float32", keys=[-3, 11, 12, 13])
    result = import_table(path, tmp_path / "f.parquet", upsert=True)
    assert (result.rows, result.added) == (4, 3)
    with tierstore.open(path) as store:
        found = store["item"].read([5, -3, 11, 12, 13])
    assert found.tobytes() == matrix[[0, 2, 3, 4, 5]].tobytes()

    write_file(tmp_path / "g.parquet", random_matrix(4, DIM), "float32", keys=[-3, 21, 22, 23])
    write_file(tmp_path / "h.parquet", random_matrix(5, DIM), "float32", keys=range(30, 35))
    with pytest.raises(InvalidInputError, match="holds 8 keys, and these would be 10"):
        import_table(path, tmp_path / "h.parquet", upsert=True)
    with tierstore.open(path) as store:  # nothing of it stayed
        assert store["item"].rows == 5
    import_table(path, tmp_path / "g.parquet", upsert=True)
    with tierstore.open(path) as store:
        assert store["item"].rows == 8


def test_values_are_converted_and_overflows_counted_once(tmp_path):
    made(tmp_path / "s.tier", WORDS, "float16")
    matrix = random_matrix(60, DIM, "float64", seed=8)
    matrix[:, 0] = 1e30
    file_keys = [*WORDS[30:60], *(f"n{n}" for n in range(30))]
    write_file(tmp_path / "f.parquet", matrix, "float64", keys=file_keys)
    with np.errstate(over="ignore"):
        rounded = matrix.astype(np.float16)
    infinite = int((np.isinf(rounded) & np.isfinite(matrix)).sum())
    with pytest.warns(UserWarning, match=f"{infinite} values"):
        result = import_table(tmp_path / "s.tier", tmp_path / "f.parquet", upsert=True)
    assert result.overflowed == infinite >= 60
    _, weight = held(tmp_path / "s.tier")
    assert weight[[*range(30, 60), *range(ROWS, ROWS + 30)]].tobytes() == rounded.tobytes()


def test_half_precision_bits_are_kept(tmp_path):
    made(tmp_path / "s.tier", WORDS, "bfloat16")
    bits = random_matrix(3, DIM, "bfloat16", seed=6)
    write_file(tmp_path / "f.safetensors", bits, "bfloat16", keys=["w1", "fresh", "w0"])
    import_table(tmp_path / "s.tier", tmp_path / "f.safetensors", upsert=True)
    _, weight = held(tmp_path / "s.tier")
    np.testing.assert_array_equal(weight[[1, ROWS, 0]], BFLOAT16.decode(bits))


def test_keys_that_repeat(tmp_path):
    made(tmp_path / "s.tier", WORDS)
    matrix = random_matrix(3, DIM, seed=9)
    write_file(tmp_path / "f.parquet", matrix, "float32", keys=["w2", "w9", "w2"])
    with pytest.raises(InvalidInputError, match="'w2' in rows 0 and 2"):
        import_table(tmp_path / "s.tier", tmp_path / "f.parquet", upsert=True)
    import_table(tmp_path / "s.tier", tmp_path / "f.parquet", upsert=True, duplicates="last")
    assert held(tmp_path / "s.tier")[1][[2, 9]].tobytes() == matrix[[2, 1]].tobytes()


def test_numbers_are_strings_where_the_keys_of_the_table_are(tmp_path):
    made(tmp_path / "s.tier", [str(row) for row in range(ROWS)])
    matrix = random_matrix(2, DIM, seed=9)
    write_file(tmp_path / "f.parquet", matrix, "float32", keys=[499, 500])
    assert import_table(tmp_path / "s.tier", tmp_path / "f.parquet", upsert=True).added == 1
    keys, weight = held(tmp_path / "s.tier")
    assert keys[-2:] == ["499", "500"]
    assert weight[-2:].tobytes() == matrix.tobytes()


def test_keys_above_int64_stay(tmp_path):
    large = [2**63 + row for row in range(ROWS)]
    made(tmp_path / "s.tier", np.array(large, np.uint64))
    write_file(tmp_path / "f.parquet", random_matrix(1, DIM), "float32", keys=[12])
    import_table(tmp_path / "s.tier", tmp_path / "f.parquet", upsert=True)
    assert held(tmp_path / "s.tier")[0] == [*large, 12]


@pytest.mark.parametrize("first", [0, 2**63])
def test_keys_above_int64_are_found_and_added(tmp_path, first):
    own = [first + row for row in range(ROWS)]
    made(tmp_path / "s.tier", own)
    matrix = random_matrix(3, DIM, seed=9)
    write_file(tmp_path / "f.parquet", matrix, "float32", keys=[2**64 - 1, own[3], 2**63 - 1])
    assert import_table(tmp_path / "s.tier", tmp_path / "f.parquet", upsert=True).added == 2
    keys, weight = held(tmp_path / "s.tier")
    assert keys == [*own, 2**64 - 1, 2**63 - 1]
    assert weight[[ROWS, 3, ROWS + 1]].tobytes() == matrix.tobytes()


def test_keys_above_int64_are_not_added_to_negative_ones(tmp_path):
    rows = made(tmp_path / "s.tier", range(-5, ROWS - 5))
    write_file(tmp_path / "f.npz", random_matrix(2, DIM), "float32", keys=[3, 2**63])
    with pytest.raises(InvalidInputError, match="fit into int64, or all of them into uint64"):
        import_table(tmp_path / "s.tier", tmp_path / "f.npz", upsert=True)
    keys, weight = held(tmp_path / "s.tier")
    assert keys == list(range(-5, ROWS - 5))
    assert weight.tobytes() == rows["weight"].tobytes()


@pytest.mark.parametrize("suffix", [".npz", ".parquet", ".csv", ".safetensors"])
def test_a_table_by_key_takes_uint64_keys_by_their_bits(tmp_path, suffix):
    keys = np.array([2**64 - 3, 7, 2**63], np.uint64)
    matrix = random_matrix(3, DIM, seed=4)
    spec = TableSpec(8, DIM, keys="int64")
    for name in ("written", "loaded"):
        with tierstore.create(tmp_path / name, {"item": spec}) as store:
            store["item"].write([-3], matrix[:1] + 1)
            store.commit()
    with tierstore.open(tmp_path / "written", mode="r+") as store:
        store["item"].write(keys, matrix)
        store.commit()
    write_file(tmp_path / f"f{suffix}", matrix, "float32", keys=keys)
    assert import_table(tmp_path / "loaded", tmp_path / f"f{suffix}", upsert=True).added == 2
    for name in ("written", "loaded"):
        with tierstore.open(tmp_path / name) as store:
            assert list(store["item"].keys) == [-3, 7, -(2**63)]
            assert store["item"].read([-3, 7, -(2**63)]).tobytes() == matrix.tobytes()


def test_what_does_not_fit_changes_nothing(tmp_path):
    rows = made(tmp_path / "s.tier", WORDS)
    write_file(tmp_path / "a.npz", random_matrix(3, DIM + 1), "float32", keys=["w1", "x", "y"])
    with pytest.raises(InvalidInputError, match=f"rows of {DIM + 1}, .* has {DIM}"):
        import_table(tmp_path / "s.tier", tmp_path / "a.npz", upsert=True)
    write_file(tmp_path / "b.npy", random_matrix(3, DIM), "float32")
    with pytest.raises(InvalidInputError, match=r"holds no keys, .*--keys"):
        import_table(tmp_path / "s.tier", tmp_path / "b.npy", upsert=True)
    assert held(tmp_path / "s.tier")[1].tobytes() == rows["weight"].tobytes()


def test_rows_to_replace_are_held_against_the_memory(tmp_path):
    made(tmp_path / "s.tier", list(range(ROWS)))
    matrix = random_matrix(401, DIM, seed=2)
    write_file(tmp_path / "f.npz", matrix, "float32", keys=[*range(400), ROWS])
    with pytest.raises(FormatError, match=r"the rows to replace would take 7.* --memory"):
        import_table(tmp_path / "s.tier", tmp_path / "f.npz", upsert=True, memory=7000)
    import_table(tmp_path / "s.tier", tmp_path / "f.npz", upsert=True, memory=9000)
    assert held(tmp_path / "s.tier")[1][[*range(400), ROWS]].tobytes() == matrix.tobytes()


def test_words_are_no_whole_numbers(tmp_path):
    made(tmp_path / "s.tier", list(range(ROWS)))
    write_file(tmp_path / "f.npz", random_matrix(1, DIM), "float32", keys=["a"])
    with pytest.raises(InvalidTypeError, match="keys int64, and not strings such as 'a'"):
        import_table(tmp_path / "s.tier", tmp_path / "f.npz", upsert=True)


def test_uncommitted_rows_are_in_the_way(tmp_path):
    made(tmp_path / "s.tier", WORDS)
    write_file(tmp_path / "f.npz", random_matrix(1, DIM), "float32", keys=["w3"])
    with tierstore.open(tmp_path / "s.tier", "r+") as store:
        store["item"].write([0], random_matrix(1, DIM, seed=2))
        with pytest.raises(InvalidInputError, match="uncommitted rows"):
            import_table(store, tmp_path / "f.npz", upsert=True)
        store.rollback()


def test_a_file_that_breaks_off_rolls_back(tmp_path):
    rows = made(tmp_path / "s.tier", WORDS)
    lines = [f"{word} " + " ".join(["0.5"] * DIM) for word in WORDS[:300]]
    lines[250] = "w250 0.5 x 0.5 0.5 0.5"
    (tmp_path / "f.vec").write_text(f"300 {DIM}\n" + "\n".join(lines) + "\n")
    with pytest.raises(FormatError):
        import_table(tmp_path / "s.tier", tmp_path / "f.vec", upsert=True)
    assert held(tmp_path / "s.tier")[1].tobytes() == rows["weight"].tobytes()


@pytest.mark.variants(12, 20)
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".vec", ".bin"])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("held_keys", [None, [5, 1, 0, 2], ["b", "1", "0", "2"]])
def test_keys_that_number_the_rows_of_a_text_are_keys(tmp_path, suffix, count, held_keys):
    """As those of `export --since`, which changed the first rows only."""
    start = np.full((4, DIM), 9.0, "f4")
    with tierstore.create(tmp_path / "s.tier", {"item": TableSpec(4, DIM)}) as store:
        store["item"].write(np.arange(4), start)
        store.commit()
        if held_keys is not None:
            store.set_keys("item", held_keys)
    matrix = random_matrix(count, DIM, seed=4)
    write_file(tmp_path / f"f{suffix}", matrix, "float32", keys=np.arange(count))
    result = import_table(tmp_path / "s.tier", tmp_path / f"f{suffix}", upsert=True)
    assert (result.rows, result.added, result.notes) == (count, 0, ())
    at = [list(map(str, held_keys or range(4))).index(str(key)) for key in range(count)]
    start[at] = matrix
    assert held(tmp_path / "s.tier")[1].tobytes() == start.tobytes()


@pytest.mark.parametrize("kind", ["int64", "text"])
def test_keys_that_number_the_rows_of_a_text_are_keys_of_a_table_by_key(tmp_path, kind):
    with tierstore.create(tmp_path / "s.tier", {"item": TableSpec(dim=DIM, keys=kind)}) as store:
        matrix = random_matrix(3, DIM, seed=4)
        write_file(tmp_path / "f.csv", matrix, "float32", keys=np.arange(3))
        assert import_table(store, tmp_path / "f.csv").added == 3
        keys = [0, 1, 2] if kind == "int64" else ["0", "1", "2"]
        assert store["item"].read(keys).tobytes() == matrix.tobytes()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_that_closes_the_store_is_not_hidden_by_that(tmp_path, monkeypatch, error):
    """As a second Ctrl-C does, after which a command line says that it was interrupted."""
    rows = made(tmp_path / "s.tier", WORDS)["weight"]
    np.savez(tmp_path / "f.npz", keys=np.array(WORDS[:3]), weight=rows[3:6])
    with tierstore.open(tmp_path / "s.tier", "r+") as store:

        def write(*_):
            store.close()
            raise error

        monkeypatch.setattr(type(store["item"]), "write", write)
        with pytest.raises(error):
            import_table(store, tmp_path / "f.npz", upsert=True)
    assert np.array_equal(held(tmp_path / "s.tier")[1], rows)


WIDE = 1 << 18
"""Elements of rows of which four are a block."""


def test_rows_of_several_blocks_go_to_their_ids(tmp_path):
    rows = np.random.default_rng(3).standard_normal((12, WIDE), np.float32)
    spec = tierstore.TableSpec(12, WIDE, init=tierstore.from_array(rows))
    ids = np.array([7, 0, 3, 8, 2, 5, 1, 11, 9, 10])  # of three blocks
    np.savez(tmp_path / "f.npz", weight=rows[ids] + 1, key=ids)
    with tierstore.create(tmp_path / "s", {"t": spec}) as store:
        done = import_table(store, tmp_path / "f.npz", upsert=True)
        assert (done.rows, done.added) == (10, 0)
        rows[ids] += 1
        assert np.array_equal(store["t"].read(np.arange(12)), rows)


def test_rows_of_several_blocks_are_replaced_and_appended(tmp_path):
    rows = np.random.default_rng(3).standard_normal((9, WIDE), np.float32)
    spec = tierstore.TableSpec(9, WIDE, init=tierstore.from_array(rows), sparse=False)
    with tierstore.create(tmp_path / "s", {"t": spec}) as store:
        store.set_keys("t", [f"k{n}" for n in range(9)])
        keys = ["k7", "new", "k0", "k8", "other", "k5"]
        more = np.random.default_rng(4).standard_normal((6, WIDE), np.float32)
        np.save(tmp_path / "f.npy", more)
        done = import_table(store, tmp_path / "f.npy", keys=keys, upsert=True)
        assert (done.rows, done.added) == (6, 2)
        rows[[7, 0, 8, 5]] = more[[0, 2, 3, 5]]
        assert np.array_equal(store["t"].read(np.arange(11)), [*rows, *more[[1, 4]]])
        assert list(store["t"].keys[9:]) == ["new", "other"]


def test_one_of_several_fields_is_loaded_in_blocks_of_other_sizes(tmp_path):
    fields = {name: tierstore.Field(WIDE) for name in ("weight", "more", "most")}
    rows = np.random.default_rng(3).standard_normal((7, WIDE), np.float32)
    np.save(tmp_path / "f.npy", rows)
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(7, fields=fields)}) as store:
        import_table(store, tmp_path / "f.npy", field="more")
        assert np.array_equal(store["t"].read(np.arange(7), "more"), rows)
        assert not store["t"].read(np.arange(7), "weight").any()


def test_many_new_words_keep_their_rows(tmp_path):
    count = (1 << 16) + 9
    words = [f"word {n}" for n in range(count)]
    rows = np.arange(count, dtype=np.float32)[:, None]
    np.save(tmp_path / "f.npy", rows)
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(2, 1)}) as store:
        store.set_keys("t", ["word 5", "word 65540"])
        assert import_table(store, tmp_path / "f.npy", keys=words, upsert=True).added == count - 2
        some = [0, 5, 6, 65_535, 65_536, 65_540, count - 1]
        found = store["t"].read(store["t"].lookup([words[at] for at in some]))
        assert found[:, 0].tolist() == some


def test_an_upsert_that_fails_in_the_middle_changes_nothing(tmp_path):
    def fail(done, total):
        raise KeyboardInterrupt

    rows = np.random.default_rng(3).standard_normal((9, 4), np.float32)
    spec = tierstore.TableSpec(9, 4, init=tierstore.from_array(rows))
    np.savez(tmp_path / "f.npz", weight=rows[:3] + 1, key=np.arange(3))
    np.savez(tmp_path / "outside.npz", weight=rows[:2], key=np.array([0, -1]))
    np.savez(tmp_path / "narrow.npz", weight=rows[:2, :3], key=np.arange(2))
    with tierstore.create(tmp_path / "s", {"t": spec}) as store:
        with pytest.raises(KeyboardInterrupt):
            import_table(store, tmp_path / "f.npz", upsert=True, progress=fail)
        with pytest.raises(RowIndexError, match="row -1 is outside"):
            import_table(store, tmp_path / "outside.npz", upsert=True)
        with pytest.raises(InvalidInputError, match=r"rows of 3, and field 'weight' .* has 4"):
            import_table(store, tmp_path / "narrow.npz", upsert=True)
        assert (store.version, store.uncommitted_rows()) == (1, 0)
        assert np.array_equal(store["t"].read(np.arange(9)), rows)


def test_a_table_that_got_more_rows_takes_the_space_of_all(tmp_path):
    np.save(tmp_path / "f.npy", np.ones((2, 4), np.float32))
    spec = tierstore.TableSpec(9, 4, sparse=True)
    with tierstore.create(tmp_path / "s", {"t": spec}) as store:
        store.set_keys("t", [f"k{n}" for n in range(9)])
        import_table(store, tmp_path / "f.npy", keys=["k3", "new"], upsert=True)
        assert store["t"].rows == 10 and not store["t"].spec.sparse


class Pieces(Source):
    """Rows that come in blocks of given sizes, as many as were said or not."""

    def __init__(self, matrix, rows, sizes):
        super().__init__(Path("pieces"), rows, matrix.shape[1], "float32")
        self.matrix, self.sizes = matrix, sizes

    def _blocks(self, block_rows):
        start = 0
        for size in (*self.sizes, len(self.matrix)):
            yield self.matrix[start : start + size]
            start += size

    def close(self):
        pass


@tries(60)
@given(
    rows=st.integers(2, 40),
    dims=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    cuts=st.data(),
    more=st.integers(-1, 1),
)
def test_rows_come_in_whatever_their_blocks_are(rows, dims, cuts, more):
    fields = {f"f{at}": Field(dim) for at, dim in enumerate(dims)}
    given_rows = {name: random_matrix(rows, each.dim) for name, each in fields.items()}
    sizes = st.lists(st.integers(0, 9), max_size=9)
    sources = {n: Pieces(each, rows + more, cuts.draw(sizes)) for n, each in given_rows.items()}
    spec = TableSpec(rows + max(more, 0), fields=fields)
    counts = [min(7, spec.rows - start) for start in range(0, spec.rows, 7)]
    empty = (np.zeros((count, spec.layout.record_bytes), np.uint8) for count in counts)
    found = merged(empty, spec, Incoming(sources, fields))
    if more:
        with pytest.raises(FormatError, match=f"but {rows + more} were expected"):
            list(found)
        return
    records = np.concatenate(list(found))
    for name, each in given_rows.items():
        assert spec.layout.view(records, name).tobytes() == each.tobytes()
