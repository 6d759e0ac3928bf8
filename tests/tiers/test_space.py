"""Several tables in one space, against plain arrays: what a space promises its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.every import every
from tests.gpu.emulator import EmulatedDevice
from tests.oracle import records
from tests.tiers.stack import ArrayTier, check, random_span, read
from tierstore import Budget, Field, TableSpec
from tierstore._tiers.host import HostTier
from tierstore._tiers.space import Router
from tierstore._tiers.uncached import Uncached
from tierstore.errors import ClosedError, RowIndexError
from tierstore.stats import Occupancy

WIDTH, DIM = 48, 6
SIZES = (5, 1, 60, 17)


@every(seed=range(6), slots=[0, 1, 7, sum(SIZES)])
def test_extents_are_one_range_of_rows(seed: int, slots: int) -> None:
    rng = np.random.default_rng([seed, slots])
    tiers = [ArrayTier(records(rng, rows, WIDTH)) for rows in SIZES]
    oracle = np.concatenate([tier.records for tier in tiers])
    router = Router(tiers)  # type: ignore[arg-type]
    nearest = HostTier(router, slots=slots) if slots else Uncached(router)
    rows = router.rows
    assert rows == sum(SIZES) and router.record_bytes == WIDTH
    for _ in range(60):
        wanted, (lo, hi) = rng.integers(0, rows, rng.integers(0, 150)), random_span(rng, WIDTH)
        if rng.random() < 0.5:
            assert np.array_equal(read(nearest, wanted, lo, hi), oracle[wanted, lo:hi])
        else:
            wanted = rng.permutation(rows)[: rng.integers(0, rows)]
            oracle[wanted, lo:hi] = records(rng, wanted.size, hi - lo)
            nearest.write(wanted, oracle[wanted, lo:hi], lo, hi)
        nearest.stage(wanted)
        if isinstance(nearest, HostTier):
            check(nearest)
    nearest.flush()
    assert np.array_equal(np.concatenate([tier.records for tier in tiers]), oracle)


@pytest.mark.parametrize("count", [0, 1, 2, 40, 500])
@pytest.mark.parametrize("order", ["ascending", "any", "repeated"])
def test_byte_ranges_of_any_rows_are_read_and_each_record_once(count: int, order: str) -> None:
    rng = np.random.default_rng(count)
    below = ArrayTier(records(rng, 600, WIDTH))
    rows = rng.permutation(600)[:count]
    rows = {"ascending": np.sort(rows), "any": rows, "repeated": rows // 40}[order]
    for lo, hi in [(0, WIDTH), (2, 7), (8, 24)]:
        before = below.stats.requested
        assert np.array_equal(read(below, rows, lo, hi), below.records[rows, lo:hi])
        assert below.stats.requested - before == np.unique(rows).size


# -- a store whose tables share spaces


class Program:
    """Random work on tables of a store, and arrays that get the same."""

    def __init__(self, path: Path, seed: int, budget: Budget | None, device: Any = "cpu") -> None:
        self.rng = np.random.default_rng(seed)
        self.path, self.options = path, {"budget": budget, "device": device}
        specs = self.specs()
        self.store = tierstore.create(path, specs, **self.options)
        self.truth = {
            name: np.zeros((spec.rows, spec.dim), np.float32) for name, spec in specs.items()
        }
        for name in specs:
            self.write(name)
        self.commit()

    def specs(self) -> dict[str, TableSpec]:
        specs = {f"t{n}": TableSpec(rows, DIM) for n, rows in enumerate(SIZES)}
        return specs | {"wide": TableSpec(9, 2 * DIM)}

    def rare(self) -> list[Callable[[], None]]:
        return [self.commit, self.rollback, self.change, self.reopen, self.follow]

    def run(self, steps: int) -> None:
        steps_of_a_table = [self.write, self.read, self.lease, self.scan, self.warm]
        rare = self.rare()
        for _ in range(steps):
            name = str(self.rng.choice(list(self.truth)))
            if self.rng.random() < 0.7:
                steps_of_a_table[self.rng.integers(len(steps_of_a_table))](name)
            else:
                rare[self.rng.integers(len(rare))]()
            self.check_counts()
        self.reopen()
        self.store.close()

    def ids(self, name: str, most: int = 30) -> np.ndarray:
        rows = len(self.truth[name])
        return self.rng.permutation(rows)[: self.rng.integers(0, most)]

    def write(self, name: str) -> None:
        ids = self.ids(name)
        rows = self.rng.standard_normal((ids.size, self.truth[name].shape[1])).astype(np.float32)
        self.truth[name][ids] = rows
        self.store[name].write(ids, rows)

    def read(self, name: str) -> None:
        ids = self.rng.integers(0, len(self.truth[name]), self.rng.integers(0, 50))
        assert np.array_equal(self.store[name].read(ids), self.truth[name][ids])

    def lease(self, name: str) -> None:
        ids, field = self.ids(name), next(iter(self.store[name].fields))
        with self.store[name].lease(ids) as lease:
            lease.trim(wait=True)
            held = np.asarray(lease.rows)
            assert np.array_equal(np.sort(held), np.sort(ids))
            rows = lease.read(field)
            assert np.array_equal(rows, self.truth[name][held])
            lease.write(field, rows + 1)
            self.truth[name][held] += 1

    def scan(self, name: str) -> None:
        assert np.array_equal(np.concatenate(list(self.store[name].scan())), self.truth[name])

    def warm(self, name: str) -> None:
        self.store[name].warm(self.ids(name))

    def commit(self) -> None:
        self.store.commit()
        self.committed = {name: rows.copy() for name, rows in self.truth.items()}

    def rollback(self) -> None:
        self.store.rollback()
        self.truth = {name: rows.copy() for name, rows in self.committed.items()}

    def change(self) -> None:
        """Change the schema of one table; what the others have is as it was."""
        self.commit()
        name = str(self.rng.choice(list(self.truth)))
        spec = self.store[name].spec
        match int(self.rng.integers(5)):
            case 0:
                self.store.grow(name, spec.rows + 3)
                more = np.zeros((3, self.truth[name].shape[1]), np.float32)
                self.truth[name] = np.concatenate([self.truth[name], more])
            case 1 if len(spec.fields) < 3:
                self.store.add_fields(name, {f"f{len(spec.fields)}": Field(DIM)})
            case 2 if len(self.truth) > 3:
                gone = self.store[name]
                self.store.drop(name)
                del self.truth[name]
                with pytest.raises(ClosedError, match="renamed or dropped"):
                    gone.read([0])
            case 3:
                other = f"r{self.rng.integers(1 << 30)}"
                self.store.rename(name, other)
                self.truth = {
                    other if each == name else each: rows for each, rows in self.truth.items()
                }
            case _:
                new = f"n{self.rng.integers(1 << 30)}"
                self.store.create_table(new, TableSpec(11, DIM))
                self.truth[new] = np.zeros((11, DIM), np.float32)
        self.committed = {each: rows.copy() for each, rows in self.truth.items()}

    def follow(self) -> None:
        """A reader that was open before a commit shows it after a refresh."""
        with tierstore.open(self.path, **self.options) as reader:
            for name, rows in self.committed.items():
                assert np.array_equal(reader[name].read(np.arange(len(rows))), rows)
            self.commit()
            reader.refresh()
            for name, rows in self.committed.items():
                assert np.array_equal(reader[name].read(np.arange(len(rows))), rows)

    def reopen(self) -> None:
        self.commit()
        self.store.close()
        self.store = tierstore.open(self.path, "r+", **self.options)
        for name in self.truth:
            self.scan(name)

    def check_counts(self) -> None:
        spaces = {id(inside.space(table)): inside.space(table) for table in self.store.values()}
        lengths = {table.spec.layout.record_bytes for table in self.store.values()}
        assert len(spaces) == len(lengths)
        for space in spaces.values():
            if space.host is not None:
                check(space.host)


class LongProgram(Program):
    """The same on a dozen tables in several spaces, with versions, folds and a reader beside it."""

    def specs(self) -> dict[str, TableSpec]:
        backends = ("memmap", "zarr", "memmap")
        return {
            f"t{n}": TableSpec(int(rows), DIM * (1 + n % 3), backend=backends[n % 3])
            for n, rows in enumerate(self.rng.integers(1, 60, 12))
        }

    def __init__(self, path: Path, seed: int, budget: Budget | None) -> None:
        super().__init__(path, seed, budget)
        self.kept: dict[str, np.ndarray] = {}
        self.reader: tierstore.Store | None = None
        self.shown: dict[str, np.ndarray] = {}

    def rare(self) -> list[Callable[[], None]]:
        more = [self.keep, self.restore, self.fold, self.verify, self.count, self.look]
        return [*super().rare(), *more, self.commit]

    def run(self, steps: int) -> None:
        super().run(steps)
        if self.reader is not None:
            self.reader.close()

    def keep(self) -> None:
        self.commit()
        self.store.keep(self.store.version, "mine")
        self.kept = self.committed

    def restore(self) -> None:
        if self.kept:
            self.store.restore("mine")
            self.truth = {name: rows.copy() for name, rows in self.kept.items()}
            self.committed = self.kept
            for name in self.truth:
                self.scan(name)

    def fold(self) -> None:
        self.commit()
        if self.kept:
            self.store.release("mine")
            self.kept = {}
        if self.reader is not None:
            self.reader.close()
            self.reader = None
        self.store.fold()
        assert self.store.info().folded

    def verify(self) -> None:
        report = self.store.verify()
        assert report.ok

    def count(self) -> None:
        total = self.store.stats()
        for space in self.store.info().spaces:
            found = self.store.stats(space.tables)
            asked = [self.store[name].stats() for name in space.tables]
            for tier, counters in found.items():
                assert counters.requested == sum(each[tier].requested for each in asked)
                total[tier].requested -= counters.requested
        assert all(counters.requested == 0 for counters in total.values())

    def look(self) -> None:
        """A reader shows what it did, whatever was committed since, and the newest if asked."""
        if self.reader is None:
            self.reader = tierstore.open(self.path, **self.options)
            self.shown = self.committed
        for again in (False, True):
            for name, rows in self.shown.items():
                ids = self.rng.integers(0, len(rows), 8)
                assert np.array_equal(self.reader[name].read(ids), rows[ids])
            if not again:
                self.reader.refresh()
                self.shown = self.committed
        assert list(self.reader) == list(self.shown)

    def check_counts(self) -> None:
        super().check_counts()
        dirty = sum(
            self.store[name].occupancy().get("host", Occupancy(0, 0, 0)).dirty
            for name in {
                id(inside.space(table)): name for name, table in self.store.items()
            }.values()
        )
        assert self.store.uncommitted_rows() >= dirty
        assert self.store.uncommitted_rows() == sum(
            inside.uncommitted(table).size for table in self.store.values()
        )


BUDGETS: dict[str, Any] = {
    "no host tier": Budget(host_rows=0),
    "a slot a table": Budget(host_rows=1),
    "some": Budget(host_rows=9),
    "all": None,
}


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("seed", range(2))
def test_tables_that_share_a_space_are_tables_of_their_own(
    tmp_path: Path, seed: int, budget: str
) -> None:
    Program(tmp_path / "s", seed, BUDGETS[budget]).run(60)


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.torture)])
def test_a_dozen_tables_with_versions_folds_and_a_reader(
    tmp_path: Path, seed: int, budget: str
) -> None:
    LongProgram(tmp_path / "s", 100 + seed, BUDGETS[budget]).run(120)


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("rows", [(1, 1), (9, 2), (200, 3), (3, 200), (200, 200)])
@pytest.mark.parametrize("device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tables_share_a_space_on_a_gpu(tmp_path: Path, device: str, rows: tuple[int, int]) -> None:
    host, gpu = rows
    place = EmulatedDevice() if device == "emulated" else device
    Program(tmp_path / "s", host, Budget(host_rows=host, gpu_rows=gpu), place).run(25)


@pytest.mark.parametrize("device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bad", [-1, 40, 41, 79, 80, 1 << 40, -(1 << 61), -(1 << 63), 2**63 - 1])
def test_a_bad_id_on_a_gpu_names_its_table(tmp_path: Path, device: str, bad: int) -> None:
    """Also one that is a row of another table of the space."""
    torch = pytest.importorskip("torch")
    place = EmulatedDevice() if device == "emulated" else device
    specs = {name: TableSpec(40, DIM) for name in "ab"}
    with tierstore.create(tmp_path / "s", specs, device=place) as made:
        ids = torch.tensor([3, bad, 5]).to(inside.access(made["b"]).torch_device)
        for name in "ab":
            made[name].write(np.arange(40), np.ones((40, DIM), np.float32))
        rows = made["b"].read(ids)
        assert torch.isnan(rows[1]).all() and (rows[[0, 2]] == 1).all()
        with pytest.raises(RowIndexError, match=rf"row {bad} at position 1 .* table 'b', .* 39;"):
            made.commit()
        made.rollback()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tierstore.Store]:
    specs = {name: TableSpec(40, DIM) for name in "ab"}
    with tierstore.create(tmp_path / "s", specs, budget=Budget(host_rows=10)) as made:
        yield made


def test_tables_compete_for_slots_by_use(store: tierstore.Store) -> None:
    assert inside.space(store["a"]) is inside.space(store["b"])
    store["a"].read(np.arange(18))
    store["b"].read([3])
    assert store["a"].occupancy()["host"].used == 19


def test_a_rollback_of_the_store_ends_the_leases_of_all(store: tierstore.Store) -> None:
    leases = [store[name].lease([1, 2]) for name in "ab"]
    store.rollback()
    assert all(lease.ended for lease in leases)


def test_a_table_whose_records_get_longer_leaves_its_space(store: tierstore.Store) -> None:
    store["a"].write([39], np.full((1, DIM), 7, np.float32))
    store["b"].write([39], np.full((1, DIM), 8, np.float32))
    store.commit()
    store["a"].scalars["step"] = 3
    store.commit()
    store.add_fields("b", {"extra": Field(20)})
    assert (store["a"].read([39]) == 7).all() and (store["b"].read([39]) == 8).all()
    assert store["a"].scalars == {"step": 3}
    assert inside.space(store["a"]) is not inside.space(store["b"])
