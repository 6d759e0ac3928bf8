"""Background writes: records are queued in memory, in order, for the thread of a store.

It writes a piece of each queue in turn. A failed write stays queued: the next caller retries it and
gets the exception. An error is therefore raised where a synchronous write would raise it, and no
queued record is lost.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk.behind import Behind
from tierstore._parts import beside
from tierstore._threads import Condition

_LOG = logging.getLogger("tierstore")

_MIN_QUEUED_BYTES = 128 << 10
"""Size below which writing takes no longer than handing over to a thread."""
_PART_BYTES = 2 << 20
"""Bytes written at a time by who waits for it, while as many are copied."""
_BLOCK_BYTES = 4 << 20
"""Most bytes queued at a time: several threads copy them, and few blocks are handed over."""
_BLOCKS = 4
"""Minimum number of blocks: one is written while others are filled."""
_PATIENCE = 0.05
"""Seconds after which a waiter checks whether the thread is alive."""

Bytes = npt.NDArray[np.uint8]
Fill = Callable[[slice, Bytes], object]
"""Copies a part of the records that are put to where they are wanted."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Records `(n, record_bytes)` of `rows` `(n,)`, for distinct, ascending `positions` `(n,)`.

    `cached`: whether the written bytes stay in the page cache.
    """

    positions: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    records: Bytes
    cached: bool = True

    def find(
        self, positions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return which of `positions` the piece contains, and where."""
        near = (positions >= self.positions[0]) & (positions <= self.positions[-1])
        which = np.flatnonzero(near)
        at = np.searchsorted(self.positions, positions[which])
        here = self.positions[at] == positions[which]
        return which[here], at[here]


class WriteQueue:
    """A queue of pieces for a file, held in a few blocks of memory.

    Only one thread besides the writing one may use it at a time.
    """

    def __init__(
        self,
        write: Callable[[Piece], None],
        record_bytes: int,
        room: int,
        behind: Behind | None = None,
    ) -> None:
        """Write pieces with `write`, in order; at most `room` bytes of records are queued.

        `behind` writes them, by default a thread that ends with the queue.
        """
        self._write = write
        self._record_bytes = record_bytes
        self._behind = behind or Behind()
        self._rows = max(1, min(_BLOCK_BYTES, room // _BLOCKS) // record_bytes)
        self._block_bytes = self._rows * record_bytes + _io.direct.BLOCK
        block = self._rows * record_bytes
        self._most = room // block if block >= _MIN_QUEUED_BYTES else 0
        self._waiting: deque[tuple[Piece, Bytes]] = deque()
        self._spare: list[Bytes] = []
        self._turn: object | None = None  # for which the thread is to write, or writes
        self._changed = Condition()

    def put(
        self,
        positions: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        fill: Fill,
        *,
        cached: bool = True,
        now: bool = False,
    ) -> None:
        """Queue records, which `fill` copies part by part; wait until there is room.

        Few are written at once if none waits, and so are all with `now`, or where the room is for
        small blocks: to hand one over and back takes a few tenths of a millisecond. Raises what
        writing raises, for these records or those before; of these, some may be taken.
        """
        if now:
            self.drain()
        if not positions.size:
            return
        nbytes = positions.size * self._record_bytes
        if now or not self._most or (nbytes < _MIN_QUEUED_BYTES and not self._waiting):
            self._write_now(positions, rows, fill, cached=cached)
            return
        for start in range(0, positions.size, self._rows):
            part = slice(start, min(start + self._rows, positions.size))
            self._put(positions[part], rows[part], partial(fill, part), cached=cached)

    def _write_now(
        self,
        positions: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        fill: Fill,
        *,
        cached: bool,
    ) -> None:
        """Write records; copy each part while the one before is written, which also computes."""
        count, step = positions.size, max(1, _PART_BYTES // self._record_bytes)
        blocks = np.empty((1 + (count > step), min(step, count), self._record_bytes), np.uint8)
        part = slice(0, min(step, count))
        fill(part, blocks[0])
        for number in range(-(-count // step)):
            block = blocks[number % 2, : part.stop - part.start]
            write = partial(self._write, Piece(positions[part], rows[part], block, cached))
            part = slice(part.stop, min(part.stop + step, count))
            if part.start < count:
                spare = blocks[(number + 1) % 2, : part.stop - part.start]
                beside(write, partial(fill, part, spare))
            else:
                write()

    def _put(
        self,
        positions: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        fill: Callable[[Bytes], object],
        *,
        cached: bool,
    ) -> None:
        self.await_room()
        with self._changed:
            mine = self._take_over()
        if mine:
            self._write_waiting()
        block = self._spare.pop() if self._spare else np.empty(self._block_bytes, np.uint8)
        nbytes, offset = (self._record_bytes * int(n) for n in (positions.size, positions[0]))
        records = _io.direct.placed(block, nbytes, offset).reshape(-1, self._record_bytes)
        fill(records)
        piece = Piece(positions.copy(), rows.copy(), records, cached)
        with self._changed:
            self._waiting.append((piece, block))
            if self._idle():
                self._start()

    def await_room(self) -> None:
        """Wait until there is room for a block; other threads may do so as well."""
        with self._changed:
            if self._has_room():
                return
            begin = time.monotonic()
            self._wait_for(self._has_room)
        _LOG.debug(
            "a write waited %d ms for the disk: %d blocks of %d bytes are queued",
            round((time.monotonic() - begin) * 1000),
            self._most,
            self._block_bytes,
        )

    def find(
        self, positions: npt.NDArray[np.int64]
    ) -> Iterator[tuple[npt.NDArray[np.intp], Bytes, npt.NDArray[np.intp]]]:
        """Yield queued `positions`, their records and the indices in these; the last one counts.

        All other positions were written before the first item is yielded.
        """
        with self._changed:
            waiting = tuple(self._waiting)
        for piece, _ in waiting:
            which, at = piece.find(positions)
            if which.size:
                yield which, piece.records, at

    def drain(self) -> None:
        """Wait until everything is written, and free the memory.

        Raises the errors of writing; the data then remains queued.
        """
        if self._is_empty():
            return
        with self._changed:
            self._wait_for(self._take_over)
        self._write_waiting()  # what the thread failed to write
        self._spare.clear()

    def drop(self) -> None:
        """Discard the queue; one piece may still be written before this returns."""
        if self._is_empty():
            return
        with self._changed:
            while len(self._waiting) > 1:
                self._waiting.pop()
            self._wait_for(self._take_over)
            self._waiting.clear()
            self._spare.clear()

    def _is_empty(self) -> bool:
        """Whether the queue is empty and the thread, which only the caller asks, does nothing."""
        return self._turn is None and not (self._waiting or self._spare)

    def _has_room(self) -> bool:
        return self._idle() or len(self._waiting) < self._most

    def _idle(self) -> bool:
        return self._turn is None or not self._behind.alive

    def _take_over(self) -> bool:
        """Return whether the thread does nothing; what waits is then left to the caller.

        Called with the lock: a new thread finds that the turn of one that died is over.
        """
        if not self._idle():
            return False
        self._turn = None
        return True

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait with the lock until something is the case, or the thread has died."""
        while not ready():
            self._changed.wait(_PATIENCE)

    def _start(self) -> None:
        """Ask the thread to write; if there is none, the next caller does its work.

        Called with the lock: where it is interrupted, the thread finds that its turn is over.
        """
        turn = object()
        try:
            self._turn = turn
            asked = self._behind.ask(partial(self._work, turn))
        except BaseException:
            self._turn = None
            raise
        if not asked:
            self._turn = None

    def _work(self, turn: object) -> None:
        """Write the first that waits, in the thread, and ask for the next."""
        try:
            with self._changed:
                if self._turn is not turn:
                    return
            self._write_first()
            with self._changed:
                if self._waiting:
                    self._start()  # no caller finds it idle between two pieces
                else:
                    self._turn = None
                self._changed.notify_all()
        except BaseException:
            with self._changed:
                if self._turn is turn:
                    self._turn = None
                self._changed.notify_all()

    def _write_waiting(self) -> None:
        """Write all that waits, in the caller's thread."""
        while self._waiting:
            self._write_first()

    def _write_first(self) -> None:
        piece, block = self._waiting[0]
        self._write(piece)
        with self._changed:
            self._waiting.popleft()
            self._spare.append(block)
