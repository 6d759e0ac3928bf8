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

__all__ = ["memory_for", "read", "write"]

_BLOCK = mmap.PAGESIZE
"""Offsets, sizes and addresses are multiples of this: no disk's blocks are larger than pages."""

Bytes = npt.NDArray[np.uint8]


def memory_for(nbytes: int, offset: int) -> Bytes:
    """Return new memory, `(nbytes,)`, for what is, or will be, at `offset` of a file.

    Its address is as far behind a multiple of the block as the offset is.
    """
    room = np.empty(nbytes + _BLOCK, np.uint8)
    shift = (offset - room.ctypes.data) % _BLOCK
    return room[shift : shift + nbytes]


def read(file: File, out: Bytes, offset: int) -> None:
    """Fill `out` `(n,)`, contiguous, with the bytes at `offset`."""
    head, body = _split(out, offset)
    file.read_into(out[:head], offset)
    with explained("read", file.path):
        head += _move(file, os.O_RDONLY, _read_some, out[head : head + body], offset + head)
    file.read_into(out[head:], offset + head)


def write(file: File, data: Bytes, offset: int) -> None:
    """Write `data` `(n,)`, contiguous, at `offset`; like other writes it is not durable by that."""
    head, body = _split(data, offset)
    file.write(data[:head], offset)
    with explained("write", file.path):
        head += _move(file, os.O_WRONLY, _write_some, data[head : head + body], offset + head)
    file.write(data[head:], offset + head)


def _split(data: Bytes, offset: int) -> tuple[int, int]:
    """Return how many bytes come before the first whole block, and how many are in whole ones."""
    head = min(-offset % _BLOCK, data.size)
    if (data.ctypes.data + head) % _BLOCK:
        return 0, 0
    return head, (data.size - head) // _BLOCK * _BLOCK


def _read_some(fd: int, part: Bytes, offset: int) -> int:
    return int(system.calls.preadv(fd, [part], offset))


def _write_some(fd: int, part: Bytes, offset: int) -> int:
    return int(system.calls.pwrite(fd, part, offset))


def _move(
    file: File, mode: int, some: Callable[[int, Bytes, int], int], data: Bytes, offset: int
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
        while done < data.size and done % _BLOCK == 0:
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
