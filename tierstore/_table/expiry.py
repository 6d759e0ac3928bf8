"""Which rows of a table by key expire, by its record of their uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInputError, InvalidTypeError, NotExpiredWarning, warn

Rows = npt.NDArray[np.int64]
Block = tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]


class Blocks(Iterator[Block]):
    """Blocks of keys that expire with their rows; warns if it is dropped and none was taken."""

    def __init__(self, table: str, blocks: Iterator[Block]) -> None:
        """Start before the first of the blocks, after the last of which the keys are removed."""
        self._table, self._blocks, self._begun = table, blocks, False

    def __next__(self) -> Block:
        """Return the next block."""
        self._begun = True
        return next(self._blocks)

    def __del__(self) -> None:
        """Warn of a call that removes nothing; that of a loop that ends early is documented."""
        if not self._begun:
            warn(
                f"no key of table {self._table!r} expired: keys are removed once all of them were "
                "taken; write `for keys, rows in table.expire(...): ...`",
                NotExpiredWarning,
            )


def expired(
    uses: npt.NDArray[np.float64],
    version: int,
    *,
    unused_for: int | None,
    fewer_than: int | None,
    keep_at_most: int | None,
) -> Rows:
    """Return the rows that expire, ascending.

    Args:
        uses: how often each row was used, and the version that used it last, `(rows, 2)`.
        version: the present one.
        unused_for: versions since the last use after which a row expires.
        fewer_than: uses below which a row expires.
        keep_at_most: rows that stay, those with the most uses, and of these the latest.
    """
    goes = np.zeros(len(uses), np.bool_)
    if unused_for is not None:
        goes |= version - uses[:, 1] >= unused_for
    if fewer_than is not None:
        goes |= uses[:, 0] < fewer_than
    if keep_at_most is not None:
        count = int(len(uses) - np.count_nonzero(goes)) - keep_at_most
        if count > 0 and not goes.any():
            goes[_least(uses, count)] = True
        elif count > 0:
            stays = np.flatnonzero(~goes)
            goes[stays[_least(uses[stays], count)]] = True
    return np.flatnonzero(goes)


def _least(uses: npt.NDArray[np.float64], count: int) -> Rows:
    """Return so many rows, more than none, of least uses, by the first column, then the second.

    Of equal ones the first. Rows are not sorted: that takes ten times as long.
    """
    values = uses[:, 0]
    edge = np.partition(values, count - 1)[count - 1]
    found, tied = np.flatnonzero(values < edge), np.flatnonzero(values == edge)
    count -= found.size
    values = uses[tied, 1]
    edge = np.partition(values, count - 1)[count - 1]
    older, last = tied[values < edge], tied[values == edge]
    return np.concatenate([found, older, last[: count - older.size]])


def tally(uses: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], Rows]:
    """Return the distinct uses of rows `(n, 2)`, those that expire last first, and how many each.

    They are few, because numbers of uses and versions repeat.
    """
    distinct, counts = np.unique(uses, axis=0, return_counts=True)
    return distinct[::-1], counts[::-1]


def shares(tallies: Sequence[tuple[npt.NDArray[np.float64], Rows]], keep_at_most: int) -> list[int]:
    """Return how many rows of each tally stay, together `keep_at_most` or all.

    Of rows with equal uses, those of the first tallies stay.
    """
    uses = np.concatenate([each for each, _ in tallies])
    counts = np.concatenate([each for _, each in tallies])
    owners = np.repeat(np.arange(len(tallies)), [len(each) for each, _ in tallies])
    order = np.lexsort((owners, -uses[:, 1], -uses[:, 0]))
    counts, owners = counts[order], owners[order]
    before = counts.cumsum() - counts
    kept = np.minimum(counts, (keep_at_most - before).clip(0))
    return [int(each) for each in np.bincount(owners, kept, len(tallies))]


def check(**conditions: int | None) -> None:
    """Raise unless at least one condition is given, and all are whole numbers from 0 on."""
    given = {name: each for name, each in conditions.items() if each is not None}
    for name, each in given.items():
        if isinstance(each, bool) or not isinstance(each, int | np.integer):
            raise InvalidTypeError(f"{name} is a whole number, not {each!r}")
        if each < 0:
            raise InvalidInputError(f"{name} is at least 0, not {each}")
    if not given:
        raise InvalidInputError(f"give at least one of {', '.join(conditions)}")


def moves(rows: int, gone: Rows) -> tuple[Rows, Rows]:
    """Return which rows move to close the gaps of removed ones, and where each goes."""
    left = rows - gone.size
    tail = np.arange(left, rows)
    return tail[~np.isin(tail, gone, assume_unique=True)], gone[gone < left]
