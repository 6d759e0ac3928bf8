"""Atomic creation: files and directories appear complete and durable, or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from tierstore._io import system
from tierstore._io.allocated import allocated_bytes
from tierstore._io.directory import Directory
from tierstore._io.system import FULL, explained
from tierstore.budget import format_bytes
from tierstore.errors import (
    CommitFailedError,
    ExistsError,
    InvalidInputError,
    LockedError,
    StoreFullError,
    StoreIOError,
    TierStoreError,
    UpkeepWarning,
    warn,
)

_NAME_LENGTH = 50
"""Characters of the target's name in the name of its temporary file."""

_STALE_SECONDS = 3600
"""A temporary file that nothing was written to for so long is taken for left over."""

_HELD = "held-"
_PARTIAL = re.compile(rf"\.(.+)\.({_HELD})?([0-9a-f]{{8}})\.partial", re.ASCII | re.DOTALL)
"""The name of what is written, whether a lock is held for it while it is, and of which offset."""


@contextlib.contextmanager
def publish(
    target: str | Path,
    *,
    force: bool = False,
    replaceable: Callable[[Path], bool] = lambda _: False,
    kin: Callable[[str], object] = lambda _: False,
) -> Iterator[Path]:
    """Create a file or directory that appears complete and durable, or not at all.

    Yields a new path beside `target` for the body to create. When the body ends, the new file or
    directory is synced and moved to `target`; if the body raises, it is removed. Raises ExistsError
    if the target exists and `force` is False. `force` replaces files, and those directories and
    symbolic links themselves, never their targets, that are `replaceable`. Write errors in the body
    become StoreFullError or StoreIOError.

    What killed processes left when they wrote the target, or an entry beside it of the same `kin`,
    told by its name, is removed. A lock tells that no process of this machine writes it any more;
    where others may, or none can lock, an UpkeepWarning names what is an hour old, and it stays.

    CommitFailedError means that the target exists and is complete, but may not be durable. A
    RuntimeWarning names files that could not be removed after another error.
    """
    target = Path(os.path.abspath(target))
    with explained("create", str(target)):
        _check_target(target, force, replaceable)
    own = target.name[:_NAME_LENGTH]
    _remove_leftovers(target.parent, lambda name: name == own or kin(name))
    with _held(target) as temporary:
        try:
            with _writing(temporary, target):
                yield temporary
            with explained("publish", str(target)), Directory.open(target.parent) as parent:
                _sync_tree(parent, temporary.name)
                _check_target(target, force, replaceable)
                _give_name(parent, temporary.name, target.name, force=force)
            _clean_up(temporary)  # a directory that was replaced
        except BaseException:
            _clean_up(temporary)
            raise


@contextlib.contextmanager
def publish_directory(target: str | Path) -> Iterator[Directory]:
    """Yield a new directory, open, that appears complete and durable or not at all: see `publish`.

    What the body maps in it is mapped no longer when that ends.
    """
    with publish(target) as temporary, Directory.make(temporary) as directory:
        try:
            yield directory
        finally:
            directory.end_mappings()


@contextlib.contextmanager
def alone_in(place: str | Path, doing: str) -> Iterator[None]:
    """Raise LockedError if another process or thread is within such a body for a directory."""
    with Directory.open(place) as directory:
        try:
            system.calls.flock(directory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(
                f"another process is {doing} {place}; wait for it", filename=str(place)
            ) from None
        except OSError:
            pass  # where none can lock, names that are taken are an ExistsError
        yield


def relink(link: str | Path, target: str) -> None:
    """Point a symbolic link, new or old, to another entry beside it, in one durable step.

    Raises ExistsError if the name is taken by anything but a link.
    """
    link = Path(os.path.abspath(link))
    if link.exists() and not link.is_symlink():
        raise ExistsError(f"{link} exists and is no link; remove it", filename=str(link))
    temporary = _beside(link)
    try:
        with explained("create", str(link)), Directory.open(link.parent) as parent:
            os.symlink(target, temporary)
            parent.rename(temporary.name, link.name)
            parent.sync()
    except BaseException:
        _clean_up(temporary)
        raise


def withdraw(path: str | Path) -> None:
    """Remove a published directory: its name atomically, then its contents."""
    path = Path(os.path.abspath(path))
    temporary = _beside(path)
    with explained("remove", str(path)), Directory.open(path.parent) as parent:
        parent.rename(path.name, temporary.name)
    _clean_up(temporary)


def leftovers(place: str | Path) -> list[Path]:
    """Return the temporary files of interrupted or running `publish` calls, by target name."""
    with explained("list", str(place)):
        return sorted(each for each in Path(place).iterdir() if _PARTIAL.fullmatch(each.name))


def _beside(path: Path, kind: str = "") -> Path:
    """Return a new temporary name beside `path`."""
    return path.with_name(f".{path.name[:_NAME_LENGTH]}.{kind}{uuid.uuid4().hex[:8]}.partial")


@contextlib.contextmanager
def _held(path: Path) -> Iterator[Path]:
    """Yield a new temporary name beside `path` that tells whether its process still runs.

    The process holds a lock on one offset of the directory, which is the number in the name. Where
    none can lock, the name does not say that one does.
    """
    with contextlib.ExitStack() as held:
        temporary = _beside(path)
        with contextlib.suppress(OSError):
            place = held.enter_context(Directory.open(path.parent))
            if place.filesystem in system.TESTED:
                locked = _beside(path, _HELD)
                place.lock_range(_offset(locked.name), 1, exclusive=False)
                temporary = locked
        yield temporary


def _offset(name: str) -> int:
    match = _PARTIAL.fullmatch(name)
    return int(match[3], 16) if match else 0


def _is_left(path: Path) -> bool:
    """Whether the process that held a name has ended; see `_held`."""
    with Directory.open(path.parent) as place:
        known = place.filesystem in system.TESTED
        return known and place.lock_within(_offset(path.name), 1) is None


def _remove_leftovers(place: Path, wanted: Callable[[str], object]) -> None:
    """Remove, or warn of, what killed processes left when they wrote entries of these names."""
    limit = time.time() - _STALE_SECONDS
    with contextlib.suppress(OSError):  # such as a directory that cannot be listed
        for each in leftovers(place):
            match = _PARTIAL.fullmatch(each.name)
            if match is None or not wanted(match[1]):
                continue
            if match[2] and _is_left(each):
                _clean_up(each)
            elif _last_written(each) < limit:
                size = format_bytes(allocated_bytes(each))
                warn(
                    f"{each}, {size}, is left of a process that was killed while it wrote or "
                    f"removed {match[1]}; remove it: rm -r {shlex.quote(str(each))}",
                    UpkeepWarning,
                )


def _last_written(path: Path) -> float:
    parts = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    return max(part.lstat().st_mtime for part in parts)


def _check_target(target: Path, force: bool, replaceable: Callable[[Path], bool]) -> None:
    if not target.parent.is_dir():
        raise InvalidInputError(f"{target.parent} is not a directory; create it first")
    try:
        target.lstat()
    except FileNotFoundError:
        return
    special = target.is_symlink() or target.is_dir()
    if special and not replaceable(target):
        kind = "is a symbolic link" if target.is_symlink() else "is a directory"
        raise ExistsError(f"{target} exists and {kind}; choose another name", filename=target)
    if not force:
        raise ExistsError(
            f"{target} exists; choose another name, or replace it (force=True, --force)",
            filename=target,
        )


@contextlib.contextmanager
def _writing(temporary: Path, target: Path) -> Iterator[None]:
    """Explain write errors of the body, which name the target; leave others as they are."""
    try:
        yield
    except OSError as error:
        about = str(error.filename or temporary)
        if error.errno == errno.EPIPE or not about.startswith(str(temporary)):
            raise
        if isinstance(error, TierStoreError):
            error.args = (str(error).replace(str(temporary), str(target)),)
            error.filename = about.replace(str(temporary), str(target))
            raise
        reason = error.strerror or str(error)
        failure: OSError = StoreIOError(f"cannot write {target}: {reason}; no file was left behind")
        if error.errno in FULL:
            failure = StoreFullError(
                f"no space to write {target} ({reason}); no file was left behind, free some space "
                "and try again"
            )
        failure.errno, failure.filename = error.errno, str(target)
        raise failure from error


def _sync_tree(parent: Directory, name: str) -> None:
    """Make a file, or a directory and its contents, durable, except for its own name."""
    if not parent.is_directory(name):
        with parent.open_file(name) as file:
            file.sync()
        return
    with parent.directory(name) as inside:
        for entry in inside.names():
            _sync_tree(inside, entry)
        inside.sync()


def _give_name(parent: Directory, temporary: str, name: str, *, force: bool) -> None:
    """Move a complete file or directory to its name, durably.

    A directory takes the name of an entry by exchanging both. If an error occurs during or after
    the move, a target that now exists is removed again, unless it replaced an entry.
    """
    made = parent.status(temporary)
    swaps = force and parent.is_directory(temporary) and parent.exists(name)
    try:
        if swaps:
            parent.exchange(temporary, name)
        elif force and not parent.is_directory(temporary):
            parent.rename(temporary, name)
        elif not parent.put_if_absent(temporary, name):
            raise ExistsError(f"{parent.join(name)} exists; nothing was changed")
        parent.sync()
    except BaseException as error:
        if not parent.is_same(name, made) or (not force and _withdrawn(parent, temporary, name)):
            raise
        if not isinstance(error, OSError):
            raise
        raise CommitFailedError(
            f"{parent.join(name)} is complete, but its name may not survive a power failure "
            f"({error}); check the disk"
        ) from error


def _withdrawn(parent: Directory, temporary: str, name: str) -> bool:
    """Revert the rename of a just published entry; return whether that was possible."""
    with contextlib.suppress(OSError):
        if parent.is_directory(name):
            parent.rename(name, temporary)
        else:
            parent.unlink(name)
        return True
    return False


def _clean_up(temporary: Path) -> None:
    """Remove a temporary entry, even if it is interrupted once; warn if that fails."""
    try:
        with explained("remove", str(temporary)):
            try:
                _remove(str(temporary))
            except KeyboardInterrupt:
                _remove(str(temporary))
                raise
    except OSError as error:
        if os.path.lexists(temporary):  # a read-only file system says so even if it is not
            warn(
                f"{temporary} is left over and could not be removed ({error}); remove it",
                UpkeepWarning,
            )


def _remove(path: str) -> None:
    """Remove a file, or a directory with its contents, using one descriptor."""
    try:
        system.calls.rmdir(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        system.calls.unlink(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        for name in system.calls.listdir(path):
            _remove(os.path.join(path, name))
        system.calls.rmdir(path)
