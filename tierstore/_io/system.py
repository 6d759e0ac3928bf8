"""The interface to the operating system: system calls, and the meaning of their errors.

Errors are OSErrors, whether the call goes through `os`, `fcntl` or the C library. All calls go
through `calls`, which a test may replace to record, delay or fail them.

This module also determines file systems. A device number identifies neither the subvolumes of btrfs
nor the file system that FUSE serves. The mount through which a descriptor was opened does; if
mounts cannot be read, the kernel's type number is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from tierstore.errors import (
    AccessError,
    CommitFailedError,
    StoreFullError,
    StoreIOError,
    TierStoreError,
)

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_STATFS_BYTES = 256
_SYS_PIDFD_OPEN = 434
_SYS_PROCESS_MADVISE = 440
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LOOKUPS = frozenset({"open", "examine"})
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE, errno.EPERM})
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_WAIT = 7
"""Wait for writes in progress, write the rest, and wait for that."""
_NEARLY_ALL = 0.9


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.sync_file_range.argtypes = (ctypes.c_int, *[ctypes.c_int64] * 2, ctypes.c_uint)
    library.syscall.restype = ctypes.c_long
    return library


def _call(name: str, *given: Any) -> int:
    """Call a C library function that returns -1 on failure; retry it when interrupted."""
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


class Reserved(mmap.mmap):
    """Address space that is reserved to map files into, and holds nothing else."""


class Calls:
    """The system calls by name; a test may replace an instance."""

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
        """Rename; raise FileExistsError if the new name is taken (renameat2)."""
        names = os.fsencode(old), os.fsencode(new)
        _call("renameat2", src_dir_fd, names[0], dst_dir_fd, names[1], _RENAME_NOREPLACE)

    @staticmethod
    def rename_exchange(one: str, other: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        """Exchange two names in one step (renameat2)."""
        names = os.fsencode(one), os.fsencode(other)
        _call("renameat2", src_dir_fd, names[0], dst_dir_fd, names[1], _RENAME_EXCHANGE)

    @staticmethod
    def sync_file_range(fd: int, offset: int, nbytes: int, flags: int) -> None:
        """Start writing a range to the disk, or wait for it."""
        _call("sync_file_range", fd, offset, nbytes, flags)

    @staticmethod
    def reserve(nbytes: int) -> Reserved:
        """Reserve address space without memory."""
        return Reserved(-1, nbytes, mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ)

    @staticmethod
    def map_file(address: int, nbytes: int, fd: int) -> None:
        """Map the beginning of a file read-only over reserved addresses."""
        _call("mmap", address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)

    @staticmethod
    def unmap_file(address: int, nbytes: int) -> None:
        """Let go of files mapped there; the addresses stay reserved, and read as zeros."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        _call("mmap", address, nbytes, mmap.PROT_READ, flags, -1, 0)

    @staticmethod
    def madvise(address: int, nbytes: int, advice: int) -> None:
        """Advise the system how mapped pages will be used."""
        _call("madvise", address, nbytes, advice)

    @staticmethod
    def pidfd_open(pid: int) -> int:
        """Open a descriptor of a process."""
        return _call("syscall", ctypes.c_long(_SYS_PIDFD_OPEN), ctypes.c_int(pid), ctypes.c_uint(0))

    @staticmethod
    def process_madvise(pidfd: int, ranges: npt.NDArray[np.uint64], advice: int) -> None:
        """Advise the system how ranges `(n, 2)` of addresses and lengths will be used."""
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


calls: Any = Calls()


@contextlib.contextmanager
def explained(action: str, path: str) -> Iterator[None]:
    """Raise any OSError of the body as `raise_explained` does."""
    try:
        yield
    except OSError as error:
        raise_explained(error, action, path)


def raise_explained(error: OSError, action: str, path: str) -> NoReturn:
    """Raise an error with a remedy from an OSError, keeping its errno.

    FileNotFoundError and NotADirectoryError, which are results of a lookup, and errors that were
    already explained are raised unchanged.
    """
    is_answer = isinstance(error, FileNotFoundError | NotADirectoryError) and action in _LOOKUPS
    failure = error
    try:
        if is_answer and not isinstance(error, TierStoreError):
            error.filename = path  # it was relative to an open directory
        if is_answer or isinstance(error, TierStoreError):
            raise error
        failure = _explanation(action, path, error)
        failure.errno, failure.filename = error.errno, path
        raise failure from error
    finally:
        del error, failure  # otherwise error and frame form a cycle that keeps files open


def _explanation(action: str, path: str, error: OSError) -> OSError:
    if error.errno in FULL:
        return StoreFullError(
            f"no space to {action} {path} ({error.strerror}); the last commit is intact, "
            "free some space and try again"
        )
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return StoreIOError(
            f"too many open files to {action} {path}: this process may have {limit} (ulimit -n), "
            "of which stores use at most a quarter; raise the limit, or close other files"
        )
    if error.errno == errno.ENFILE:
        return StoreIOError(
            f"too many open files on this machine to {action} {path}; close files in other "
            "programs, or raise fs.file-max"
        )
    if error.errno == errno.ENOMEM and action == "map" and (mappings := _too_many_mappings()):
        return StoreIOError(
            f"too many mappings to map {path}: {mappings}; close readers and fold the store to "
            "reduce its deltas, or raise the limit"
        )
    if isinstance(error, PermissionError):
        return AccessError(
            f"cannot {action} {path}: {error.strerror} to user {os.geteuid()}; have its owner "
            "allow it (chmod, chown), or run as another user"
        )
    return StoreIOError(f"cannot {action} {path}: {error.strerror or error}")


def _too_many_mappings() -> str:
    """Return the number and limit of mappings, or "" if the limit was not reached."""
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        with open("/proc/self/maps", "rb") as table:
            count = sum(1 for _ in table)
        if count > _NEARLY_ALL * limit:
            return f"this process has {count} of at most {limit} (vm.max_map_count)"
    return ""


def sync_descriptor(fd: int, path: str) -> None:
    """Sync a descriptor, once; raises CommitFailedError, which is final.

    A failed sync must never be repeated: the kernel may have dropped the bytes that it could not
    write and marked their pages clean, so that the next sync falsely succeeds (Rebello et al., "Can
    applications recover from fsync failures?", USENIX ATC 2020).
    """
    try:
        calls.fsync(fd)
    except OSError as error:
        raise _sync_failed(path, error) from error


def send_range(fd: int, path: str, offset: int, nbytes: int) -> None:
    """Start writing a range to the disk; errors are final, as for a sync."""
    _sync_range(fd, path, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def wait_for_range(fd: int, path: str, offset: int, nbytes: int) -> None:
    """Wait until a range was written to the disk; errors are final, as for a sync.

    The kernel reports a write error once to each open description, so this descriptor must not be
    the one that is synced later.
    """
    _sync_range(fd, path, offset, nbytes, _SYNC_FILE_RANGE_WAIT)


def _sync_range(fd: int, path: str, offset: int, nbytes: int, flags: int) -> None:
    try:
        calls.sync_file_range(fd, offset, nbytes, flags)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise _sync_failed(path, error) from error


def _sync_failed(path: str, error: OSError) -> CommitFailedError:
    failure = CommitFailedError(
        f"cannot sync {path} ({error.strerror}): writes since the last commit may be "
        "lost, the last commit is intact; check the disk and open the store again"
    )
    failure.errno, failure.filename = error.errno, path
    return failure


TESTED = frozenset({"ext4", "ext3", "ext2", "xfs", "btrfs", "tmpfs", "overlay"})
"""File systems on which locks, syncs, renames and mappings were tested."""
LASTING_INODES = TESTED - {"overlay"}
"""File systems on which a closed file keeps its inode number."""

_MAGIC = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0x65735546: "fuse",
    0xFF534D42: "cifs",
    0xFE534D42: "smb3",
    0x01021997: "9p",
}


def filesystem(path: str | Path) -> str:
    """Return the name of the file system of `path`, such as "ext4", or "" if unknown."""
    fd = calls.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return filesystem_of(fd)
    finally:
        with contextlib.suppress(OSError):
            calls.close(fd)


def filesystem_of(fd: int) -> str:
    """Return the name of the file system of an open file or directory, or "" if unknown."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        return _mounted_as(_mount_of(fd))
    with contextlib.suppress(OSError):
        return _MAGIC.get(calls.file_system_magic(fd), "")
    return ""


def _mount_of(fd: int) -> bytes:
    """Return the number of the mount that a descriptor was opened through."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_bytes().splitlines()
    return dict(line.split(b":", 1) for line in lines if b":" in line)[b"mnt_id"].strip()


def _mounted_as(mount: bytes) -> str:
    """Return the type of the file system of a mount; raises LookupError."""
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            fields = line.split()
            if fields[0] == mount:
                return fields[fields.index(b"-") + 1].decode()
    raise LookupError(mount)
