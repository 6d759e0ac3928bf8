"""What changed between two versions, and patches that bring it to a copy."""

from itertools import pairwise

import numpy as np
import pytest

import tierstore
from tierstore._store.following import union
from tierstore._store.lineage import descends, newest_common
from tierstore._store.row_list import FILLED, RowList
from tierstore.errors import ExistsError, FormatError, InvalidInputError, VersionError

ROWS, DIM = 400, 8


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def store(tmp_path):
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=2))
    small = tierstore.TableSpec(50, 3, "bfloat16", init=tierstore.uniform(-1, 1, seed=3))
    with tierstore.create(tmp_path / "a.tier", {"item": spec, "user": small}, keep=50) as store:
        yield store


def write(store, rng, count=20, name="item"):
    table = store[name]
    ids = rng.choice(table.rows, count, replace=False)
    table.write(ids, rng.normal(size=(count, table.dim)).astype("f4"))
    return store.commit(step=store.version)


def bits(store, version=None):
    with tierstore.open(store.path, version=version or store.version) as opened:
        return {
            name: np.concatenate(list(table.scan(raw=True))).copy()
            for name, table in opened.items()
        }


def differing(one, other):
    found = {name: np.flatnonzero((one[name] != other[name]).any(1)) for name in other}
    return {name: rows for name, rows in found.items() if rows.size}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


@pytest.mark.slow
def test_changed_rows_are_those_that_differ(store, rng):
    for name in ("item", "user", "item", "item"):
        write(store, rng, name=name)
    every = {version: bits(store, version) for version in range(1, store.version + 1)}
    for one in every:
        for other in every:
            expected = differing(every[one], every[other])
            assert same(store.changed(one, other), expected), (one, other)
    assert same(store.changed(1), differing(every[1], every[store.version]))


def test_rows_written_with_the_same_values_have_not_changed(store):
    store["item"].write([3, 4], store["item"].read([3, 4]))
    store.commit()
    assert store.changed(1) == {}


def test_changes_across_folds_and_restored_versions(store, rng):
    store.keep(1, "first")
    for _ in range(4):
        write(store, rng, 300)
    first = bits(store, 1)
    store.restore(3)
    write(store, rng)
    assert same(store.changed("first"), differing(first, bits(store)))
    assert same(store.changed(5, store.version), differing(bits(store, 5), bits(store)))
    store.release("first")
    store.fold()
    version = store.version
    write(store, rng)
    assert same(store.changed(version), differing(bits(store, version), bits(store)))
    with pytest.raises(VersionError):
        store.changed(1)


def test_added_rows_and_other_fields(store, rng):
    write(store, rng)
    store.grow("item", ROWS + 5)
    changed = store.changed(2)
    assert changed["item"].tolist() == list(range(ROWS, ROWS + 5))
    store.add_fields("user", {"age": tierstore.Field(1)})
    store.create_table("tag", tierstore.TableSpec(4, 2))
    changed = store.changed(2)
    assert changed["user"].tolist() == list(range(50))
    assert changed["tag"].tolist() == list(range(4))


def test_changed_rows_of_partitions(tmp_path, rng):
    path, spec = tmp_path / "p.tier", tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=2))
    tierstore.distributed.create(path, {"item": spec}, partitions=3).close()
    with tierstore.distributed.open(path, "r+", keep=9) as store:
        for _ in range(3):
            ids = rng.choice(ROWS, 20, replace=False)
            store["item"].write(ids, rng.normal(size=(20, DIM)).astype("f4"))
            store.commit()
    with tierstore.open(path) as store:
        for one in (1, 2, 3):
            assert same(store.changed(one), differing(bits(store, one), bits(store)))
        assert len(store.changed(3)["item"]) == 20


def test_patches_bring_a_copy_to_the_same_versions(store, rng, tmp_path):
    store.save(tmp_path / "b.tier")
    versions = [1, *(write(store, rng, name=name) for name in ("item", "user", "item"))]
    with tierstore.open(tmp_path / "b.tier", "r+") as copy:
        for number, (one, other) in enumerate(pairwise(versions)):
            info = store.write_patch(tmp_path / f"{number}.patch", one, other)
            assert (info.from_version, info.to_version, info.store) == (one, other, store.uuid)
            assert info.bytes == (tmp_path / f"{number}.patch").stat().st_size
            applied = copy.apply_patch(tmp_path / f"{number}.patch")
            assert applied.rows == info.rows
            assert copy.step == other - 1
        assert same(bits(copy), bits(store))
        copy.load_state_dict(store.state_dict())  # the version has the mark of the original
    assert tierstore.verify(tmp_path / "b.tier").ok


def test_a_patch_has_three_times_the_bytes_of_its_rows_at_most(store, rng, tmp_path):
    write(store, rng, 200)
    info = store.write_patch(tmp_path / "x.patch", 1)
    assert info.bytes <= 3 * 200 * DIM * 4


def test_scalars_and_payload_come_with_a_patch(store, tmp_path):
    store.save(tmp_path / "b.tier")
    store["item"].scalars["lr"] = 0.25
    tree = {"weight": np.arange(6, dtype="f4"), "n": 3}
    store.commit(step=9, payload={"model": tree, "note": b"abc"})
    store["item"].write([1], np.ones((1, DIM), "f4"))
    store.commit()
    with tierstore.open(tmp_path / "b.tier", "r+") as copy:
        for one in (1, 2):
            store.write_patch(tmp_path / f"{one}.patch", one, one + 1)
            copy.apply_patch(tmp_path / f"{one}.patch")
            assert copy["item"].scalars == {"lr": 0.25}
            assert copy.step == 9
            assert copy.payload["note"].read() == b"abc"
            assert copy.payload["model"].tree()["weight"].tolist() == list(range(6))
    assert tierstore.verify(tmp_path / "b.tier").ok


@pytest.fixture
def patched(store, rng, tmp_path):
    """Patches 1 to 2 and 2 to 3 of a store, and a copy at version 1, open for writing."""
    store.save(tmp_path / "b.tier")
    for version in (1, 2):
        write(store, rng)
        store.write_patch(tmp_path / f"{version}.patch", version)
    with tierstore.open(tmp_path / "b.tier", "r+") as copy:
        yield copy


def test_patches_are_refused_out_of_order(patched, tmp_path):
    before = bits(patched)
    with pytest.raises(VersionError, match="from version 2 to 3"):
        patched.apply_patch(tmp_path / "2.patch")
    assert same(bits(patched), before)
    patched.apply_patch(tmp_path / "1.patch")
    with pytest.raises(VersionError, match="already has version 2"):
        patched.apply_patch(tmp_path / "1.patch")
    patched.apply_patch(tmp_path / "2.patch")


def test_a_patch_to_the_version_that_restores_that_of_the_copy_changes_nothing(patched, rng, store):
    """A night's script goes on after a restore: it makes a patch, and applies it."""
    path = store.path.parent / "none.patch"
    before = bits(patched)
    store.keep(1, "copied")
    store.restore("copied")
    assert store.write_patch(path, "copied").rows == {}
    patched.apply_patch(path)
    assert same(bits(patched), before)
    write(store, rng)
    store.write_patch(path, "copied", force=True)
    patched.apply_patch(path)
    assert same(bits(patched), bits(store))


def test_patches_are_refused_by_copies_that_were_changed_and_by_other_stores(
    patched, rng, tmp_path
):
    patched["item"].write([0], np.ones((1, DIM), "f4"))
    with pytest.raises(InvalidInputError, match="not committed"):
        patched.apply_patch(tmp_path / "1.patch")
    patched.commit()
    with pytest.raises(VersionError, match="that nothing else has changed"):
        patched.apply_patch(tmp_path / "1.patch")
    other = tierstore.create(tmp_path / "c.tier", {"item": tierstore.TableSpec(ROWS, DIM)})
    with other, pytest.raises(VersionError):
        other.apply_patch(tmp_path / "1.patch")


def test_every_changed_bit_of_a_patch_is_found(patched, rng, tmp_path):
    data = (tmp_path / "1.patch").read_bytes()
    before, version = bits(patched), patched.version
    places = [0, 1, 20, len(data) - 1, *rng.integers(0, len(data), 60)]
    for place in map(int, places):
        wrong = bytearray(data)
        wrong[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "wrong.patch").write_bytes(wrong)
        with pytest.raises(FormatError):
            patched.apply_patch(tmp_path / "wrong.patch")
        assert patched.version == version
        assert patched.uncommitted_rows() == 0
    for cut in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "wrong.patch").write_bytes(data[:cut])
        with pytest.raises(FormatError):
            patched.apply_patch(tmp_path / "wrong.patch")
    assert same(bits(patched), before)
    patched.apply_patch(tmp_path / "1.patch")  # the control: unchanged, it applies
    assert not same(bits(patched), before)


def test_a_patch_holds_values_only(store, rng, tmp_path):
    write(store, rng)
    store.set_keys("user", list(range(50)))
    with pytest.raises(InvalidInputError, match="keys"):
        store.write_patch(tmp_path / "x.patch", 2)
    store.grow("item", ROWS + 1)
    with pytest.raises(InvalidInputError, match="rows or fields"):
        store.write_patch(tmp_path / "x.patch", 3)
    store.drop("item")
    with pytest.raises(InvalidInputError, match="tables"):
        store.write_patch(tmp_path / "x.patch", 4)
    assert not (tmp_path / "x.patch").exists()


def test_an_existing_file_is_replaced_only_on_demand(store, rng, tmp_path):
    write(store, rng)
    (tmp_path / "x.patch").write_text("mine")
    with pytest.raises(ExistsError):
        store.write_patch(tmp_path / "x.patch", 1)
    store.write_patch(tmp_path / "x.patch", 1, force=True)


def test_rows_of_a_table_that_was_written_anew_are_compared(tmp_path):
    rows = np.random.default_rng(1).standard_normal((50, 4)).astype(np.float32)
    spec = tierstore.TableSpec(50, 4, init=tierstore.from_array(rows))
    with tierstore.create(tmp_path / "s", {"t": spec}) as store:
        old = store.keep(1, "old")
        rows[[3, 30]] += 1
        np.save(tmp_path / "rows.npy", rows)
        tierstore.import_table(store, tmp_path / "rows.npy")
        assert store.changed(old)["t"].tolist() == [3, 30]
        store.set_keys("t", [f"k{n}" for n in range(50)])
        named = store.keep(store.version, "named")
        store.set_keys("t", ["k1", "k0", *(f"k{n}" for n in range(2, 50))])
        assert store.changed(named)["t"].tolist() == [0, 1]
        assert store.changed(old)["t"].size == 50


def test_ancestors_of_versions_that_were_restored():
    forks = [(4, 2), (7, 5)]  # 4 restores 2, and 7 restores 5
    line = [version for version in range(9) if descends(8, forks, version)]
    assert line == [0, 1, 2, 4, 5, 7, 8]
    assert newest_common((8, forks), (3, [])) == 2
    assert newest_common((8, forks), (6, [(4, 2)])) == 5
    assert newest_common((4, [(4, 2)]), (4, [(4, 2)])) == 4
    assert newest_common((3, []), (3, [])) == 3


def test_rows_of_two_versions_are_told_together():
    one, other = {"a": np.array([1, 5])}, {"a": np.array([2, 5]), "b": np.array([3])}
    found = {name: rows.tolist() for name, rows in union(one, other).items()}
    assert found == {"a": [1, 2, 5], "b": [3]}
    assert {name: rows.tolist() for name, rows in union(other, one).items()} == found


def test_runs_of_a_list_of_rows_have_one_outcome(tmp_path):
    rows = RowList(tmp_path / "rows.csv")
    rows.add("t", np.array([1, 2, 3, 7]), np.array([5, 5, 6, 6]))
    rows.add("t", np.array([8, 9]), np.array([6, FILLED]))
    rows.add("u", np.array([10]), np.array([FILLED]))
    rows.close()
    assert (tmp_path / "rows.csv").read_text().splitlines()[1:] == [
        "t,1,2,2,older,5",
        "t,3,3,1,older,6",
        "t,7,8,2,older,6",
        "t,9,9,1,filled,",
        "u,10,10,1,filled,",
    ]
