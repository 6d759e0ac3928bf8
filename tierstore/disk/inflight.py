"""Many reads in flight from one thread, by Linux's asynchronous I/O: the most that a disk gives.

A pread waits for one block, and a thread for each of 256 blocks costs more than the disk. Here one
system call starts reads and another waits for some of them. That makes a limit to measure others
by; what is read is not looked at. The structures are those of io_submit(2) and io_getevents(2).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DEPTH", "available", "read"]

DEPTH = 256
"""Reads in flight: what a disk, or a virtual one, takes at a time."""

_AWAITED = 32
_SETUP, _DESTROY, _EVENTS, _SUBMIT = 206, 207, 208, 209
_REQUEST = np.dtype(
    {
        "names": ["opcode", "fd", "address", "nbytes", "offset"],
        "formats": ["<u2", "<i4", "<u8", "<u8", "<i8"],
        "offsets": [16, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("more", "<i8")])


def _call(number: int, *given: Any) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *given))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def available() -> bool:
    """Whether this is a machine whose system calls are known here, and which allows these."""
    if os.uname().machine != "x86_64":
        return False
    try:
        read(-1, np.empty(0, np.int64), mmap.PAGESIZE)
    except OSError:
        return False
    return True


def read(fd: int, offsets: npt.NDArray[np.int64], nbytes: int) -> None:
    """Read `nbytes` at each of `offsets` `(n,)` of a file, and drop them.

    The file is to be open with O_DIRECT, or reads wait for one another; then offsets and `nbytes`
    are multiples of its block. Raises OSError where a read fails or is short.
    """
    context = ctypes.c_ulong(0)
    _call(_SETUP, ctypes.c_uint(DEPTH), ctypes.byref(context))
    # Reads share their memory.
    buffer = np.frombuffer(mmap.mmap(-1, DEPTH * nbytes), np.uint8)
    requests = np.zeros(offsets.size, _REQUEST)
    requests["fd"] = fd
    requests["address"] = buffer.ctypes.data + np.arange(offsets.size) % DEPTH * nbytes
    requests["nbytes"] = nbytes
    requests["offset"] = offsets
    pointers = requests.ctypes.data + _REQUEST.itemsize * np.arange(offsets.size, dtype=np.uint64)
    events = np.zeros(DEPTH, _EVENT)
    started = done = 0
    try:
        while done < offsets.size:
            count = min(DEPTH - (started - done), offsets.size - started)
            first = ctypes.c_void_p(pointers.ctypes.data + pointers.itemsize * started)
            started += _call(_SUBMIT, context, ctypes.c_long(count), first) if count else 0
            least = ctypes.c_long(min(_AWAITED, started - done))
            into = ctypes.c_void_p(events.ctypes.data)
            came = _call(_EVENTS, context, least, ctypes.c_long(DEPTH), into, None)
            done += came
            if (events["result"][:came] != nbytes).any():
                raise OSError(f"a read of {nbytes} bytes gave {events['result'][:came].min()}")
    finally:
        _call(_DESTROY, context)  # waits for reads under way
