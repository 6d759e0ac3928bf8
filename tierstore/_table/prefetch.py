"""Bring rows nearer before they are used, off the caller's thread."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tierstore import _rowcopy
from tierstore._door import Door, Errand
from tierstore._threads import Condition, Worker
from tierstore.errors import TierStoreError

_LOG = logging.getLogger("tierstore")

_MOST_PENDING = 64
_PATIENCE = 0.05
"""Seconds after which a waiter checks whether the thread is alive."""
_LINGER = 1.0
"""Seconds for which the thread waits for another request before it ends."""

Advice = Callable[[], object]
"""Announces pages to a disk; may wait for it; must not be called after their files are closed."""

Rows = npt.NDArray[np.int64]
Request = tuple[Rows, Callable[[Rows], Advice | None], Callable[[Rows], object]]


class Prefetcher:
    """One thread that works through requests in order; excess requests are dropped.

    A dropped request costs speed, never correctness: the rows are read when they are used. For the
    same reason an error is dropped too; the read that needs the row meets it again.
    """

    def __init__(self, door: Door) -> None:
        """Start nothing: there is a thread while there are requests, and a little longer."""
        self._door = door
        self._waiting: deque[Request] = deque()
        self._changed = Condition()
        self._worker: Worker | None = None
        self._busy = False
        self._closed = False
        self._advising = threading.Lock()

    def submit(
        self,
        rows: Rows,
        look: Callable[[Rows], Advice | None],
        fetch: Callable[[Rows], object],
    ) -> None:
        """Call `look` and then `fetch` soon with the distinct `rows`; return at once.

        `look` is called inside the store, `fetch` enters it itself. The rows are sorted before, and
        the advice that `look` returns is called in between, outside the store: other threads
        continue meanwhile. If too many requests wait, or no thread can be started, this request is
        dropped.
        """
        with self._changed:
            if self._closed:
                return
            full = len(self._waiting) >= _MOST_PENDING
            if not full:
                self._waiting.append((rows, look, fetch))
                self._changed.notify()
                if self._worker is None or not self._worker.alive:
                    self._start()
        if full:
            _LOG.debug("a prefetch of %d rows is dropped: %d others wait", rows.size, _MOST_PENDING)

    def _start(self) -> None:
        self._busy = False
        try:
            self._worker = Worker(self._work, "prefetch rows")
        except (TierStoreError, MemoryError):
            self._waiting.clear()

    def wait_for_advice(self) -> None:
        """Wait for advice under way; within a use of the store no other begins.

        Code that closes files calls this first. It needs nothing that the thread could be waiting
        for.
        """
        with self._advising:  # an interrupt leaves it free, too
            pass

    def wait(self) -> None:
        """Wait until every request so far is done; not from within a use of the store."""
        with self._changed:
            while (self._waiting or self._busy) and self._worker is not None and self._worker.alive:
                self._changed.wait(_PATIENCE)

    def close(self) -> None:
        """Drop waiting requests and take no more; the thread ends by itself."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while (request := self._next()) is not None:
            rows, look, fetch = request
            with contextlib.suppress(Exception):
                rows = _rowcopy.unique(rows)
                self._take(lambda: look(rows))  # noqa: B023 - called at once
                fetch(rows)
            del request, look, fetch  # which hold a table

    def _next(self) -> Request | None:
        """Return the next request, or None where this thread is to end."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            if not self._waiting and not self._closed:
                self._changed.wait(_LINGER)
            if not self._waiting:
                self._worker = None  # in the same moment, so that no request waits for nothing
                return None
            self._busy = True
            return self._waiting.popleft()

    def _take(self, look: Callable[[], Advice | None]) -> None:
        with contextlib.ExitStack() as stack:
            with Errand(self._door):
                advice = look()
                if advice is None:
                    return
                stack.enter_context(self._advising)
            advice()
