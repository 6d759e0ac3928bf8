"""Negative controls: with any one sync of the protocol removed, the crash enumerator finds a loss.

A harness that cannot fail proves nothing. The list names every place that syncs; a new one must be
added, and must be needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest

from tests.durability.crash import Recording
from tests.durability.disk import Enter, Sync
from tests.durability.judge import Failure, Judge
from tests.durability.test_crash import COMMITS, COMPACTING, FOLDS, SHAPES

NEEDED = [
    "opening._create_store > publish_directory > publish > _give_name > Directory.sync",
    "base.write_digest > Directory.write_file > File.sync",
    "compressed.CompressedRecords._replace > Directory.write_file > File.sync",
    "compressed.CompressedRecords.sync > Held.sync > Directory.sync",
    "delta.LiveDelta.sync > Held.sync > File.sync",
    "generation.Generation.bind > Directory.sync",
    "generation.Generation.sync > Held.sync > Directory.sync",
    "generation.create > Directory.sync",
    "keys.write_keys > Directory.sync",
    "keys.write_keys > Directory.write_file > File.sync",
    "records.RecordFiles.sync > File.sync",
    "zarr.Zarr.create > Directory.sync",
    "zarr.Zarr.create > Directory.write_file > File.sync",
    "ledger.publish > Directory.sync",
    "ledger.publish > File.sync",
    "ledger.Ledger.sweep > Directory.sync",
    "payload._write > File.sync",
    "payload.write_payloads > Directory.sync",
    "commit.publish.<locals>.sync > Directory.sync",
    "copy._new_directory > publish_directory > publish > _give_name > Directory.sync",
    "state.State._begin > Directory.sync",
]
EITHER = [
    "opening._create_store > publish_directory > publish > _sync_tree > Directory.sync",
    "opening._create_store > publish_directory > publish > _sync_tree > File.sync",
    "records.Files.create > File.sync",
    "ledger.write_skeleton > Directory.write_file > File.sync",
    "copy._new_directory > publish_directory > publish > _sync_tree > Directory.sync",
    "copy._new_directory > publish_directory > publish > _sync_tree > File.sync",
]
"""A new store is synced as it is written and, before it gets its name, as a whole."""


_NEAR = 40
"""Events after a sync that was left out in which the loss is looked for."""


@cache
def recordings() -> list[Recording]:
    """Workloads that come by every sync, the first of them a recovery from a kill."""
    shapes = f"{SHAPES} write commit fold save"
    made = [
        Recording.of(1, COMMITS.split(), backend="memmap"),
        Recording.of(3, shapes.split(), backend="zarr"),
        Recording.of(4, shapes.split(), backend="zstd"),
        Recording.of(5, shapes.split()),
    ]
    log = made[0].log
    published = max(
        number
        for number, event in enumerate(log)
        if isinstance(event, Enter) and event.name.endswith(".json") and event.directory == 1
    )
    return [made[0].recovered(log[: published + 1]), *made]


@cache
def behind() -> list[Recording]:
    """Workloads in which folds go on while versions are committed."""
    return [Recording.of(seed, FOLDS.split(), backend=backend, folds=True)
            for seed, backend in ((11, "memmap"), (13, "zstd"))]  # fmt: skip


@cache
def beside_a_reader() -> list[Recording]:
    """Workloads in which deltas are compacted, since the first version is being read."""
    return [
        Recording.of(seed, steps.split(), backend=backend, read=True)
        for seed, steps, backend in COMPACTING
    ]


@cache
def linked() -> list[Recording]:
    """Workloads in which folds find that files of the base have other names, too."""
    steps = ["write", "commit", "fold", "write", "commit", "write", "commit", "fold"]
    return [
        Recording.of(seed, steps, backend=backend, linked=True)
        for seed, backend in ((21, "memmap"), (22, "zarr"))
    ]


def is_caught(pattern: str, within: Callable[[], list[Recording]] = recordings) -> bool:
    """Whether a state that must not be is found once the matching syncs do nothing."""
    for recording in within():
        mutant = recording.without(pattern)
        dropped = [
            number
            for number, event in enumerate(recording.log)
            if isinstance(event, Sync) and re.search(pattern, event.site)
        ]
        near = {at - before + d for before, at in enumerate(dropped) for d in range(_NEAR)}
        judge = Judge(mutant.states)
        for seed in range(12 if dropped else 0):
            for number, image, progress in mutant.crashes(seed, 1, first=dropped[0]):
                try:
                    if number in near:
                        judge.check(image, progress)
                except Failure:
                    return True
    return False


def test_every_sync_has_a_mutant() -> None:
    found = set().union(*(recording.sites() for recording in recordings()))
    assert found - {"image"} == {*NEEDED, *EITHER}


@pytest.mark.parametrize("site", NEEDED)
@pytest.mark.slow
@pytest.mark.nightly(
    "commit.publish.<locals>.sync > Directory.sync", "ledger.Ledger.sweep > Directory.sync"
)
def test_no_sync_can_be_left_out(site: str) -> None:
    assert is_caught(f"^{re.escape(site)}$")


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("site", [site for site in NEEDED if re.match("records|compressed", site)])
def test_no_sync_of_a_fold_behind_can_be_left_out(site: str) -> None:
    assert is_caught(f"^{re.escape(site)}$", behind)


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("site", ["File.sync", "Directory.sync"])
def test_no_sync_of_a_compaction_can_be_left_out(site: str) -> None:
    assert is_caught(f"^{re.escape(f'merging.Compaction.steps > {site}')}$", beside_a_reader)


LINKED = ["records._separated > File.sync", "records.RecordFiles.own > Directory.sync"]


def test_every_sync_of_a_file_with_other_names_has_a_mutant() -> None:
    found = set().union(*(recording.sites() for recording in linked()))
    assert found - set().union(*(recording.sites() for recording in recordings())) == {*LINKED}


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("site", LINKED)
def test_no_sync_of_a_file_with_other_names_can_be_left_out(site: str) -> None:
    assert is_caught(f"^{re.escape(site)}$", linked)


@pytest.mark.slow
def test_a_new_store_is_synced_one_way_or_the_other() -> None:
    assert is_caught("|".join(map(re.escape, EITHER)))
