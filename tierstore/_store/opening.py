"""Making and opening stores."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tierstore import _io
from tierstore._disk import generation as generations
from tierstore._disk.base import Progress
from tierstore._disk.manifest import Identity, Manifest, TableInfo, new_mark
from tierstore._door import internal_errors
from tierstore._store.copy import Overall
from tierstore._store.ledger import write_skeleton
from tierstore._store.locking import WriterLock, require_tested
from tierstore._store.options import Options
from tierstore._store.store import Store
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.placement import Placement, check_names, find_device
from tierstore.budget import Budget, Size
from tierstore.errors import InvalidInputError, InvalidTypeError, TierStoreError
from tierstore.policy import Policies
from tierstore.spec import DeviceName, TableSpec, check_name

if TYPE_CHECKING:
    import torch

__all__ = ["check_tables", "create", "discard_store", "open", "open_or_create"]

_MEMORY = "/dev/shm"


def create(
    path: str | os.PathLike[str] | None,
    tables: Mapping[str, TableSpec],
    *,
    progress: Progress | None = None,
    budget: Budget | Size | None = None,
    policy: Policies | None = None,
    keep: int | None = None,
    allow_untested: bool = False,
    device: DeviceName | torch.device | Device = "cpu",
) -> Store:
    """Make a store with these tables at `path`, which must not exist, and open it for writing.

    Without a path, None, it is made in memory, a directory of /dev/shm where there is one, and is
    gone when it is closed: for tests.

    The arguments are checked before anything is written. Every row is written, and disk space for
    all of them reserved, before the store appears under its name: a full disk, a kill or a power
    cut leaves nothing. A store that is made and cannot be opened is removed again.
    `progress(done, total)` is called with rows. For `allow_untested` see `open`. Raises
    ExistsError, StoreFullError, StoreIOError, CapacityError,
    InvalidInputError.
    """
    if path is None:
        return _create_in_memory(
            tables,
            progress=progress,
            budget=budget,
            policy=policy,
            keep=keep,
            allow_untested=allow_untested,
            device=device,
        )
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
        Placement(options.budget, policy, options.device).check_fit(tables)
        if not allow_untested and where.parent.is_dir():
            with _io.Directory.open(where.parent) as parent:
                require_tested(parent)
        _create_store(where, tables, progress)
        try:
            return Store(options)
        except BaseException as error:
            discard_store(where, error)
            raise


def _create_in_memory(tables: Mapping[str, TableSpec], **options: Any) -> Store:
    """Make a store in a temporary directory, which goes when the store is closed."""
    directory = _temporary_directory()
    remove = partial(_remove_temporary, directory, os.getpid())
    try:
        store = create(Path(directory, "store"), tables, **options)
    except BaseException:
        remove()
        raise
    store._when_closed(remove)
    return store


def _temporary_directory() -> str:
    """Make a directory in memory where there is such a file system, else on a disk."""
    in_memory = os.path.isdir(_MEMORY) and os.access(_MEMORY, os.W_OK)
    return tempfile.mkdtemp(prefix="tierstore-", dir=_MEMORY if in_memory else None)


def _remove_temporary(directory: str, made_by: int) -> None:
    """Remove a temporary directory, in the process that made it."""
    if os.getpid() == made_by:
        shutil.rmtree(directory, ignore_errors=True)


def open_or_create(
    path: str | os.PathLike[str],
    tables: Mapping[str, TableSpec],
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Store:
    """Open a store for writing, or make it with these tables where nothing is: for notebooks.

    A store that is there must have the tables, with the fields that their specs name; more fields
    and rows, such as an optimizer and `grow` add, are no difference, and initializers are not
    looked at. `options` are arguments that `open` and `create` share: budget, policy, keep, device
    and allow_untested. Raises InvalidInputError for other tables, and what `open` and `create` do.
    """
    check_tables(tables)
    if not os.path.lexists(path):
        return create(path, tables, progress=progress, **options)
    store = open(path, "r+", **options)
    try:
        for name, spec in tables.items():
            _check_same(store, name, spec)
    except BaseException:
        store.close()
        raise
    return store


def _check_same(store: Store, name: str, spec: TableSpec) -> None:
    """Raise InvalidInputError if a store lacks a table, or has another one of that name."""
    if name not in store:
        raise InvalidInputError(
            f"{store.path} has no table {name!r}; add it with store.create_table({name!r}, spec)"
        )
    table = store[name]
    if table.rows < spec.rows:
        raise InvalidInputError(
            f"table {name!r} of {store.path} has {table.rows} rows, not {spec.rows}; "
            f"store.grow({name!r}, {spec.rows}) adds them"
        )
    for field, item in spec.fields.items():
        if table.fields.get(field) != item:
            raise InvalidInputError(
                f"field {field!r} of table {name!r} of {store.path} is "
                f"{table.fields.get(field, 'missing')}, not {item}; open the store as it is, or "
                "alter the table"
            )


def open(
    path: Any,
    mode: Literal["r", "r+"] = "r",
    *,
    budget: Budget | Size | None = None,
    policy: Policies | None = None,
    version: int | str | None = None,
    discard_newer: bool = False,
    keep: int | None = None,
    allow_untested: bool = False,
    device: DeviceName | torch.device | Device = "cpu",
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
        version: a kept version to read, or with "r+" and `discard_newer` to go on from: a number,
            or the name it is kept by.
        discard_newer: drop the versions after `version`, named ones too.
        keep: how many versions a writer keeps; None keeps as many as the last one did, at first 2.
        allow_untested: write on a file system on which it was not tested whether locks and syncs
            hold, such as one of another machine; see docs/durability.md.
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
            allow_untested=allow_untested,
            device=find_device(device),
            check_ids=check_ids,
        )
        store = Store(options)
        try:
            check_names(store, options.budget, policy)
        except BaseException:
            store.close()
            raise
        return store


def _create_store(
    path: str | Path, tables: Mapping[str, TableSpec], progress: Progress | None = None
) -> None:
    """Write a store with these tables beside `path` and give it that name when it is complete."""
    report = Overall(progress, sum(spec.rows for spec in tables.values()))
    identity = Identity(uuid.uuid4().hex)
    infos: dict[str, TableInfo] = {}
    with _io.publish(path) as temporary, _io.Directory.make(temporary) as directory:
        for name, spec in tables.items():
            with directory.make_directory(name) as table:
                infos[name] = generations.create(table, spec.bound(name), 1, progress=report)
            report.passed(spec.rows)
        first = Manifest(identity.uuid, 1, 1, infos, confirmed=1, mark=new_mark())
        write_skeleton(directory, identity, first)


def discard_store(path: str | Path, error: BaseException) -> None:
    """Remove a store that was just made and that its maker could not open because of `error`.

    A store that another process writes to by now stays, and so does one that cannot be removed: a
    note of the error says so.
    """
    try:
        with (
            _io.Directory.open(path) as directory,
            contextlib.closing(WriterLock(directory, allow_untested=True)),
        ):
            _io.withdraw(path)
    except (TierStoreError, OSError, MemoryError) as reason:
        error.add_note(f"{path} was made and is still there ({reason}); open it or remove it")


def check_tables(tables: Mapping[str, TableSpec]) -> None:
    """Raise InvalidTypeError or InvalidInputError for what cannot be the tables of a store."""
    if not isinstance(tables, Mapping):
        raise InvalidTypeError(f"tables are a dict from name to TableSpec, not {tables!r}")
    for name, spec in tables.items():
        check_name(name)
        if not isinstance(spec, TableSpec):
            raise InvalidTypeError(f"table {name!r} needs a tierstore.TableSpec, not {spec!r}")
