"""The calls that a store makes of the operating system, and no others.

A failure is an OSError whatever the call goes through: `os`, `fcntl` or the C library.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Calls"]

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_RENAME_NOREPLACE = 1
_STATFS_BYTES = 256
_SYS_PIDFD_OPEN = 434
_SYS_PROCESS_MADVISE = 440


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    library.sync_file_range.argtypes = (ctypes.c_int, *[ctypes.c_int64] * 2, ctypes.c_uint)
    library.syscall.restype = ctypes.c_long
    return library


def _call(name: str, *given: Any) -> int:
    """Call a function of the C library that answers a failure with -1, again if interrupted."""
    try:
        function = getattr(_libc(), name)
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    while True:
        result = function(*given)
        if result not in (-1, ctypes.c_void_p(-1).value):
            return int(result or 0)
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class Calls:
    """Each call under its own name; a test puts something in the place of an instance."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    stat = staticmethod(os.stat)
    fstat = staticmethod(os.fstat)
    fstatvfs = staticmethod(os.fstatvfs)
    listdir = staticmethod(os.listdir)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    link = staticmethod(os.link)
    unlink = staticmethod(os.unlink)
    rename = staticmethod(os.rename)
    lseek = staticmethod(os.lseek)
    pread = staticmethod(os.pread)
    preadv = staticmethod(os.preadv)
    pwrite = staticmethod(os.pwrite)
    ftruncate = staticmethod(os.ftruncate)
    posix_fallocate = staticmethod(os.posix_fallocate)
    posix_fadvise = staticmethod(os.posix_fadvise)
    fsync = staticmethod(os.fsync)
    flock = staticmethod(fcntl.flock)
    fcntl = staticmethod(fcntl.fcntl)

    @staticmethod
    def rename_noreplace(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        """Rename, and raise FileExistsError where the new name is taken (renameat2)."""
        names = os.fsencode(old), os.fsencode(new)
        _call("renameat2", src_dir_fd, names[0], dst_dir_fd, names[1], _RENAME_NOREPLACE)

    @staticmethod
    def sync_file_range(fd: int, offset: int, nbytes: int, flags: int) -> None:
        """Begin to write a range to the disk, or wait for it."""
        _call("sync_file_range", fd, offset, nbytes, flags)

    @staticmethod
    def reserve(nbytes: int) -> mmap.mmap:
        """Reserve addresses without memory behind them."""
        return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ)

    @staticmethod
    def map_file(address: int, nbytes: int, fd: int) -> None:
        """Map the beginning of a file read-only over reserved addresses."""
        _call("mmap", address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)

    @staticmethod
    def madvise(address: int, nbytes: int, advice: int) -> None:
        """Say how mapped pages will be used."""
        _call("madvise", address, nbytes, advice)

    @staticmethod
    def mincore(address: int, nbytes: int, state: Any) -> None:
        """Ask which mapped pages are in memory, a byte for each."""
        _call("mincore", address, nbytes, state)

    @staticmethod
    def pidfd_open(pid: int) -> int:
        """Open a descriptor of a process."""
        return _call("syscall", ctypes.c_long(_SYS_PIDFD_OPEN), ctypes.c_int(pid), ctypes.c_uint(0))

    @staticmethod
    def process_madvise(pidfd: int, ranges: npt.NDArray[np.uint64], advice: int) -> None:
        """Say how ranges `(n, 2)` of addresses and lengths will be used."""
        _call(
            "syscall",
            ctypes.c_long(_SYS_PROCESS_MADVISE),
            ctypes.c_int(pidfd),
            ctypes.c_void_p(ranges.ctypes.data),
            ctypes.c_size_t(len(ranges)),
            ctypes.c_int(advice),
            ctypes.c_uint(0),
        )

    @staticmethod
    def file_system_magic(fd: int) -> int:
        """Return the number of a file system's type (fstatfs, `f_type`)."""
        status = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
        _call("fstatfs", fd, status)
        return int(status[0])
