"""How leases and prefetches end, and that what a lease writes is in the table at once."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.gpu.conftest import Place
from tests.gpu.late import LateDevice
from tierstore import Budget, TableSpec
from tierstore._disk.tier import DiskTier
from tierstore._door import Call
from tierstore._tiers.gpu import lease as gpu_lease
from tierstore._tiers.host import nothing_to_await
from tierstore.errors import ClosedError, DeviceError

ROWS, DIM = 100, 4
SPEC = TableSpec(ROWS, DIM, init=tierstore.normal(seed=3))
EVERY = np.arange(ROWS)
BUDGETS = {
    "disk": Budget(host_rows=0),
    "host": Budget(host_rows=ROWS),
    "host cache": Budget(host_rows=20),
    "gpu": Budget(host_rows=ROWS, gpu_rows=6),
    "gpu over cache": Budget(host_rows=20, gpu_rows=6),
}
ON_GPU = ["gpu", "gpu over cache"]


def values(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, DIM)).astype(np.float32)


@pytest.fixture
def make(tmp_path: Path, place: Place) -> Iterator[Callable[..., tierstore.Store]]:
    """Makes a store with the tiers of a name; what is left uncommitted is dropped."""
    made = []

    def make(tiers: str) -> tierstore.Store:
        device = place.device if tiers in ON_GPU else "cpu"
        store = tierstore.create(
            tmp_path / f"{len(made)}.tier", {"t": SPEC}, budget=BUDGETS[tiers], device=device
        )
        made.append(store)
        return store

    yield make
    for store in made:
        if not inside.door(store).closed:
            store.rollback()
            store.close()


def both(
    rows: Any, look: Callable[[Any], Any], fetch: Callable[[Any], object]
) -> Callable[[], None]:
    """What the prefetcher's thread does with a request."""

    def run() -> None:
        distinct = np.unique(rows)
        advice = look(distinct)
        if advice is not None:
            advice()
        fetch(distinct)

    return run


def uses(lease: Any) -> list[Callable[[], object]]:
    return [
        lambda: lease.read("weight"),
        lambda: lease.expand("weight"),
        lambda: lease.write("weight", values(lease.bound)),
        lambda: lease.trim(wait=True),
    ]


ENDS: dict[str, Callable[[tierstore.Store], object]] = {
    "rollback": lambda store: store.rollback(),
    "rows": lambda store: store.grow("t", ROWS + 5),
    "fields": lambda store: store.add_fields("t", {"more": tierstore.Field(2)}),
    "close": lambda store: store.close(),
}


@pytest.mark.variants(14)
@pytest.mark.parametrize("tiers", BUDGETS)
@pytest.mark.parametrize("end", ENDS)
def test_every_use_of_a_lease_that_has_ended_raises(make: Any, tiers: str, end: str) -> None:
    store = make(tiers)
    table = store["t"]
    before = table.read(EVERY)
    lease, released = table.lease([1, 2, 2, 3]), table.lease([4])
    released.release()
    assert released.ended
    assert not lease.ended
    ENDS[end](store)
    assert lease.ended
    if end != "close":
        table.read(np.arange(10, 16))  # into slots that the lease had
    for dead in (lease, released):
        for use in uses(dead):
            with pytest.raises(ClosedError):
                use()
        dead.release()
        dead.release()
    if end != "close":
        np.testing.assert_array_equal(table.read(EVERY), before)
        assert store.uncommitted_rows() == 0


@pytest.mark.parametrize("tiers", BUDGETS)
def test_a_refresh_ends_the_leases_of_a_reader(make: Any, place: Place, tiers: str) -> None:
    writer = make(tiers)
    device = place.device if tiers in ON_GPU else "cpu"
    with tierstore.open(writer.path, budget=BUDGETS[tiers], device=device) as reader:
        lease = reader["t"].lease([1, 2])
        writer["t"].write([1], values(1))
        writer.commit()
        assert reader.refresh()
        for use in uses(lease):
            with pytest.raises((ClosedError, tierstore.errors.ReadOnlyError)):
                use()
        lease.release()
        np.testing.assert_array_equal(reader["t"].read([1]), values(1))


@pytest.mark.parametrize("tiers", ON_GPU)
def test_a_lease_is_checked_within_the_guard_and_seldom_before(
    make: Any, monkeypatch: pytest.MonkeyPatch, tiers: str
) -> None:
    """What was checked before may end while the call waits; values are looked at before that."""
    store = make(tiers)
    check, held = gpu_lease.GpuLease.check, []

    def checking(lease: Any) -> None:
        held.append(inside.state(store).door.held)
        check(lease)

    with store["t"].lease([1, 2, 3]) as lease:
        lease.trim(wait=True)
        monkeypatch.setattr(gpu_lease.GpuLease, "check", checking)
        read, expand, write, _ = uses(lease)
        for use, expected in (read, [True]), (expand, [True]), (write, [False, True]):
            use()
            assert held == expected
            held.clear()
        lease.trim(wait=True)
        assert len(held) == 1


@pytest.mark.parametrize("tiers", BUDGETS)
@pytest.mark.parametrize("end", ["rollback", "rows"])
def test_a_lease_that_waits_while_another_thread_ends_its_epoch_raises(
    make: Any, monkeypatch: pytest.MonkeyPatch, tiers: str, end: str
) -> None:
    store = make(tiers)
    table, waits, raised = store["t"], threading.Event(), []
    before, wait = table.read(EVERY), Call._wait

    def waiting(use: Call) -> None:
        waits.set()
        wait(use)

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except ClosedError as error:
            raised.append(str(error))

    monkeypatch.setattr(Call, "_wait", waiting)
    lease = table.lease([1, 2, 3])
    lease.trim(wait=True)
    ended = uses(lease)[:3]
    out = values(1)

    def read() -> None:  # by a lease: what is in memory is read without waiting
        with table.lease([5]) as each:
            out[:] = each.read("weight")

    others: list[Callable[[], object]] = [  # which go on in the tiers that the table gets
        read,
        lambda: table.write([6], before[[6]]),
        lambda: table.lease([5]).release(),
    ]
    released = table.lease([1, 2, 3])
    given = [*ended, *others]
    if tiers in ("host cache", *ON_GPU):  # a lease that pins nothing is released without waiting
        given.append(released.release)
    threads = [threading.Thread(target=run, args=(call,)) for call in given]
    with inside.state(store).door.use():
        for thread in threads:
            waits.clear()
            thread.start()
            assert waits.wait(600)
        ENDS[end](store)
    for thread in threads:
        thread.join()
    assert released.ended
    assert len(raised) == len(ended)
    assert all("since this lease began" in each for each in raised)
    np.testing.assert_array_equal(out, before[[5]])
    np.testing.assert_array_equal(table.read(EVERY), before)
    assert store.uncommitted_rows() == 1
    store.rollback()


@pytest.mark.parametrize("tiers", ON_GPU)
@pytest.mark.parametrize("protected", [True, False])
def test_a_lease_that_outlives_a_rollback_writes_into_no_slot(
    make: Any, monkeypatch: pytest.MonkeyPatch, tiers: str, protected: bool
) -> None:
    store = make(tiers)
    table = store["t"]
    before = table.read(EVERY)
    lease = table.lease([1, 2, 3])
    store.rollback()
    if not protected:
        monkeypatch.setattr(gpu_lease.GpuLease, "check", lambda _: None)
    table.read(np.arange(10, 16))  # as many rows as slots
    if protected:
        with pytest.raises(ClosedError, match=r"was rolled back since.*table\.lease"):
            lease.write("weight", values(3))
    else:
        lease.write("weight", values(lease.bound))
    table.write([50], values(1))
    store.commit()
    before[50] = values(1)
    wrong = (table.read(EVERY) != before).any(axis=1).sum()
    assert (wrong > 0) != protected


def test_the_release_of_a_dead_lease_leaves_other_pins_alone(make: Any) -> None:
    store = make("host cache")
    table = store["t"]
    dead = table.lease(np.arange(5))
    store.rollback()
    with table.lease(np.arange(5)):
        dead.release()
        for start in range(20, 100, 20):
            table.read(np.arange(start, start + 20))
        assert (inside.space(table).host.map.lookup(np.arange(5)) >= 0).all()
    assert not inside.pins(table).any()
    table.read(np.arange(50, 70))
    assert (inside.space(table).host.map.lookup(np.arange(5)) < 0).all()


@pytest.mark.parametrize("tiers", BUDGETS)
@pytest.mark.parametrize("end", ["rollback", "rows"])
def test_a_prefetch_that_comes_too_late_is_dropped(
    make: Any, monkeypatch: pytest.MonkeyPatch, tiers: str, end: str
) -> None:
    store = make(tiers)
    table, requests = store["t"], []
    monkeypatch.setattr(
        inside.state(store).prefetcher, "submit", lambda *given: requests.append(both(*given))
    )
    before = table.read(EVERY)
    table.prefetch(np.arange(3, 9))
    ENDS[end](store)
    tier = inside.space(table).host or inside.disk(table)
    asked = tier.stats.requested
    for request in requests:
        try:
            request()
        except ClosedError:
            assert end == "rows"
    assert tier.stats.requested == asked
    np.testing.assert_array_equal(table.read(EVERY), before)


def test_a_prefetch_does_not_look_at_the_callers_ids_later(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make("host cache")
    table, requests = store["t"], []
    monkeypatch.setattr(
        inside.state(store).prefetcher, "submit", lambda *given: requests.append(both(*given))
    )
    ids = np.arange(3, 9)
    table.prefetch(ids)
    ids += 50
    requests.pop()()
    assert (inside.space(table).host.map.lookup(np.arange(3, 9)) >= 0).all()
    assert (inside.space(table).host.map.lookup(ids) < 0).all()


# -- rows without a slot


@pytest.mark.variants(5, 9)
@pytest.mark.parametrize("tiers", BUDGETS)
@pytest.mark.parametrize("way", ["write", "columns"])
def test_what_a_lease_writes_is_in_reads_and_commits(make: Any, tiers: str, way: str) -> None:
    """However many of its rows have a slot."""
    from tierstore._table.values import Columns

    store = make(tiers)
    table = store["t"]
    ids = np.arange(30, 70)
    expected = table.read(EVERY)
    with table.lease(ids) as lease, table.lease(ids[:9]) as other:
        lease.trim(wait=True)
        rows = values(40)
        if way == "write":
            lease.write("weight", rows)
        else:
            lease.write_columns(Columns(table.spec.layout, ["weight"]), {"weight": rows})
        expected[lease.rows] = rows
        np.testing.assert_array_equal(table.read(EVERY), expected)
        np.testing.assert_array_equal(other.expand("weight"), expected[ids[:9]])
        store.commit()
        committed = expected.copy()
        with tierstore.open(store.path) as reader:
            np.testing.assert_array_equal(reader["t"].read(EVERY), committed)
        table.write([35, 69], values(2, seed=2))
        expected[[35, 69]] = values(2, seed=2)
        np.testing.assert_array_equal(lease.expand("weight"), expected[ids])
        other.trim(wait=True)
        other.write("weight", values(9, seed=4))
        expected[other.rows] = values(9, seed=4)
        np.testing.assert_array_equal(lease.read("weight"), expected[lease.rows])
    np.testing.assert_array_equal(table.read(EVERY), expected)
    store.rollback()
    np.testing.assert_array_equal(table.read(EVERY), committed)


def test_without_writing_through_a_commit_is_torn(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lease.GpuLease, "_write_through", lambda *_: None)
    store = make("gpu over cache")
    table = store["t"]
    with table.lease(np.arange(40)) as lease:
        lease.trim(wait=True)
        lease.write("weight", values(40))
        store.commit()
        with tierstore.open(store.path) as reader:
            found = reader["t"].read(lease.rows)
    right = (found == values(40)).all(axis=1).sum()
    assert 0 < right < 40


# -- what cannot be released yet


@pytest.mark.parametrize("tiers", ON_GPU)
def test_a_lease_whose_release_failed_can_be_released(
    make: Any, place: Place, monkeypatch: pytest.MonkeyPatch, tiers: str
) -> None:
    table = make(tiers)["t"]
    lease = table.lease([1, 2, 3])
    monkeypatch.setattr(place.device, "capturing", lambda stream: True)
    with pytest.raises(DeviceError, match="captured"):
        lease.release()
    assert not lease.ended
    monkeypatch.undo()
    lease.release()
    assert lease.ended
    assert not place.get(inside.arrays(inside.space(table).gpu.memory)["pins"]).any()


def test_a_lease_on_the_host_whose_release_was_interrupted_can_be_released(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make("host cache")
    table = store["t"]
    lease = table.lease([1, 2, 3])

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Call, "__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    monkeypatch.undo()
    lease.release()
    assert not inside.pins(table).any()


# -- copies beside


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
@pytest.mark.parametrize("late", [None, {LateDevice.beside}])
@pytest.mark.parametrize("protected", [True, False])
def test_warming_waits_for_the_copies_of_prefetches(
    tmp_path: Path, late: set[int] | None, protected: bool
) -> None:
    """They write rows that leave the GPU to slots of the host tier, which warming gives away."""
    budget = Budget(host_rows=30, gpu_rows=10)
    device = LateDevice(late=late)
    with tierstore.create(tmp_path / "s", {"t": SPEC}, budget=budget, device=device) as store:
        table = store["t"]
        expected = table.read(EVERY)
        if not protected:
            inside.space(table).host.before_change = nothing_to_await
        table.read(np.arange(40, 50))  # now the host tier has them, too
        table.write(np.arange(40, 50), values(10))
        expected[40:50] = values(10)
        table.read(np.arange(45, 50))
        table.prefetch(np.arange(5))
        inside.state(store).prefetcher.wait()
        table.read(np.arange(45, 50))  # behind the plan of the prefetch, not behind its copies
        table.warm(np.arange(5, 35))
        wrong = (table.read(EVERY) != expected).any(axis=1).sum()
        store.rollback()
        assert (wrong > 0) != protected


def test_a_fetch_holds_up_commits_but_no_batch(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for the disk, batches of other rows go on, and see no row half come."""
    store = make("gpu over cache")
    table, deliver = store["t"], DiskTier.deliver
    before, begun, go_on = table.read(EVERY), threading.Event(), threading.Event()
    fetcher = set[int]()

    def slow(tier: Any, rows: Any, put: Any) -> None:
        if threading.get_ident() != caller:
            fetcher.add(threading.get_ident())
            begun.set()
            assert go_on.wait(60)
        deliver(tier, rows, put)

    caller = threading.get_ident()
    table.write(np.arange(40, 60), values(20))
    before[40:60] = values(20)
    monkeypatch.setattr(DiskTier, "deliver", slow)
    table.prefetch(np.arange(5))
    assert begun.wait(60)
    for start in (60, 90, 40, 30, 80):
        rows = np.arange(start, start + 10)
        np.testing.assert_array_equal(table.read(rows), before[rows])
        table.write(rows[:3], values(3, start))
        before[rows[:3]] = values(3, start)
    committed = threading.Event()
    commit = threading.Thread(target=lambda: (store.commit(), committed.set()))
    commit.start()
    assert not committed.wait(0.2)
    go_on.set()
    commit.join(60)
    assert committed.is_set() and fetcher
    np.testing.assert_array_equal(table.read(EVERY), before)


def test_lists_that_a_lease_has_shown_stay_as_they_are(make: Any, place: Place) -> None:
    table = make("gpu")["t"]
    first = place.put(np.array([4, 1, 4, 2]))
    with table.lease(first) as lease:
        positions, rows, held = lease.positions, lease.rows, lease.gpu.count
    kept = [place.get(each).copy() for each in (positions, rows, held)]
    del lease
    for ids in ([7, 7, 8, 9], [3, 5, 6, 0], [2]):
        table.lease(place.put(np.array(ids))).release()
    for each, before in zip((positions, rows, held), kept, strict=True):
        np.testing.assert_array_equal(place.get(each), before)


def test_a_lease_finds_the_lists_of_one_that_is_gone(make: Any, place: Place) -> None:
    table = make("gpu")["t"]
    ids, more = place.put(np.arange(4)), place.put(np.arange(5))
    lease = table.lease(ids)
    block = lease.gpu.arguments.batch.count
    lease.release()
    other = table.lease(ids)  # the first one has ended, and still has its lists
    assert other.gpu.arguments.batch.count != block
    other.release()
    del lease, other
    with table.lease(ids[:3]) as again:
        written = values(3, seed=5)
        again.write("weight", place.put(written))
        np.testing.assert_array_equal(place.get(again.read("weight")), written)
        assert place.get(again.gpu.count)[0] == 3
    assert inside.space(table).gpu.rooms
    with table.lease(more):
        assert not inside.space(table).gpu.rooms  # those left are too small, and were dropped
