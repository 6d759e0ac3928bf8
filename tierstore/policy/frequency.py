"""Rankings by how often rows are used: aged counts, and counts that are known beforehand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._rowcopy import unique
from tierstore.errors import InvalidInputError
from tierstore.policy.base import Rows
from tierstore.policy.ranked import Keys

__all__ = ["AgedFrequency", "Counts", "count_keys", "most_used"]

_NO_ROWS = np.empty(0, np.int64)
_TURNOVERS = 4
_IN_USE = np.float32(1.5)
_LARGEST = 2.0**64
_SAMPLED = 64


class AgedFrequency:
    """How often a row was used, where a use counts half after every `half_life` batches.

    A half-life of four turnovers of the tier (4 × slots ÷ distinct rows of a batch) was never below
    LRU and up to 10 points above it, on eight streams and at three sizes. Instead of ageing every
    score, each batch counts 2^(1/half-life) times as much as the one before.
    """

    keeps_batch = True

    def __init__(self, rows: int, slots: int, half_life: float | None = None) -> None:
        """Start with every score at 0; without `half_life` it follows the size of the batches."""
        self._scores = np.zeros(rows, np.float32)
        self._slots = slots
        self._half_life = half_life
        self._weight = 1.0
        self._batches = 0
        self._unique = 0.0

    @staticmethod
    def bytes_for(rows: int) -> int:
        """Bytes of the scores."""
        return 4 * rows

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        return int(self._scores.nbytes)

    @property
    def half_life(self) -> float:
        """Batches after which a use counts half."""
        if self._half_life is not None:
            return self._half_life
        return max(_TURNOVERS * self._slots / max(self._unique, 1.0), 1 / 16)

    def use(self, rows: Rows) -> Rows | None:
        """Add one use to each of `rows`, once however often it repeats."""
        self._measure(rows)
        self._scores[rows] += np.float32(self._weight)  # not add.at: a row counts once a batch
        self._weight *= 2 ** (1 / self.half_life)
        if self._weight <= _LARGEST:
            return _NO_ROWS
        self._scores /= np.float32(self._weight)
        self._weight = 1.0
        return None

    def _measure(self, rows: Rows) -> None:
        """Follow the number of distinct rows in a batch by a sample of the batches."""
        if self._half_life is None and rows.size and self._batches % _SAMPLED < 4:
            distinct = unique(rows).size
            rate = 1 / min(self._batches // _SAMPLED * 4 + self._batches % _SAMPLED + 1, 16)
            self._unique += (distinct - self._unique) * rate
        self._batches += 1

    def keys(self, rows: Rows) -> Keys:
        """Return the scores; the bits of floats that are not negative have their order."""
        return self._scores[rows].view(np.uint32)

    def bids(self, rows: Rows) -> Keys:
        """Return the scores, raised: a row in use now is likelier to be used next than they say.

        Costs up to a point of hit rate where batches are drawn at random, and wins as much where
        use is local in time; with it, this does no worse than LRU there either.
        """
        return (self._scores[rows] * _IN_USE).view(np.uint32)

    def announce(self, rows: Rows) -> Rows:
        """Do nothing."""
        return _NO_ROWS

    def prime(self, counts: npt.NDArray[np.float32]) -> None:
        """Take `counts` for scores, as though every batch had used the row of the highest."""
        top = float(counts.max(initial=0))
        if top > 0:
            self._scores[:] = counts * np.float32(self._weight * self.half_life / math.log(2) / top)


class Counts:
    """Rows ranked by counts that do not change."""

    keeps_batch = True

    def __init__(self, counts: npt.NDArray[np.float32]) -> None:
        """Take one count a row, as `count_keys` makes them."""
        self._counts = counts

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        return int(self._counts.nbytes)

    def use(self, rows: Rows) -> Rows | None:
        """Do nothing."""
        return _NO_ROWS

    def keys(self, rows: Rows) -> Keys:
        """Return the counts; the bits of floats that are not negative have their order."""
        return self._counts[rows].view(np.uint32)

    def bids(self, rows: Rows) -> Keys:
        """Return the keys."""
        return self.keys(rows)

    def announce(self, rows: Rows) -> Rows:
        """Do nothing."""
        return _NO_ROWS

    def prime(self, counts: npt.NDArray[np.float32]) -> None:
        """Do nothing: the counts were given once and for all."""


def count_keys(counts: Any, rows: int) -> npt.NDArray[np.float32]:
    """Return counts, one finite number of at least 0 a row, as float32; check that they are."""
    array = np.asarray(counts)
    if array.shape != (rows,) or array.dtype.kind not in "iuf":
        raise InvalidInputError(
            f"counts are one number a row, ({rows},), not {array.dtype} {array.shape}"
        )
    with np.errstate(over="ignore"):
        keys = array.astype(np.float32)
    if not np.isfinite(keys).all() or keys.min(initial=0) < 0:
        raise InvalidInputError("counts are finite and not negative")
    return keys + np.float32(0)  # -0.0 becomes 0.0, whose bits are 0


def most_used(counts: npt.NDArray[np.float32], most: int) -> Rows:
    """Return up to `most` rows of a count above 0, those of the highest counts, highest first."""
    most = min(most, int(np.count_nonzero(counts)))
    rows = np.argpartition(counts, -most)[-most:] if most else _NO_ROWS
    return rows[np.argsort(-counts[rows], kind="stable")].astype(np.int64)
