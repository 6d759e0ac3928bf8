"""Files and directories that appear under their name complete and durable, or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from tierstore.errors import ExistsError, InvalidInputError
from tierstore.io import system
from tierstore.io.directory import Directory
from tierstore.io.system import explained, sync_descriptor

__all__ = ["leftovers", "publish", "withdraw"]

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial", re.ASCII | re.DOTALL)


@contextlib.contextmanager
def publish(target: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Make a file or directory that appears under its name complete and durable, or not at all.

    Yields a fresh path beside `target` for the body to create. When the body ends, what it made is
    synced and moved to `target`; when it raises, it is removed. Raises ExistsError if the target
    exists and `force` is False; a target that is a symbolic link is always refused, and `force`
    replaces files only.
    """
    target = Path(os.path.abspath(target))
    with explained("create", str(target)):
        _check_target(target, force=force)
    temporary = _beside(target)
    try:
        yield temporary
        _sync_tree(temporary)
        with explained("publish", str(target)), Directory.open(target.parent) as parent:
            if temporary.is_dir():
                _check_target(target, force=False)
                parent.rename(temporary.name, target.name)
            elif force:
                _check_target(target, force=True)
                parent.rename(temporary.name, target.name)
            elif not parent.put_if_absent(temporary.name, target.name):
                raise ExistsError(f"{target} exists; nothing was changed")
            parent.sync()
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise


def withdraw(path: str | Path) -> None:
    """Take a directory that was published away again: its name at once, then what is in it."""
    path = Path(os.path.abspath(path))
    temporary = _beside(path)
    with explained("remove", str(path)), Directory.open(path.parent) as parent:
        parent.rename(path.name, temporary.name)
    shutil.rmtree(temporary, ignore_errors=True)


def leftovers(place: str | Path) -> list[Path]:
    """Return what `publish` left in a directory where it was killed, or is making now, by name."""
    with explained("list", str(place)):
        return sorted(each for each in Path(place).iterdir() if _PARTIAL.fullmatch(each.name))


def _beside(path: Path) -> Path:
    """Return a fresh name beside `path` for what is not yet, or no more, under its own."""
    return path.with_name(f".{path.name[:50]}.{uuid.uuid4().hex[:8]}.partial")


def _check_target(target: Path, *, force: bool) -> None:
    if not target.parent.is_dir():
        raise InvalidInputError(f"{target.parent} is not a directory; create it first")
    if target.is_symlink():
        raise ExistsError(f"{target} is a symbolic link; name the file itself")
    if target.is_dir() or (target.exists() and not force):
        hint = "" if target.is_dir() else ", or force it to be replaced"
        raise ExistsError(f"{target} exists; choose another name{hint}")


def _sync_tree(path: Path) -> None:
    for entry in sorted(path.iterdir()) if path.is_dir() else ():
        _sync_tree(entry)
    with explained("open", str(path)):
        fd = system.calls.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        sync_descriptor(fd, str(path))
    finally:
        system.calls.close(fd)
