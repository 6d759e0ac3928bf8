"""The only module that opens, maps, reads, writes, syncs, links or unlinks files of a store.

Every name is a single path component, resolved against an open directory and never followed through
a link, so a store that is renamed while it is open stays the same store. Writes are positioned and
complete, sizes are checked before anything is mapped, and nothing is ever written through a
mapping: on a full disk that would kill the process with SIGBUS instead of raising.

All system calls go through `_os`, which a test may replace to record, delay or fail them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from tierstore.errors import (
    CommitFailedError,
    CorruptStoreError,
    ExistsError,
    FormatError,
    InvalidInputError,
    StoreFullError,
    StoreIOError,
    TierStoreError,
)

__all__ = ["Directory", "File", "filesystem", "map_files", "publish"]

_os: Any = os

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_LOOKUPS = frozenset({"open", "examine"})
_COMPONENT = re.compile(r"[^/\0]{1,255}")
_MAX_IO = 1 << 30
_MAP_FIXED = 0x10
_SYNC_FILE_RANGE_WRITE = 2
_MAP_NORESERVE = 0x4000
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextlib.contextmanager
def _explained(action: str, path: str) -> Iterator[None]:
    """Turn an OSError into the error a user can act on, keeping its errno.

    Where something is only looked up, that it is missing is an answer: FileNotFoundError passes.
    """
    try:
        yield
    except TierStoreError:
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError) and action in _LOOKUPS:
            raise
        if error.errno in _FULL:
            failure: OSError = StoreFullError(
                f"no space to {action} {path} ({error.strerror}); the last commit is intact, "
                "free some space and try again"
            )
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            failure = StoreIOError(
                f"too many open files to {action} {path}; raise the limit (ulimit -n) "
                "or fold the store to have fewer deltas"
            )
        else:
            failure = StoreIOError(f"cannot {action} {path}: {error.strerror or error}")
        failure.errno = error.errno
        raise failure from error


def _sync(fd: int, path: str) -> None:
    """Sync a descriptor, once.

    A failed sync must never be repeated: the kernel may have dropped the bytes it could not write
    and marked their pages clean, and the next sync then succeeds for nothing (Rebello et al., "Can
    applications recover from fsync failures?", USENIX ATC 2020).
    """
    try:
        _os.fsync(fd)
    except OSError as error:
        failure = CommitFailedError(
            f"cannot sync {path} ({error.strerror}): what was written since the last commit may be "
            "lost, the last commit is intact; check the disk and open the store again"
        )
        failure.errno = error.errno
        raise failure from error


def _component(name: str) -> str:
    if _COMPONENT.fullmatch(name) is None or name in (".", ".."):
        raise FormatError(f"not a file name: {name!r}")
    return name


class File:
    """An open regular file of a store, read and written at positions."""

    def __init__(self, fd: int, path: str) -> None:
        """Take over the descriptor `fd`; `path` is for messages."""
        self.fd = fd
        self.path = path

    @property
    def size(self) -> int:
        """Bytes of the file now."""
        with _explained("examine", self.path):
            return int(_os.fstat(self.fd).st_size)

    @property
    def nameless(self) -> bool:
        """Whether the file has no name any more: it was removed, or another took its place."""
        with _explained("examine", self.path):
            return int(_os.fstat(self.fd).st_nlink) == 0

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        """Return up to `nbytes` bytes from `offset`; fewer only at the end of the file."""
        parts = []
        with _explained("read", self.path):
            while nbytes > 0:
                part = _os.pread(self.fd, min(nbytes, _MAX_IO), offset)
                if not part:
                    break
                parts.append(part)
                offset += len(part)
                nbytes -= len(part)
        return b"".join(parts)

    def write(self, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`, however often the system writes less."""
        view = memoryview(cast(Any, data)).cast("B")
        with _explained("write", self.path):
            while view.nbytes:
                count = _os.pwrite(self.fd, view[:_MAX_IO], offset)
                offset += count
                view = view[count:]

    def allocate(self, offset: int, nbytes: int) -> None:
        """Reserve disk space for a range, so that running out of it is an error here."""
        if nbytes <= 0:
            return
        with _explained("allocate space for", self.path):
            try:
                _os.posix_fallocate(self.fd, offset, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                _os.ftruncate(self.fd, max(self.size, offset + nbytes))

    def truncate(self, nbytes: int) -> None:
        """Set the size of the file."""
        with _explained("set the size of", self.path):
            _os.ftruncate(self.fd, nbytes)

    def sync(self) -> None:
        """Make the file's bytes and size durable; raises CommitFailedError, which is final."""
        _sync(self.fd, self.path)

    def advise(self, advice: int, offset: int = 0, nbytes: int = 0) -> None:
        """Tell the system how a range will be read; failing to is no error."""
        with contextlib.suppress(OSError):
            _os.posix_fadvise(self.fd, offset, nbytes, advice)

    def start_writing(self, offset: int, nbytes: int) -> None:
        """Have the system send a range to the disk from now on; advice, nothing is durable by it.

        A sync then has less to wait for.
        """
        libc = ctypes.CDLL(None)
        libc.sync_file_range.argtypes = (ctypes.c_int, *[ctypes.c_int64] * 2, ctypes.c_uint)
        libc.sync_file_range(self.fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)

    def lock(self, *, exclusive: bool) -> bool:
        """Take the advisory lock of the file without waiting; return whether it was free."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreIOError(f"cannot lock {self.path}: {error.strerror}") from error
        return True

    def unlock(self) -> None:
        """Release the advisory lock."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the descriptor; harmless when done twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _os.close(fd)

    def __del__(self) -> None:
        """Close a file that an error left open."""
        with contextlib.suppress(OSError):
            self.close()

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


class Directory:
    """An open directory; all names are resolved against it and links are refused."""

    def __init__(self, fd: int, path: str) -> None:
        """Take over the descriptor `fd`; `path` is for messages."""
        self.fd = fd
        self.path = path

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the directory at `path`; raises FileNotFoundError or NotADirectoryError."""
        return cls(_os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), os.fspath(path))

    def join(self, name: str) -> str:
        """Path of an entry, for messages."""
        return os.path.join(self.path, name)

    def directory(self, name: str) -> Directory:
        """Open a directory within this one; raises FormatError for anything else."""
        flags = os.O_RDONLY | os.O_DIRECTORY | _OPEN
        path = self.join(name)
        try:
            with _explained("open", path):
                return Directory(_os.open(_component(name), flags, dir_fd=self.fd), path)
        except StoreIOError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise FormatError(f"{path} is not a directory") from error
            raise

    @classmethod
    def make(cls, path: str | Path) -> Self:
        """Create the directory at `path`, whose parent exists, and open it."""
        with _explained("create", os.fspath(path)):
            _os.mkdir(path)
            return cls.open(path)

    def make_directory(self, name: str) -> Directory:
        """Create a directory within this one and open it."""
        with _explained("create", self.join(name)):
            _os.mkdir(_component(name), 0o777, dir_fd=self.fd)
        return self.directory(name)

    def create(self, name: str) -> File:
        """Create a file that did not exist, open for reading and writing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN
        with _explained("create", self.join(name)):
            return File(_os.open(_component(name), flags, 0o666, dir_fd=self.fd), self.join(name))

    def open_file(self, name: str, *, write: bool = False) -> File:
        """Open a regular file; raises FormatError for links, FIFOs, devices and directories."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | _OPEN
        path = self.join(name)
        try:
            with _explained("open", path):
                fd = _os.open(_component(name), flags, dir_fd=self.fd)
        except StoreIOError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise FormatError(f"{path} is not a regular file") from error
            raise
        if not stat.S_ISREG(_os.fstat(fd).st_mode):
            _os.close(fd)
            raise FormatError(f"{path} is not a regular file")
        return File(fd, path)

    def read_file(self, name: str, limit: int) -> bytes:
        """Return a whole file; raises FormatError if it is larger than `limit` bytes."""
        with self.open_file(name) as file:
            if file.size > limit:
                raise FormatError(f"{file.path} has {file.size} bytes; at most {limit} are read")
            return file.read(limit)

    def write_file(self, name: str, data: Buffer) -> None:
        """Create a file with these bytes and make them durable; the name is not yet."""
        with self.create(name) as file:
            file.write(data, 0)
            file.sync()

    def names(self) -> list[str]:
        """Names of all entries, sorted."""
        with _explained("list", self.path):
            return sorted(_os.listdir(self.fd))

    def size(self, name: str) -> int:
        """Bytes of an entry."""
        return self._status(name).st_size

    def exists(self, name: str) -> bool:
        """Whether an entry of this name exists, of whatever kind."""
        try:
            self._status(name)
        except FileNotFoundError:
            return False
        return True

    def is_directory(self, name: str) -> bool:
        """Whether the entry is a directory itself, not a link to one."""
        return stat.S_ISDIR(self._status(name).st_mode)

    def _status(self, name: str) -> os.stat_result:
        """Return the status of an entry itself, not of what a link points to."""
        with _explained("examine", self.join(name)):
            status: os.stat_result = _os.stat(
                _component(name), dir_fd=self.fd, follow_symlinks=False
            )
        return status

    def put_if_absent(self, temporary: str, name: str) -> bool:
        """Give a complete file its final name unless that is taken; return whether it was free.

        A hard link is the one file-system call that creates a name atomically and never replaces
        one. Where links are not to be had, a rename serves, which the writer's lock must protect.
        """
        with _explained("publish", self.join(name)):
            try:
                _os.link(
                    temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False
                )
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if self.exists(name):
                    return False
                _os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
                return True
            with contextlib.suppress(OSError):
                _os.unlink(temporary, dir_fd=self.fd)
        return True

    def rename(self, old: str, new: str) -> None:
        """Rename an entry, replacing a file of the new name."""
        with _explained("rename", self.join(old)):
            _os.rename(_component(old), _component(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Remove a file; one that is gone already is no error."""
        with _explained("remove", self.join(name)), contextlib.suppress(FileNotFoundError):
            _os.unlink(_component(name), dir_fd=self.fd)

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory; one that is not empty is left, and that is no error."""
        with contextlib.suppress(OSError):
            _os.rmdir(_component(name), dir_fd=self.fd)

    def sync(self) -> None:
        """Make the directory's names durable; raises CommitFailedError, which is final."""
        _sync(self.fd, self.path)

    def free_bytes(self) -> int:
        """Bytes a user may still write to this file system."""
        status = _os.fstatvfs(self.fd)
        return int(status.f_bavail * status.f_frsize)

    def close(self) -> None:
        """Close the descriptor; harmless when done twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _os.close(fd)

    def __del__(self) -> None:
        """Close a directory that an error left open."""
        with contextlib.suppress(OSError):
            self.close()

    def __enter__(self) -> Self:
        """Return the directory itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the directory."""
        self.close()


def map_files(files: Sequence[File], nbytes: int, *, advice: int) -> npt.NDArray[np.uint8]:
    """Map the first `nbytes` of each file read-only, one after another, as one array of bytes.

    More than one file needs `nbytes` to be a multiple of the page size. A file that is shorter is
    refused, since touching a page behind its end would kill the process. The mapping lives as long
    as the array or a view of it; the files may be closed.
    """
    for file in files:
        if file.size < nbytes:
            raise CorruptStoreError(
                f"{file.path} has {file.size} bytes, at least {nbytes} are expected; "
                "restore the file from a copy, or open another version"
            )
    if nbytes * len(files) == 0:
        return np.empty(0, np.uint8)
    with _explained("map", files[0].path):
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
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    address = array.ctypes.data
    for file in files:
        mapped = libc.mmap(
            address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file.fd, 0
        )
        if mapped != address:
            raise StoreIOError(f"cannot map {file.path}: {os.strerror(ctypes.get_errno())}")
        address += nbytes


def filesystem(path: str | Path) -> str:
    """Name of the file system that holds `path`, such as "ext4"; "" if it cannot be told."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as table:
        for line in table:
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    return ""


@contextlib.contextmanager
def publish(target: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Make a file or directory that appears under its name complete and durable, or not at all.

    Yields a fresh path beside `target` for the body to create. When the body ends, what it made is
    synced and moved to `target`; when it raises, it is removed. Raises ExistsError if the target
    exists and `force` is False; a target that is a symbolic link is always refused, and `force`
    replaces files only.
    """
    target = Path(os.path.abspath(target))
    with _explained("create", str(target)):
        _check_target(target, force=force)
    temporary = target.with_name(f".{target.name[:50]}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield temporary
        _sync_tree(temporary)
        with _explained("publish", str(target)), Directory.open(target.parent) as parent:
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
    with _explained("open", str(path)):
        fd = _os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _sync(fd, str(path))
    finally:
        _os.close(fd)
