"""Row numbers of a table by key, which are not to be taken for keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierstore.errors import InvalidTypeError


class RowNumbers(np.ndarray[Any, np.dtype[np.int64]]):
    """Numbers of rows of a table by key, int64, which calls that take keys refuse.

    A number is a key to them otherwise, and another row is read or written without a word. Slices
    and choices of it are row numbers too; `np.asarray` makes plain integers of them.
    """


def refuse_row_numbers(keys: object) -> None:
    """Raise InvalidTypeError for row numbers in place of keys."""
    if isinstance(keys, RowNumbers):
        raise InvalidTypeError(
            "these are row numbers, which this call would take for keys: table.by_row reads and "
            "writes rows by number, and table.keys_of(rows) returns their keys"
        )
