"""Versions that are kept by name, and an open store that is brought back to one."""

import itertools
import json
import random
import warnings
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner

import tierstore
from tests import inside
from tests.durability.crash import scratch, small_deltas
from tests.durability.stepwise import folds_in_steps
from tests.durability.twin import Twin, observe
from tierstore._disk.manifest import Manifest
from tierstore._store.ledger import Ledger
from tierstore._store.lineage import descends, newest_common, pruned
from tierstore._strictjson import canonical, seal
from tierstore.budget import Budget
from tierstore.errors import (
    ClosedError,
    CorruptStoreError,
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    ReadOnlyError,
    UnknownNameError,
    VersionError,
)
from tierstore_cli.main import cli

ROWS, DIM = 300, 8
EVERY = np.arange(ROWS)
NONE = Budget(host=0)


@pytest.fixture(params=[0, 40, ROWS], ids=["no host tier", "a small one", "a whole one"])
def store(request, tmp_path):
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=1, seed=1))
    budget = Budget(host_rows=request.param)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=budget, keep=2) as made:
        yield made
        if not inside.door(made).closed:
            made.rollback()


def change(store, seed, **options):
    """Write half of the rows and commit; return all rows."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(ROWS)[: ROWS // 2]
    store["t"].write(ids, rng.standard_normal((ids.size, DIM)).astype(np.float32))
    store["t"].scalars["step"] = seed
    store.commit(step=seed, payload={"model": b"%d" % seed}, **options)
    return store["t"].read(EVERY)


def numbers(store):
    return [each.version for each in store.versions()]


def test_a_named_version_outlives_keep_and_comes_back(store):
    best = change(store, 1, keep="best")
    for seed in range(2, 9):
        change(store, seed)
    assert numbers(store) == [2, 8, 9]
    assert store.versions()[0].names == ("best",)
    store["t"].write([5], np.ones((1, DIM), np.float32))
    assert store.restore("best") == 10
    assert np.array_equal(store["t"].read(EVERY), best)
    assert (store.step, store["t"].scalars["step"]) == (1, 1)
    assert store.payload["model"].read() == b"1"
    assert store.uncommitted_rows() == 0
    assert numbers(store) == [2, 9, 10]
    with tierstore.open(store.path, budget=NONE) as reader:
        assert np.array_equal(reader["t"].read(EVERY), best)
        assert reader.version == 10


def test_training_goes_on_from_a_restored_version(store):
    best = change(store, 1, keep="best")
    newest = change(store, 2, keep="second")
    store.restore(2)
    after = change(store, 3, keep="last")
    assert not np.array_equal(after, best)
    assert store.restore("second") == 6
    assert np.array_equal(store["t"].read(EVERY), newest)
    assert store.restore("best") == 7
    assert np.array_equal(store["t"].read(EVERY), best)
    store.restore("last")
    assert np.array_equal(store["t"].read(EVERY), after)
    assert store.verify().ok


def test_restoring_what_is_open_publishes_nothing(store):
    best = change(store, 1)
    store["t"].write([5], np.ones((1, DIM), np.float32))
    assert store.restore(2) == 2
    assert np.array_equal(store["t"].read(EVERY), best)
    change(store, 2)
    assert [store.restore(2), store.restore(2), store.restore(4)] == [4, 4, 4]
    assert numbers(store) == [3, 4]
    change(store, 3)
    assert store.restore(4) == 6
    assert np.array_equal(store["t"].read(EVERY), best)


def test_names_move_and_go(store):
    change(store, 1, keep="best")
    change(store, 2, keep="best")
    assert [each.names for each in store.versions()] == [(), ("best",)]
    assert store.keep(2, "first") == 2
    assert store.keep("first", "also") == 2
    change(store, 3)
    assert numbers(store) == [2, 3, 4]
    store.release("also")
    assert numbers(store) == [2, 3, 4]
    store.release("first")
    change(store, 4)
    change(store, 5)
    assert numbers(store) == [3, 5, 6]
    with pytest.raises(UnknownNameError, match="no version is kept as 'first'; there are: 'best'"):
        store.release("first")
    with pytest.raises(VersionError, match=r"no version is kept as 'first'.*'best' \(3\)"):
        store.restore("first")
    with pytest.raises(VersionError, match="version 2 is not kept; there are: 3, 5, 6"):
        store.keep(2, "first")
    with pytest.raises(VersionError, match="version 2 is not kept"):
        store.restore(2)
    for name in ("", "two\nlines", "x" * 1025):
        with pytest.raises(InvalidInputError, match="not a version's name"):
            store.commit(keep=name)
    with pytest.raises(InvalidTypeError, match="name of a version must be"):
        store.keep(3, 7)
    with pytest.raises(InvalidTypeError, match="version must be an int"):
        store.restore(1.5)


def test_names_survive_reopening_and_every_commit(store):
    best = change(store, 1)
    store.keep(2, "runs/epoch=1-step=8.ckpt")
    store.add_fields("t", {"age": tierstore.Field(1)})
    store.commit_async(keep="behind").result()
    path = store.path
    store.close()
    with tierstore.open(path, "r+", budget=NONE) as again:
        for seed in range(5):
            change(again, seed)
        assert numbers(again)[:2] == [2, 4]
        again.restore("runs/epoch=1-step=8.ckpt")
        assert np.array_equal(again["t"].read(EVERY), best)
        assert list(again["t"].fields) == ["weight"]
    with tierstore.open(path, version="behind", budget=NONE) as reader:
        assert (reader.version, list(reader["t"].fields)) == (4, ["weight", "age"])


def test_tables_keys_and_shapes_are_those_of_the_version(store):
    store.set_keys("t", [f"k{row}" for row in range(ROWS)])
    best = change(store, 1, keep="best")
    table = store["t"]
    store.grow("t", ROWS + 5, keys=[f"n{row}" for row in range(5)])
    store.create_table("later", tierstore.TableSpec(3, 4))
    later = store["later"]
    store.rename("t", "u")
    store.restore("best")
    assert list(store) == ["t"]
    assert np.array_equal(store["t"].read(EVERY), best)
    assert store["t"].lookup(["k7"]).tolist() == [7]
    with pytest.raises(ClosedError):
        later.read([0])
    with pytest.raises(ClosedError):
        table.read([0])  # it was renamed
    assert store.verify().ok


def test_leases_end_and_tables_stay(store):
    change(store, 1)
    table = store["t"]
    change(store, 2)
    lease = table.lease([1, 2])
    store.restore(2)
    with pytest.raises(ClosedError):
        lease.write("weight", np.ones((2, DIM), np.float32))
    assert store["t"] is table
    table.write([1], np.ones((1, DIM), np.float32))
    assert store.uncommitted_rows() == 1


def test_a_reader_goes_to_a_version_and_back(store):
    rows = {2: change(store, 1), 3: change(store, 2)}
    with tierstore.open(store.path, budget=Budget(host_rows=50)) as reader:
        for version in (2, 3, 2):
            assert reader.restore(version) == version
            assert np.array_equal(reader["t"].read(EVERY), rows[version])
        assert reader.refresh()
        assert reader.version == 3
        with pytest.raises(VersionError):
            reader.restore(7)
        assert np.array_equal(reader["t"].read(EVERY), rows[3])
        with pytest.raises(ReadOnlyError):
            reader.keep(3, "best")


def test_readers_follow_a_writer_to_a_restored_version(store):
    """Rows that only later versions had changed come from the delta before, or from the base."""
    best = change(store, 1, keep="best")
    newer = change(store, 2)
    path = store.path
    with (
        tierstore.open(path, budget=Budget(host_rows=50)) as follows,
        tierstore.open(path, budget=Budget(host_rows=50)) as stays,
    ):
        follows["t"].read(EVERY[:50])
        store.restore("best")
        assert follows.refresh()
        assert np.array_equal(follows["t"].read(EVERY), best)
        assert np.array_equal(stays["t"].read(EVERY), newer)
    store.close()
    with tierstore.open(path, budget=NONE) as reader:
        with tierstore.open(path, "r+", version=2, discard_newer=True, budget=NONE):
            pass
        reader.refresh()
        assert np.array_equal(reader["t"].read(EVERY), best)


def test_going_back_for_good_drops_the_names_of_newer_versions(store):
    change(store, 1, keep="old")
    change(store, 2, keep="new")
    path = store.path
    store.close()
    with tierstore.open(path, "r+", version="old", discard_newer=True, budget=NONE) as again:
        assert [each.names for each in again.versions()] == [("old",)]
        change(again, 3)
        assert again.version == 4


def test_a_fold_names_the_version_that_is_in_its_way(store):
    change(store, 1, keep="best")
    change(store, 2)
    with pytest.raises(InvalidInputError, match=r"version 2 is kept as 'best'.*release\('best'\)"):
        store.fold()
    store.release("best")
    newest = change(store, 3, keep="last")
    store.fold()
    assert numbers(store) == [store.version]
    assert np.array_equal(store["t"].read(EVERY), newest)


def test_what_was_not_confirmed_stays(store):
    change(store, 1)
    for seed in range(2, 6):
        change(store, seed, confirm=False)
    store.restore(3)
    assert numbers(store) == [2, 3, 4, 5, 6, 7]
    store.confirm(7)
    assert numbers(store) == [6, 7]


def test_a_version_that_is_not_whole_leaves_the_store_as_it_was(store):
    change(store, 1, keep="best")
    newest = change(store, 2)
    (delta, *_) = sorted(store.path.glob("t/g*/delta-*.bin"))
    data = delta.read_bytes()
    delta.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptStoreError, match="version 2 is damaged, nothing was changed"):
        store.restore("best")
    delta.write_bytes(data)
    assert np.array_equal(store["t"].read(EVERY), newest)
    assert change(store, 3) is not None


def test_verify_save_and_repair_know_names(store, tmp_path):
    best = change(store, 1, keep="best")
    change(store, 2)
    change(store, 3)
    report = tierstore.verify(store.path, version="best")
    assert report.ok
    assert (report.version, report.whole) == (2, [2])
    store.save(tmp_path / "saved", version="best")
    tierstore.repair(store.path, tmp_path / "repaired", version="best")
    for name in ("saved", "repaired"):
        with tierstore.open(tmp_path / name, budget=NONE) as copy:
            assert np.array_equal(copy["t"].read(EVERY), best)
            assert [each.names for each in copy.versions()] == [()]
    oldest = min(store.path.glob("manifest-*.json"))
    store.close()
    oldest.unlink()
    report = tierstore.verify(store.path)
    assert "version 2, which is kept as 'best', is missing" in report.bad_files


# -- the past that versions share


def test_the_past_of_a_version_skips_what_it_left_behind():
    line = (9, ((5, 2), (8, 6)))  # 1 2 | 5 6 | 8 9
    assert [n for n in range(12) if descends(*line, n)] == [0, 1, 2, 5, 6, 8, 9]
    other = (7, ((5, 2),))
    assert newest_common(line, other) == 6
    assert newest_common(line, (4, ())) == 2
    assert newest_common(line, line) == 9
    assert pruned(line[1], 5) == ((8, 6),)


def test_the_newest_common_version_is_that_of_a_tree():
    rng = random.Random(3)
    for _ in range(50):
        parents, forks = {1: 0}, {1: ()}
        for version in range(2, 30):
            parents[version] = rng.choice([version - 1, version - 1, rng.randrange(1, version)])
            source = parents[version]
            own = () if source == version - 1 else ((version, source),)
            forks[version] = (*forks[source], *own)

        def past(version, parents=parents):
            return {0} if not version else {version} | past(parents[version], parents)

        for one, other in itertools.combinations(parents, 2):
            common = max(past(one) & past(other))
            assert newest_common((one, forks[one]), (other, forks[other])) == common


BAD = {
    "names": [{"": 1}, {"a\n": 1}, {"best": 0}, {"best": 9}, {"best": -1}, {"best": "1"}, [1]],
    "forks": [[[3, 3]], [[9, 1]], [[3]], [[3, 0]], [[3, 1], [2, 1]], [["3", 1]], {"3": 1}, [3]],
    "payload_mark": ["x", 3, "0" * 17],
    "skipped": [6, -(2**62), "1", 1.0],
}


@pytest.mark.parametrize("key", BAD)
def test_a_manifest_that_was_made_up_is_refused(key):
    good = Manifest(
        "0" * 32,
        5,
        5,
        last_version=5,
        names={"best": 3},
        forks=((4, 2),),
        skipped=1,
        payload_mark="ab",
    )
    assert Manifest.decode(good.encode(), "m") == good
    body = json.loads(good.encode())["body"]
    for value in BAD[key]:
        with pytest.raises(FormatError):
            Manifest.decode(seal(canonical({**body, key: value})), "m")
    plain = Manifest("0" * 32, 5, 5)
    assert not BAD.keys() & json.loads(plain.encode())["body"].keys()


# -- folds beside versions that were left behind

STEPS = ("write commit " * 4 + "restore keep release confirm add_fields reopen").split()


def wander(seed, length=45):
    """Take random steps while folds go on; compare every version and reader after each."""
    rng = random.Random(seed)
    with scratch() as root, small_deltas(), folds_in_steps(seed) as folds, ExitStack() as readers:
        twin = Twin(root, lambda *_: None, seed)
        twin.run(["create"])
        staying = []

        def check(reader, where):
            found = observe(reader)
            same = [state for state in twin.states if state["version"] == found["version"]]
            assert found in same, (seed, where)

        for number in range(length):
            step = rng.choice(STEPS)
            twin.run([step])
            folds.advance()
            if rng.random() < 0.15:
                reader = tierstore.open(twin.path, budget=Budget(host_rows=3))
                staying.append(readers.enter_context(reader))
            if staying and rng.random() < 0.2:
                staying[rng.randrange(len(staying))].refresh()
            for reader in staying:
                check(reader, (number, step, "stays"))
            with tierstore.open(twin.path, budget=NONE) as newest:
                for each in newest.versions():
                    with tierstore.open(twin.path, version=each.version, budget=NONE) as one:
                        check(one, (number, step, each.version))
        assert twin.store.verify().ok
        twin.close()
        return folds.overlaps


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("seed", [4, 21])
def test_folds_leave_every_version_and_reader_as_it_was(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert wander(seed) > 0


@pytest.fixture
def five(tmp_path):
    """A store of five versions of which a writer kept all."""
    spec = tierstore.TableSpec(ROWS, DIM)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=NONE, keep=10) as made:
        for seed in range(4):
            change(made, seed)
    return tmp_path / "s"


def files(path):
    """Return every file but LOCK, which says who had the store open."""
    every = [each for each in path.rglob("*") if each.is_file() and each.name != "LOCK"]
    return {each: each.read_bytes() for each in every}


def test_a_new_store_keeps_as_many_as_it_is_made_to(tmp_path):
    tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(ROWS, DIM)}, keep=10).close()
    with tierstore.open(tmp_path / "s") as reader:
        assert reader.info().keep == 10


def test_opening_to_keep_fewer_removes_nothing(five):
    before = files(five)
    with tierstore.open(five, "r+", budget=NONE, keep=1) as looked:
        assert numbers(looked) == [1, 2, 3, 4, 5]
        assert looked.info().keep == 10
    assert files(five) == before
    with pytest.raises(UnknownNameError):
        tierstore.open(five, "r+", keep=1, policy={"typo": "lfu"})
    assert files(five) == before


def test_fewer_are_kept_from_the_next_commit_on(five):
    with tierstore.open(five, "r+", budget=NONE, keep=2) as store:
        change(store, 9)
        assert numbers(store) == [5, 6]
        assert store.info().keep == 2
    with tierstore.open(five, "r+", budget=NONE) as store:
        change(store, 10)
        assert numbers(store) == [6, 7]


def test_names_and_confirmations_are_no_commits(five):
    with tierstore.open(five, "r+", budget=NONE, keep=1) as store:
        store.keep(3, "third")
        store.release("third")
        store.confirm(5)
        assert numbers(store) == [1, 2, 3, 4, 5]
        assert store.info().keep == 10
    with tierstore.open(five, budget=NONE) as reader:
        assert numbers(reader) == [1, 2, 3, 4, 5]
        assert reader.info().keep == 10


@pytest.mark.parametrize(
    "commit",
    [
        lambda store: store.restore(2),
        lambda store: store.add_fields("t", {"age": tierstore.Field(1)}),
        lambda store: store.commit_async().result(),
    ],
    ids=["restore", "a new field", "behind"],
)
def test_every_new_version_is_a_commit(five, commit):
    with tierstore.open(five, "r+", budget=NONE, keep=2) as store:
        commit(store)
        assert numbers(store) == [5, 6]
        assert store.info().keep == 2


def test_a_fold_leaves_how_many_are_kept(five):
    with tierstore.open(five, "r+", budget=NONE, keep=1) as store:
        store.fold()
        assert numbers(store) == [5]
    with tierstore.open(five, "r+", budget=NONE) as store:
        change(store, 9)
        assert numbers(store) == [5, 6]


def test_more_are_kept_at_once(five):
    """Also where the writer before was killed before it removed what is too many for it."""
    with (
        mock.patch.object(Ledger, "keep_newest"),
        mock.patch.object(Ledger, "sweep"),
        tierstore.open(five, "r+", budget=NONE, keep=1) as store,
    ):
        change(store, 9)
    with tierstore.open(five, "r+", budget=NONE, keep=4) as store:
        assert numbers(store) == [3, 4, 5, 6]


def two_lines(root):
    """Keep the ends of two lines that part at version 3, one of them newest; fold at the close."""
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=1, seed=1))
    rows = {}
    with tierstore.create(root / "s", {"t": spec}, budget=NONE, keep=1) as store:
        for seed in range(2, 6):
            rows[seed] = change(store, seed, keep=f"v{seed}")
        store.restore("v3")
        rows[6] = store["t"].read(EVERY)
        store.keep(6, "v6")
        for name in ("v2", "v3", "v4"):
            store.release(name)
        store.restore("v5")
        rows[7] = rows[5]
    with tierstore.open(root / "s", budget=NONE) as reader:
        found = reader.versions()
        assert [each.version for each in found] == [5, 6, 7]
    for each in found:
        with tierstore.open(root / "s", version=each.version, budget=NONE) as reader:
            assert np.array_equal(reader["t"].read(EVERY), rows[each.version])
    return found


def test_a_fold_merges_what_all_lines_share(tmp_path):
    newest = two_lines(tmp_path)[-1]
    assert newest.delta_rows == ROWS  # of versions 4 and 5; those of 2 and 3 are in the base


def test_control_a_fold_that_ignores_forks_is_found_out(tmp_path):
    def oldest(ledger, readers):
        return min([*ledger.versions, *readers])

    with (
        mock.patch.object(Ledger, "common_past", oldest),
        pytest.raises((AssertionError, CorruptStoreError)),
    ):
        two_lines(tmp_path)


@pytest.mark.parametrize("name", ["7", "0", "٧", "13"])
def test_a_name_is_never_taken_for_a_number(tmp_path, name):
    """`--version 7` is version 7; a version called so could not be told from it."""
    with tierstore.create(tmp_path / "s.tier", {"t": tierstore.TableSpec(4, 2)}) as made:
        for work in (lambda: made.keep(1, name), lambda: made.commit(keep=name)):
            with pytest.raises(InvalidInputError, match="would be taken for version"):
                work()
        made.keep(1, f"v{name}")
        assert made.commit() == 2
    result = CliRunner().invoke(cli, ["keep", str(tmp_path / "s.tier"), name])
    assert result.exit_code and "would be taken for version" in result.output
