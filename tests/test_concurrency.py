"""Threads beside each other: no torn record, no lost update, no half call in a version, no hang.

Every record holds one number, in all its elements. A writer owns some rows and counts them up, a
group of rows in each call, so that what readers and versions may see is known without an oracle.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.pairs import pairs
from tests.tiers.stack import ArrayTier, check, read
from tierstore import Budget, Field, TableSpec, _rowcopy, _tiers
from tierstore._disk.base import Base
from tierstore._disk.tier import DiskTier
from tierstore._door import Call, Door
from tierstore._rowcopy import Groups
from tierstore._tiers.base import Held
from tierstore._tiers.changes import Changes
from tierstore._tiers.host import HostTier
from tierstore._tiers.slots import CachedSlots, DirectSlots
from tierstore._tiers.uncached import Uncached
from tierstore.errors import ClosedError, CorruptRowError
from tierstore.policy import PolicySpec, lfu, lru

ROWS, GROUP = 120, 6
FIELDS = {"weight": Field(3), "sum": Field(1), "late": Field(4)}
SPEC = TableSpec(ROWS, fields=FIELDS)
WRITERS = 3


@pytest.fixture(autouse=True)
def switching() -> Iterator[None]:
    """Have threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-6)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own; raise what the first of them raised, or that one hangs."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive() or errors, "a thread hangs"
    if errors:
        raise errors[0]


def groups_of(writer: int) -> np.ndarray:
    """The rows of a writer's groups, `(groups, GROUP)`, spread over the table."""
    return np.arange(ROWS).reshape(GROUP, -1).T[writer::WRITERS]


# -- tiers


class SlowTier(ArrayTier):
    """Yields to other threads before it reads, before it writes and before it returns."""

    def read(self, rows: Any, out: Any) -> None:
        time.sleep(0)
        super().read(rows, out)
        time.sleep(1e-5)

    def write(self, rows: Any, records: Any, *, resident: bool = False) -> None:
        time.sleep(1e-5)
        super().write(rows, records, resident=resident)


class TierProgram:
    """Writers and readers of tiers whose records are 16 equal bytes."""

    def __init__(self, seed: int, slots: tuple[int, ...], policy: PolicySpec | None) -> None:
        self.seed = seed
        self.below = SlowTier(np.zeros((ROWS, 16), np.uint8))
        tiers: list[Any] = [self.below]
        for count in slots:
            tiers.append(HostTier(tiers[-1], slots=count, policy=policy))
        self.tiers, self.top = tiers[:0:-1], tiers[-1]
        self.true = np.zeros(ROWS, np.uint8)

    def run(self, calls: int) -> None:
        together(
            *(lambda w=writer: self.write(w, calls) for writer in range(WRITERS)),
            *(lambda r=reader: self.look(r, calls) for reader in range(WRITERS)),
        )
        for tier in self.tiers:
            check(tier)
            assert not tier._moves
            if not tier.direct:
                assert not tier.map.pins.leases.any()
            tier.flush()
        assert np.array_equal(self.below.records, np.repeat(self.true[:, None], 16, 1))

    def write(self, writer: int, calls: int) -> None:
        rng = np.random.default_rng([self.seed, writer])
        groups = groups_of(writer)
        for _ in range(calls):
            rows = np.sort(rng.choice(groups))
            records = np.repeat((self.true[rows] + 1)[:, None], 16, 1)
            match int(rng.integers(4)):
                case 0:
                    self.top.write(rows, records)
                case 1:
                    with_slots = self.top.lease(Groups(rows))
                    assert np.array_equal(read(self.top, rows)[:, 0], self.true[rows])
                    self.top.write_held(rows, records, 0, 16)
                    self.top.give_back(with_slots)
                case 2:
                    found = read(self.top, rows, admit=bool(rng.integers(2)))
                    assert np.array_equal(found[:, 3], self.true[rows]), "an update is lost"
                    self.top.write(rows, found + np.uint8(1))
                case 3:
                    self.top.fetch(rng.integers(0, ROWS, 9), 3)
                    continue
            self.true[rows] += 1

    def look(self, reader: int, calls: int) -> None:
        rng = np.random.default_rng([self.seed, reader, 7])
        for _ in range(calls):
            rows = rng.integers(0, ROWS, int(rng.choice([1, 5, 40])))
            before, admit = self.true[rows], bool(rng.integers(2))
            found = np.empty((rows.size, 16), np.uint8)
            given = (0, ROWS), 0, found, found.nbytes, self.top.counters_from(0), admit
            inside.rest(self.top)  # else reads without the lock are rare beside writers
            if not self.top.read_apart(rows, *given):
                found = read(self.top, rows, admit=admit)
            after = self.true[rows] + np.uint8(1)  # one call may be under way
            assert (found == found[:, :1]).all(), "a record is torn"
            behind = (found[:, 0] - before).astype(np.uint8)
            assert (behind <= (after - before).astype(np.uint8)).all(), "a record goes back"


TIERS = {
    "cache": (25,),
    "one slot": (1,),
    "direct": (ROWS,),
    "two caches": (40, 9),
    "cache over direct": (ROWS, 11),
}


@pytest.mark.variants(2, 5)
@pairs(together=1, slots=list(TIERS), policy=[lru(), lfu(3)])
def test_tiers(slots: str, policy: PolicySpec) -> None:
    TierProgram(1, TIERS[slots], policy).run(120)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every read copy without the lock, long enough for other calls to come in between."""
    monkeypatch.setattr(_tiers.host, "APART_BYTES", 1)
    monkeypatch.setattr(Changes, "rest", lambda _: True)
    copy = _rowcopy.gather

    def slow(*args: Any) -> None:
        time.sleep(2e-3)
        copy(*args)

    monkeypatch.setattr(_rowcopy, "gather", slow)


@pytest.mark.variants(1, 1)
@pairs(together=1, slots=list(TIERS), policy=[lru(), lfu(3)])
def test_tiers_whose_reads_copy_apart(slots: str, policy: PolicySpec, apart: None) -> None:
    TierProgram(2, TIERS[slots], policy).run(120)


def test_a_copy_apart_that_is_believed_is_wrong(
    apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: nothing that comes in between is noticed."""
    whole = HostTier._copy_apart

    def believed(tier: HostTier, *args: Any) -> bool:
        whole(tier, *args)
        return True

    monkeypatch.setattr(HostTier, "_copy_apart", believed)
    for seed in range(40):
        try:
            TierProgram(seed, (25,), lru()).run(80)
        except AssertionError:
            return
    pytest.fail("40 programs found nothing")


@pytest.fixture
def without_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have reads without the lock pause after the look-up, as the core may."""

    def read(
        self: Any, records: Any, ids: Any, rows: tuple[int, int], lo: int, out: Any, note: bool
    ) -> bool:
        slots = self.lookup(ids + rows[0])
        if (slots < 0).any():
            return False
        time.sleep(2e-3)
        _rowcopy.gather(records, slots, out, lo)
        if note:
            self.touch(slots, done=True)
            self.next_batch()
        return True

    for kind in (CachedSlots, DirectSlots):
        monkeypatch.setattr(kind, "read", read)


@pytest.mark.variants(3, 15)
@pytest.mark.parametrize("seed", range(100, 108))
@pytest.mark.parametrize("slots", TIERS)
def test_tiers_that_are_read_without_the_lock(slots: str, seed: int, without_lock: None) -> None:
    TierProgram(seed, TIERS[slots], lru()).run(60)


def test_a_read_without_the_lock_that_is_believed_is_wrong(
    without_lock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: no change is noticed."""
    monkeypatch.setattr(Changes, "number", property(lambda _: 0, lambda *_: None))
    for seed in range(40):
        try:
            TierProgram(seed, (25,), lru()).run(60)
        except AssertionError:
            return
    pytest.fail("40 programs found nothing")


MEANWHILE: dict[str, Callable[[HostTier], object]] = {
    "write": lambda tier: tier.write(np.array([3]), np.full((1, 16), 77, np.uint8)),
    "write a part": lambda tier: tier.write(np.array([3]), np.full((1, 4), 77, np.uint8), 4, 8),
    "write held": lambda tier: tier.write_held(
        np.array([3]), np.full((1, 16), 77, np.uint8), 0, 16
    ),
    "update": lambda tier: tier.update_held(
        np.array([3]),
        Held(tier.map.lookup(np.array([3])), True),
        0,
        16,
        lambda records, slots: records.__setitem__(slots, 77),
    ),
    "evict": lambda tier: read(tier, np.arange(20, 28)),
    "drop": lambda tier: tier.discard(np.array([3])),
}


@pytest.mark.parametrize("slots", [8, ROWS], ids=["cache", "direct"])
@pytest.mark.parametrize("way", MEANWHILE)
def test_a_copy_is_made_again_where_a_record_changed_meanwhile(
    way: str, slots: int, apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is stopped in the middle, and finds all bytes of row 3 as they are at the end."""
    below = ArrayTier(np.repeat(np.arange(ROWS, dtype=np.uint8)[:, None], 16, 1))
    tier = HostTier(below, slots=slots)
    rows = np.array([1, 2, 3])
    read(tier, np.arange(8))
    copy, copies = _rowcopy.gather, []

    def stopped(records: Any, slots: Any, out: Any, lo: int = 0) -> None:
        copy(records, slots, out, lo)
        copies.append(len(out))
        if len(copies) == 1:
            out[2, :8] = 5  # what a thread has written of the record by then
            together(lambda: MEANWHILE[way](tier))

    with monkeypatch.context() as patch:
        patch.setattr(_tiers.host._rowcopy, "gather", stopped)
        found = read(tier, rows)
    assert len(copies) == 1 or copies[0] == 3
    assert np.array_equal(found, read(tier, rows))
    if way in ("evict", "drop"):
        assert found[:, 0].tolist() == [1, 2, 3]
    else:
        assert 77 in found[2]
    assert not tier._changes.copies


def closing(tier: HostTier) -> threading.Thread:
    """Close a tier that is being read in a thread, which waits for the reader."""
    closer = threading.Thread(target=tier.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive() and len(tier.records)
    return closer


def test_a_tier_whose_records_are_being_copied_is_closed_afterwards(
    apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = HostTier(ArrayTier(np.ones((ROWS, 16), np.uint8)), slots=ROWS)
    read(tier, np.arange(ROWS))
    entered, go_on = threading.Event(), threading.Event()
    copy = _rowcopy.gather

    def waits(*args: Any) -> None:
        entered.set()
        assert go_on.wait(60)
        copy(*args)

    monkeypatch.setattr(_tiers.host._rowcopy, "gather", waits)
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(read(tier, np.arange(ROWS))))
    reader.start()
    assert entered.wait(60)
    closer = closing(tier)
    go_on.set()
    closer.join(60)
    reader.join(60)
    assert found[0].all() and not closer.is_alive()


def test_reads_copy_apart_until_records_change_and_from_the_next_but_one_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tiers.host, "APART_BYTES", 1)
    copy, held = _rowcopy.gather, []

    def noted(*args: Any) -> None:
        held.append(tier._lock._is_owned())  # type: ignore[attr-defined]
        copy(*args)

    records = 65_536  # more than what is copied as items of a window
    tier = HostTier(ArrayTier(np.ones((9, records), np.uint8)), slots=9)
    read(tier, np.arange(9))
    monkeypatch.setattr(_tiers.host._rowcopy, "gather", noted)
    for _ in range(3):
        read(tier, np.arange(2))
    tier.write(np.array([1]), np.ones((1, records), np.uint8))
    for _ in range(3):
        read(tier, np.arange(2))
    assert held == [True, False, False, True, False, False]


@pytest.fixture
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tiers.host, "APART_BYTES", 1)


class Stopped:
    """The map of a tier, a read of which `stop` interrupts before it is over."""

    def __init__(self, tier: HostTier, stop: Callable[[], object]) -> None:
        self._tier, self._stop, self._map = tier, stop, tier.map
        self.notes_apart = self._map.notes_apart
        tier._readable = self  # type: ignore[assignment]

    def read(self, *given: Any) -> bool:
        done = self._map.read(*given)
        if self._tier._readable is self:
            self._tier._readable = self._map
            self._stop()
        return done


def read_apart(tier: HostTier, rows: Any, span: tuple[int, int]) -> Any:
    out = np.full((len(rows), span[1] - span[0]), 99, np.uint8)
    given = (0, tier.rows), span[0], out, out.nbytes, tier.counters_from(0), True
    return out if tier.read_apart(rows, *given) else None


@pytest.mark.parametrize("slots", [8, ROWS], ids=["cache", "direct"])
@pytest.mark.parametrize("span", [(0, 16), (4, 8)])
@pytest.mark.parametrize("way", MEANWHILE)
def test_a_read_without_the_lock_is_not_believed_where_a_record_changed_meanwhile(
    way: str, span: tuple[int, int], slots: int, of_any_size: None
) -> None:
    below = ArrayTier(np.repeat(np.arange(ROWS, dtype=np.uint8)[:, None], 16, 1))
    tier, rows = HostTier(below, slots=slots), np.array([1, 2, 3])
    assert read_apart(tier, rows, span) is None  # nothing is loaded
    read(tier, np.arange(slots))
    assert read_apart(tier, rows, span) is None  # nothing has looked since they came
    read(tier, rows)
    read(tier, rows)
    plain = read_apart(tier, rows, span)
    assert plain.tobytes() == read(tier, rows)[:, slice(*span)].tobytes()
    assert read_apart(tier, np.array([1, ROWS]), span) is None
    before = tier.stats
    Stopped(tier, lambda: together(lambda: MEANWHILE[way](tier)))
    changes = way != "evict" or slots < ROWS
    assert (read_apart(tier, rows, span) is None) == changes
    assert (read_apart(tier, rows, span) is None) == changes  # until a read with the lock looks
    after = tier.stats
    written = way in ("write", "write a part")  # which count as requests
    others = 6 if not changes else 0
    assert after.requested - before.requested == written + 8 * (way == "evict") + others
    assert not tier._changes.copies
    for _ in range(3):
        read(tier, rows)
    assert read_apart(tier, rows, span).tobytes() == read(tier, rows)[:, slice(*span)].tobytes()


@pytest.mark.parametrize("at", ["slots are taken", "rows are entered"])
def test_a_read_without_the_lock_is_not_believed_beside_a_miss(at: str, of_any_size: None) -> None:
    """Slots that are taken have other records before these have a slot; then the map changes."""
    copied, go_on = threading.Event(), threading.Event()

    class Slow(ArrayTier):
        def stream(self, rows: Any) -> Any:
            for each in super().stream(rows):
                yield each
                if rows[0] == 10:
                    copied.set()
                    assert go_on.wait(10)

    tier = HostTier(Slow(np.arange(ROWS, dtype=np.uint8)[:, None]), slots=8)
    for row in range(8):
        read(tier, np.array([row]))
    thread = threading.Thread(target=lambda: read(tier, np.array([10, 11])))

    def begin() -> None:
        thread.start()
        assert copied.wait(10)

    def end() -> None:
        go_on.set()
        thread.join()

    rows = np.array([0, 1]) if at == "slots are taken" else np.array([6, 7])
    if at == "rows are entered":
        begin()
    for _ in range(2):
        read(tier, rows)
    Stopped(tier, begin if at == "slots are taken" else end)
    assert read_apart(tier, rows, (0, 1)) is None
    end()
    assert read(tier, rows).ravel().tolist() == rows.tolist()


@pytest.mark.parametrize("policy", [lru(), lfu()])
def test_what_is_read_without_the_lock_is_the_last_to_go(
    policy: PolicySpec, of_any_size: None
) -> None:
    below = ArrayTier(np.arange(ROWS, dtype=np.uint8)[:, None])
    tier = HostTier(below, slots=8, policy=policy)
    for row in range(8):
        read(tier, np.array([row]))
    for _ in range(2):
        read(tier, np.array([7]))
    assert read_apart(tier, np.array([0, 2]), (0, 1)) is not None
    read(tier, np.arange(10, 15))
    assert {0, 2, 7} <= set(tier.map.row_of.tolist())


@pytest.mark.parametrize("slots", [30, ROWS], ids=["cache", "direct"])
def test_many_rows_are_read_without_the_lock_in_parts(slots: int, of_any_size: None) -> None:
    records = np.random.default_rng(1).integers(0, 256, (ROWS, 16), np.uint8)
    tier, rng = HostTier(ArrayTier(records), slots=slots), np.random.default_rng(2)
    for _ in range(3):
        read(tier, np.arange(30))
    with inside.core_threads(4):
        for size in (1, 8, 9, 100):
            rows = rng.integers(0, 30, size)
            assert np.array_equal(read_apart(tier, rows, (4, 12)), records[rows, 4:12])
            if slots < ROWS:
                rows[rng.integers(size)] = 30
                assert read_apart(tier, rows, (4, 12)) is None


def test_a_tier_that_is_read_without_the_lock_is_closed_afterwards(of_any_size: None) -> None:
    tier = HostTier(ArrayTier(np.ones((ROWS, 16), np.uint8)), slots=ROWS)
    for _ in range(3):
        read(tier, np.arange(ROWS))
    entered, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert go_on.wait(60)

    Stopped(tier, wait)
    found: list[Any] = []
    rows = np.arange(ROWS)
    reader = threading.Thread(target=lambda: found.append(read_apart(tier, rows, (0, 16))))
    reader.start()
    assert entered.wait(60)
    closer = closing(tier)
    assert read_apart(tier, rows, (0, 16)) is None  # none begins any more
    go_on.set()
    closer.join(60)
    reader.join(60)
    assert found[0].tobytes() == bytes([1] * 16 * ROWS) and not closer.is_alive()


def test_a_map_moves_once_no_thread_reads_it_without_the_lock(of_any_size: None) -> None:
    below = ArrayTier(np.ones((2 * ROWS, 16), np.uint8))
    below.rows = ROWS
    tier = HostTier(below, slots=8, grows=True)
    for _ in range(3):
        read(tier, np.arange(8))
    entered, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert go_on.wait(60)

    Stopped(tier, wait)
    rows, found = np.arange(8), list[Any]()
    reader = threading.Thread(target=lambda: found.append(read_apart(tier, rows, (0, 16))))
    reader.start()
    assert entered.wait(60)
    grower = threading.Thread(target=tier.grow, args=(2 * ROWS,))
    grower.start()
    grower.join(0.2)
    assert grower.is_alive() and tier.rows == ROWS
    assert read_apart(tier, rows, (0, 16)) is None  # none begins any more
    go_on.set()
    grower.join(60)
    reader.join(60)
    assert tier.rows == 2 * ROWS and found[0].all()
    assert read_apart(tier, rows, (0, 16)).all()


def test_threads_that_read_without_the_lock_lose_no_count(of_any_size: None) -> None:
    tier = HostTier(ArrayTier(np.ones((ROWS, 16), np.uint8)), slots=ROWS)
    for _ in range(3):
        read(tier, np.arange(ROWS))
    before = tier.stats

    def reads() -> None:
        for _ in range(300):
            assert read_apart(tier, np.array([1, 2, 2]), (0, 8)) is not None

    threads = [threading.Thread(target=reads) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = tier.stats
    assert after.requested - before.requested == 4 * 300 * 3 == after.hits - before.hits
    assert after.bytes_out - before.bytes_out == 4 * 300 * 3 * 8
    sampled = after.unique_of - before.unique_of
    assert sampled and sampled % 3 == 0
    unique = after.unique - before.unique
    assert unique in (2 * 1024, 2 * 1536)  # of 1,200 batches, with that which stands for the last
    assert unique == after.unique_hits - before.unique_hits


def test_tables_read_without_the_lock_what_others_write(tmp_path: Path) -> None:
    """Rows of one number each, which another thread replaces by others: none is torn."""
    spec = tierstore.TableSpec(2000, 64)
    budget = tierstore.Budget(host_rows=2000)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=budget, device="cpu") as store:
        table = store["t"]
        table.write(np.arange(2000), np.zeros((2000, 64), np.float32))
        wrong: list[str] = []
        stop = threading.Event()

        def reads(number: int) -> None:
            ids = np.random.default_rng(number).integers(0, 2000, 1500)
            while not stop.is_set():
                found = table.read(ids)
                if (found != found[:, :1]).any():
                    wrong.append("torn")

        threads = [threading.Thread(target=reads, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for number in range(60):
            table.write(np.arange(2000), np.full((2000, 64), number, np.float32))
            for _ in range(8):
                assert (table.read(np.arange(1000)) == number).all()
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong
        store.rollback()


def claims_nothing(tier: HostTier, *rows: Any) -> Any:
    return _apart(tier)


_apart = HostTier._apart


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("_are_moving", lambda *_: False),
        ("_apart", claims_nothing),
        ("_find", lambda tier, rows: (s := tier.map.lookup(rows), np.flatnonzero(s < 0))),
    ],
    ids=["no wait", "no move", "no second look"],
)
def test_tiers_without_their_rules_lose_updates(
    monkeypatch: pytest.MonkeyPatch, what: str, instead: Any
) -> None:
    monkeypatch.setattr(HostTier, what, instead)
    for seed in range(40):
        try:
            TierProgram(seed, (25,) if seed % 2 else (3,), lru()).run(80)
        except (AssertionError, IndexError, ValueError):
            return
    pytest.fail("40 programs found nothing")


# -- stores


class StoreProgram:
    """Writers, readers and a committer of a store, through its public interface."""

    def __init__(
        self, path: Path, seed: int, budget: Budget, policy: PolicySpec | None = None
    ) -> None:
        self.seed, self.path = seed, path
        self.store = tierstore.create(path, {"t": SPEC}, budget=budget, policy=policy, keep=999)
        self.table = self.store["t"]
        self.true = np.zeros(ROWS, np.float32)
        self.writing = WRITERS
        self.versions = [self.store.version]

    def run(self, calls: int) -> None:
        with self.store:
            together(
                *(lambda w=writer: self.write(w, calls) for writer in range(WRITERS)),
                *(lambda r=reader: self.look(r) for reader in range(WRITERS)),
                self.commit,
            )
            with inside.door(self.store).use():  # a prefetch may be under way
                if inside.space(self.table).host is not None:
                    check(inside.space(self.table).host)
            self.versions.append(self.store.commit())
            assert self.store.verify().ok
        for version in self.versions:
            with tierstore.open(self.path, version=version) as old:
                found = old["t"].read(np.arange(ROWS), list(FIELDS))
                self.check_rows(found)
                whole = found["sum"].reshape(GROUP, -1)
                assert (whole == whole[:1]).all(), f"version {version} has half a call"
        assert np.array_equal(found["sum"][:, 0], self.true), "an update is lost"

    @staticmethod
    def check_rows(found: dict[str, np.ndarray]) -> None:
        one = found["sum"]
        for values in found.values():
            assert (values == one).all(), "a row is torn"

    def values(self, rows: np.ndarray, fields: list[str]) -> dict[str, np.ndarray]:
        number = (self.true[rows] + 1)[:, None]
        return {name: np.repeat(number, FIELDS[name].dim, 1) for name in fields}

    def write(self, writer: int, calls: int) -> None:
        rng = np.random.default_rng([self.seed, writer])
        groups = groups_of(writer)
        try:
            for _ in range(calls):
                rows = rng.choice(groups)
                names = list(FIELDS)
                match int(rng.integers(3)):
                    case 0:
                        self.table.write(rows, self.values(rows, names))
                    case 1:
                        with self.table.lease(rows) as lease:
                            assert np.array_equal(lease.read("sum")[:, 0], self.true[lease.rows])
                            columns = tierstore._table.values.Columns(SPEC.layout, names)
                            lease.write_columns(columns, self.values(lease.rows, names))
                    case 2:
                        self.table.prefetch(rng.integers(0, ROWS, 9), window=2)
                        continue
                self.true[rows] += 1
        finally:
            self.writing -= 1

    def look(self, reader: int) -> None:
        rng = np.random.default_rng([self.seed, reader, 7])
        seen = np.zeros(ROWS, np.float32)
        while self.writing:
            rows = rng.integers(0, ROWS, int(rng.choice([1, 5, 60])))
            found = self.table.read(rows, list(FIELDS), cache=bool(rng.integers(2)))
            self.check_rows(found)
            assert (found["sum"][:, 0] >= seen[rows]).all(), "a row goes back"
            np.maximum.at(seen, rows, found["sum"][:, 0])

    def commit(self) -> None:
        while self.writing:
            if len(self.versions) < 60:
                self.versions.append(self.store.commit())
            time.sleep(1e-3)


BUDGETS = {
    "no host tier": Budget(host_rows=0),
    "one slot": Budget(host_rows=1),
    "cache": Budget(host_rows=25),
    "direct": Budget(host_rows=ROWS),
}


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.nightly("cache", "one slot")
def test_stores(tmp_path: Path, budget: str) -> None:
    StoreProgram(tmp_path / "s", 1, BUDGETS[budget], lfu(3)).run(60)


def test_a_version_without_the_fence_has_half_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a commit beside calls that have given their tier's lock up."""
    monkeypatch.setattr(Door, "busy", lambda *_: False)
    for seed in range(30):
        try:
            StoreProgram(tmp_path / f"{seed}", seed, BUDGETS["one slot"]).run(40)
        except Exception:
            return
    pytest.fail("30 programs found nothing")


# -- a hit beside a miss


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tierstore.Store]:
    with tierstore.create(tmp_path / "s", {"t": SPEC}, budget=BUDGETS["cache"]) as store:
        store["t"].write(np.arange(9), np.ones((9, 3), np.float32))
        store.commit()
        yield store
        if not inside.door(store).closed:
            store.rollback()


@contextlib.contextmanager
def blocked(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> Iterator[None]:
    """Have a thread do work that reads the base, and keep it there meanwhile."""
    entered, over, errors = threading.Event(), threading.Event(), []
    whole = {name: getattr(Base, name) for name in ("read", "deliver")}

    def wait(name: str, base: Base, rows: Any, out: Any) -> None:
        entered.set()
        assert over.wait(60)
        whole[name](base, rows, out)

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with monkeypatch.context() as patch:
        for name in whole:
            patch.setattr(Base, name, lambda *given, name=name: wait(name, *given))
        thread.start()
        try:
            assert entered.wait(60)
            yield
        finally:
            over.set()
            thread.join(60)
    assert not thread.is_alive() and not errors, errors


def in_time(work: Callable[[], object], seconds: float = 30) -> bool:
    """Whether work ends while nothing else happens."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


@pytest.mark.parametrize(
    "miss",
    [
        lambda table: table.read([99, 100]),
        lambda table: table.read([99, 100], cache=False),
        lambda table: table.lease([99, 100]).release(),
        lambda table: table.write([99, 100], np.ones((2, 3), np.float32)),
        lambda table: list(table.scan(start=90, stop=100)),
    ],
    ids=["read", "uncached", "lease", "write", "scan"],
)
def test_rows_that_are_resident_wait_for_no_miss(
    store: tierstore.Store, monkeypatch: pytest.MonkeyPatch, miss: Callable[[Any], object]
) -> None:
    table, ones = store["t"], np.ones((2, 3), np.float32)
    with table.lease([5, 6]) as lease, blocked(monkeypatch, lambda: miss(table)):
        assert in_time(lambda: table.read([1, 2]))
        assert in_time(lambda: table.write([3, 4], 2 * ones))
        assert in_time(lambda: lease.write("weight", 3 * ones))
        assert in_time(lambda: table.stats())
    assert table.read([2, 3, 4, 5])[:, 0].tolist() == [1, 2, 2, 3]


def test_a_row_on_its_way_is_waited_for_and_a_commit_waits_for_calls(
    store: tierstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = store["t"]
    with blocked(monkeypatch, lambda: table.read([99])):
        waiting = threading.Thread(target=table.write, args=([99], np.ones((1, 3), np.float32)))
        waiting.start()
        committing = threading.Thread(target=store.commit)
        committing.start()
        waiting.join(0.2)
        assert waiting.is_alive() and committing.is_alive()
        assert store.version == 2
    waiting.join(60)
    committing.join(60)
    assert store.version == 3
    assert table.read([99])[0, 0] == 1


def test_a_call_beside_which_another_broke_off_does_not_return(
    store: tierstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught: list[BaseException] = []

    def miss() -> None:
        try:
            store["t"].read([99])
        except ClosedError as error:
            caught.append(error)

    with blocked(monkeypatch, miss), pytest.raises(MemoryError), Call(inside.door(store)):
        raise MemoryError
    assert inside.door(store).closed and len(caught) == 1


# -- the disk


def test_what_does_not_match_is_read_again_under_the_lock(
    store: tierstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = inside.disk(store["t"])
    out, rows = np.empty((1, SPEC.layout.record_bytes), np.uint8), np.array([3])
    tier.write(rows, np.full_like(out, 7))
    newest, read_now = int(inside.index(tier).entries.take(rows)[0]), []

    def place(entry: int) -> None:
        inside.index(tier).entries[rows] = np.array([entry], np.int32)

    def superseded(self: Base, rows: Any, out: Any) -> None:
        place(newest)
        read_now.append(rows.tolist())
        raise tierstore.errors.CorruptRowError("torn", rows=[3], file="base")

    place(0)
    monkeypatch.setattr(Base, "deliver", superseded)
    tier.read(rows, out)
    assert (out == 7).all() and read_now == [[3]]
    place(0)
    newest = 0
    with pytest.raises(tierstore.errors.CorruptRowError):
        tier.read(rows, out)
    place(1)


class NoLock:
    """Replaces a lock, and never blocks; others come in between on a busy machine too."""

    def __enter__(self) -> None:
        time.sleep(1e-4)

    def __exit__(self, *error: object) -> None:
        time.sleep(1e-4)


def test_a_disk_tier_without_its_lock_is_read_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the store's programs, over the disk tier alone."""

    def unlocked(made: Callable[..., None]) -> Callable[..., None]:
        def make(tier: Any, *given: Any, **named: Any) -> None:
            made(tier, *given, **named)
            tier._lock = NoLock()

        return make

    for kind in (DiskTier, Uncached):
        monkeypatch.setattr(kind, "__init__", unlocked(kind.__init__))
    for seed in range(30):
        try:
            StoreProgram(tmp_path / f"{seed}", seed, BUDGETS["no host tier"]).run(40)
        except Exception:
            return
    pytest.fail("30 programs found nothing")


@pytest.mark.parametrize("damaged", [False, True])
def test_rows_of_a_large_miss_come_in_threads_without_a_trace(
    tmp_path: Path, damaged: bool
) -> None:
    """With the same counters; and where one of them is damaged, none has come."""
    path, rows = tmp_path / "s", 3000
    spec = tierstore.TableSpec(rows, 8, init=tierstore.normal(seed=1))
    rng = np.random.default_rng(2)
    truth = rng.standard_normal((rows, 8)).astype(np.float32)
    with tierstore.create(path, {"t": spec}, budget=tierstore.Budget(host=0)) as store:
        store["t"].write(np.arange(1000, rows), truth[1000:])
        store.commit()
        truth[:1000] = store["t"].read(np.arange(1000))
    if damaged:
        (delta,) = path.rglob("delta-*")
        with delta.open("r+b") as file:
            file.seek(32 * 5)
            file.write(b"damage")
    batches = [rng.integers(0, rows, 900) for _ in range(8)]
    found = list[Any]()
    for threads in (1, 4):
        with (
            inside.core_threads(threads),
            tierstore.open(path, budget=tierstore.Budget(host_rows=1000), device="cpu") as store,
        ):
            table = store["t"]
            if damaged:
                with pytest.raises(CorruptRowError, match="row 1005"):
                    table.read(np.arange(900, 1200))
                assert (inside.space(table).host.map.lookup(np.arange(900, 1200)) < 0).all()
                assert np.array_equal(table.read(np.arange(900, 1000)), truth[900:1000])
            else:
                for batch in batches:
                    assert np.array_equal(table.read(batch), truth[batch])
            found.append(store.stats())
    assert damaged or found[0] == found[1]
