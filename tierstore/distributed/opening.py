"""Making and opening a partitioned store on every rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tierstore import _io
from tierstore._door import internal_errors
from tierstore._progress import Shown, shown
from tierstore._store.locking import require_tested
from tierstore._store.opening import check_tables, discard_store, for_writing
from tierstore._store.opening import open as open_plain
from tierstore._store.schema import shape_of
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.placement import check_names
from tierstore.budget import Budget, Size
from tierstore.distributed.apart import within_share
from tierstore.distributed.creating import (
    check_partitions,
    growing,
    make_store,
    new_identities,
    of_rank,
    same_seeds,
)
from tierstore.distributed.ranks import Ranks
from tierstore.distributed.store import DistributedStore
from tierstore.errors import InvalidInputError, RanksError
from tierstore.policy import Policies
from tierstore.spec import DeviceName, TableSpec

if TYPE_CHECKING:
    import torch


def create(
    path: str | os.PathLike[str],
    tables: Mapping[str, TableSpec],
    *,
    partitions: int = 64,
    progress: Shown = None,
    budget: Budget | Size | None = None,
    policy: Policies | None = None,
    keep: int | None = None,
    allow_untested: bool = False,
    device: DeviceName | torch.device | Device = "cpu",
    check_ids: Literal["async", "sync"] = "async",
    average: bool = True,
    timeout: float | None = None,
) -> DistributedStore:
    """Make a partitioned store at `path`, which must not exist, and open it on every rank.

    Collective. First values are those of a store that `tierstore.create` makes with the same seeds,
    bit for bit, whatever the number of partitions; without seeds those of rank 0 count. It is made
    once on each file system that the ranks see, and removed again where it cannot be opened.

    Args:
        path: the directory to make.
        tables: by name, what each is made of.
        partitions: how many stores the rows are spread over, fixed from now on. No more ranks can
            open the store; rows are spread most evenly where it is a multiple of the number of
            ranks.
        progress: called with rows done and in all, on the rank that makes the store.
        budget: see `open`, as for all that follow.
        policy: which rows the tiers keep.
        keep: how many versions are kept.
        allow_untested: write on an untested file system.
        device: where the nearest tier is.
        check_ids: when ids on a GPU are checked.
        average: divide gradients of rows by the number of ranks.
        timeout: seconds that one rank waits for another; None is that of `init_process_group`.

    Raises what `tierstore.create` and `open` do.
    """
    with internal_errors():
        where = _local(path)
        check_tables(tables)
        given: dict[str, Any] = {
            "budget": budget,
            "policy": policy,
            "keep": keep,
            "allow_untested": allow_untested,
            "device": device,
            "check_ids": check_ids,
        }
        options = for_writing(where, **given)
        ranks = Ranks(timeout)
        try:
            number = check_partitions(partitions, ranks.count)
            shapes = {name: shape_of(spec) for name, spec in tables.items()}
            ranks.agree("create", {"partitions": number, "tables": shapes})
            specs = same_seeds(ranks, {name: spec.bound(name) for name, spec in tables.items()})
            identities = ranks.gather("name the store", new_identities(number))[0]
            leaders = ranks.leaders(where.parent) if where.parent.is_dir() else [0] * ranks.count

            placement = within_share(options, ranks).placement()

            def check() -> None:
                check_names(tables, options.budget, policy)
                share = number, ranks.rank, ranks.count
                placement.check({name: of_rank(spec, *share) for name, spec in specs.items()})

            def make() -> None:
                if leaders[ranks.rank] == ranks.rank:
                    if not allow_untested and where.parent.is_dir():
                        with _io.Directory.open(where.parent) as parent:
                            require_tested(parent)
                    make_store(where, specs, identities, shown(progress), keep=options.keep)

            ranks.together("check the budget", check)
            ranks.together("make the store", make)
        finally:
            ranks.close()
    try:
        return open(path, average=average, timeout=timeout, **given)
    except BaseException as error:
        if leaders[ranks.rank] == ranks.rank and not isinstance(error, RanksError):
            discard_store(where, identities[0][0], error)
        raise


def open(
    path: str | os.PathLike[str],
    mode: Literal["r+"] = "r+",
    *,
    budget: Budget | Size | None = None,
    policy: Policies | None = None,
    version: int | str | None = None,
    discard_newer: bool = False,
    keep: int | None = None,
    allow_untested: bool = False,
    device: DeviceName | torch.device | Device = "cpu",
    check_ids: Literal["async", "sync"] = "async",
    average: bool = True,
    timeout: float | None = None,
) -> DistributedStore:
    """Open a partitioned store for writing, on every rank. Collective.

    Rank r of W has the partitions p open of which p * W // P is r, whatever W was before; without a
    process group, or with one of a single rank, all of them. Where the ranks see one directory it
    may be a shared file system; else each host has its own copy of the root, and the partitions of
    its ranks. The newest version that all copies have is opened, and what is newer is dropped.
    To read, `tierstore.open(path)` takes the store as one, in any process.

    Args:
        path: the store's directory.
        mode: "r+".
        budget: memory for the tiers of this rank; see `tierstore.open`.
        policy: which rows the tiers keep.
        version: a kept version to go on from, or its name; with `discard_newer`.
        discard_newer: drop the versions after it.
        keep: how many versions are kept from the first commit on; opening removes none. None keeps
            as many as the last writer did.
        allow_untested: write on a file system on which locks and syncs were not tested.
        device: where the nearest tier of this rank is, such as f"cuda:{local_rank}".
        check_ids: see `tierstore.open`.
        average: divide the gradients of rows by the number of ranks, as DistributedDataParallel
            does those of other parameters; False sums them.
        timeout: seconds that one rank waits for another before it raises RanksError; None is that
            of torch.distributed.

    An error on one rank is raised on all, naming it. Raises what `tierstore.open` does, and
    RanksError for a rank that does not come.
    """
    if mode != "r+":
        raise InvalidInputError(
            f"mode is 'r+', not {mode!r}; tierstore.open(path) opens the store for reading"
        )
    with internal_errors():
        options = for_writing(
            _local(path),
            budget=budget,
            policy=policy,
            version=version,
            discard_newer=discard_newer,
            keep=keep,
            allow_untested=allow_untested,
            device=device,
            check_ids=check_ids,
        )
        ranks = Ranks(timeout)
        try:
            given = {"version": version, "keep": keep, "average": average, "check_ids": check_ids}
            ranks.agree("open", given)
            store = DistributedStore(options, ranks, average=average)
        except BaseException:
            ranks.close()
            raise
        try:
            check_names(store, options.budget, policy)
        except BaseException:
            store.close()
            raise
        return store


def save(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    partitions: int = 64,
    version: int | str | None = None,
    progress: Shown = None,
) -> None:
    """Copy a store, plain or of another number of partitions, to a partitioned one. Not collective.

    Args:
        source: the store; a writer may have it open.
        path: the directory to make, which must not exist.
        partitions: how many stores the rows are spread over.
        version: a kept version, or its name; the newest if None.
        progress: called with rows done and in all; True shows a bar.

    Rows, optimizer state, scalars, step, payload and the number of the version are those of the
    source, which is the `parent` of the copy. A table by key with a fixed capacity grows in the
    copy. Damage raises. Raises what `tierstore.open` and `Store.save` do.
    """
    with internal_errors(), open_plain(source, version=version, budget=Budget(host=0)) as reader:
        number = check_partitions(partitions, 1)
        specs = {name: growing(reader[name].spec) for name in reader}
        make_store(_local(path), specs, new_identities(number), shown(progress), reader)


def _local(path: str | os.PathLike[str]) -> Path:
    where = _io.locate(path)
    if isinstance(where, _io.Objects):
        raise InvalidInputError(f"{where} is not on a disk, and ranks write to files of their own")
    return where
