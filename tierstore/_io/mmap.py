"""Mappings of files: read-only, of checked size, and without a descriptor of their own."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tierstore._io import system
from tierstore._io.file import File
from tierstore._io.filesystems import filesystem_of
from tierstore._io.system import raise_explained
from tierstore.errors import CorruptStoreError, StoreIOError

__all__ = ["map_files"]


def map_files(
    files: Iterable[File], nbytes: int, *, count: int = 1, advice: int
) -> npt.NDArray[np.uint8]:
    """Map the first `nbytes` of `count` files read-only, one after another, as one array of bytes.

    More than one file needs `nbytes` to be a multiple of the page size. A file that is shorter is
    refused, since touching a page behind its end would kill the process. The mapping lives as long
    as the array or a view of it; each file may be closed when the next is asked for. Objects, which
    cannot be mapped, are read into memory.
    """
    array = np.empty(0, np.uint8)
    parts = []
    for number, file in enumerate(files):
        if file.size < nbytes:
            raise CorruptStoreError(
                f"{file.path} has {file.size} bytes, at least {nbytes} are expected; "
                "restore the file from a copy, or open another version"
            )
        if not file.mappable:
            parts.append(file.read(nbytes))
        elif nbytes:
            array = _reserved(nbytes * count, file.path) if number == 0 else array
            _map_over(array.ctypes.data + number * nbytes, file, nbytes)
    if array.size:
        with contextlib.suppress(OSError):  # it is advice
            system.calls.madvise(array.ctypes.data, array.size, advice)
        return array
    return np.frombuffer(b"".join(parts), np.uint8)


def _reserved(nbytes: int, path: str) -> npt.NDArray[np.uint8]:
    try:
        return np.frombuffer(system.calls.reserve(nbytes), np.uint8)
    except OSError as error:
        raise_explained(error, "map", path)


def _map_over(address: int, file: File, nbytes: int) -> None:
    """Lay a file over its part of a reserved range, whose mapping stays the owner.

    Python's own mapping of a file keeps a descriptor of it; this keeps none, so that a store may
    have as many deltas as it likes.
    """
    try:
        system.calls.map_file(address, nbytes, file.fd)
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.EOPNOTSUPP):
            raise_explained(error, "map", file.path)
        raise StoreIOError(
            f"the file system of {file.path} ({filesystem_of(file.fd) or 'unknown'}) cannot "
            "map files; keep the store on another disk"
        ) from error
