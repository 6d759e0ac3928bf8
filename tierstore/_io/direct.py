"""Direct I/O: bypasses the page cache for bytes that are not read again soon.

A full page cache costs more than the disk: in a full memory cgroup, direct writes of 4 MiB were
four times as fast as buffered writes. Direct I/O transfers only whole blocks. The bytes before and
after them use buffered I/O, as does everything if the file system or the memory does not support
direct I/O.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from tierstore._io import system
from tierstore._io.file import File
from tierstore._io.system import explained

BLOCK = mmap.PAGESIZE
"""Alignment of offsets, sizes and addresses: disk blocks are not larger than pages."""

_GAP = 12 << 10
"""Bytes that are read in the time of one more request."""
_GATHERED_BYTES = 8 << 20
_READERS = 8
"""Threads that read scattered blocks, because a disk serves many reads in the time of one."""

Bytes = npt.NDArray[np.uint8]


def placed(room: Bytes, nbytes: int, offset: int) -> Bytes:
    """Return `nbytes` of `room`, which has `BLOCK` extra bytes, aligned like `offset` of a file."""
    begin = (offset - room.ctypes.data) % BLOCK
    return room[begin : begin + nbytes]


def memory_for(nbytes: int, offset: int) -> Bytes:
    """Return new memory `(nbytes,)`, aligned like `offset` of a file."""
    return placed(np.empty(nbytes + BLOCK, np.uint8), nbytes, offset)


def read(file: File, out: Bytes, offset: int) -> None:
    """Fill `out` `(n,)`, contiguous, with the bytes at `offset`."""
    with explained("read", file.path):
        _move(file, out, offset, file.read_into, os.O_RDONLY, _read_some)


def write(file: File, data: Bytes, offset: int) -> None:
    """Write contiguous `data` `(n,)` at `offset`; a sync must still make it durable."""
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
    """Transfer whole blocks with `some`, and the bytes before and after them with `usual`."""
    done = min(-offset % BLOCK, data.size)
    usual(data[:done], offset)
    if (data.ctypes.data + done) % BLOCK == 0:
        whole = data[done : data.size - (data.size - done) % BLOCK]
        done += _move_blocks(file, whole, offset + done, mode, some)
    usual(data[done:], offset + done)


def _move_blocks(
    file: File, data: Bytes, offset: int, mode: int, some: Callable[[int, Bytes, int], int]
) -> int:
    """Read or write whole blocks; return the number of bytes transferred."""
    if not data.size:
        return 0
    try:  # a separate description: others use the cache meanwhile
        way = file.reopened(mode | os.O_DIRECT)
    except OSError:
        return 0
    if mode == os.O_WRONLY:
        way.unsynced = file.unsynced = True
    done = 0
    with way:
        try:
            while done < data.size and done % BLOCK == 0:
                count = some(way.fd, data[done:], offset + done)
                done += count
                if not count:
                    break
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return done


def gather(file: File, offsets: npt.NDArray[np.int64], out: Bytes) -> None:
    """Fill `out` `(n, nbytes)` with the bytes at each of ascending `offsets` `(n,)`.

    If the file system allows it, the bytes are read from the disk regardless of the page cache, in
    whole blocks. Raises StoreIOError if the file is too short.
    """
    with explained("read", file.path), contextlib.ExitStack() as stack:
        fd = -1
        with contextlib.suppress(OSError):
            fd = stack.enter_context(file.reopened(os.O_RDONLY | os.O_DIRECT)).fd
        _gather(file, fd, offsets, out)


def _gather(file: File, fd: int, offsets: npt.NDArray[np.int64], out: Bytes) -> None:
    ends = offsets + out.shape[1]
    begins = offsets // BLOCK * BLOCK
    apart = np.ones(offsets.size, np.bool_)
    apart[1:] = begins[1:] > _block_ends(ends[:-1]) + _GAP
    first = np.flatnonzero(apart)  # of the rows that share blocks
    starts, stops = begins[first], ends[np.append(first[1:], offsets.size) - 1]
    places = np.cumsum(np.append(0, _block_ends(stops) - starts))
    if places[-1] > _GATHERED_BYTES and offsets.size > 1:
        half = offsets.size // 2
        _gather(file, fd, offsets[:half], out[:half])
        _gather(file, fd, offsets[half:], out[half:])
        return
    memory = memory_for(int(places[-1]), 0)

    def read_every(step: int, begin: int) -> None:
        for number in range(begin, starts.size, step):
            part = memory[places[number] : places[number + 1]]
            _read_blocks(file, fd, part, int(starts[number]), int(stops[number] - starts[number]))

    _in_turns(read_every, min(_READERS, starts.size))
    group = np.cumsum(apart) - 1
    windows = np.lib.stride_tricks.sliding_window_view(memory, out.shape[1])
    out[:] = windows[places[group] + offsets - starts[group]]


def _block_ends(ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return -(-ends // BLOCK) * BLOCK


def _in_turns(work: Callable[[int, int], None], count: int) -> None:
    """Divide the work among `count` threads, or do it here if no thread can be started."""
    if count > 1:
        with contextlib.suppress(RuntimeError), ThreadPoolExecutor(count) as pool:
            list(pool.map(work, [count] * count, range(count)))
            return
    work(1, 0)


def _read_blocks(file: File, fd: int, out: Bytes, offset: int, nbytes: int) -> None:
    """Read whole blocks from the disk; at least `nbytes` bytes must exist."""
    done = 0
    try:
        while fd >= 0 and done < nbytes and done % BLOCK == 0:
            count = _read_some(fd, out[done:], offset + done)
            if not count:
                break
            done += count
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    if done < nbytes:
        file.advise(os.POSIX_FADV_DONTNEED, offset, out.nbytes)
        file.read_into(out[done:nbytes], offset + done)
