"""Reads and writes past the page cache, for bytes that nobody reads soon.

Where the cache has to make room first, it costs more than the disk: in a memory cgroup that was
full, 4 MiB pieces were written four times as fast past it as through it. Only whole blocks can go
this way; what lies before and behind them goes the usual one, and so does everything where the file
system or the memory will not have it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tierstore.io import system
from tierstore.io.file import File
from tierstore.io.system import explained

__all__ = ["BLOCK", "memory_for", "placed", "read", "write"]

BLOCK = mmap.PAGESIZE
"""Offsets, sizes and addresses are multiples of this: no disk's blocks are larger than pages."""

Bytes = npt.NDArray[np.uint8]


def placed(room: Bytes, nbytes: int, offset: int) -> Bytes:
    """Return `nbytes` of `room`, which has `BLOCK` more, for what is at `offset` of a file.

    They begin as far behind a multiple of the block as the offset is.
    """
    begin = (offset - room.ctypes.data) % BLOCK
    return room[begin : begin + nbytes]


def memory_for(nbytes: int, offset: int) -> Bytes:
    """Return new memory, `(nbytes,)`, for what is, or will be, at `offset` of a file."""
    return placed(np.empty(nbytes + BLOCK, np.uint8), nbytes, offset)


def read(file: File, out: Bytes, offset: int) -> None:
    """Fill `out` `(n,)`, contiguous, with the bytes at `offset`."""
    with explained("read", file.path):
        _move(file, out, offset, file.read_into, os.O_RDONLY, _read_some)


def write(file: File, data: Bytes, offset: int) -> None:
    """Write `data` `(n,)`, contiguous, at `offset`; like other writes it is not durable by that."""
    with explained("write", file.path):
        _move(file, data, offset, file.write, os.O_WRONLY, _write_some)


def _read_some(fd: int, part: Bytes, offset: int) -> int:
    return int(system.calls.preadv(fd, [part], offset))


def _write_some(fd: int, part: Bytes, offset: int) -> int:
    return int(system.calls.pwrite(fd, part, offset))


def _move(
    file: File,
    data: Bytes,
    offset: int,
    usual: Callable[[Bytes, int], None],
    mode: int,
    some: Callable[[int, Bytes, int], int],
) -> None:
    """Read or write whole blocks by `some`, and what lies before and behind them as `usual`."""
    done = min(-offset % BLOCK, data.size)
    usual(data[:done], offset)
    if (data.ctypes.data + done) % BLOCK == 0:
        whole = data[done : data.size - (data.size - done) % BLOCK]
        done += _move_blocks(file, whole, offset + done, mode, some)
    usual(data[done:], offset + done)


def _move_blocks(
    file: File, data: Bytes, offset: int, mode: int, some: Callable[[int, Bytes, int], int]
) -> int:
    """Read or write whole blocks, and return the bytes for which that could be done."""
    if not data.size:
        return 0
    try:  # a descriptor of its own: others read and write through the cache meanwhile
        fd = system.calls.open(f"/proc/self/fd/{file.fd}", mode | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return 0
    done = 0
    try:
        while done < data.size and done % BLOCK == 0:
            count = some(fd, data[done:], offset + done)
            done += count
            if not count:
                break
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        system.calls.close(fd)
    return done
