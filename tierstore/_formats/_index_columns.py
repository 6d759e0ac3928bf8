"""Columns of a text file that other tools added to number its rows, in addition to the keys.

A data frame that is saved with its index, read back and saved again has two of them in front: one
without a name, and `Unnamed: 0`. Such a column is never an element of a row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["counts_rows", "names_an_index", "note_of"]

_INDEX = re.compile(r"|unnamed: \d+(_level_\d+)?(\.\d+)?|level_\d+", re.IGNORECASE)


def names_an_index(name: str) -> bool:
    """Whether a column has a name that pandas gives to an index without a name."""
    return _INDEX.fullmatch(name) is not None


def counts_rows(cells: Sequence[str], fewest: int) -> bool:
    """Whether cells are 0, 1, 2, … or 1, 2, 3, …, for at least `fewest` rows."""
    if len(cells) < fewest:
        return False
    return any(
        all(cell.strip() == str(start + at) for at, cell in enumerate(cells)) for start in (0, 1)
    )


def note_of(columns: str, ways: str) -> str:
    """Return the note on columns that are not read, and ways to read them."""
    return f"columns not read, as they number or name the rows: {columns}{ways}"
