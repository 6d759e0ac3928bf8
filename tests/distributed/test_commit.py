"""One version of all ranks or none: ranks that are killed, fail, disagree or do not come."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import tierstore
from tests import inside
from tests.distributed.ranks import Killed, in_turn, run, values
from tierstore import distributed
from tierstore.distributed.ranks import Ranks
from tierstore.errors import (
    ClosedError,
    CorruptStoreError,
    InvalidInputError,
    LockedError,
    RanksError,
    RowIndexError,
    StoreFullError,
)

pytestmark = pytest.mark.slow

ROWS, DIM = 400, 6
SPEC = {"item": tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=0.5, seed=3))}
MOMENTS = [
    (what, when)
    for what in ("put the payload together", "commit its partitions", "publish the version")
    for when in ("before", "done", "told")
] + [("confirm the version", "before"), ("confirm the version", "done")]


def rows_of(step: int) -> np.ndarray:
    """Return what all rows are after a step; another half of them changes in each."""
    rows = np.zeros((ROWS, DIM), np.float32)
    for each in range(1, step + 1):
        changed = np.random.default_rng(each).permutation(ROWS)[: ROWS // 2]
        rows[changed] = each
    return rows


def take_step(store: Any, step: int) -> None:
    """Write the rows of a step, each rank those of its shard."""
    changed = np.random.default_rng(step).permutation(ROWS)[: ROWS // 2]
    ranks = store.ranks
    mine = changed[store.rank :: ranks]
    store["item"].write(mine, np.full((mine.size, DIM), step, np.float32))


def start(path: Path) -> None:
    """Make a store that is at step 2."""
    with distributed.create(path, SPEC, partitions=4) as store:
        store["item"].write(np.arange(ROWS), np.zeros((ROWS, DIM), np.float32))
        for step in (1, 2):
            take_step(store, step)
            store.commit(step, payload={"step": {"of": step}})


def check(path: Path, *, steps: set[int]) -> int:
    """Check that the store is whole and at one of the steps; return which."""
    with tierstore.open(path) as store:
        assert store.step in steps
        assert np.array_equal(store["item"][:], rows_of(store.step))
        assert store.payload["step"].tree() == {"of": store.step}
        found = store.step
    report = tierstore.verify(path)
    assert report.ok, report.bad_files
    return found


def hooked(hook: Callable[[str, str], None]) -> None:
    """Call a hook before and after what a rank does with the others, and when all know."""
    together = Ranks.together

    def watched(self: Ranks, what: str, work: Any) -> Any:
        hook(what, "before")

        def done() -> Any:
            value = work()
            hook(what, "done")
            return value

        found = together(self, what, done)
        hook(what, "told")
        return found

    Ranks.together = watched  # type: ignore[method-assign]


def kill_at(moment: tuple[str, str]) -> None:
    """Kill this rank at a moment of what it does with the others; see `hooked`."""

    def hook(what: str, when: str) -> None:
        if (what, when) == moment:
            time.sleep(0.05)  # the others come as far as they can
            os.kill(os.getpid(), signal.SIGKILL)

    hooked(hook)


def killed_at(rank: int, path: Path, victim: int, what: str, when: str) -> int:
    with distributed.open(path) as store:
        take_step(store, 3)
        if rank == victim:
            kill_at((what, when))
        store.commit(3, payload={"step": {"of": 3}})
        return store.version


def go_on(rank: int, path: Path) -> int:
    with distributed.open(path) as store:
        for step in range(store.step + 1, 6):
            take_step(store, step)
            store.commit(step, payload={"step": {"of": step}})
        return store.version


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.torture)])
def test_a_rank_is_killed_at_each_moment_of_a_commit(tmp_path: Path, first: int) -> None:
    """One rank and the other in turn; one process goes on with what is left, or now and then two.

    The tests at length turn them round.
    """
    start(tmp_path / "before")
    for at, (second, (what, when)) in enumerate(in_turn(MOMENTS)):
        victim = first ^ second
        path = tmp_path / f"{what} {when}".replace(" ", "-")
        shutil.copytree(tmp_path / "before", path)
        found = run(2, killed_at, path, victim, what, when)
        assert isinstance(found[victim], Killed), (what, when, found)
        other = found[1 - victim]
        told = what == "commit its partitions" and when == "told" and victim == 1
        is_after = (
            what.startswith("confirm")
            or told  # so that rank 0 published
            or (what == "publish the version" and (victim == 1 or when != "before"))
        )
        assert isinstance(other, RanksError | int), (what, when, found)
        step = check(path, steps={2, 3})
        assert step == (3 if is_after else 2), (what, when)
        if at % 3:
            go_on(0, path)
        else:
            values(run(2, go_on, path))
        assert check(path, steps={5}) == 5
        shutil.rmtree(path)


def killed_while_altering(rank: int, path: Path, victim: int, what: str, when: str) -> None:
    with distributed.open(path) as store:

        def hook(found: str, moment: str) -> None:
            if rank == victim and (found, moment) == (what, when):
                time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)

        hooked(hook)
        store.add_fields("item", {"more": tierstore.Field(2, init=tierstore.constant(4.0))})


@pytest.mark.variants(0, 2)
@pytest.mark.parametrize(
    ("what", "when"),
    [
        ("write its tables", "done"),
        ("change its partitions", "before"),
        ("change its partitions", "done"),
        ("publish the version", "before"),
        ("publish the version", "done"),
    ],
)
def test_a_rank_is_killed_while_tables_are_altered(tmp_path: Path, what: str, when: str) -> None:
    path = tmp_path / "store"
    start(path)
    found = run(2, killed_while_altering, path, 0, what, when)
    assert isinstance(found[0], Killed)
    check(path, steps={2})
    with tierstore.open(path) as store:
        has = {"weight", *(("more",) if (what, when) == ("publish the version", "done") else ())}
        assert set(store["item"].fields) == has
    values(run(2, go_on, path))
    check(path, steps={5})


def checkpointed(rank: int, path: Path, until: int) -> int:
    import torch

    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    with distributed.open(path) as store:
        emb = TieredEmbedding(store["item"])
        optimizer = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
        model = torch.nn.Sequential(emb, torch.nn.Linear(DIM, 1))
        run = tierstore.Checkpoint(store, model=model, tiered=optimizer)
        begin = run.resume() if until > 2 else 0
        for step in range(begin, until):
            ids = torch.arange(rank, ROWS, 7 + step)
            emb(ids).sum().backward()
            optimizer.step()
            run.commit(step + 1)
        return begin


def test_a_checkpoint_is_resumed_by_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "store"
    distributed.create(path, SPEC, partitions=4).close()
    values(run(2, checkpointed, path, 2))
    assert values(run(2, checkpointed, path, 4)) == [2, 2]
    with tierstore.open(path) as store:
        assert store.step == 4
        assert store["item"].scalars["step"] == 4


def killed_at_random(rank: int, path: Path, victim: int, seconds: float) -> None:
    if rank == victim:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends the process
    with distributed.open(path) as store:
        step = store.step
        while step < 1000:
            step += 1
            take_step(store, step)
            store.commit(step, payload={"step": {"of": step}})


def go_on_from(rank: int, path: Path) -> None:
    with distributed.open(path) as store:
        take_step(store, store.step + 1)
        store.commit(store.step + 1, payload={"step": {"of": store.step + 1}})


@pytest.mark.torture
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ranks_are_killed_at_random(tmp_path: Path, seed: int) -> None:
    start(tmp_path / "store")
    random = np.random.default_rng(seed)
    steps = [2]
    for _ in range(200):
        ranks = int(random.integers(1, 4))
        victim, seconds = int(random.integers(ranks)), random.uniform(0.01, 0.4)
        found = run(ranks, killed_at_random, tmp_path / "store", victim, seconds)
        assert isinstance(found[victim], Killed | RanksError), found
        steps.append(check(tmp_path / "store", steps=set(range(steps[-1], 1001))))
    assert len(set(steps)) > 20  # so that kills came at steps, not only as ranks began
    values(run(2, go_on_from, tmp_path / "store"))
    check(tmp_path / "store", steps={steps[-1] + 1})


def full_on_one(rank: int, path: Path) -> list[str]:
    with distributed.open(path) as store:
        take_step(store, 3)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, unlimited[1]))
        with pytest.raises(StoreFullError) as info:
            store.commit(3, payload={"step": {"of": 3}})
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        with tierstore.open(path) as reader:
            assert reader.step == 2
            assert np.array_equal(reader["item"][:], rows_of(2))
        assert store.commit(3, payload={"step": {"of": 3}}) == store.version
        if rank == 0:
            assert "rank 1 of 2" in str(info.value)
        return [str(info.value)]


def test_a_full_disk_of_one_rank(tmp_path: Path) -> None:
    start(tmp_path / "store")
    values(run(2, full_on_one, tmp_path / "store"))
    check(tmp_path / "store", steps={3})


def full_then_back(rank: int, path: Path) -> None:
    with distributed.open(path) as store:
        take_step(store, 3)

        def hook(what: str, when: str) -> None:
            if rank == 1 and (what, when) == ("commit its partitions", "done"):
                raise StoreFullError("no space")

        together = Ranks.together
        hooked(hook)
        with pytest.raises(StoreFullError, match="no space"):
            store.commit(3, payload={"step": {"of": 3}})
        Ranks.together = together  # type: ignore[method-assign]
        table = store["item"]
        assert np.array_equal(table.read(np.arange(ROWS)), rows_of(3))
        with pytest.raises(InvalidInputError, match="not committed"):
            store.add_fields("item", {"more": tierstore.Field(1)})
        store.rollback()
        assert np.array_equal(table.read(np.arange(ROWS)), rows_of(2))
        store.add_fields("item", {"more": tierstore.Field(1)})
        take_step(store, 3)
        store.commit(3, payload={"step": {"of": 3}})


def test_a_rollback_takes_partitions_back_that_are_ahead(tmp_path: Path) -> None:
    start(tmp_path / "store")
    values(run(2, full_then_back, tmp_path / "store"))
    check(tmp_path / "store", steps={3})


def disagree(rank: int, path: Path) -> list[str]:
    errors = []
    with distributed.open(path) as store:
        take_step(store, 3)
        calls: list[Callable[[], Any]] = [
            lambda: store.commit(3 + rank),
            lambda: store.commit(3, keep="best" if rank else None),
            lambda: store.commit(3, payload={"a": 1} if rank else None),
            lambda: store.commit(3) if rank else store.rollback(),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError, match="ranks disagree") as info:
                call()
            errors.append(str(info.value))
        with pytest.raises(RowIndexError if rank else RanksError, match=r"401|rank 1 of 2"):
            store["item"].read([401] if rank else [3])
        store["item"].scalars["lr"] = rank
        with pytest.raises(InvalidInputError, match="scalars"):
            store.commit(3, payload={"step": {"of": 3}})
        store["item"].scalars["lr"] = 1
        store.commit(3, payload={"step": {"of": 3}})
    return errors


def test_ranks_that_disagree(tmp_path: Path) -> None:
    start(tmp_path / "store")
    one, other = values(run(2, disagree, tmp_path / "store"))
    assert one == other
    assert "step: rank 0 has 3, rank 1 has 4" in one[0]
    check(tmp_path / "store", steps={3})


def open_it(rank: int, path: Path) -> None:
    distributed.open(path).close()


def differing(rank: int, path: Path) -> None:
    distributed.open(path, average=bool(rank)).close()


def test_what_one_rank_cannot_open_no_rank_opens(tmp_path: Path) -> None:
    path = tmp_path / "store"
    start(path)
    partition = path / "partitions" / "00003"
    with tierstore.open(partition, "r+"):
        one, other = run(2, open_it, path)
    assert isinstance(one, LockedError) and "rank 1 of 2" in str(one)
    assert isinstance(other, LockedError) and "00003" in str(other)
    partition.rename(path / "away")
    for error in run(2, open_it, path):
        assert isinstance(error, CorruptStoreError) and "partition 3" in str(error)
    (path / "away").rename(partition)
    base = next((partition / "item").glob("g*/rows.npy"))
    whole = base.read_bytes()
    base.write_bytes(whole[:-5])
    for error in run(2, open_it, path):
        assert isinstance(error, CorruptStoreError) and "00003" in str(error)
    base.write_bytes(whole)
    for error in run(2, differing, path):
        assert isinstance(error, InvalidInputError) and "disagree on average" in str(error)
    for error in run(5, open_it, path):
        assert isinstance(error, InvalidInputError) and "4 partitions, and 5 ranks" in str(error)
    values(run(4, open_it, path))
    check(path, steps={2})


def never_commits(rank: int, path: Path) -> None:
    told = path.with_name("told")
    with distributed.open(path, timeout=5) as store:
        take_step(store, 3)
        if rank == 0:
            until(told)
            return
        with pytest.raises(RanksError, match="did not come in time"):
            store.commit(3)
        with pytest.raises(ClosedError):
            store.commit(3)
        told.touch()


def never_opens(rank: int, path: Path) -> None:
    told = path.with_name("told")
    if rank == 1:
        until(told)
        return
    with pytest.raises(RanksError, match="did not come in time"):
        distributed.open(path, timeout=2)
    told.touch()


def never_opens_to_a_group(rank: int, path: Path) -> None:
    told = path.with_name("told")
    if rank == 1:
        until(told)
        return
    with pytest.raises(RanksError, match="did not come in time"):
        distributed.open(path)
    told.touch()


def until(told: Path) -> None:
    """Wait for what the other rank makes when it has waited in vain."""
    while not told.exists():
        time.sleep(0.01)


@pytest.mark.parametrize("work", [never_commits, never_opens])
@pytest.mark.filterwarnings("ignore")
def test_a_rank_that_never_comes(tmp_path: Path, work: Any) -> None:
    start(tmp_path / "store")
    values(run(2, work, tmp_path / "store"))
    check(tmp_path / "store", steps={2})
    values(run(2, open_it, tmp_path / "store"))


@pytest.mark.filterwarnings("ignore")
def test_the_timeout_of_the_process_group_holds(tmp_path: Path) -> None:
    start(tmp_path / "store")
    values(run(2, never_opens_to_a_group, tmp_path / "store", timeout=2))
    check(tmp_path / "store", steps={2})


def forks(rank: int, path: Path) -> str:
    with distributed.open(path) as store:
        store["item"].read([rank])
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(5)  # which ends it, if it waits for other ranks
            try:
                store["item"].read([1])
            except Exception as error:
                os.write(writing, repr(error).encode())
            os._exit(0)
        os.close(writing)
        said = os.read(reading, 1000).decode()
        os.waitpid(child, 0)
        store["item"].read([2])
        store.commit(3, payload={"step": {"of": 3}})
        return said


def test_a_process_that_a_rank_forked_is_told(tmp_path: Path) -> None:
    start(tmp_path / "store")
    for said in values(run(2, forks, tmp_path / "store")):
        assert said.startswith("ForkedStoreError") and "tierstore.open(path)" in said


def on_disks_of_their_own(rank: int, paths: list[Path], victim: int | None) -> int:
    with distributed.open(paths[rank]) as store:
        take_step(store, store.step + 1)

        def hook(what: str, when: str) -> None:
            if rank == victim and (what, when) == ("publish the version", "before"):
                time.sleep(0.3)  # the other has published by then
                os.kill(os.getpid(), signal.SIGKILL)

        hooked(hook)
        assert inside.root(store) is not None  # each leads: it has a root of its own
        store.commit(store.step + 1, payload={"step": {"of": store.step + 1}})
        return store.version


def rows_on(rank: int, paths: list[Path]) -> tuple[int, bytes]:
    with distributed.open(paths[rank]) as store:
        return store.step, store["item"].read(np.arange(ROWS)).tobytes()


def test_hosts_with_disks_of_their_own(tmp_path: Path) -> None:
    start(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    paths = [tmp_path / "one", tmp_path / "other"]
    values(run(2, on_disks_of_their_own, paths, None))
    found = run(2, on_disks_of_their_own, paths, 1)
    assert isinstance(found[1], Killed)
    for _, (step, rows) in enumerate(values(run(2, rows_on, paths))):
        assert step == 3  # one host had published step 4, the other had not
        assert rows == rows_of(3).tobytes()
    values(run(2, on_disks_of_their_own, paths, None))
    for step, rows in values(run(2, rows_on, paths)):
        assert (step, rows) == (4, rows_of(4).tobytes())
    (error,) = run(1, open_it, paths[0])
    assert "lacks the version" in str(error)


def alone(rank: int, path: Path) -> list[str]:
    errors = []
    try:
        store = tierstore.open(path, "r+")
    except LockedError as error:
        errors.append(str(error))
    dist.barrier()
    if not errors:
        store.close()
    return errors


def test_a_second_rank_that_opens_a_plain_store_is_told(tmp_path: Path) -> None:
    tierstore.create(tmp_path / "plain", SPEC).close()
    found = [each for each in values(run(2, alone, tmp_path / "plain")) if each]
    assert len(found) == 1
    assert "tierstore.distributed.create" in found[0][0]


def apart(rank: int, paths: list[Path]) -> str:
    import torch

    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    with tierstore.open(paths[rank], "r+") as store:
        emb = TieredEmbedding(store["item"])
        optimizer = TieredOptimizer(torch.optim.SGD, [emb], lr=0.1)
        compiled = torch.compile(emb, backend="eager")  # which looks up with no regard to ranks
        compiled(torch.arange(5)).sum().backward()
        with pytest.raises(InvalidInputError) as info:
            optimizer.step()
        optimizer.zero_grad()
        return str(info.value)


def test_ranks_that_would_train_rows_apart_are_told(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "other"]
    for path in paths:
        tierstore.create(path, SPEC).close()
    for text in values(run(2, apart, paths)):
        assert "tierstore.distributed.open" in text
