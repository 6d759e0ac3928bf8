"""Open files: positioned, complete reads and writes, allocation, syncs, locks and mappings.

Mappings are read-only, have a checked size and keep no descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import weakref
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from tierstore._io import system
from tierstore._io.system import (
    explained,
    filesystem_of,
    raise_explained,
    send_range,
    sync_descriptor,
    wait_for_range,
)
from tierstore.errors import CorruptStoreError, StoreIOError

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]

_MAX_IO = 1 << 30
_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock`: type, whence, start, length, pid (0 if a description holds the lock)."""


class Descriptor:
    """An open file or directory, closed by the `with` statement that uses it.

    Attributes:
        fd: the descriptor; -1 once it is closed.
        path: its name in messages.
        unsynced: whether something was written that no sync has made durable yet.
    """

    fd: int = -1  # on the class too, for an instance whose __init__ failed
    unsynced: bool = False
    _locked_by = 0
    """The process that took a lock through this description, if any did."""

    def __init__(self, fd: int, path: str) -> None:
        """Take ownership of the descriptor `fd`; `path` is for messages."""
        self.fd = fd
        self.path = path

    @contextlib.contextmanager
    def use(self) -> Iterator[Self]:
        """Yield the file, which is already open, unlike a held one."""
        yield self

    @property
    def identity(self) -> tuple[int, int]:
        """The numbers of device and inode, which tell it from others while it is open."""
        try:
            status = system.calls.fstat(self.fd)
        except OSError as error:
            raise_explained(error, "examine", self.path)
        return int(status.st_dev), int(status.st_ino)

    @cached_property
    def device(self) -> int:
        """Number of the device it is on."""
        return self.identity[0]

    def close(self) -> None:
        """Close the descriptor; may be called again. The process that locked it unlocks it first.

        A forked child may have the same description open, and its locks would last as long.

        The system closes it even if it reports an error. An error counts only if written data was
        not synced; it raises StoreIOError or StoreFullError.
        """
        try:
            if self.fd >= 0 and self._locked_by == os.getpid():
                self._unlock_all()
        finally:
            self._release()

    def _release(self) -> None:
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        try:
            system.calls.close(fd)
        except OSError as error:
            if self.unsynced:
                raise_explained(error, "write", self.path)

    def _unlock_all(self) -> None:
        with contextlib.suppress(OSError):  # closing it unlocks it too
            self.unlock_range(0, 0)
            system.calls.flock(self.fd, fcntl.LOCK_UN)
            self._locked_by = 0

    def lock_range(self, start: int, length: int, *, exclusive: bool) -> bool:
        """Try to lock a range of offsets; return whether it was free.

        The offsets need not exist. The lock belongs to the open description, not to the process; an
        exclusive lock requires a descriptor that is open for writing.
        """
        kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
        self._locked_by = os.getpid()
        try:
            self._range_lock(fcntl.F_OFD_SETLK, kind, start, length)
        except BlockingIOError:
            return False
        return True

    def unlock_range(self, start: int, length: int) -> None:
        """Release the lock on a range of offsets."""
        self._range_lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, start, length)

    def lock_within(self, start: int, length: int) -> int | None:
        """Return the start of any lock that others hold in a range, or None if it is free."""
        kind, begin = self._range_lock(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start, length)
        return None if kind == fcntl.F_UNLCK else begin

    def _range_lock(self, command: int, kind: int, start: int, length: int) -> tuple[int, int]:
        """Return the type and start from the `struct flock` that a command fills in."""
        request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
        try:
            answer = system.calls.fcntl(self.fd, command, request)
        except BlockingIOError:
            raise
        except OSError as error:
            raise StoreIOError(f"cannot lock {self.path}: {error.strerror}") from error
        kind, _, begin, _, _ = _FLOCK.unpack(answer)
        return kind, begin

    def discard(self) -> None:
        """Close the descriptor and ignore errors of unsynced data."""
        self.unsynced = False
        self.close()

    def __del__(self) -> None:
        """Close a descriptor that an error left open."""
        if self.fd >= 0:
            self.discard()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the file; an error of the body takes precedence over one of closing."""
        if error is not None:
            self.unsynced = False
        self.close()


class Mappings:
    """Mappings that end together."""

    def __init__(self) -> None:
        """Start with none."""
        self._places: weakref.WeakKeyDictionary[system.Reserved, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, reserved: system.Reserved, address: int, nbytes: int) -> None:
        """Note a mapping, which is forgotten with its last view."""
        self._places[reserved] = address, nbytes

    def end(self) -> None:
        """Unmap the files; nothing may be read from a view of one any more."""
        places, self._places = self._places, weakref.WeakKeyDictionary()
        for address, nbytes in places.values():
            with contextlib.suppress(OSError):  # it ends with the last view
                system.calls.unmap_file(address, nbytes)


class File(Descriptor):
    """An open regular file of a store, with positioned reads and writes."""

    mappable = True
    scope: Mappings | None = None
    """Where its mappings are noted."""

    @property
    def locked(self) -> bool:
        """Whether locks taken through it are held; in a forked child, those of the parent are."""
        return self._locked_by != 0 and (self.fd >= 0 or self._locked_by != os.getpid())

    def status(self) -> os.stat_result:
        """Return the current status of the file."""
        try:
            status: os.stat_result = system.calls.fstat(self.fd)
        except OSError as error:
            raise_explained(error, "examine", self.path)
        return status

    @property
    def size(self) -> int:
        """Current size of the file in bytes."""
        return int(self.status().st_size)

    @property
    def written(self) -> int:
        """Bytes allocated on the disk; fewer than the size if the file has holes."""
        return 512 * int(self.status().st_blocks)

    @property
    def regular(self) -> bool:
        """Whether it is a regular file, not a pipe or device."""
        return stat.S_ISREG(self.status().st_mode)

    @property
    def nameless(self) -> bool:
        """Whether the file no longer has a name: it was removed or replaced."""
        return int(self.status().st_nlink) == 0

    @property
    def inode(self) -> int:
        """Number that identifies the file in its file system while it is open or mapped."""
        return int(self.status().st_ino)

    def reopened(self, flags: int) -> File:
        """Open the file again, regardless of its current name; raises OSError.

        The new description has its own position, flags and reported errors.
        """
        fd = system.calls.open(f"/proc/self/fd/{self.fd}", flags | os.O_CLOEXEC)
        return File(fd, self.path)

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        """Return up to `nbytes` bytes from `offset`; fewer only at the end of the file."""
        parts = []
        try:
            while nbytes > 0:
                part = system.calls.pread(self.fd, min(nbytes, _MAX_IO), offset)
                if not part:
                    break
                parts.append(part)
                offset += len(part)
                nbytes -= len(part)
        except OSError as error:
            raise_explained(error, "read", self.path)
        return b"".join(parts)

    def read_some(self, out: memoryview, offset: int) -> int:
        """Fill the start of `out` from `offset`; return how many bytes, 0 at the end."""
        try:
            return int(system.calls.preadv(self.fd, [out], offset))
        except OSError as error:
            raise_explained(error, "read", self.path)

    def read_into(self, out: npt.NDArray[np.uint8], offset: int) -> None:
        """Fill contiguous `out` from `offset`; raises StoreIOError if the file is too short."""
        data = self.read(out.nbytes, offset)
        if len(data) != out.nbytes:
            raise StoreIOError(f"{self.path} ends within bytes {offset} to {offset + out.nbytes}")
        out[:] = np.frombuffer(data, np.uint8)

    def is_hole(self, offset: int, nbytes: int) -> bool:
        """Whether a range is known to be a hole, which reads as zeros."""
        try:
            return bool(system.calls.lseek(self.fd, offset, os.SEEK_DATA) >= offset + nbytes)
        except OSError as error:
            return error.errno == errno.ENXIO

    def write(self, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`, repeating partial writes."""
        view = memoryview(cast(Any, data)).cast("B")
        self.unsynced = True
        try:
            while view.nbytes:
                count = system.calls.pwrite(self.fd, view[:_MAX_IO], offset)
                offset += count
                view = view[count:]
        except OSError as error:
            raise_explained(error, "write", self.path)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Reserve disk space for a range, so that a full disk raises here."""
        if nbytes <= 0:
            return
        self.unsynced = True
        try:
            system.calls.posix_fallocate(self.fd, offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise_explained(error, "allocate", self.path)
            with explained("allocate", self.path):
                system.calls.ftruncate(self.fd, max(self.size, offset + nbytes))

    def truncate(self, nbytes: int) -> None:
        """Set the size of the file."""
        self.unsynced = True
        try:
            system.calls.ftruncate(self.fd, nbytes)
        except OSError as error:
            raise_explained(error, "set the size of", self.path)

    def sync(self) -> None:
        """Make the file's bytes and size durable; raises CommitFailedError, which is final."""
        sync_descriptor(self.fd, self.path)
        self.unsynced: bool = False

    def advise(self, advice: int, offset: int = 0, nbytes: int = 0) -> None:
        """Advise the system how a range will be read; ignore errors."""
        with contextlib.suppress(OSError):
            system.calls.posix_fadvise(self.fd, offset, nbytes, advice)

    def start_writing(self, offset: int, nbytes: int) -> None:
        """Start writing a range to the disk, so that a later sync waits for less.

        This makes nothing durable. Raises CommitFailedError, which is final.
        """
        send_range(self.fd, self.path, offset, nbytes)

    def write_out(self, offset: int, nbytes: int) -> None:
        """Wait until a range was written to the disk, and drop it from the page cache.

        This makes nothing durable. Raises CommitFailedError, which is final. Errors are consumed
        from a separate description, so a sync of this one still reports them.
        """
        try:
            waiting = self.reopened(os.O_RDONLY)
        except OSError:
            return  # no descriptor or no /proc: the sync waits for all
        with waiting:
            wait_for_range(waiting.fd, self.path, offset, nbytes)
        self.advise(os.POSIX_FADV_DONTNEED, offset, nbytes)

    def lock(self, *, exclusive: bool) -> bool:
        """Try to take the advisory lock of the file; return whether it was free."""
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        self._locked_by = os.getpid()
        with explained("lock", self.path):
            try:
                system.calls.flock(self.fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


def map_files(
    files: Iterable[File], nbytes: int, *, count: int = 1, advice: int, lasting: bool = False
) -> npt.NDArray[np.uint8]:
    """Map the first `nbytes` of each of `count` files read-only, as one contiguous byte array.

    With more than one file, `nbytes` must be a multiple of the page size. A shorter file is
    refused, since touching a page after its end would kill the process. The mapping exists as long
    as the array or a view of it, but unless it is `lasting`, only until `Directory.end_mappings`.
    Each file may be closed once the next is requested. Objects cannot be mapped and are read into
    memory.
    """
    array = np.empty(0, np.uint8)
    parts = []
    for number, file in enumerate(files):
        if file.size < nbytes:
            raise CorruptStoreError(
                f"{file.path} has {file.size} bytes instead of at least {nbytes}; "
                "restore the file from a copy, or open another version"
            )
        if not file.mappable:
            parts.append(file.read(nbytes))
        elif nbytes:
            if number == 0:
                array = _reserved(nbytes * count, file, lasting=lasting)
            _map_over(array.ctypes.data + number * nbytes, file, nbytes)
    if array.size:
        if array.size <= mmap.PAGESIZE:
            return array
        with contextlib.suppress(OSError):  # only advice
            system.calls.madvise(array.ctypes.data, array.size, advice)
        return array
    return np.frombuffer(b"".join(parts), np.uint8)


def let_go(array: npt.NDArray[np.uint8]) -> None:
    """Drop the pages of a part of a mapping from the memory of this process.

    They stay in the page cache. The last page stays if the part ends within it. Does nothing for an
    array that is not from `map_files`, or of objects: its contents would be lost.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    owner = owner.obj if isinstance(owner, memoryview) else owner
    if not isinstance(owner, system.Reserved):
        return
    page = mmap.PAGESIZE
    begin = array.ctypes.data // page * page
    end = (array.ctypes.data + array.nbytes) // page * page
    if end > begin:
        with contextlib.suppress(OSError):  # only advice
            system.calls.madvise(begin, end - begin, mmap.MADV_DONTNEED)


def _reserved(nbytes: int, file: File, *, lasting: bool) -> npt.NDArray[np.uint8]:
    try:
        reserved = system.calls.reserve(nbytes)
    except OSError as error:
        raise_explained(error, "map", file.path)
    array = np.frombuffer(reserved, np.uint8)
    if file.scope is not None and not lasting:
        file.scope.add(reserved, array.ctypes.data, nbytes)
    return array


def _map_over(address: int, file: File, nbytes: int) -> None:
    """Map a file over its part of a reserved range, whose mapping remains the owner.

    Python's `mmap` keeps a descriptor per file. This keeps none, so the number of deltas of a store
    is not limited by descriptors.
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
