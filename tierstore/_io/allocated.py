"""The space that files take on the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_BLOCK_BYTES = 512
"""Unit of `st_blocks`."""


def allocated_bytes(path: str | os.PathLike[str]) -> int:
    """Return the bytes that a file takes on the disk, or a directory with all that is in it.

    A symbolic link takes its own; what it leads to is not counted.
    """
    return sum(each.st_blocks for each in _statuses(os.fspath(path))) * _BLOCK_BYTES


def _statuses(path: str) -> Iterator[os.stat_result]:
    with contextlib.suppress(FileNotFoundError):  # a writer may remove files meanwhile
        yield os.lstat(path)
    if os.path.islink(path):
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _statuses(entry.path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False)
