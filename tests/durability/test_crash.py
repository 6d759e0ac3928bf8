"""Power cuts at every moment of every operation that changes a store, on the simulated disk.

Whatever a crash leaves must be exactly the last acknowledged commit or the one in flight, verify
as clean, hold every older version it lists, and take a further commit. A failure prints the seed of
its workload and the event after which the power went.
"""

from __future__ import annotations

import random
import re

import pytest

from tests.durability.crash import Recording, durable
from tests.durability.disk import Disk, Enter, Mark, Remove, Sync
from tests.durability.judge import Failure, Judge

COMMITS = "write write commit write commit confirm write write commit fold write commit save write"
SHAPES = (
    "write commit create_table write commit add_fields write commit grow set_keys replace_table"
)
BACK = "write commit write commit reopen write commit set_keys write commit reopen save"
RESTORE = (
    "write commit keep write commit write restore write commit keep add_fields write commit restore"
    " write commit release restore"
)
STEPS = (
    "write commit confirm rollback fold create_table replace_table add_fields grow set_keys keep "
    "restore release"
)
WORKLOADS = [
    (1, COMMITS, "memmap"),
    (2, COMMITS, "zarr"),
    (3, SHAPES, "memmap"),
    (4, SHAPES, "zstd"),
    (5, SHAPES, "zarr"),
    (6, BACK, None),
    (7, RESTORE, "memmap"),
    (8, RESTORE, "zstd"),
]


FOLDS = "write commit " * 6 + "confirm write commit rollback write commit write"
FOLDING = [
    (11, FOLDS, "memmap"),
    (12, FOLDS, "zarr"),
    (13, FOLDS, "zstd"),
    (15, f"{'write commit ' * 4} keep {FOLDS} restore {FOLDS} restore release {FOLDS}", None),
    (14, f"{FOLDS} commit grow write commit write commit reopen write commit write commit", None),
]
"""Folds go on between these steps, some of them while versions are committed."""


def survive(recording: Recording, seed: int, each: int) -> int:
    """Judge crashes of a workload and return their number."""
    judge, count = Judge(recording.states), 0
    for number, image, progress in recording.crashes(seed, each):
        count += 1
        try:
            judge.check(image, progress)
        except Failure as failure:
            event = repr(recording.log[number])[:200]
            pytest.fail(f"seed {seed}, after event {number}, {event}: {failure}")
    return count


def after_creation(recording: Recording) -> int:
    """Number of the first event of a store that exists."""
    return next(
        number
        for number, event in enumerate(recording.log)
        if isinstance(event, Mark) and event.kind == "done"
    )


def recover(seed: int, recording: Recording, times: int) -> int:
    """Let a crash be followed by a recovery, and that be cut off too."""
    rng, count = random.Random(seed), 0
    for _ in range(times):
        moment = rng.randrange(after_creation(recording), len(recording.log))
        past = recording.log[:moment]
        if rng.random() < 0.5:  # else only the process was killed: what was cached still is
            past = durable(Disk(past).crash(rng, hostile=rng.random() < 0.5))
        count += survive(recording.recovered(past), seed, 1)
    return count


@pytest.mark.variants(1, 1)
@pytest.mark.fault(30)
@pytest.mark.parametrize("backend", ["memmap", pytest.param("zarr", marks=pytest.mark.slow)])
def test_a_power_cut_in_a_short_workload_leaves_a_committed_state(backend: str) -> None:
    recording = Recording.of(1, ["write", "commit", "write", "commit"], backend=backend)
    assert survive(recording, 1, 1) > 50


@pytest.mark.fault(30)
def test_files_go_only_when_the_manifest_that_needs_them_cannot_come_back() -> None:
    steps = ["write", "commit", "write", "commit", "reopen", "commit"]
    log = Recording.of(1, steps, backend="memmap").log
    (store,) = {each.directory for each in log if isinstance(each, Enter) and each.name == "LOCK"}
    gone = removed = 0
    for event in log:
        if isinstance(event, Sync) and event.node == store:
            gone = 0
        elif isinstance(event, Remove) and re.fullmatch(r"manifest-\d+\.json", event.name):
            gone += 1
        elif isinstance(event, Remove) and not event.name.endswith(".tmp"):
            removed += 1
            assert gone == 0, event
    assert removed >= 4  # a delta, a digest and two payloads


@pytest.mark.parametrize(("seed", "steps", "backend"), WORKLOADS)
@pytest.mark.fault(30)
@pytest.mark.slow
@pytest.mark.nightly("4", "5", "6", "7", "8")
def test_a_power_cut_leaves_a_committed_state(seed: int, steps: str, backend: str | None) -> None:
    recording = Recording.of(seed, steps.split(), backend=backend)
    assert survive(recording, seed, 1) > 150


@pytest.mark.nightly
@pytest.mark.parametrize(("seed", "steps", "backend"), FOLDING)
@pytest.mark.fault(30)
@pytest.mark.slow
@pytest.mark.nightly("zarr", "zstd", "None")
def test_a_power_cut_while_a_fold_goes_on_behind(
    seed: int, steps: str, backend: str | None
) -> None:
    recording = Recording.of(seed, steps.split(), backend=backend, folds=True)
    assert recording.overlaps > 4
    assert survive(recording, seed, 1) > 150


COMPACTING = [
    (21, ("write commit " * 4 + "commit " * 5) * 3, "memmap"),
    (22, f"{'write commit ' * 6} confirm rollback {'write commit ' * 5} set_keys write", "zstd"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("seed", "steps", "backend"), COMPACTING)
@pytest.mark.fault(30)
@pytest.mark.slow
@pytest.mark.nightly("memmap")
def test_a_power_cut_while_deltas_are_compacted(seed: int, steps: str, backend: str) -> None:
    recording = Recording.of(seed, steps.split(), backend=backend, read=True)
    assert any("merging.Compaction" in site for site in recording.sites())
    assert recording.overlaps > 4
    assert survive(recording, seed, 1) > 150


@pytest.mark.parametrize(("seed", "steps", "backend"), WORKLOADS[:1] + WORKLOADS[3:4])
@pytest.mark.slow
@pytest.mark.fault(30)
@pytest.mark.nightly("4")
def test_a_power_cut_in_a_recovery_leaves_a_committed_state(
    seed: int, steps: str, backend: str | None
) -> None:
    recording = Recording.of(seed, steps.split(), backend=backend)
    assert recover(seed, recording, 2) > 50


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(100, 140))
def test_power_cuts_in_random_workloads(seed: int) -> None:
    rng = random.Random(seed)
    folds = seed % 2 == 1  # behind the steps, of which there are more
    more = ["write", "commit"] * 5 if folds else []
    steps = rng.choices([*STEPS.split(), "write", "write", "commit", "reopen", "save", *more], k=12)
    recording = Recording.of(seed, steps + more, folds=folds)
    count = survive(recording, seed, 2) + recover(seed, recording, 3)
    print(f"seed {seed}: {count} crash states")
    assert count > 250
