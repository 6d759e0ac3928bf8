"""A version of a store in partitions is confirmed when the root names it, never before.

Whatever fails in whichever call: the store is at its last commit or at the next, in the process
that goes on and for all that open it, on any number of ranks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

import tierstore
from tests import inside
from tests.distributed.confirming import (
    ALONE,
    BY_PATH,
    CALLS,
    NEW,
    SPECS,
    Full,
    NoManifest,
    Seen,
    contents,
    goes_on,
    layout,
    make,
    make_files,
    opens,
    prepare,
    rows_of,
    seen,
    write,
)
from tests.distributed.ranks import Killed, run, values
from tests.distributed.test_commit import hooked, kill_at
from tests.durability.faults import FAULTS, Faulty
from tierstore import _io, distributed
from tierstore._io.system import Calls
from tierstore.errors import (
    CommitFailedError,
    ConcurrentWriterError,
    RanksError,
    StoreFullError,
    TierStoreError,
    UpkeepWarning,
)

EVERY = [*CALLS, *ALONE, *BY_PATH]
QUICK = ("create_table", "add_fields", "append", "restore", "optimizer")
"""Those of which the first failure is looked at in every run."""
STRIDE = int(os.environ.get("TIERSTORE_TEST_STRIDE", "1"))
"""Which operations fail in an enumeration: all, or every so-manieth."""
_MOST = 4000
"""Calls of the file system in one call of a store, at most: the end of an enumeration."""


@contextmanager
def calls(replaced: Any) -> Iterator[Any]:
    with mock.patch.object(_io.system, "calls", replaced):
        yield replaced


def call_of(name: str) -> Callable[[Any, Path], object]:
    return (CALLS | ALONE)[name]


# -- one process


def fails_in_one(path: Path, place: Path, name: str, faulty: Any) -> Exception | None:
    """Make a call while something fails; check the process that goes on, and return the error.

    A store that is still open shows its last commit, before a rollback and after it.
    """
    if name in BY_PATH:
        try:
            with calls(faulty):
                BY_PATH[name](path, place)
        except (TierStoreError, OSError) as error:
            return error
        return None
    before = contents(path)
    store = distributed.open(path)
    try:
        with calls(faulty):
            call_of(name)(store, place)
    except (TierStoreError, OSError) as error:
        is_final = isinstance(error, CommitFailedError | ConcurrentWriterError)
        assert inside.door(store).closed or not is_final
        if not inside.door(store).closed:
            if name not in ("commit", "get_or_add"):  # whose rows are still to be committed
                assert seen(store) == before
            store.rollback()
            assert seen(store) == before
        return error
    else:
        return None
    finally:
        with calls(Faulty(FAULTS["ENOSPC"], _MOST)):
            store.close()


def after(path: Path, place: Path, name: str) -> Seen:
    """Return what a call leads to."""
    other = path.with_name("after")
    shutil.copytree(path, other)
    assert fails_in_one(other, place, name, Faulty(FAULTS["EIO"], _MOST)) is None
    return contents(other)


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize(
    "name",
    [
        each if each in QUICK else pytest.param(each, marks=pytest.mark.slow)
        for each in EVERY
        if each not in ("keep", "set_keys")  # which write nothing there
    ],
)
@pytest.mark.fault(77)
def test_a_full_disk_under_the_last_partition_costs_no_version(tmp_path: Path, name: str) -> None:
    """Twice: what a first failure leaves must not cost the version at the next."""
    prepare(tmp_path / "new", 2, name)
    make_files(tmp_path, name)
    path = tmp_path / "new"
    before = contents(path)
    for _ in range(2):
        full = Full(3)
        assert isinstance(fails_in_one(path, tmp_path, name, full), StoreFullError)
        assert full.struck
        assert opens(path, [before]) == before
    goes_on(path)


def test_going_back_writes_nothing(tmp_path: Path) -> None:
    """From the first failure on no write succeeds: the same process goes back, reads and waits."""
    make(tmp_path / "s", 1)
    before, store = contents(tmp_path / "s"), distributed.open(tmp_path / "s")
    with (
        calls(NoManifest("/00003")),
        pytest.raises(StoreFullError),
        mock.patch.object(inside.parts(store), "keep_only", full_everywhere(store)),
    ):
        store.add_fields("item", {"q": tierstore.Field(9)})
    assert not inside.parts(store).ahead(inside.manifest(store))
    assert seen(store) == before
    store.close()
    assert opens(tmp_path / "s", [before]) == before


def full_everywhere(store: Any) -> Callable[[Any], None]:
    """Return what removes versions on a disk that has no room for a manifest at all."""
    keep_only = inside.parts(store).keep_only

    def full(roots: Any) -> None:
        with calls(Full(0, 1, 2, 3)), pytest.warns(UpkeepWarning):
            try:
                keep_only(roots)
            except StoreFullError as error:
                tierstore.errors.warn(str(error), UpkeepWarning)

    return full


def test_what_a_failed_change_wrote_is_removed_at_once(tmp_path: Path) -> None:
    """The space is there again for the next commit, which needs it."""
    make(tmp_path / "s", 2)
    files = sorted(each for each in (tmp_path / "s").glob("partitions/*/*/g*"))
    with distributed.open(tmp_path / "s") as store:
        with calls(Full(3)), pytest.raises(StoreFullError):
            store.create_table("user", NEW)
        assert sorted((tmp_path / "s").glob("partitions/*/*/g*")) == files


def test_partitions_confirm_nothing_themselves(tmp_path: Path) -> None:
    """So that a program which goes by that keeps all versions, too."""
    make(tmp_path / "s", 1)
    with distributed.open(tmp_path / "s") as store:
        store.add_fields("item", {"q": tierstore.Field(9)})
        store.commit(9)
        assert {part.manifest.confirmed for part in inside.parts(store).own} == {1}


def test_a_failed_commit_is_rolled_back_with_its_keys(tmp_path: Path) -> None:
    """Also those of partitions that had committed them, beside one that had not."""
    make(tmp_path / "s", 1)
    before = contents(tmp_path / "s")
    for number in (0, 3):
        faulty = NoManifest(f"/{number:05}")
        assert isinstance(fails_in_one(tmp_path / "s", tmp_path, "commit", faulty), StoreFullError)
        assert opens(tmp_path / "s", [before]) == before


def test_the_command_line_costs_no_version(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from tierstore_cli.main import cli

    make(tmp_path / "s", 2)
    np.save(tmp_path / "rows.npy", rows_of(11, 41, 6))
    before, where = contents(tmp_path / "s"), str(tmp_path / "s")
    for line in (
        ["add-field", where, "q", "--table", "item", "--dim", "9"],
        ["rename", where, "word", "text"],
        ["drop", where, "item"],
        ["load", where, str(tmp_path / "rows.npy"), "--table", "user"],
    ):
        with calls(Full(3)):
            done = CliRunner().invoke(cli, line)
        assert done.exit_code == 6, (line, done.output)
        assert "No space left" in done.output, (line, done.output)
        assert opens(tmp_path / "s", [before]) == before


def enumerated(tmp_path: Path, name: str, fault: str, keep: int) -> tuple[int, set[Any]]:
    """Fail each operation of a call once; return how many there were, and the layouts seen."""
    prepare(tmp_path / "new", keep, name)
    make_files(tmp_path, name)
    before, then = contents(tmp_path / "new"), after(tmp_path / "new", tmp_path, name)
    path, number, layouts = tmp_path / "s", 0, {}
    while True:
        number += STRIDE
        shutil.copytree(tmp_path / "new", path)
        faulty = Faulty(FAULTS[fault], number)
        error = fails_in_one(path, tmp_path, name, faulty)
        if not faulty.struck:
            break
        is_known = error is not None and not isinstance(error, CommitFailedError)
        expected = [before] if is_known and name not in BY_PATH else [before, then]
        found, shape = contents(path), layout(path)
        assert found in expected, (number, found["version"], error)
        if shape not in layouts:
            layouts[shape] = found
            shutil.copytree(path, tmp_path / f"layout {len(layouts)}")
            opens(path, [found])
        goes_on(path)
        shutil.rmtree(path)
    for at, found in enumerate(layouts.values(), 1):
        for ranks in (2, 3):
            here = tmp_path / f"layout {at} {ranks}"
            shutil.copytree(tmp_path / f"layout {at}", here)
            values(run(ranks, go_on_together, here))
            assert contents(here)["version"] == found["version"] + 1
    return number // STRIDE - 1, set(layouts)


def go_on_together(rank: int, path: Path) -> None:
    with distributed.open(path) as store:
        write(store, 9)
        store.commit(9)


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.filterwarnings("ignore::tierstore.errors.UpkeepWarning")  # of what is put off
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("fault", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("name", EVERY)
def test_every_operation_fails_once(tmp_path: Path, name: str, fault: str, keep: int) -> None:
    count, layouts = enumerated(tmp_path, name, fault, keep)
    print(f"\n{name}, {fault}, keep={keep}: {count} operations, {len(layouts)} layouts")
    assert count


# -- two ranks


def on_disks_of_their_own(rank: int, paths: list[Path], first: int) -> None:
    """Have only one of two hosts publish; both open again at what both have, and go on."""
    with distributed.create(paths[rank], SPECS, partitions=4, keep=1) as store:
        write(store, 1)
        store.commit(1)
    for change in (lambda store: store.create_table("user", NEW), lambda store: store.commit(2)):
        store = distributed.open(paths[rank])
        version, rows = store.version, store["item"].read(np.arange(41))
        with (
            calls(NoManifest("/s") if rank != first else Calls()),
            pytest.raises(CommitFailedError, match="some hosts have published"),
        ):
            change(store)
        assert inside.door(store).closed
        store.close()
        with distributed.open(paths[rank]) as store:
            assert store.version == version
            assert np.array_equal(store["item"].read(np.arange(41)), rows)
            write(store, 2)
            store.commit(2)
            with calls(NoManifest("/s")), pytest.raises(StoreFullError):  # no host has published
                store.add_fields("item", {"q": tierstore.Field(1)})
            assert not inside.door(store).closed
            store.commit(3)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_of_two_hosts_publishes(tmp_path: Path, first: int) -> None:
    paths = [tmp_path / str(rank) / "s" for rank in range(2)]
    for path in paths:
        path.parent.mkdir()
    values(run(2, on_disks_of_their_own, paths, first))


def fails_on(rank: int, place: Path, name: str, victim: int, make_faulty: Any) -> list[Any]:
    """Make a call on two ranks while something fails on one, again and again; return the errors.

    `make_faulty(number)` is what fails at a time, until nothing does.
    """
    found: list[Any] = []
    before, then = contents(place / "new"), contents(place / "after")
    layouts: set[Any] = set()
    for number in range(1, _MOST, STRIDE):
        path = place / "s"
        if rank == 0:
            shutil.copytree(place / "new", path)
        dist.barrier()
        store, error = distributed.open(path), None
        faulty = make_faulty(number) if rank == victim else Faulty(FAULTS["EIO"], _MOST)
        try:
            with calls(faulty):
                call_of(name)(store, place)
        except (TierStoreError, OSError) as each:
            error = each
            if not inside.door(store).closed:
                store.rollback()
                assert store.version == before["version"]
        store.close()
        told: list[Any] = [None, None]
        dist.all_gather_object(told, (faulty.struck, error and type(error).__name__))
        if rank == 0:
            is_final = any(each in ("CommitFailedError", "RanksError") for _, each in told)
            failed = any(each for _, each in told)
            seen_now, shape = contents(path), layout(path)
            assert seen_now in ([before] if failed and not is_final else [before, then]), told
            if shape not in layouts:
                layouts.add(shape)
                shutil.copytree(path, place / f"layout {len(layouts)}")
        dist.barrier()
        go_on_together(rank, path)
        dist.barrier()  # when both have closed it
        if rank == 0:
            shutil.rmtree(path)
        dist.barrier()
        if not any(struck for struck, _ in told):
            return found
        found.append(told)
    raise RuntimeError("it never ended")


def full_once(number: int) -> Any:
    return Full(1, 3) if number == 1 else Faulty(FAULTS["ENOSPC"], _MOST)


def spaceless(number: int) -> Any:
    return Faulty(FAULTS["ENOSPC"], number)


def unreadable(number: int) -> Any:
    return Faulty(FAULTS["EIO"], number)


def start_two(place: Path, name: str, keep: int) -> None:
    prepare(place / "new", keep, name)
    make_files(place, name)
    after(place / "new", place, name)


@pytest.mark.variants(0, 2)
@pytest.mark.parametrize("name", [each for each in CALLS if each not in ("keep", "set_keys")])
def test_a_full_disk_of_one_rank_costs_no_version(tmp_path: Path, name: str) -> None:
    start_two(tmp_path, name, 1)
    for each in values(run(2, fails_on, tmp_path, name, 1, full_once)):
        assert len(each) == 1
        assert each[0][1][1] == "StoreFullError"


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", [spaceless, unreadable])
@pytest.mark.parametrize("name", CALLS)
def test_every_operation_of_one_rank_fails_once(
    tmp_path: Path, name: str, fault: Any, victim: int, keep: int
) -> None:
    start_two(tmp_path, name, keep)
    told = values(run(2, fails_on, tmp_path, name, victim, fault, timeout=300.0, limit=3600))
    found = list(tmp_path.glob("layout *"))
    print(f"\n{name}, {fault.__name__}, rank {victim}, keep={keep}: {len(told[0])}, {len(found)}")
    for each in found:
        other = each.with_name(f"{each.name} of 3")
        shutil.copytree(each, other)
        opens(each, [contents(each)])
        goes_on(each)
        values(run(3, go_on_together, other))


# -- kills


def moments_of(rank: int, path: Path, place: Path, name: str) -> list[tuple[str, str]]:
    """Return the moments of a call between the ranks."""
    found: list[tuple[str, str]] = []
    with distributed.open(path) as store:
        hooked(lambda what, when: found.append((what, when)))
        call_of(name)(store, place)
    return found


def killed_in(rank: int, path: Path, place: Path, name: str, victim: int, moment: Any) -> None:
    with distributed.open(path) as store:
        if rank == victim:
            kill_at(moment)
        call_of(name)(store, place)


@pytest.mark.slow
@pytest.mark.torture
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_is_killed_between_all_messages(tmp_path: Path, name: str, keep: int) -> None:
    start_two(tmp_path, name, keep)
    kill_everywhere(tmp_path, name, [0, 1])


@pytest.mark.slow
def test_a_rank_is_killed_while_a_table_is_made(tmp_path: Path) -> None:
    start_two(tmp_path, "create_table", 1)
    kill_everywhere(tmp_path, "create_table", [1])


def kill_everywhere(place: Path, name: str, victims: list[int]) -> None:
    """Kill one rank at each moment of a call; the store opens on one, two and three ranks."""
    shutil.copytree(place / "new", place / "whole")
    moments = list(dict.fromkeys(run(2, moments_of, place / "whole", place, name)[0]))
    before, then = contents(place / "new"), contents(place / "after")
    reached = set()
    for at, moment in enumerate(moments):
        for victim in victims:
            path = place / f"{at} {victim}"
            shutil.copytree(place / "new", path)
            found = run(2, killed_in, path, place, name, victim, moment)
            assert isinstance(found[victim], Killed), (moment, found)
            assert found[1 - victim] is None or isinstance(found[1 - victim], RanksError)
            three = path.with_name(f"{path.name} of 3")
            shutil.copytree(path, three)
            reached.add(opens(path, [before, then])["version"])
            values(run(3 if at % 2 else 2, go_on_together, three))
            shutil.rmtree(path)
    print(f"\n{name}: killed {len(moments) * len(victims)} times")
    assert reached == {before["version"], then["version"]}
