"""Creates and opens stores."""

from __future__ import annotations

import contextlib
import fcntl
import os
import reprlib
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tierstore import _io
from tierstore._disk import generation as generations
from tierstore._disk.manifest import DEFAULT_KEEP, Identity, Manifest, TableInfo, new_mark
from tierstore._door import internal_errors
from tierstore._progress import Overall, Progress, Shown, shown
from tierstore._store import closing
from tierstore._store.ledger import write_skeleton
from tierstore._store.locking import WriterLock, require_tested
from tierstore._store.options import Options
from tierstore._store.store import Store, opened_before
from tierstore._store.versions import (
    STORE,
    History,
    check_free,
    has_manifests,
    open_directory,
    read_identity,
)
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.placement import check_names, find_device
from tierstore.budget import Budget, Size
from tierstore.errors import (
    ConcurrentWriterError,
    ExistsError,
    InvalidInputError,
    InvalidTypeError,
    LockedError,
    NotAStoreError,
    StoreFullError,
    TierStoreError,
    counted,
)
from tierstore.policy import Policies
from tierstore.spec import DeviceName, TableSpec, check_name

if TYPE_CHECKING:
    import torch

_MEMORY = "/dev/shm"
_TEMPORARY = "tierstore-temporary-"

Made = TypeVar("Made")


def create(
    path: str | os.PathLike[str] | None,
    tables: Mapping[str, TableSpec],
    *,
    progress: Shown = None,
    budget: Budget | Size | None = None,
    policy: Policies | None = None,
    keep: int | None = None,
    allow_untested: bool = False,
    device: DeviceName | torch.device | Device = "cpu",
) -> Store:
    """Create a store with these tables at `path`, which must not exist, and open it for writing.

    If `path` is None, the store is created in memory (under /dev/shm, if available) and removed
    when it is closed, without a warning about uncommitted rows; use this for tests.

    The arguments are checked before anything is written. All rows are written and their disk space
    is reserved before the store appears under its name, so a full disk, a kill or a power failure
    leaves nothing behind. A new store that cannot be opened is removed again. `progress(done,
    total)` is called with numbers of rows. For `allow_untested` see `open`.

    Raises ExistsError, StoreFullError, StoreIOError, CapacityError, InvalidInputError,
    UnknownNameError for a budget or a policy that names a table which is not among these,
    DeviceError for a GPU that is not there, and MissingExtraError for one without CuPy.
    """
    progress = shown(progress)
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
                f"{where} is not on a disk: create the store on a disk, and save a copy there"
            )
        check_tables(tables)
        options = for_writing(
            where,
            budget=budget,
            policy=policy,
            keep=keep,
            allow_untested=allow_untested,
            device=device,
        )
        check_names(tables, options.budget, policy)
        options.placement().check(tables)
        if not allow_untested and where.parent.is_dir():
            with _io.Directory.open(where.parent) as parent:
                require_tested(parent)
        identity = Identity(uuid.uuid4().hex)
        lock = _create_store(where, identity, tables, progress, keep=options.keep)
        try:
            return Store(options, lock)
        except BaseException as error:
            lock.close()
            discard_store(where, identity.uuid, error)
            raise


def for_writing(path: Any, *, budget: Any, device: Any, **options: Any) -> Options:
    """Return the options of a writer, of the arguments that `create` and `open` share."""
    return Options(
        path=_io.locate(path),
        mode="r+",
        budget=Budget.of(budget),
        device=find_device(device),
        **options,
    )


def _create_in_memory(tables: Mapping[str, TableSpec], **options: Any) -> Store:
    """Create a store in a temporary directory, which is removed when the store is closed."""
    directory, lock = _temporary_directory()
    remove = partial(_remove_temporary, directory, lock, os.getpid())
    try:
        store = create(Path(directory, "store"), tables, **options)
    except StoreFullError as error:
        remove()
        where = os.path.dirname(directory)
        raise StoreFullError(
            f"{error}; a store without a path is in {where}: give it a path, or {where} more room, "
            "which that of a container has by --shm-size"
        ) from error
    except BaseException:
        remove()
        raise
    closing.remove_when_closed(store, remove)
    return store


def _temporary_directory() -> tuple[str, int]:
    """Create a temporary directory, in memory if such a file system exists.

    Returns it with a descriptor that locks it as long as its process lives. Those of processes that
    were killed are removed: in memory they would take room until the next boot.
    """
    in_memory = os.path.isdir(_MEMORY) and os.access(_MEMORY, os.W_OK)
    parent = _MEMORY if in_memory else tempfile.gettempdir()
    with contextlib.suppress(OSError):
        _remove_abandoned(parent)
    made = tempfile.mkdtemp(prefix="tierstore-", dir=parent)
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # where none can lock, none takes it for abandoned
        fcntl.flock(lock, fcntl.LOCK_EX)
    directory = os.path.join(parent, _TEMPORARY + made.rpartition("-")[2])
    os.rename(made, directory)  # the name that others look for: it is locked before it has that
    return directory, lock


def _remove_abandoned(parent: str) -> None:
    """Remove temporary directories of this user that no process has locked any more."""
    with os.scandir(parent) as entries:
        found = [each for each in entries if each.name.startswith(_TEMPORARY)]
    for each in found:
        with contextlib.suppress(OSError):  # such as one that another process removes
            if each.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            lock = os.open(each.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(each.path, ignore_errors=True)
            finally:
                os.close(lock)


def _remove_temporary(directory: str, lock: int, made_by: int) -> None:
    """Remove a temporary directory, in the process that created it."""
    if os.getpid() == made_by:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def open_or_create(
    path: str | os.PathLike[str] | None,
    tables: Mapping[str, TableSpec],
    *,
    progress: Shown = None,
    budget: Budget | Size | None = None,
    policy: Policies | None = None,
    keep: int | None = None,
    allow_untested: bool = False,
    device: DeviceName | torch.device | Device = "cpu",
) -> Store:
    """Open a store for writing, or create it if `path` does not exist; useful in notebooks.

    An existing store must have these tables with the fields of their specs. Additional fields and
    rows, as added by an optimizer and `grow`, are allowed, and initializers are ignored. The other
    arguments are those of `open` and `create`. If `path` is None, a new store is created in memory.

    A store that this process has open for writing at this path is returned as it is, the same
    object with its uncommitted rows, if all of these arguments are those it was opened or created
    with. A policy given as an object equals itself, or one of equal parameters. One `close` closes
    it for all. A store that a parent process has open is none of this process.

    Raises InvalidInputError for different tables, LockedError for a store that another process has
    open for writing, or this one with other arguments, and the errors of `open` and `create`.
    """
    check_tables(tables)
    arguments: dict[str, Any] = {
        "budget": budget,
        "policy": policy,
        "keep": keep,
        "allow_untested": allow_untested,
        "device": device,
    }

    if path is None:
        return create(None, tables, progress=progress, **arguments)

    def work() -> Store:
        if not os.path.lexists(path):
            return create(path, tables, progress=progress, **arguments)
        try:
            store = open(path, "r+", **arguments)
        except LockedError as error:
            store = opened_before(for_writing(path, **arguments), error)
            _check_all_same(store, tables)
            return store
        try:
            _check_all_same(store, tables)
        except BaseException:
            store.close()
            raise
        return store

    with _one_thread:  # or two would find no store, and one would find it locked
        return made_or_opened(path, work)


def made_or_opened(path: str | os.PathLike[str], work: Callable[[], Made]) -> Made:
    """Call `work`, which makes a store at a path that is free, and opens the one that is there.

    Calls it again if another process makes a store there meanwhile, which raised ExistsError.
    """
    was_free = not os.path.lexists(path)
    try:
        return work()
    except ExistsError:
        if not (was_free and is_store(path)):
            raise
    return work()


_one_thread = threading.RLock()
"""Held by the thread that opens or creates a store which others may be about to open, too."""


def _make_lock() -> None:
    """Let a forked child open stores, whatever thread of its parent did."""
    global _one_thread
    _one_thread = threading.RLock()


os.register_at_fork(after_in_child=_make_lock)


def _check_all_same(store: Store, tables: Mapping[str, TableSpec]) -> None:
    for name, spec in tables.items():
        _check_same(store, name, spec)


def _check_same(store: Store, name: str, spec: TableSpec) -> None:
    """Raise InvalidInputError if a store lacks a table, or has a different one of that name."""
    if name not in store:
        raise InvalidInputError(
            f"{store.path} has no table {name!r}; add it with store.create_table({name!r}, spec)"
        )
    table = store[name]
    if table.spec.keys != spec.keys:
        raise InvalidInputError(
            f"table {name!r} of {store.path} has {table.spec.keys or 'no'} keys, not "
            f"{spec.keys or 'none'}"
        )
    rows = table.spec.rows
    if rows < spec.rows and not table.spec.grows:
        raise InvalidInputError(
            f"table {name!r} of {store.path} has {counted(rows, 'row')}, not {spec.rows:,}; "
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
    missing: Literal["raise", "init"] | float | None = None,
) -> Store:
    """Open a store.

    Args:
        path: the directory of the store. For reading also the place of a copy that `Store.save`
            wrote: a URL for fsspec, such as "s3://bucket/emb.tier", or a zarr store.
        mode: "r" for reading one version, by any number of readers; "r+" for the single writer.
        budget: memory for the tiers; a size such as "8GiB" applies to the host tier. None is what
            TIERSTORE_BUDGET says in the environment, or the default of Budget.
        policy: the replacement policy of the tiers: "lru" (the default), "lfu", "lookahead", or a
            value of `tierstore.policy` such as `static(counts)`; one for all tables, or a dict by
            table.
        version: a kept version to read, or with "r+" and `discard_newer` to continue from: its
            number, or the name under which it is kept.
        discard_newer: drop the versions after `version`, including named ones.
        keep: number of versions that a writer keeps from its first commit on; opening removes none.
            None uses the number of the last writer, initially 2.
        allow_untested: write on a file system on which locks and syncs were not tested, such as a
            remote one; the page "Durability" lists those that were.
        device: the device of the nearest tier and of returned tensors: "cpu", "cuda", "cuda:1", a
            torch.device, or "auto" for a GPU if there is one.
        check_ids: "async" checks ids in GPU memory without waiting, and raises at the next call
            that waits; "sync" raises at once.
        missing: what keys without a row read as in tables by key, in `read` and in layers that do
            not train: "raise" is an UnknownNameError, a KeyError; "init" the first row of the key;
            a number that value. None is "raise" for mode "r", and "init" for "r+".

    Raises NotAStoreError, FormatError, CorruptStoreError, LockedError, VersionError,
    UnknownNameError for a budget or a policy that names a table which the store does not have,
    DeviceError for a GPU that is not there, and MissingExtraError for one without CuPy.
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
            missing=missing,
        )
        store = Store(options)
        try:
            check_names(store, options.budget, policy)
        except BaseException:
            store.close()
            raise
        return store


def is_store(path: Any) -> bool:
    """Return whether `path`, as `open` takes it, holds a store, damaged or not.

    False for a path that does not exist, a file, and a directory of other files. A directory that
    lost its STORE.json and has manifests is a damaged store. Raises
    StoreIOError where that cannot be seen, such as without permission, and InvalidInputError for
    what is no path.
    """
    with internal_errors():
        try:
            with open_directory(_io.locate(path)) as directory:
                return directory.exists(STORE) or has_manifests(directory)
        except NotAStoreError:
            return False


def _create_store(
    path: str | Path,
    identity: Identity,
    tables: Mapping[str, TableSpec],
    progress: Progress | None = None,
    keep: int | None = None,
) -> WriterLock:
    """Write a store with these tables beside `path`, and rename it when it is complete.

    Returns its lock, held since before it had its name: no other process can write it first.
    """
    report = Overall(progress, sum(spec.rows for spec in tables.values()))
    infos: dict[str, TableInfo] = {}
    check_free(path, _OPEN_IT)
    with contextlib.ExitStack() as unlocking:
        with _clearly_taken(path), _io.publish_directory(path) as directory:
            for name, spec in tables.items():
                with directory.make_directory(name) as table:
                    infos[name] = generations.create(table, spec.bound(name), 1, progress=report)
                report.passed(spec.rows)
            report.finish()
            first = Manifest(
                identity.uuid, 1, 1, infos, confirmed=1, keep=keep or DEFAULT_KEEP, mark=new_mark()
            )
            write_skeleton(directory, identity, first.counted())
            lock = WriterLock(directory, allow_untested=True)
            unlocking.callback(lock.close)
        unlocking.pop_all()
    return lock


_OPEN_IT = "open it: tierstore.open(path, 'r+')"


@contextlib.contextmanager
def _clearly_taken(path: str | Path) -> Iterator[None]:
    """Say what another process has made at a path meanwhile, as if it had been there before."""
    try:
        yield
    except ExistsError:
        check_free(path, _OPEN_IT)
        raise


def discard_store(path: str | Path, uuid: str, error: BaseException) -> None:
    """Remove a new store, of this uuid, that its creator could not open because of `error`.

    If another process writes to it or has written to it, or if it cannot be removed, it remains,
    and a note on the error says so.
    """
    try:
        with (
            _io.Directory.open(path) as directory,
            contextlib.closing(WriterLock(directory, allow_untested=True)),
        ):
            if read_identity(directory).uuid != uuid or History(directory, uuid).newest().seq > 1:
                raise ConcurrentWriterError("another process has written to it")
            _io.withdraw(path)
    except (TierStoreError, OSError, MemoryError) as reason:
        error.add_note(f"{path} was created and still exists ({reason}); open it or remove it")


def check_tables(tables: Mapping[str, TableSpec]) -> None:
    """Raise InvalidTypeError or InvalidInputError if these cannot be the tables of a store."""
    if not isinstance(tables, Mapping):
        raise InvalidTypeError(
            "tables must be a dict from name to TableSpec, such as {'item': TableSpec(1000, 16)}, "
            f"not {type(tables).__name__}"
        )
    for name, spec in tables.items():
        check_name(name)
        if not isinstance(spec, TableSpec):
            raise _not_a_spec(name, spec)


def _not_a_spec(name: str, given: Any) -> InvalidTypeError:
    shape: Any = getattr(given, "shape", ())
    if len(shape) == 2:
        return InvalidTypeError(
            f"table {name!r} needs a tierstore.TableSpec, not an array; "
            f"TableSpec({shape[0]}, {shape[1]}, init=tierstore.from_array(array)) is that"
        )
    return InvalidTypeError(
        f"table {name!r} needs a tierstore.TableSpec, not {reprlib.repr(given)}"
    )
