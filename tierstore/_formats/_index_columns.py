"""Columns of a text file that other tools added to number its rows, beside the column of keys.

A data frame that is saved with its index, read back and saved again has two of them in front:
without a name, and as `Unnamed: 0`. No such column is an element of a row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["counts_rows", "names_an_index", "note_of"]

_INDEX = re.compile(r"|unnamed: \d+(_level_\d+)?(\.\d+)?|level_\d+", re.IGNORECASE)
_FEWEST = 3
"""Rows that a column without a telling name must number before it is taken to count them."""


def names_an_index(name: str) -> bool:
    """Whether a header calls a column as pandas does an index without a name of its own."""
    return _INDEX.fullmatch(name) is not None


def counts_rows(cells: Sequence[str], fewest: int = _FEWEST) -> bool:
    """Whether cells are 0, 1, 2, … or 1, 2, 3, …, for at least `fewest` rows."""
    if len(cells) < fewest:
        return False
    return any(
        all(cell.strip() == str(start + at) for at, cell in enumerate(cells)) for start in (0, 1)
    )


def note_of(columns: str) -> str:
    """Return what to say of columns that are left out."""
    return f"columns not read, as they number or name the rows: {columns}"
