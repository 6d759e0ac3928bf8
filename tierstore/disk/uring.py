"""Many reads in flight from one thread: io_uring, whose queues NumPy fills and empties.

A pread waits for one block; a thread for each of 256 blocks costs more than the disk. Here a whole
batch of requests is written to a ring that the kernel shares, and one system call starts some and
waits for others. Containers often forbid io_uring: then `Ring` raises OSError.

The layout of the shared memory is that of io_uring_setup(2), Linux 5.6 and newer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DEPTH", "Ring", "available"]

DEPTH = 256
"""Reads in flight: what a disk, or a virtual one, takes at a time."""

_REAPED = 32
_SETUP, _ENTER = 425, 426
_WAIT_FOR_EVENTS = 1
_READ = 22
_SINGLE_MAP = 1
_ENTRIES_AT = 0x10000000
_REQUEST = np.dtype(
    {
        "names": ["opcode", "fd", "offset", "address", "length", "number"],
        "formats": ["u1", "<i4", "<u8", "<u8", "<u4", "<u8"],
        "offsets": [0, 4, 8, 16, 24, 32],
        "itemsize": 64,
    }
)
_COMPLETION = np.dtype([("number", "<u8"), ("result", "<i4"), ("flags", "<u4")])

Offsets = npt.NDArray[np.int64]
Completed = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int32]], int]

_NO_NUMBERS = np.empty(0, np.int64)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def _call(number: int, *given: Any) -> int:
    result = int(_libc().syscall(ctypes.c_long(number), *given))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@cache
def available() -> bool:
    """Whether this system lets this process use io_uring."""
    try:
        Ring().close()
    except (OSError, ValueError):
        return False
    return True


class Ring:
    """A queue of reads. Not for several threads, nor for a forked child."""

    def __init__(self) -> None:
        """Set the queues up. Raises OSError where the kernel cannot, or will not."""
        parameters = np.zeros(30, np.uint32)
        self._fd = _call(_SETUP, ctypes.c_uint(DEPTH), ctypes.c_void_p(parameters.ctypes.data))
        try:
            self._map(parameters)
        except BaseException:
            os.close(self._fd)
            raise

    def _map(self, parameters: npt.NDArray[np.uint32]) -> None:
        """Map what the kernel shares; the parameters say where everything is."""
        entries, completions, features = (int(parameters[at]) for at in (0, 1, 5))
        if not features & _SINGLE_MAP:
            raise OSError("io_uring of Linux 5.4 and newer is needed")
        submission, completion = parameters[10:20].tolist(), parameters[20:30].tolist()
        nbytes = max(submission[6] + 4 * entries, completion[5] + 16 * completions)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        queues = np.frombuffer(mmap.mmap(self._fd, nbytes, flags), np.uint8)
        requests = mmap.mmap(self._fd, 64 * entries, flags, offset=_ENTRIES_AT)

        def word(at: int, count: int = 1) -> npt.NDArray[np.uint32]:
            return queues[at : at + 4 * count].view(np.uint32)

        self._head, self._tail = word(submission[0]), word(submission[1])
        self._mask = int(word(submission[2])[0])
        word(submission[6], entries)[:] = np.arange(entries)
        self._requests = np.frombuffer(requests, _REQUEST)
        self._requests["opcode"] = _READ
        self._done_head, self._done_tail = word(completion[0]), word(completion[1])
        self._done_mask = int(word(completion[2])[0])
        at = completion[5]
        self._done = queues[at : at + 16 * completions].view(_COMPLETION)

    def read(
        self,
        fds: int | npt.NDArray[np.int32],
        offsets: Offsets,
        lengths: npt.NDArray[np.int64],
        addresses: npt.NDArray[np.int64],
        *,
        completed: Completed | None = None,
    ) -> npt.NDArray[np.int32]:
        """Read `lengths` bytes at `offsets` of `fds` to memory at `addresses`, all `(n,)`.

        Returns the bytes read of each, or its error number negated; a read may be short. Where
        given, `completed` is called with the numbers of requests that are done, and their results,
        and returns how many of all may be started; it may wait. All memory belongs to the kernel
        until this returns, but that of requests that are done.
        """
        total = offsets.size
        results = np.zeros(total, np.int32)
        allowed = total if completed is None else completed(_NO_NUMBERS, results[:0])
        started = done = 0
        try:
            while done < total:
                count = min(DEPTH - (started - done), allowed - started)
                chosen = slice(started, started + count)
                fd = fds if isinstance(fds, int) else fds[chosen]
                self._start(fd, offsets[chosen], lengths[chosen], addresses[chosen], started)
                started += count
                self._enter(count, min(_REAPED, started - done))
                numbers = self._finished(results)
                done += numbers.size
                if completed is not None:
                    allowed = completed(numbers, results[numbers])
        except BaseException:
            started -= self._withdraw()
            while done < started:  # their memory must not go before they are over
                self._enter(0, 1)
                done += self._finished(results).size
            raise
        return results

    def _start(
        self,
        fd: Any,
        offsets: Offsets,
        lengths: npt.NDArray[np.int64],
        addresses: npt.NDArray[np.int64],
        number: int,
    ) -> None:
        """Write requests to the queue, numbered from `number`."""
        tail = int(self._tail[0])
        places = (tail + np.arange(offsets.size)) & self._mask
        requests = self._requests
        requests["fd"][places] = fd
        requests["offset"][places] = offsets
        requests["length"][places] = lengths
        requests["address"][places] = addresses
        requests["number"][places] = np.arange(number, number + offsets.size)
        self._tail[0] = (tail + offsets.size) & 0xFFFFFFFF

    def _withdraw(self) -> int:
        """Take back the requests that the kernel has not seen; return their number."""
        head, tail = int(self._head[0]), int(self._tail[0])
        self._tail[0] = head
        return (tail - head) & 0xFFFFFFFF

    def _enter(self, count: int, wait: int) -> None:
        """Start `count` requests and wait until `wait` are done."""
        while True:
            try:
                started = _call(
                    _ENTER,
                    ctypes.c_uint(self._fd),
                    ctypes.c_uint(count),
                    ctypes.c_uint(wait),
                    ctypes.c_uint(_WAIT_FOR_EVENTS),
                    ctypes.c_void_p(None),
                    ctypes.c_size_t(0),
                )
            except InterruptedError:
                continue
            if started >= count:
                return
            count -= started

    def _finished(self, results: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Take what is done off the queue; return the requests' numbers."""
        head, tail = int(self._done_head[0]), int(self._done_tail[0])
        places = (head + np.arange((tail - head) & 0xFFFFFFFF)) & self._done_mask
        done = self._done[places]
        numbers: npt.NDArray[np.int64] = done["number"].astype(np.int64)
        results[numbers] = done["result"]
        self._done_head[0] = tail
        return numbers

    def close(self) -> None:
        """Give the queues back; harmless when repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
