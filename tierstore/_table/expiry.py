"""Which rows of a table by key expire, by the uses that it keeps of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInputError, InvalidTypeError

__all__ = ["check", "expired", "moves"]

Rows = npt.NDArray[np.int64]


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
        unused_for: versions since the last use from which on a row expires.
        fewer_than: uses below which it does.
        keep_at_most: rows that stay, those with the most uses, and of these the latest.
    """
    goes = np.zeros(len(uses), np.bool_)
    if unused_for is not None:
        goes |= version - uses[:, 1] >= unused_for
    if fewer_than is not None:
        goes |= uses[:, 0] < fewer_than
    if keep_at_most is not None:
        stays = np.flatnonzero(~goes)
        if stays.size > keep_at_most:
            order = np.lexsort((uses[stays, 1], uses[stays, 0]))
            goes[stays[order[: stays.size - keep_at_most]]] = True
    return np.flatnonzero(goes)


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
    """Return which rows move to close the gaps of those that are gone, and where each goes."""
    left = rows - gone.size
    tail = np.arange(left, rows)
    return tail[~np.isin(tail, gone, assume_unique=True)], gone[gone < left]
