"""Memory of a growing map, without copies, and without waits for the system's pages.

The system provides a page when it is first touched, zeroed, which takes milliseconds for one of
2 MiB where it has none. A map uses its array from the first element to the last, so a thread
touches the pages that come next, by reading zeros into them.
"""

from __future__ import annotations

import contextlib
import io
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._threads import Worker
from tierstore.errors import StoreIOError

_LAZY_BYTES = 1 << 22
"""Bytes from which on the system provides memory as it is touched."""
_ROOM = 2
"""Multiple of the memory that is reserved as addresses, which are free, so that it seldom moves."""
_PAGE = 1 << 21
"""Bytes of a huge page."""
_AHEAD = 2 * _PAGE, 32 * _PAGE
"""The least and the most bytes provided before they are used; between these, an eighth of the used
bytes."""


class Memory:
    """An array of zeros that grows without being copied, and takes memory as it is touched."""

    def __init__(self, dtype: type[np.unsignedinteger[Any]] = np.uint64) -> None:
        """Start with a few elements."""
        self.array: npt.NDArray[Any] = np.zeros(16, dtype)
        self._map: mmap.mmap | None = None
        self._provider: _Provider | None = None
        self._provided = 0

    def reserve(self, size: int) -> None:
        """Provide at least so many elements, before they are written.

        Raises MemoryError.
        """
        if size > self.array.size:
            self._grow(max(size, 2 * self.array.size))
        if self._map is not None:
            self._provide(self.array.itemsize * size)

    def _grow(self, size: int) -> None:
        nbytes = self.array.itemsize * size
        if nbytes >= _LAZY_BYTES:
            self._map_more(_ROOM * nbytes)
        else:
            before, self.array = self.array, np.zeros(size, self.array.dtype)
            self.array[: before.size] = before

    def _map_more(self, nbytes: int) -> None:
        self._end_provider()
        nbytes = -(-nbytes // _PAGE) * _PAGE  # so that whole pages move if it moves
        before, mapped = self.array, self._map
        if mapped is not None:
            self.array = before = np.empty(0, before.dtype)  # a view keeps the memory where it is
            with contextlib.suppress(BufferError, OSError, SystemError):
                mapped.resize(nbytes)
            self.array = before = np.frombuffer(mapped, before.dtype)
            if before.nbytes >= nbytes:
                return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._map = mmap.mmap(-1, nbytes, flags=flags)
        except OSError as error:
            raise MemoryError(f"no memory for {nbytes} bytes of a map of keys: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # where the system has none
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(self._map, before.dtype)
        self.array[: before.size] = before
        self._provided = 0

    def _provide(self, used: int) -> None:
        """Provide pages after the first `used` bytes, before few are left."""
        least, most = _AHEAD
        ahead = max(least, min(used // 8, most))
        provider = self._provider
        if provider is not None and provider.done >= used and not provider.ended:
            return
        self._end_provider()  # a late one has no pages left to touch before a batch uses them
        begin = max(self._provided, -(-used // _PAGE) * _PAGE)
        stop = min(begin + ahead, self.array.nbytes)
        if self._map is not None and begin - used < ahead // 2 and begin < stop:
            with contextlib.suppress(StoreIOError):  # no thread can be started
                self._provider = _Provider(self._map, begin, stop)

    def _end_provider(self) -> None:
        if self._provider is not None:
            self._provided = self._provider.end()
            self._provider = None


class _Provider:
    """A thread that touches pages of a mapping.

    Attributes:
        done: the bytes up to which pages are touched.
    """

    def __init__(self, mapped: mmap.mmap, begin: int, stop: int) -> None:
        """Start with bytes `begin:stop` of zeros."""
        self.done = begin
        self._mapped = mapped
        self._stop = stop
        self._is_over = False
        self._worker = Worker(self._run, "provide memory")

    @property
    def ended(self) -> bool:
        """Whether it has finished."""
        return self._worker.ended

    def end(self) -> int:
        """Stop it after its present page, and wait for that; return `done`."""
        self._is_over = True
        self._worker.join()
        return self.done

    def _run(self) -> None:
        with (
            contextlib.suppress(OSError),  # otherwise pages come as a batch touches them
            io.FileIO("/dev/zero") as zeros,
            memoryview(self._mapped) as memory,
        ):
            while self.done < self._stop and not self._is_over:
                with memory[self.done : self.done + _PAGE] as page:
                    zeros.readinto(page)
                self.done += _PAGE
