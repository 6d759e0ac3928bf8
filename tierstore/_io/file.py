"""An open file: positioned, complete reads and writes, allocation, syncs and locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tierstore._io import system
from tierstore._io.descriptor import Descriptor
from tierstore._io.system import explained, send_range, sync_descriptor, wait_for_range
from tierstore.errors import StoreIOError

__all__ = ["Buffer", "File"]

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]

_MAX_IO = 1 << 30
_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock`: type, whence, start, length, pid, which is 0 where a description has the lock."""


class File(Descriptor):
    """An open regular file of a store, read and written at positions."""

    mappable = True

    @property
    def size(self) -> int:
        """Bytes of the file now."""
        with explained("examine", self.path):
            return int(system.calls.fstat(self.fd).st_size)

    @property
    def written(self) -> int:
        """Bytes that the file takes on the disk; fewer than its size where it has holes."""
        with explained("examine", self.path):
            return 512 * int(system.calls.fstat(self.fd).st_blocks)

    @property
    def regular(self) -> bool:
        """Whether it is a file, and no pipe or device."""
        with explained("examine", self.path):
            return stat.S_ISREG(system.calls.fstat(self.fd).st_mode)

    @property
    def nameless(self) -> bool:
        """Whether the file has no name any more: it was removed, or another took its place."""
        with explained("examine", self.path):
            return int(system.calls.fstat(self.fd).st_nlink) == 0

    @property
    def inode(self) -> int:
        """Number that tells the file from others of its file system while it is open or mapped."""
        with explained("examine", self.path):
            return int(system.calls.fstat(self.fd).st_ino)

    def reopened(self, flags: int) -> File:
        """Open the file once more, whatever its name is by now; raises OSError.

        The new description has a position, flags and reported errors of its own.
        """
        fd = system.calls.open(f"/proc/self/fd/{self.fd}", flags | os.O_CLOEXEC)
        return File(fd, self.path)

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        """Return up to `nbytes` bytes from `offset`; fewer only at the end of the file."""
        parts = []
        with explained("read", self.path):
            while nbytes > 0:
                part = system.calls.pread(self.fd, min(nbytes, _MAX_IO), offset)
                if not part:
                    break
                parts.append(part)
                offset += len(part)
                nbytes -= len(part)
        return b"".join(parts)

    def read_into(self, out: npt.NDArray[np.uint8], offset: int) -> None:
        """Fill `out`, contiguous, from `offset`; raises StoreIOError where the file ends before."""
        data = self.read(out.nbytes, offset)
        if len(data) != out.nbytes:
            raise StoreIOError(f"{self.path} ends within bytes {offset} to {offset + out.nbytes}")
        out[:] = np.frombuffer(data, np.uint8)

    def is_hole(self, offset: int, nbytes: int) -> bool:
        """Whether a range is known to have no bytes on the disk, so that it reads zeros."""
        try:
            return bool(system.calls.lseek(self.fd, offset, os.SEEK_DATA) >= offset + nbytes)
        except OSError as error:
            return error.errno == errno.ENXIO

    def write(self, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`, however often the system writes less."""
        view = memoryview(cast(Any, data)).cast("B")
        self.unsynced = True
        with explained("write", self.path):
            while view.nbytes:
                count = system.calls.pwrite(self.fd, view[:_MAX_IO], offset)
                offset += count
                view = view[count:]

    def allocate(self, offset: int, nbytes: int) -> None:
        """Reserve disk space for a range, so that running out of it is an error here."""
        if nbytes <= 0:
            return
        self.unsynced = True
        with explained("allocate space for", self.path):
            try:
                system.calls.posix_fallocate(self.fd, offset, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                system.calls.ftruncate(self.fd, max(self.size, offset + nbytes))

    def truncate(self, nbytes: int) -> None:
        """Set the size of the file."""
        self.unsynced = True
        with explained("set the size of", self.path):
            system.calls.ftruncate(self.fd, nbytes)

    def sync(self) -> None:
        """Make the file's bytes and size durable; raises CommitFailedError, which is final."""
        sync_descriptor(self.fd, self.path)
        self.unsynced = False

    def advise(self, advice: int, offset: int = 0, nbytes: int = 0) -> None:
        """Tell the system how a range will be read; failing to is no error."""
        with contextlib.suppress(OSError):
            system.calls.posix_fadvise(self.fd, offset, nbytes, advice)

    def start_writing(self, offset: int, nbytes: int) -> None:
        """Have the system send a range to the disk from now on, so that a sync waits for less.

        Nothing is durable by it. Raises CommitFailedError, which is final.
        """
        send_range(self.fd, self.path, offset, nbytes)

    def write_out(self, offset: int, nbytes: int) -> None:
        """Wait until a range has gone to the disk, and let the system forget it.

        Nothing is durable by it. Raises CommitFailedError, which is final. An error is taken off a
        description of its own, so a sync of this one reports it all the same.
        """
        try:
            waiting = self.reopened(os.O_RDONLY)
        except OSError:
            return  # no descriptor or no /proc: the sync waits for all
        with waiting:
            wait_for_range(waiting.fd, self.path, offset, nbytes)
        self.advise(os.POSIX_FADV_DONTNEED, offset, nbytes)

    def lock(self, *, exclusive: bool) -> bool:
        """Take the advisory lock of the file without waiting; return whether it was free."""
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        with explained("lock", self.path):
            try:
                system.calls.flock(self.fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def unlock(self) -> None:
        """Release the advisory lock."""
        with explained("unlock", self.path):
            system.calls.flock(self.fd, fcntl.LOCK_UN)

    def lock_range(self, start: int, length: int, *, exclusive: bool) -> bool:
        """Lock a range of offsets without waiting; return whether it was free.

        The offsets need not exist. The lock belongs to the open description, not to the process;
        an exclusive one takes a descriptor that is open for writing.
        """
        kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
        try:
            self._range_lock(fcntl.F_OFD_SETLK, kind, start, length)
        except BlockingIOError:
            return False
        return True

    def unlock_range(self, start: int, length: int) -> None:
        """Release the lock on a range of offsets."""
        self._range_lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, start, length)

    def lock_within(self, start: int, length: int) -> int | None:
        """Return where a lock begins that others hold in a range, any of them; None: it is free."""
        kind, begin = self._range_lock(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start, length)
        return None if kind == fcntl.F_UNLCK else begin

    def _range_lock(self, command: int, kind: int, start: int, length: int) -> tuple[int, int]:
        """Return the kind and the start of the `struct flock` that a command leaves."""
        request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
        try:
            answer = system.calls.fcntl(self.fd, command, request)
        except BlockingIOError:
            raise
        except OSError as error:
            raise StoreIOError(f"cannot lock {self.path}: {error.strerror}") from error
        kind, _, begin, _, _ = _FLOCK.unpack(answer)
        return kind, begin
