"""Stores of many tables: what a call costs is what changed, or what is used."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests import inside
from tierstore._disk.manifest import Manifest
from tierstore._strictjson import canonical, seal
from tierstore.errors import ClosedError, CorruptRowError, CorruptStoreError, FormatError

ROWS, DIM = 50, 4
NAMES = [f"t{number}" for number in range(12)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made") / "s"
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=3))
    tierstore.create(place, dict.fromkeys(NAMES, spec)).close()
    return place


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "s")


@pytest.fixture
def store(path: Path) -> Iterator[tierstore.Store]:
    with tierstore.open(path, "r+") as opened:
        yield opened


def write(
    store: tierstore.Store, name: str, seed: int, ids: Sequence[int] = (4, 2, 9)
) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((len(ids), DIM)).astype(np.float32)
    store[name].write(ids, values)
    return values


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions, of Python and of C, a call of `work` calls in this thread."""
    count = 0

    def note(frame: object, event: str, what: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # which calls what is to be called when something is gone
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def many(count: int) -> tierstore.Store:
    """Return a store of so many tables, each of which has a row that was committed."""
    made = tierstore.create(None, {f"t{n}": tierstore.TableSpec(7, DIM) for n in range(count)})
    for name in made:
        write(made, name, 0, [0])
    made.commit()
    return made


@pytest.mark.nightly
@pytest.mark.slow
def test_a_commit_of_one_row_calls_the_same_functions_however_many_tables() -> None:
    counts = []
    for count in (3, 30, 300):
        with many(count) as store:
            found = []
            for version in range(6):
                write(store, "t2", version, [version % 7])
                if version == 3:
                    store["t1"].scalars["step"] = 1
                found.append(calls_of(lambda store=store, version=version: store.commit(version)))
            counts.append(found[1:])  # the first one drops what all tables were written to
    assert np.ptp(np.array(counts), axis=0).max() <= 25, counts  # of some thousands


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize(
    "what", ["open", "write", "info", "refresh", "commit", "rollback", "close"]
)
def test_what_is_done_to_every_table_costs_each_the_same(what: str) -> None:
    """Nothing looks at all tables for each table."""
    counts = {}
    for count in (30, 300):
        with many(count) as store, tierstore.open(store.path) as reader:
            path = store.path
            if what == "close":
                opened = tierstore.open(path)
                opened["t0"].read([0])
                counts[count] = calls_of(opened.close)
                continue
            for name in store:
                write(store, name, 1, [3])
            if what == "refresh":
                store.commit()
            acts: dict[str, Callable[[], object]] = {
                "open": lambda path=path: tierstore.open(path).close(),
                "write": lambda store=store: [write(store, name, 2, [5]) for name in store],
                "info": lambda store=store: [str(store.info()), store.info().to_dict()],
                "refresh": reader.refresh,
                "commit": store.commit,
                "rollback": store.rollback,
            }
            counts[count] = calls_of(acts[what])
            store.rollback()
    assert counts[300] <= 20 * counts[30], counts  # 100 where each looks at all


def test_a_commit_encodes_the_tables_that_changed(store: tierstore.Store) -> None:
    write(store, "t3", 1)
    store.commit()
    before = inside.manifest(store).tables
    write(store, "t7", 2)
    store["t1"].scalars["step"] = 1
    store.commit()
    after = inside.manifest(store).tables
    assert [name for name in NAMES if after[name] is not before[name]] == ["t1", "t7"]


def test_scalars_of_another_type_are_a_change(store: tierstore.Store) -> None:
    for value in (1, 1.0, True):
        store["t2"].scalars["step"] = value
        store.commit()
        with tierstore.open(store.path) as reader:
            assert type(reader["t2"].scalars["step"]) is type(value)


def test_what_a_manifest_shares_with_another_is_what_is_the_same(store: tierstore.Store) -> None:
    first = inside.manifest(store)
    write(store, "t5", 1)
    store.commit()
    second = inside.manifest(store)
    plain = Manifest.decode(second.encode(), "manifest")
    shared = Manifest.decode(second.encode(), "manifest", first)
    assert plain == shared and plain.tables == second.tables
    assert [name for name in NAMES if shared.tables[name] is not first.tables[name]] == ["t5"]
    new, gone = second.changed_paths(first)
    assert (new, gone) == (second.paths() - first.paths(), first.paths() - second.paths())


def test_of_a_table_that_changed_the_spec_and_older_deltas_are_shared(
    store: tierstore.Store,
) -> None:
    for value in (1, 2):
        write(store, "t5", value)
        store.commit()
    known = inside.manifest(store)
    write(store, "t5", 3)
    store.commit()
    later = inside.manifest(store).encode()
    before, after = known.tables["t5"], Manifest.decode(later, "m", known).tables["t5"]
    assert len(after.deltas) == 3
    assert after.spec is before.spec
    assert all(one is other for one, other in zip(after.deltas, before.deltas, strict=False))
    body = json.loads(later)["body"]
    table = body["tables"]["t5"]
    for where, key, value in (
        (table, "sparse", 0),
        (table, "rows", float(table["rows"])),
        (table["deltas"][0], "version", True),
        (table["deltas"][1], "rows", float(table["deltas"][1]["rows"])),
        (table["deltas"][0], "name", "delta-1"),
    ):
        right, where[key] = where[key], value
        with pytest.raises(FormatError):
            Manifest.decode(seal(canonical(body)), "m", known)
        where[key] = right
    assert Manifest.decode(seal(canonical(body)), "m", known).tables["t5"] == after


def test_a_table_is_mapped_when_it_is_needed(path: Path) -> None:
    with tierstore.open(path) as reader:

        def mapped() -> list[str]:
            return [
                name for name in NAMES if inside.base(inside.disk(reader[name]))._opened is not None
            ]

        assert mapped() == []
        reader["t4"].read([1, 2])
        assert mapped() == ["t4"]


@pytest.mark.parametrize("name", ["rows.npy", "rows.crc"])
def test_a_file_that_is_cut_is_found_though_it_is_not_mapped(path: Path, name: str) -> None:
    (file,) = (path / "t6").rglob(name)
    os.truncate(file, file.stat().st_size - 1)
    with tierstore.open(path) as reader:
        assert list(reader.damaged) == ["t6"]
        reader["t5"].read([0])


@pytest.mark.parametrize("name", ["rows.npy", "rows.crc"])
def test_a_file_that_is_replaced_before_it_is_mapped_is_noticed(path: Path, name: str) -> None:
    (file,) = (path / "t6").rglob(name)
    with tierstore.open(path, budget=tierstore.Budget(host=0)) as reader:
        (path.parent / "other").write_bytes(bytes(255 - each for each in file.read_bytes()))
        os.replace(path.parent / "other", file)
        with pytest.raises(CorruptStoreError):
            reader["t6"].read([1])
        reader["t5"].read([1])


def test_a_refresh_follows_what_changed_and_ends_leases_of_all(store: tierstore.Store) -> None:
    with tierstore.open(store.path) as reader:
        lease = reader["t1"].lease([1, 2])
        values = write(store, "t8", 5)
        store.commit()
        kept = {name: reader[name].read([4, 2, 9]) for name in NAMES}
        assert reader.refresh()
        assert np.array_equal(reader["t8"].read([4, 2, 9]), values)
        for name in set(NAMES) - {"t8"}:
            assert np.array_equal(reader[name].read([4, 2, 9]), kept[name])
        with pytest.raises(ClosedError):
            lease.read("weight")
        lease.release()


# One table is damaged, and the others share tiers


@pytest.fixture
def damaged(path: Path) -> Path:
    """Return a store whose table t6 does not open, and whose t7 has one damaged row."""
    for name, at in (("t6", 20), ("t7", 4096 + 16 * 9)):
        (file,) = (path / name).rglob("rows.npy")
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)
    return path


@pytest.mark.variants(1)
@pytest.mark.parametrize("budget", [None, tierstore.Budget(host_rows=4), tierstore.Budget(host=0)])
def test_tables_beside_a_damaged_one_go_on(damaged: Path, budget: tierstore.Budget | None) -> None:
    with tierstore.open(damaged, "r+", budget=budget) as store:
        assert list(store.damaged) == ["t6"]
        with pytest.raises(CorruptStoreError, match="table 't6' is damaged"):
            store["t6"]
        with pytest.raises(CorruptRowError, match="'t7'"):
            store["t7"].read([8, 9])
        written = {}
        for seed, name in enumerate(name for name in NAMES if name != "t6"):
            written[name] = write(store, name, seed, [4, 2, 11])
        with store["t5"].lease([2, 7]) as lease:
            lease.write("weight", np.full((2, DIM), 3, np.float32))
        written["t5"][1] = 3
        store.commit(1)
        assert store["t7"].read([8, 4]).shape == (2, DIM)
        with tierstore.open(damaged, budget=budget) as reader:
            write(store, "t0", 99, [30])
            store.commit(2)
            assert reader.refresh()
            for name, values in written.items():
                assert np.array_equal(reader[name].read([4, 2, 11]), values)
            assert list(reader.damaged) == ["t6"]
        report = store.verify()
        assert not report.ok


def test_layers_beside_a_damaged_table_train(damaged: Path) -> None:
    torch = pytest.importorskip("torch")
    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    with tierstore.open(damaged, "r+", budget=tierstore.Budget(host_rows=5)) as store:
        layers = [TieredEmbedding(store[name]) for name in ("t5", "t8")]
        before = [layer.table.read([1, 2]) for layer in layers]
        optimizer = TieredOptimizer(torch.optim.SparseAdam, layers, lr=0.1)
        for layer in layers:
            layer(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        store.commit()
        for layer, rows in zip(layers, before, strict=True):
            assert (layer.table.read([1, 2]) < rows).all()
        with pytest.raises(CorruptStoreError, match="table 't6' is damaged"):
            TieredEmbedding(store["t6"])


def test_a_collection_beside_a_damaged_table_trains(damaged: Path) -> None:
    torch = pytest.importorskip("torch")
    from tierstore.nn import TieredEmbeddingCollection
    from tierstore.optim import TieredOptimizer

    with tierstore.open(damaged, "r+", budget=tierstore.Budget(host_rows=5)) as store:
        with pytest.raises(CorruptStoreError, match="table 't6' is damaged"):
            TieredEmbeddingCollection(store, ["t5", "t6"])
        names = [name for name in NAMES if name != "t6"]
        collection = TieredEmbeddingCollection(store, names)
        optimizer = TieredOptimizer(torch.optim.SGD, [collection], lr=0.1)
        ids = dict.fromkeys(names, torch.tensor([1, 2]))
        before = {name: store[name].read([1, 2]) for name in names}
        torch.cat(list(collection(ids).values())).sum().backward()
        optimizer.step()
        with pytest.raises(CorruptRowError, match="'t7'"):
            collection(ids | {"t7": torch.tensor([4, 9])})
        torch.cat(list(collection(ids).values())).sum().backward()
        optimizer.step()
        store.commit()
        for name in names:
            expected = (before[name] - np.float32(0.1)) - np.float32(0.1)
            assert np.array_equal(store[name].read([1, 2]), expected), name


# A reader of many tables examines the base of each at its first use


@pytest.fixture
def at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have readers of any number of tables do so."""
    monkeypatch.setattr("tierstore._store.tables._EXAMINED_TABLES", 0)


@pytest.mark.variants(1)
@pytest.mark.parametrize("count", [64, 65])
def test_the_bases_of_more_than_64_tables_are_examined_at_their_first_use(
    tmp_path: Path, count: int
) -> None:
    names = [f"t{number}" for number in range(count)]
    tierstore.create(tmp_path / "s", dict.fromkeys(names, tierstore.TableSpec(2, DIM))).close()
    (file,) = (tmp_path / "s" / "t6").rglob("rows.npy")
    file.write_bytes(b"")
    with tierstore.open(tmp_path / "s") as reader:
        for _ in range(2):
            with pytest.raises(CorruptStoreError, match=r"'t6' is damaged.*rows.npy has 0 bytes"):
                reader["t6"]
        assert list(reader.damaged) == ["t6"]
        assert reader["t5"].read([1]).tolist() == [[0] * DIM]
        assert inside.state(reader).tables.keys() == set(names) - ({"t6"} if count == 64 else set())
        with pytest.raises(CorruptStoreError, match="t6"):
            reader.save(tmp_path / "copy")
        assert reader.save(tmp_path / "copy", damaged="skip").tables == ["t6"]
    with tierstore.open(tmp_path / "s", "r+") as writer:  # whose commits must not remove its past
        assert list(inside.state(writer).damaged) == ["t6"]


@pytest.mark.usefixtures("at_first_use")
def test_a_reader_goes_on_beside_a_table_that_it_finds_damaged(path: Path) -> None:
    with tierstore.open(path, "r+") as writer, tierstore.open(path) as reader:
        (file,) = (path / "t6").rglob("rows.npy")
        os.truncate(file, 4000)
        with pytest.raises(CorruptStoreError, match="'t6' is damaged"):
            reader["t6"]
        values = write(writer, "t6", 3)
        written = write(writer, "t0", 5)
        writer.commit()
        assert reader.refresh()
        assert np.array_equal(reader["t0"].read([4, 2, 9]), written)
        with pytest.raises(CorruptStoreError, match="'t6' is damaged"):
            reader["t6"]
        with pytest.raises(CorruptStoreError, match="'t6' is damaged"):
            reader["t6"].read([4])
        assert values.size


@pytest.mark.usefixtures("at_first_use")
@pytest.mark.parametrize("name", ["t6", "t7"])
def test_a_base_of_another_time_is_found_at_its_first_use(
    path: Path, tmp_path: Path, name: str
) -> None:
    (generation,) = (path / "t6").iterdir()
    before = {file: (generation / file).read_bytes() for file in ("rows.npy", "rows.crc")}
    with tierstore.open(path, "r+") as writer:
        write(writer, "t6", 3)
        writer.commit()
        writer.fold()
    for file, data in before.items():
        (generation / file).write_bytes(data)
    with tierstore.open(path) as reader:
        if name == "t6":
            with pytest.raises(CorruptStoreError, match="a different time"):
                reader[name]
        else:
            assert len(reader[name].read([1, 2])) == 2
        assert list(reader.damaged) == ["t6"]


@pytest.mark.usefixtures("at_first_use")
def test_a_fold_before_the_first_use_is_no_damage(path: Path) -> None:
    with tierstore.open(path, "r+") as writer:
        written = write(writer, "t6", 3)
        writer.commit()
        with tierstore.open(path) as reader:
            writer.fold()
            assert np.array_equal(reader["t6"].read([4, 2, 9]), written)
            assert not reader.damaged
            (generation,) = (path / "t7").iterdir()
            (generation / inside.manifest(reader).tables["t7"].digest.name).unlink()
        with (
            tierstore.open(path) as reader,
            pytest.raises(CorruptStoreError, match="digest of the base, is missing"),
        ):
            reader["t7"]


@pytest.mark.usefixtures("at_first_use")
def test_a_fold_in_the_midst_of_the_first_use_is_no_damage(path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with tierstore.open(path, "r+") as writer:
        written = write(writer, "t6", 3)
        writer.commit()
        with tierstore.open(path) as reader:
            with pytest.raises(KeyboardInterrupt):
                writer.fold(progress=stop)  # the base is written, its digest is not
            assert np.array_equal(reader["t6"].read([4, 2, 9]), written)


@pytest.mark.usefixtures("at_first_use")
def test_a_closed_reader_examines_nothing(path: Path) -> None:
    reader = tierstore.open(path)
    reader.close()
    with pytest.raises(ClosedError):
        reader["t6"].read([1])
    assert not reader.damaged
