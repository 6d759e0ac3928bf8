"""Stores in partitions as earlier programs left them where a change of tables failed.

These had each partition commit the change confirmed, and, where a later one failed, publish the
version before once more: of two versions that a partition kept, neither was the one that the root
names. The recipes do the same, with a partition opened as the plain store that it is.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.distributed.confirming import (
    NEW,
    PARTITIONS,
    VERSION,
    Seen,
    contents,
    goes_on,
    layout,
    make,
    opens,
    rows_of,
    seen,
    write,
)
from tests.distributed.ranks import run, values
from tests.distributed.test_confirming import go_on_together
from tierstore import distributed
from tierstore.errors import UpkeepWarning, VersionError

Change = Callable[[tierstore.Store], object]

CHANGES: dict[str, Change] = {
    "create_table": lambda part: part.create_table("user", NEW),
    "add_fields": lambda part: part.add_fields("item", {"q": tierstore.Field(9)}),
    "drop_fields": lambda part: part.drop_fields("item", ["age"]),
    "grow": lambda part: part.grow("item", part["item"].rows + 5),
    "append": lambda part: part.append("item", {"weight": rows_of(1, 2), "age": rows_of(2, 2, 1)}),
    "optimizer": lambda part: part.add_fields(
        "item", {"exp_avg": tierstore.Field(3), "exp_avg_sq": tierstore.Field(3)}
    ),
    "rename": lambda part: part.rename("item", "other"),
    "drop": lambda part: part.drop("item"),
}


def leave(path: Path, change: Change, keep: int, times: int = 1) -> None:
    """Have a change fail in the last partition so often, as earlier programs did."""
    with tierstore.open(path) as root:
        named = root._state.manifest.partitions
    for number in range(PARTITIONS - 1):
        place = path / "partitions" / f"{number:05}"
        for _ in range(times):
            with tierstore.open(place, "r+", keep=max(2, keep)) as part:
                change(part)
                with contextlib.suppress(VersionError):  # then it stayed ahead, and the store shut
                    part.restore(named[number][0])


QUICK = ("create_table", "add_fields", "append")


@pytest.fixture(
    scope="module",
    params=[
        each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in CHANGES
    ],
)
def once_left(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen]:
    path = tmp_path_factory.mktemp("left") / "s"
    make(path, 2)
    before = contents(path)
    leave(path, CHANGES[request.param], 2)
    return path, before


@pytest.fixture
def left(once_left: tuple[Path, Seen], tmp_path: Path) -> tuple[Path, Seen]:
    path, before = once_left
    return shutil.copytree(path, tmp_path / "s"), before


@pytest.mark.variants(1, 1)
@pytest.mark.filterwarnings("ignore::tierstore.errors.UpkeepWarning")
def test_it_is_what_earlier_programs_left(left: tuple[Path, Seen]) -> None:
    """Three of four partitions keep two versions, neither of that number: the recipe is right."""
    with tierstore.open(left[0]) as root:
        named = root._state.manifest.partitions
    for number, (versions, _) in enumerate(layout(left[0])[1:]):
        assert len(versions) == 2
        assert (named[number][0] in versions) == (number == PARTITIONS - 1)


@pytest.mark.variants(1, 1)
@pytest.mark.fault(78)
def test_it_opens_with_every_row_and_says_so(left: tuple[Path, Seen]) -> None:
    path, before = left
    with pytest.warns(UpkeepWarning, match="3 partitions have the rows of version 5 under another"):
        assert contents(path) == before
    with (
        pytest.warns(UpkeepWarning, match="Nothing of it is lost"),
        distributed.open(path) as store,
    ):
        assert seen(store) == before
    report = tierstore.verify(path)
    assert report.ok
    assert report.whole[-1] == VERSION
    assert "under another number" in report.notes[0]


@pytest.mark.variants(1, 1)
@pytest.mark.filterwarnings("ignore::tierstore.errors.UpkeepWarning")
def test_a_writer_goes_on_and_nothing_is_left_to_say(left: tuple[Path, Seen]) -> None:
    path, before = left
    with distributed.open(path) as store:
        assert seen(store) == before
        store["item"].write(np.arange(store["item"].rows), rows_of(1, store["item"].rows))
        store["word"].write([f"late {n}" for n in range(30)], rows_of(3, 30, 2))
        store.commit(4)
        now = seen(store)
        store.create_table("user", NEW)
        store.drop("user")
        now["version"] = store.version
        now["step"] = store.step
    assert opens(path, [now]) == now
    goes_on(path)


@pytest.mark.variants(1, 1)
@pytest.mark.filterwarnings("ignore::tierstore.errors.UpkeepWarning")
def test_a_repair_loses_nothing_of_it(left: tuple[Path, Seen], tmp_path: Path) -> None:
    path, before = left
    report = tierstore.repair(path, tmp_path / "mended")
    assert report.complete
    assert opens(tmp_path / "mended", [before]) == before


def test_after_a_second_failure_a_partition_is_ahead(tmp_path: Path) -> None:
    """Where going back failed too, since the version that the root names was gone."""
    make(tmp_path / "s", 2)
    before = contents(tmp_path / "s")
    leave(tmp_path / "s", CHANGES["add_fields"], 2)
    for number in range(PARTITIONS - 1):
        with tierstore.open(tmp_path / "s" / "partitions" / f"{number:05}", "r+") as part:
            CHANGES["drop_fields"](part)
    with pytest.warns(UpkeepWarning, match="under another number"):
        assert contents(tmp_path / "s") == before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UpkeepWarning)
        goes_on(tmp_path / "s")
    assert contents(tmp_path / "s")["version"] == VERSION + 1


def test_three_failures_with_five_versions(tmp_path: Path) -> None:
    make(tmp_path / "s", 5)
    before = contents(tmp_path / "s")
    leave(tmp_path / "s", CHANGES["create_table"], 5, times=3)
    with pytest.warns(UpkeepWarning, match="under another number"):
        assert contents(tmp_path / "s") == before
    with pytest.warns(UpkeepWarning):
        goes_on(tmp_path / "s")


def test_all_that_the_root_keeps_opens_where_partitions_confirmed_more(tmp_path: Path) -> None:
    """Earlier programs confirmed every version in each partition, and named some there."""
    make(tmp_path / "s", 5)
    with distributed.open(tmp_path / "s") as store:
        kept = {each.version: None for each in store.versions()}
    for version in kept:
        with tierstore.open(tmp_path / "s", version=version) as reader:
            kept[version] = seen(reader)
    for number in range(PARTITIONS):
        place = tmp_path / "s" / "partitions" / f"{number:05}"
        with tierstore.open(place, "r+", keep=9) as part:
            part.confirm(part.version)
            part.keep(part.version, "an earlier name")
    with distributed.open(tmp_path / "s", keep=7) as store:
        for step in (8, 9):
            write(store, step)
            store.commit(step)
        assert {each.version for each in store.versions()} > kept.keys()
    for version, expected in kept.items():
        with tierstore.open(tmp_path / "s", version=version) as reader:
            assert seen(reader) == expected
    with distributed.open(tmp_path / "s") as store:
        store.fold()
    assert tierstore.verify(tmp_path / "s").ok


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_open_it(tmp_path: Path, ranks: int) -> None:
    make(tmp_path / "s", 2)
    leave(tmp_path / "s", CHANGES["optimizer"], 2)
    values(run(ranks, go_on_together, tmp_path / "s"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert contents(tmp_path / "s")["version"] == VERSION + 1


def test_a_partition_without_the_version_gives_what_it_has(tmp_path: Path) -> None:
    """A repair of a partition that keeps only later versions takes these, not zeros."""
    make(tmp_path / "s", 2)
    before = contents(tmp_path / "s")
    with tierstore.open(tmp_path / "s") as root:
        named = root._state.manifest.partitions[0][0]
    place = tmp_path / "s" / "partitions" / "00000"
    with tierstore.open(place, "r+", keep=1) as part:
        part["item"].write([2], rows_of(9, 1))
        part.commit()
    assert named not in layout(tmp_path / "s")[1][0]
    report = tierstore.repair(tmp_path / "s", tmp_path / "mended")
    assert not report.complete
    assert not any(each.filled for each in report.tables.values())
    found, known = contents(tmp_path / "mended")["item"][2], before["item"][2]
    others = [n for n, row in enumerate(known["weight"]) if row != found["weight"][n]]
    assert others == [2 * PARTITIONS]
