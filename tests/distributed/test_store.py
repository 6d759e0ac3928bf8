"""A partitioned store, by one process: what it holds, who may open it, and every command."""

import copy
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tierstore
from tests import inside
from tests.distributed.ranks import run, values
from tierstore import distributed
from tierstore._disk.partitioning import Shard
from tierstore._store import partitions
from tierstore._store.versions import History
from tierstore.errors import (
    CapacityError,
    CorruptStoreError,
    ExistsError,
    ForkedStoreError,
    InvalidInputError,
    InvalidTypeError,
    LockedError,
    UnclosedStoreWarning,
    UncommittedRowsWarning,
    UnknownNameError,
    VersionError,
)
from tierstore_cli.main import cli

RANDOM = np.random.default_rng(7)
ROWS = 1003


def specs() -> dict[str, tierstore.TableSpec]:
    fields = {
        "weight": tierstore.Field(5, init=tierstore.normal(std=0.1, seed=3)),
        "age": tierstore.Field(1, "bfloat16", tierstore.constant(2.0)),
    }
    return {
        "item": tierstore.TableSpec(ROWS, fields=fields),
        "user": tierstore.TableSpec(3, 4, "float16", init=tierstore.uniform(seed=1)),
        "word": tierstore.TableSpec(
            500,
            8,
            backend="zarr",
            compression="zstd",
            chunk_rows=7,
            init=tierstore.xavier_uniform(),
        ),
        "empty": tierstore.TableSpec(100, 2),
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made") / "emb.tier"
    distributed.create(place, specs(), partitions=4).close()
    return place


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "emb.tier")


def contents(store: Any) -> dict[str, dict[str, np.ndarray]]:
    return {
        name: store[name].read(np.arange(store[name].rows), list(store[name].fields))
        for name in store
    }


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[table][field], other[table][field])
        for table in one
        for field in one[table]
    )


@pytest.mark.variants(2, 2)
@pytest.mark.parametrize(
    "partitions", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (64, 70))]
)
def test_first_values_are_those_of_a_plain_store(tmp_path: Path, partitions: int) -> None:
    import torch

    torch.manual_seed(5)  # for the table without a seed
    with (
        tierstore.create(tmp_path / "plain", specs()) as plain,
        distributed.create(tmp_path / "parts", specs(), partitions=partitions) as store,
        tierstore.open(tmp_path / "parts") as reader,
    ):
        assert same(contents(plain), contents(store))
        assert same(contents(plain), contents(reader))
        assert reader["item"].fields == plain["item"].fields


def test_arrays_are_spread_over_partitions(tmp_path: Path) -> None:
    values = RANDOM.standard_normal((300, 4)).astype(np.float32)
    spec = tierstore.TableSpec(300, 4, init=tierstore.from_array(values))
    with distributed.create(tmp_path / "emb.tier", {"item": spec}, partitions=8) as store:
        assert np.array_equal(store["item"][:], values)
        ids = RANDOM.integers(0, 300, (7, 9))
        assert np.array_equal(store["item"].read(ids), values[ids])


@pytest.mark.slow
def test_random_programs_equal_a_plain_store(tmp_path: Path) -> None:
    budget = "64KiB"
    with (
        tierstore.create(tmp_path / "plain", specs(), budget=budget) as plain,
        distributed.create(tmp_path / "parts", specs(), partitions=5, budget=budget) as store,
    ):
        plain["word"].write(np.arange(500), store["word"][:])
        plain.commit()
        assert store.commit() == plain.version
        for step in range(40):
            table = ["item", "user", "word", "empty"][RANDOM.integers(4)]
            rows, dim = plain[table].shape
            ids = RANDOM.integers(0, rows, RANDOM.integers(0, 200))
            values = RANDOM.standard_normal((ids.size, dim)).astype(plain[table].dtype)
            for each in (plain, store):
                each[table].write(ids, values)
                each[table].scalars["step"] = step
            kind = RANDOM.integers(4)
            if kind == 0:
                assert plain.uncommitted_rows() == store.uncommitted_rows()
                payload = {"state": {"step": step}}
                assert plain.commit(step, payload=payload) == store.commit(step, payload=payload)
            elif kind == 1:
                plain.rollback()
                store.rollback()
            assert same(contents(plain), contents(store))
            assert plain[table].scalars == store[table].scalars
        plain.commit(99, payload={"state": {"step": 99}})
        store.commit(99, payload={"state": {"step": 99}})
    with tierstore.open(tmp_path / "plain") as plain, tierstore.open(tmp_path / "parts") as reader:
        assert same(contents(plain), contents(reader))
        assert (reader.version, reader.step) == (plain.version, plain.step)
        assert reader.payload["state"].tree() == {"step": 99}
        assert list(reader["item"].scan(block_rows=10))[3].tolist() == plain["item"][30:40].tolist()
        assert reader["item"][-5:900:-7].shape == plain["item"][-5:900:-7].shape
    assert tierstore.verify(tmp_path / "parts").ok


def test_a_reader_sees_one_version_until_it_refreshes(path: Path) -> None:
    with distributed.open(path) as store, tierstore.open(path) as reader:
        before = contents(reader)
        for step in range(5):
            store["item"].write(np.arange(ROWS), RANDOM.standard_normal((ROWS, 5), np.float32))
            store.commit(step)
            assert same(contents(reader), before)
        assert reader.refresh()
        assert same(contents(reader), contents(store))
        assert reader.step == 4
        assert not reader.refresh()


def test_a_reader_opens_while_partitions_are_folded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root is as it was then, and the partitions have other files."""
    rows = RANDOM.standard_normal((100, 5)).astype(np.float32)
    with distributed.open(path) as store:
        store["item"].write(np.arange(100), rows)
        store.commit(1)
        expected, folds = contents(store), []
        generation = partitions._Reader.generation

        def folding(reader: Any, name: str) -> Any:
            if not folds:
                folds.append(inside.parts(store).fold())
            return generation(reader, name)

        inside.root(store).fold()
        monkeypatch.setattr(partitions._Reader, "generation", folding)
        with tierstore.open(path) as reader:
            assert folds and same(contents(reader), expected)


def test_a_manifest_is_replaced_while_versions_are_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As partitions do when a version is confirmed to them, or gets a name."""
    with distributed.open(path) as store:
        store["item"].write([3], np.ones((1, 5), np.float32))
        store.commit(1)
        part, names = inside.parts(store).own[0], []
        newest, history = part.manifest, History(part.directory, part.identity.uuid)
        load = history._load

        def replaced(seq: int) -> Any:
            if not names and seq == newest.seq:
                names.append("best")
                part.change(names={"best": newest.version})
                part.sweep(1)
            return load(seq)

        monkeypatch.setattr(history, "_load", replaced)
        found = history.version(newest.version)
        assert names and found.seq > newest.seq


def test_versions_are_kept_named_and_opened(path: Path) -> None:
    seen = {}
    with distributed.open(path, keep=3) as store:
        for step in range(6):
            store["item"].write(np.arange(50), RANDOM.standard_normal((50, 5), np.float32))
            number = store.commit(step, keep="best" if step == 1 else None)
            seen[number] = contents(store)
        listed = [version.version for version in store.versions()]
        assert listed == [3, 5, 6, 7]
        store.add_fields("item", {"more": tierstore.Field(3, init=tierstore.constant(1.5))})
        assert (store["item"].read([3, 4], "more") == 1.5).all()
        store.add_fields("user", {"more": tierstore.Field(1)})
        for _ in range(4):
            store["item"].write(np.arange(50), RANDOM.standard_normal((50, 5), np.float32))
            store.commit()
        assert store.keep(store.version, "last") == store.version == 13
        with tierstore.open(path / "partitions" / "00001") as partition:
            assert len(partition.versions()) <= 5
        with tierstore.open(path, version="last") as reader:
            assert same(contents(reader), contents(store))
        store.release("last")
        with pytest.raises(UnknownNameError):
            store.release("last")
    for number in (3,):
        with tierstore.open(path, version="best" if number == 3 else number) as reader:
            assert same(contents(reader), seen[number])
    with pytest.raises(VersionError, match="version 4 is not kept"):
        tierstore.open(path, version=4)


def test_a_version_to_which_a_state_points_is_kept(path: Path) -> None:
    for listed in values(run(2, keeps_states, path)):
        assert listed == ([2, 6, 7], [8, 9])


def keeps_states(rank: int, path: Path) -> tuple[list[int], list[int]]:
    """Keep a state over some commits, go back to it, and drop it; return the versions of each."""
    import torch

    from tierstore.nn import TieredEmbedding

    with distributed.open(path) as store:
        emb, ids = TieredEmbedding(store["item"]), torch.arange(50)
        states: list[Any] = []
        for step in range(6):
            store["item"].write(np.arange(50), np.full((50, 5), step, np.float32))
            with pytest.raises(InvalidInputError, match=r"commit\(keep='best'\)"):
                emb.state_dict()
            store.commit(step)
            if step == 0:
                states.append((copy.deepcopy(emb.state_dict()), emb(ids)))
        kept = [each.version for each in store.versions()]
        state, rows = states.pop()
        emb.load_state_dict(state)
        assert torch.equal(emb(ids), rows)
        del state
        store.commit()
        return kept, [each.version for each in store.versions()]


def test_a_new_store_keeps_as_many_as_it_is_made_to(tmp_path: Path) -> None:
    distributed.create(tmp_path / "emb.tier", specs(), partitions=4, keep=9).close()
    with distributed.open(tmp_path / "emb.tier") as store:
        assert store.info().keep == 9


def test_opening_to_keep_fewer_removes_nothing(tmp_path: Path) -> None:
    seen = {}
    path = tmp_path / "emb.tier"
    with distributed.create(path, specs(), partitions=4, keep=9) as store:
        for step in range(4):
            store["item"].write([step], np.full((1, 5), step, np.float32))
            seen[store.commit(step)] = contents(store)
    for _ in range(2):
        with distributed.open(path, keep=1) as store:
            assert store.info().keep == 9
            store.keep(2, "second")
            store.release("second")
    for number, expected in seen.items():
        with tierstore.open(path, version=number) as reader:
            assert same(contents(reader), expected)
    with distributed.open(path, keep=1) as store:
        store["item"].write([1], np.ones((1, 5), np.float32))
        number = store.commit()
        assert [each.version for each in store.versions()] == [number]
        assert store.info().keep == 1
    for part in path.glob("partitions/*"):
        with tierstore.open(part) as reader:
            assert len(reader.versions()) <= 2
    assert tierstore.verify(path).ok


@pytest.mark.parametrize(("keep", "error"), [(0, InvalidInputError), ("two", InvalidTypeError)])
def test_a_store_that_keeps_no_versions_is_not_made(
    tmp_path: Path, keep: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        distributed.create(tmp_path / "emb.tier", specs(), partitions=4, keep=keep)
    assert not list(tmp_path.iterdir())


def test_a_writer_goes_back_to_a_version(path: Path) -> None:
    seen = {}
    with distributed.open(path, keep=3) as store:
        for step in range(3):
            store["item"].write(np.arange(ROWS), RANDOM.standard_normal((ROWS, 5), np.float32))
            seen[store.commit(step)] = contents(store)
    with pytest.raises(VersionError, match=r"9 of .* is not kept; there are: 2, 3, 4"):
        distributed.open(path, version=9, discard_newer=True)
    with pytest.raises(InvalidInputError, match="discard_newer"):
        distributed.open(path, version=3)
    with distributed.open(path, version=3, discard_newer=True) as store:
        assert same(contents(store), seen[3])
        store["item"].write([1], [[1, 2, 3, 4, 5.0]])
        assert store.commit(7) == 5
        assert [each.version for each in store.versions()] == [2, 3, 5]
    assert tierstore.verify(path).ok
    with distributed.open(path, version=5, discard_newer=True) as store:
        assert store["item"][1].tolist() == [1, 2, 3, 4, 5]


def test_altering_needs_all_committed_and_constants(path: Path) -> None:
    with distributed.open(path) as store:
        store["item"].write([4], [[1, 2, 3, 4, 5.0]])
        with pytest.raises(InvalidInputError, match="1 row is not committed on rank 0;"):
            store.add_fields("item", {"more": tierstore.Field(3)})
        store.rollback()
        with pytest.raises(InvalidInputError, match="start from a constant"):
            store.add_fields("item", {"more": tierstore.Field(3, init=tierstore.normal())})
        assert store.version == 1


def test_fields_come_and_go_as_in_a_plain_store(tmp_path: Path) -> None:
    spec = tierstore.TableSpec(50, 4, init=tierstore.normal(seed=1))
    for make in (tierstore.create, distributed.create):
        with make(tmp_path / make.__module__, {"item": spec}) as store:
            with pytest.raises(ExistsError, match="already has a field 'weight'"):
                store.add_fields("item", {"weight": tierstore.Field(1)})
            store.add_fields("item", {"more": tierstore.Field(2, init=tierstore.constant(3.0))})
            store.drop_fields("item", ["weight"])
            assert (store["item"].read(np.arange(50)) == np.full((50, 2), 3.0)).all()
            with pytest.raises(InvalidInputError, match="at least one field"):
                store.drop_fields("item", ["more"])
            assert list(store["item"].fields) == ["more"]


def test_what_is_not_committed_is_dropped(path: Path) -> None:
    store = distributed.open(path)
    store["item"].write([1, 2], RANDOM.standard_normal((2, 5), np.float32))
    with pytest.warns(UncommittedRowsWarning, match="2 uncommitted rows of rank 0"):
        store.close()
    with distributed.open(path) as store, tierstore.open(path) as reader:
        assert same(contents(store), contents(reader))


def test_one_writer(path: Path, tmp_path: Path) -> None:
    with distributed.open(path), pytest.raises(LockedError, match="open for writing"):
        distributed.open(path)
    partition = tierstore.open(path / "partitions" / "00002", "r+")
    with pytest.raises(LockedError, match="00002 is open for writing"):
        distributed.open(path)
    partition.close()
    with pytest.raises(InvalidInputError, match=r"tierstore\.distributed\.open"):
        tierstore.open(path, "r+")
    tierstore.create(tmp_path / "plain", {}).close()
    with pytest.raises(InvalidInputError, match="has no partitions"):
        distributed.open(tmp_path / "plain")
    distributed.open(path).close()


def test_a_missing_partition(path: Path) -> None:
    (path / "partitions" / "00001").rename(path / "away")
    for way in (tierstore.open, distributed.open):
        with pytest.raises(CorruptStoreError, match=r"00001 is missing.*partition 1"):
            way(path)
    assert not tierstore.verify(path).ok
    (path / "away").rename(path / "partitions" / "00001")
    distributed.open(path).close()


def test_a_partition_of_another_moment(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path / "partitions" / "00003", tmp_path / "old")
    with distributed.open(path) as store:
        for _ in range(4):
            store["item"].write(np.arange(ROWS), RANDOM.standard_normal((ROWS, 5), np.float32))
            store.commit()
    shutil.rmtree(path / "partitions" / "00003")
    shutil.copytree(tmp_path / "old", path / "partitions" / "00003")
    with pytest.raises(CorruptStoreError, match="00003"):
        tierstore.open(path)
    with pytest.raises((CorruptStoreError, VersionError), match="00003"):
        distributed.open(path)
    assert not tierstore.verify(path).ok


def test_damage_is_reported_by_id(path: Path) -> None:
    with tierstore.open(path) as reader:
        values = reader["item"][:]
    base = next((path / "partitions" / "00002" / "item").glob("g*/rows.npy"))
    data = bytearray(base.read_bytes())
    data[4096 + 32 * 17] ^= 1
    base.write_bytes(data)
    report = tierstore.verify(path)
    (bad,) = report.bad_rows["item"]
    assert not report.ok
    with tierstore.open(path) as reader:
        with pytest.raises(CorruptStoreError):
            reader["item"].read([bad])
        sound = np.setdiff1d(np.arange(ROWS), [bad])
        assert np.array_equal(reader["item"].read(sound), values[sound])
        assert reader.verify().bad_rows["item"] == [bad]
    with distributed.open(path) as writer:
        with pytest.raises(InvalidInputError, match="copies what is intact to a new store"):
            writer.verify(mend=True)
        assert writer.verify().bad_rows["item"] == [bad]


def test_a_store_with_damaged_partitions_is_repaired(path: Path, tmp_path: Path) -> None:
    with distributed.open(path) as store:
        rows = RANDOM.standard_normal((ROWS, 5), np.float32)
        store["item"].write(np.arange(ROWS), rows)
        store.commit(1, payload={"note": {"of": 1}})
        expected = contents(store)
        parts = [Shard(ROWS, 4, 0, 4).rows_in(each, np.arange(-(-ROWS // 4))) for each in range(4)]
        newest = RANDOM.standard_normal((ROWS, 5), np.float32)
        for number in (0, 2):  # others have no third version
            ids = np.sort(parts[number][parts[number] < ROWS])
            store["item"].write(ids, newest[ids])
        store.commit(1)
    whole = tierstore.repair(path, tmp_path / "whole")
    assert whole.complete
    with distributed.open(tmp_path / "whole") as store, tierstore.open(path) as reader:
        assert same(contents(store), contents(reader))
        assert store.payload["note"].tree() == {"of": 1}
        assert reader["item"].fields == store["item"].fields

    partitions = path / "partitions"
    manifests = sorted((partitions / "00000").glob("manifest*"))
    manifests[-1].write_bytes(b"damaged")  # of the newest version
    shutil.rmtree(partitions / "00001")
    (delta,) = (partitions / "00002" / "item").glob("g*/delta-*3-*.bin")
    data = bytearray(delta.read_bytes())
    data[3] ^= 1  # the first record that was written to it
    delta.write_bytes(data)
    before = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
    report = tierstore.repair(path, tmp_path / "copy", fill=("version", "nan"))
    assert {each: each.read_bytes() for each in path.rglob("*") if each.is_file()} == before
    assert not report.complete
    counts = report.tables["item"]
    in_part = [int((each < ROWS).sum()) for each in parts]
    assert (counts.rows, counts.older, counts.filled) == (ROWS, in_part[0] + 1, in_part[1])
    assert tierstore.verify(tmp_path / "copy").ok
    with distributed.open(tmp_path / "copy") as store:
        found = contents(store)["item"]["weight"]
        assert np.array_equal(found[parts[0][parts[0] < ROWS]], rows[parts[0][parts[0] < ROWS]])
        assert np.isnan(found[parts[1][parts[1] < ROWS]]).all()
        kept = parts[2][parts[2] < ROWS]
        lost = np.flatnonzero((found[kept] != newest[kept]).any(1))
        assert lost.size == 1 and np.array_equal(found[kept[lost]], rows[kept[lost]])
        kept = parts[3][parts[3] < ROWS]
        assert np.array_equal(found[kept], expected["item"]["weight"][kept])
        store["item"].write([1], np.ones((1, 5), np.float32))
        store.commit()
    listed = (tmp_path / "copy.rows.csv").read_text().splitlines()
    filled = [line.split(",") for line in listed if "item" in line and "filled" in line]
    ids = np.concatenate([np.arange(int(a), int(b) + 1) for _, a, b, *_ in filled])
    assert np.array_equal(np.sort(ids), np.sort(parts[1][parts[1] < ROWS]))


def test_a_damaged_partition_is_repaired_alone(path: Path, tmp_path: Path) -> None:
    with distributed.open(path) as store:
        store["item"].write(np.arange(ROWS), RANDOM.standard_normal((ROWS, 5), np.float32))
        store.commit()
        expected = contents(store)
    partition = path / "partitions" / "00002"
    base = next((partition / "user").glob("g*/rows.npy"))
    data = bytearray(base.read_bytes())
    data[-1] ^= 1  # of a row that a later test need not know
    base.write_bytes(data)
    tierstore.repair(partition, tmp_path / "copy", version=2, fill="zeros")
    shutil.rmtree(partition)
    (tmp_path / "copy").rename(partition)
    assert tierstore.verify(path).ok
    with distributed.open(path) as store, tierstore.open(path) as reader:
        assert same(contents(store), contents(reader))
        assert np.array_equal(contents(store)["item"]["weight"], expected["item"]["weight"])


def test_a_reader_goes_on_in_a_forked_child(path: Path) -> None:
    with tierstore.open(path) as reader, distributed.open(path) as store:
        values = reader["item"][:]
        child = os.fork()
        if child == 0:
            same_values = np.array_equal(reader["item"][:], values)
            refused = False
            try:
                store["item"].read([1])
            except ForkedStoreError:
                refused = True
            os._exit(0 if same_values and refused else 1)
        assert os.waitpid(child, 0)[1] == 0
        store["item"].write([1], [[1, 2, 3, 4, 5.0]])
        store.commit()


@pytest.mark.slow
def test_a_store_that_is_not_closed(path: Path) -> None:
    program = f"""
import numpy as np, tierstore.distributed
store = tierstore.distributed.open({str(path)!r})
store["item"].write([1], np.ones((1, 5), np.float32))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("UncommittedRowsWarning") == 1, done.stderr
    assert "Traceback" not in done.stderr
    distributed.open(path).close()
    store = distributed.open(path)
    with pytest.warns(UnclosedStoreWarning):
        del store
        gc.collect()
    distributed.open(path).close()


def test_a_copy_is_a_plain_store(path: Path, tmp_path: Path) -> None:
    with tierstore.open(path) as reader:
        reader.save(tmp_path / "copy")
        with tierstore.open(tmp_path / "copy", "r+") as copy:
            assert same(contents(copy), contents(reader))
            assert copy.parent == (reader.uuid, reader.version)


def test_commands_take_it_as_one_store(path: Path, tmp_path: Path) -> None:
    def command(*arguments: object) -> str:
        result = CliRunner().invoke(cli, [str(each) for each in arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    found = json.loads(command("inspect", path, "--json"))
    assert found["version"] == 1
    command("verify", path)
    command("export", path, tmp_path / "item.npy", "--table", "item")
    command("save", path, tmp_path / "copy")
    with tierstore.open(path) as reader:
        assert np.array_equal(np.load(tmp_path / "item.npy"), reader["item"][:])


@pytest.mark.parametrize("budget", ["10B", tierstore.Budget(host={"other": "1MiB"})])
def test_a_store_that_cannot_be_opened_is_not_left(tmp_path: Path, budget: Any) -> None:
    with pytest.raises((CapacityError, UnknownNameError)):
        distributed.create(tmp_path / "emb.tier", specs(), partitions=2, budget=budget)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("partitions", [0, -1, 5000, 1.5])
def test_numbers_of_partitions(tmp_path: Path, partitions: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="partitions"):
        distributed.create(tmp_path / "emb.tier", specs(), partitions=partitions)
    assert not list(tmp_path.iterdir())


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("partitions", [2, 7])
def test_a_store_is_spread_over_other_partitions(
    path: Path, tmp_path: Path, partitions: int
) -> None:
    with distributed.open(path) as store:
        for table in ("item", "empty"):
            rows, dim = store[table].shape
            store[table].write(np.arange(rows), RANDOM.standard_normal((rows, dim), np.float32))
        store["item"].scalars["step"] = 12
        store.commit(12, payload={"state": {"epoch": 3}})
        expected = contents(store)
    with tierstore.open(path) as reader:
        reader.save(tmp_path / "plain")
    for source in (path, tmp_path / "plain"):
        copy = tmp_path / f"{source.name}-copy"
        distributed.save(source, copy, partitions=partitions)
        assert tierstore.verify(copy).ok
        with distributed.open(copy) as store:
            assert same(contents(store), expected)
            assert store["item"].scalars == {"step": 12}
            assert (store.version, store.step) == (2, 12)
            assert store.payload["state"].tree() == {"epoch": 3}
            store["user"].write([1], np.ones((1, 4), np.float16))
            assert store.commit() == 3
        with tierstore.open(copy) as reader, tierstore.open(source) as before:
            assert reader.parent == (before.uuid, 2)
            assert (reader["user"][1] == 1).all()


@pytest.mark.slow
def test_what_changed_between_versions_is_said_of_ids(path: Path) -> None:
    """The deltas of partitions have rows of their own, and each is folded by itself."""
    rng = np.random.default_rng(8)
    every = {}
    with distributed.open(path, "r+", keep=9) as store:
        every[store.version] = contents(store)
        for _ in range(4):
            for table in store.values():
                ids = rng.choice(table.rows, 3, replace=False)
                table.write(ids, rng.standard_normal((3, table.dim)).astype(table.dtype))
            every[store.commit()] = contents(store)
    with tierstore.open(path) as reader:
        for one in every:
            for other in every:
                found = reader.changed(one, other)
                for name, fields in every[other].items():
                    rows = [
                        np.flatnonzero((every[one][name][field] != values).any(1))
                        for field, values in fields.items()
                    ]
                    expected = np.unique(np.concatenate(rows))
                    assert np.array_equal(found.get(name, []), expected), (one, other, name)


def test_partitions_of_two_copies_are_no_store(tmp_path: Path) -> None:
    """Both have a version of the number, of different rows."""
    spec = {"t": tierstore.TableSpec(10, 4)}
    tierstore.distributed.create(tmp_path / "a", spec, partitions=2).close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for number, name in enumerate("ab"):
        with tierstore.distributed.open(tmp_path / name) as store:
            store["t"].write(range(10), np.full((10, 4), number, np.float32))
            store.commit()
    shutil.rmtree(tmp_path / "a/partitions/00001")
    shutil.copytree(tmp_path / "b/partitions/00001", tmp_path / "a/partitions/00001")
    with pytest.raises(CorruptStoreError, match=r"of another moment .* restore all from one copy"):
        tierstore.open(tmp_path / "a")["t"].read(range(10))
