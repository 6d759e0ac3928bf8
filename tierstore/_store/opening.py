"""Making and opening stores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from tierstore import _io
from tierstore._disk.base import Progress
from tierstore._door import internal_errors
from tierstore._store.creating import check_tables, create_store, discard_store
from tierstore._store.locking import require_tested
from tierstore._store.options import Options
from tierstore._store.store import Store
from tierstore._table.placement import check_fit, check_names, find_device
from tierstore._tiers.gpu.device import Device
from tierstore.budget import Budget, Size
from tierstore.errors import InvalidInputError
from tierstore.policy import Policies
from tierstore.spec import TableSpec

if TYPE_CHECKING:
    import torch

__all__ = ["create", "open"]


def create(
    path: str | os.PathLike[str],
    tables: Mapping[str, TableSpec],
    *,
    progress: Progress | None = None,
    budget: Budget | Size | None = None,
    policy: Policies | None = None,
    keep: int | None = None,
    allow_untested: bool = False,
    device: str | torch.device | Device = "cpu",
) -> Store:
    """Make a store with these tables at `path`, which must not exist, and open it for writing.

    The arguments are checked before anything is written. Every row is written, and disk space for
    all of them reserved, before the store appears under its name: a full disk, a kill or a power
    cut leaves nothing. A store that is made and cannot be opened is removed again.
    `progress(done, total)` is called with rows. For `allow_untested` see `open`. Raises
    ExistsError, StoreFullError, StoreIOError, CapacityError,
    InvalidInputError.
    """
    with internal_errors():
        where = _io.locate(path)
        if isinstance(where, _io.Objects):
            raise InvalidInputError(
                f"{where} is not on a disk: create the store on one, and save a copy of it there"
            )
        check_tables(tables)
        options = Options(
            path=where,
            mode="r+",
            budget=Budget.of(budget),
            policy=policy,
            keep=keep,
            allow_untested=allow_untested,
            device=find_device(device),
        )
        check_names(tables, options.budget, policy)
        check_fit(tables, options.budget, policy, options.device)
        if not allow_untested and where.parent.is_dir():
            with _io.Directory.open(where.parent) as parent:
                require_tested(parent)
        create_store(where, tables, progress)
        try:
            return Store(options)
        except BaseException as error:
            discard_store(where, error)
            raise


def open(
    path: Any,
    mode: Literal["r", "r+"] = "r",
    *,
    budget: Budget | Size | None = None,
    policy: Policies | None = None,
    version: int | None = None,
    discard_newer: bool = False,
    keep: int | None = None,
    allow_untested: bool = False,
    allow_network: bool = False,
    device: str | torch.device | Device = "cpu",
    check_ids: Literal["async", "sync"] = "async",
) -> Store:
    """Open a store.

    Args:
        path: the store's directory; or for reading, where `Store.save` put a copy: a URL such as
            "s3://bucket/emb.tier", for fsspec, or a zarr store.
        mode: "r" for one of many readers of one version, "r+" for the one writer.
        budget: memory for the tiers; see Budget for the defaults. A size such as "8GiB" is that
            of the host tier.
        policy: which rows the tiers keep: "lru" (the default), "lfu", "lookahead", or a value
            of `tierstore.policy` such as `static(counts)`; one for all tables, or a dict by table.
        version: a kept version to read, or with "r+" and `discard_newer` to go on from.
        discard_newer: drop the versions after `version`.
        keep: how many versions a writer keeps; None keeps as many as the last one did, at first 2.
        allow_untested: write on a file system on which it was not tested whether locks and syncs
            hold, such as one of another machine; see docs/durability.md.
        allow_network: an older name of `allow_untested`.
        device: "cpu", "cuda", "cuda:1", or "auto" for a GPU if there is one, or a torch.device:
            where the nearest tier is, and torch rows come to.
        check_ids: "async" checks ids that are on a GPU there, without waiting, and raises at the
            next call that waits; "sync" raises at once.

    Raises NotAStoreError, FormatError, CorruptStoreError, LockedError and VersionError.
    """
    with internal_errors():
        options = Options(
            path=_io.locate(path),
            mode=mode,
            budget=Budget.of(budget),
            policy=policy,
            version=version,
            discard_newer=discard_newer,
            keep=keep,
            allow_untested=allow_untested or allow_network,
            device=find_device(device),
            check_ids=check_ids,
        )
        store = Store(options)
        try:
            check_names(store.tables, options.budget, policy)
        except BaseException:
            store.close()
            raise
        return store
