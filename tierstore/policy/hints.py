"""Keep the rows that announced batches use soonest; others by another ranking.

With batches known about four turnovers of the tier ahead this comes within one to five points of
the optimum (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer",
1966).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from tierstore._rowcopy import unique
from tierstore.errors import InvalidInputError
from tierstore.policy.base import DeviceScores, PolicyLike, Rows, choose
from tierstore.policy.frequency import lfu
from tierstore.policy.ranked import NO_ROWS, Keys, RankedSpec, Ranking

__all__ = ["DueSoonest", "LookaheadSpec", "lookahead"]

_SOONEST = np.uint32(2**32 - 3)
_WINDOW = 256


@dataclass
class _Coming:
    """An announced batch: its distinct rows, ascending, and the batch that uses each one next."""

    number: int
    rows: Rows
    following: npt.NDArray[np.uint32]


class DueSoonest(Ranking):
    """Rows of announced batches, the soonest first, above all others, which `base` ranks.

    Batches are used in the order in which they were announced, each by one call or by several. A
    call belongs to the batch in use, the one that is due, or the one after, whichever it shares
    most rows with; so announcing batches that never come, or leaving some out, costs hits only.
    """

    keeps_batch = False

    def __init__(self, base: Ranking, rows: int, window: int) -> None:
        """Start with nothing announced; of more than `window` batches the oldest are given up."""
        self.base = base
        self._window = window
        self._next = np.zeros(rows, np.uint32)
        self._last = np.zeros(rows, np.uint32)
        self._coming: dict[int, _Coming] = {}
        self._in_use = NO_ROWS
        self._announced = 0

    @staticmethod
    def bytes_for(rows: int) -> int:
        """Bytes beside the base's: two batch numbers a row."""
        return 8 * rows

    @property
    def nbytes(self) -> int:
        coming = sum(batch.rows.nbytes + batch.following.nbytes for batch in self._coming.values())
        return int(self._next.nbytes + self._last.nbytes + coming + self.base.nbytes)

    def announce(self, rows: Rows) -> Rows:
        """Queue a batch behind those announced before; return the rows whose keys changed."""
        rows = unique(rows)
        self._announced += 1
        number = self._announced
        self._link(rows, number)
        self._coming[number] = _Coming(number, rows, np.zeros(rows.size, np.uint32))
        self._last[rows] = number
        unknown: Rows = rows[self._next[rows] == 0]
        self._next[unknown] = number
        if len(self._coming) <= self._window:
            return unknown
        both: Rows = np.concatenate([unknown, self._pop().rows])
        return both

    def _link(self, rows: Rows, number: int) -> None:
        """Note in the batches that used `rows` last that batch `number` uses them next."""
        before = self._last[rows]
        order = np.argsort(before, kind="stable")
        edges = np.flatnonzero(np.diff(before[order], prepend=0))
        for start, stop in pairwise([*edges.tolist(), rows.size]):
            batch = self._coming.get(int(before[order[start]]))
            if batch is not None:
                batch.following[np.searchsorted(batch.rows, rows[order[start:stop]])] = number

    def use(self, rows: Rows) -> Rows | None:
        """Take up the batch that `rows` belong to; return the rows whose keys changed."""
        changed = [NO_ROWS]
        for _ in range(self._batches_begun(rows)):
            batch = self._pop()
            self._in_use = batch.rows
            changed.append(batch.rows)
        below = self.base.use(rows)
        if below is None:
            return None
        rows_changed: Rows = np.concatenate([*changed, below])
        return rows_changed

    def _batches_begun(self, rows: Rows) -> int:
        """Return how many announced batches `rows` begin: none, the one that is due, or two."""
        if not self._coming:
            return 0
        sets = [self._in_use, *(batch.rows for batch in islice(self._coming.values(), 2))]
        return int(np.argmax([_shared(rows, members) for members in sets]))

    def _pop(self) -> _Coming:
        """Take the batch that is due; its rows are due next with a later one, or not at all."""
        batch = self._coming.pop(next(iter(self._coming)))
        due = self._next[batch.rows] == batch.number
        self._next[batch.rows[due]] = batch.following[due]
        return batch

    def keys(self, rows: Rows) -> Keys:
        """Return the keys: in the upper half for announced rows, in the lower for others."""
        due = self._next[rows]
        return np.where(due > 0, _SOONEST - due, self.base.keys(rows))

    def prime(self, counts: npt.NDArray[np.float32], start: int = 0) -> None:
        self.base.prime(counts, start)

    def admission_keys(self, rows: Rows) -> Keys:
        due = self._next[rows]
        return np.where(due > 0, _SOONEST - due, self.base.admission_keys(rows))


def _shared(rows: Rows, members: Rows) -> int:
    """Count those of `rows` that are among `members`, which ascend."""
    if not members.size:
        return 0
    places = np.minimum(np.searchsorted(members, rows), members.size - 1)
    return int(np.count_nonzero(members[places] == rows))


@dataclass(frozen=True)
class LookaheadSpec(RankedSpec):
    """Keep the rows that announced batches use soonest, the others by `on`; see `lookahead`."""

    name = "lookahead"
    looks_ahead = True
    by_table = True  # batches are announced table by table
    on: RankedSpec = field(default_factory=lfu)
    window: int = _WINDOW

    def check(self, rows: int) -> None:
        self.on.check(rows)

    def on_device(self) -> DeviceScores | None:
        """Return the scores of `on`: a GPU tier pins the rows of announced batches by itself."""
        return self.on.on_device()

    def ranking(self, rows: int, slots: int) -> Ranking:
        return DueSoonest(self.on.ranking(rows, slots), rows, self.window)

    def ranking_bytes(self, rows: int) -> int:
        """Bytes of that ranking, but for the batches that are queued."""
        return DueSoonest.bytes_for(rows) + self.on.ranking_bytes(rows)


def lookahead(on: PolicyLike = "lfu", *, window: int = _WINDOW) -> LookaheadSpec:
    """Keep the rows that announced batches (`table.prefetch`) use soonest; the others by `on`.

    Costs 8 bytes a row more than `on`, and 12 a row of each announced batch, of which `window` are
    kept. Raises InvalidInputError for a policy that ranks no rows, and for lookahead itself.
    """
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise InvalidInputError(f"the window is at least one batch, not {window}")
    fallback = choose(on)
    if fallback.looks_ahead or not isinstance(fallback, RankedSpec):
        raise InvalidInputError(
            f"lookahead needs a policy that ranks rows by their past, such as lfu(), "
            f"not {fallback.name!r}"
        )
    return LookaheadSpec(fallback, window)
