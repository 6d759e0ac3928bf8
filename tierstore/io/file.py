"""An open file: positioned, complete reads and writes, allocation, syncs and locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tierstore.errors import StoreIOError
from tierstore.io import system
from tierstore.io.descriptor import Descriptor
from tierstore.io.system import explained, libc, sync_descriptor

__all__ = ["Buffer", "File"]

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]

_MAX_IO = 1 << 30
_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock`: type, whence, start, length, pid, which is 0 where a description has the lock."""
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_WAIT = 7
"""Wait for what is being written, write the rest, and wait for that."""


class File(Descriptor):
    """An open regular file of a store, read and written at positions."""

    mappable = True

    @property
    def size(self) -> int:
        """Bytes of the file now."""
        with explained("examine", self.path):
            return int(system.calls.fstat(self.fd).st_size)

    @property
    def nameless(self) -> bool:
        """Whether the file has no name any more: it was removed, or another took its place."""
        with explained("examine", self.path):
            return int(system.calls.fstat(self.fd).st_nlink) == 0

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
        with explained("write", self.path):
            while view.nbytes:
                count = system.calls.pwrite(self.fd, view[:_MAX_IO], offset)
                offset += count
                view = view[count:]

    def allocate(self, offset: int, nbytes: int) -> None:
        """Reserve disk space for a range, so that running out of it is an error here."""
        if nbytes <= 0:
            return
        with explained("allocate space for", self.path):
            try:
                system.calls.posix_fallocate(self.fd, offset, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                system.calls.ftruncate(self.fd, max(self.size, offset + nbytes))

    def truncate(self, nbytes: int) -> None:
        """Set the size of the file."""
        with explained("set the size of", self.path):
            system.calls.ftruncate(self.fd, nbytes)

    def sync(self) -> None:
        """Make the file's bytes and size durable; raises CommitFailedError, which is final."""
        sync_descriptor(self.fd, self.path)

    def advise(self, advice: int, offset: int = 0, nbytes: int = 0) -> None:
        """Tell the system how a range will be read; failing to is no error."""
        with contextlib.suppress(OSError):
            system.calls.posix_fadvise(self.fd, offset, nbytes, advice)

    def start_writing(self, offset: int, nbytes: int) -> None:
        """Have the system send a range to the disk from now on; advice, nothing is durable by it.

        A sync then has less to wait for.
        """
        libc().sync_file_range(self.fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)

    def write_out(self, offset: int, nbytes: int) -> None:
        """Wait until a range has gone to the disk, and let the system forget it.

        Advice: nothing is durable by it.
        """
        libc().sync_file_range(self.fd, offset, nbytes, _SYNC_FILE_RANGE_WAIT)
        self.advise(os.POSIX_FADV_DONTNEED, offset, nbytes)

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
            kind, _, begin, _, _ = _FLOCK.unpack(fcntl.fcntl(self.fd, command, request))
        except BlockingIOError:
            raise
        except OSError as error:
            raise StoreIOError(f"cannot lock {self.path}: {error.strerror}") from error
        return kind, begin
