"""Mappings of files: read-only, of checked size, and without a descriptor of their own."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierstore.errors import CorruptStoreError, StoreIOError
from tierstore.io.file import File
from tierstore.io.system import explained, libc

__all__ = ["map_files"]

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


def map_files(files: Sequence[File], nbytes: int, *, advice: int) -> npt.NDArray[np.uint8]:
    """Map the first `nbytes` of each file read-only, one after another, as one array of bytes.

    More than one file needs `nbytes` to be a multiple of the page size. A file that is shorter is
    refused, since touching a page behind its end would kill the process. The mapping lives as long
    as the array or a view of it; the files may be closed. Objects, which cannot be mapped, are read
    into memory.
    """
    for file in files:
        if file.size < nbytes:
            raise CorruptStoreError(
                f"{file.path} has {file.size} bytes, at least {nbytes} are expected; "
                "restore the file from a copy, or open another version"
            )
    if nbytes * len(files) == 0:
        return np.empty(0, np.uint8)
    if not files[0].mappable:
        return np.frombuffer(b"".join(file.read(nbytes) for file in files), np.uint8)
    with explained("map", files[0].path):
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        region = mmap.mmap(-1, nbytes * len(files), flags, mmap.PROT_READ)
    array = np.frombuffer(region, np.uint8)
    _map_over(array, files, nbytes)
    region.madvise(advice)
    return array


def _map_over(array: npt.NDArray[np.uint8], files: Sequence[File], nbytes: int) -> None:
    """Lay each file over its part of a reserved range, whose mapping stays the owner.

    Python's own mapping of a file keeps a descriptor of it; this keeps none, so that a store may
    have as many deltas as it likes.
    """
    address = array.ctypes.data
    for file in files:
        mapped = libc().mmap(
            address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file.fd, 0
        )
        if mapped != address:
            raise StoreIOError(f"cannot map {file.path}: {os.strerror(ctypes.get_errno())}")
        address += nbytes
