"""A number for each of some rows: the slots of a cache, the places of changed rows.

By row the map is an array, four bytes for each row of the table, and looking up takes one access to
memory. Where few rows have a number it is hashed instead, in entries of twelve bytes that the core
lays out (`_core/map.h`), of which half are used at most: 24 bytes for each row that has a number.
An array takes a half to a third of the time, so it may take twice the memory. Zero stands for no
number, so that a new map needs no filling: the system provides zeroed pages when they are first
touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._core import find_slots, set_numbers

Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]
Take = Callable[[str, int, Any], npt.NDArray[Any]]
"""Hands out a named, zeroed array of a size and dtype."""

_ENTRY = np.dtype([("row", "<i8"), ("number", "<i4")])
_MOST = 2**31 - 1
_DEARER = 2
"""How many times the memory of hashed entries an array may take: writes of which four in five miss
take a sixth less processor time with it."""
_FIRST = 169
"""Rows that a map of any number of them has room for at first: their entries take a page."""
_PART = 1 << 18
"""Rows that get a number in one call, some ten milliseconds at most."""


def entries_for(numbers: int) -> int:
    """Return the entries of a hashed map in which so many rows have a number."""
    return 2 * numbers + 2


def is_hashed(rows: int, numbers: int) -> bool:
    """Whether the map of so many rows, of which at most `numbers` have one, is hashed."""
    return _DEARER * _ENTRY.itemsize * entries_for(numbers) < 4 * rows


def bytes_for(rows: int, numbers: int, *, by_row: bool = False) -> int:
    """Return the bytes of the map of so many rows, of which at most `numbers` have one."""
    if by_row or not is_hashed(rows, numbers):
        return 4 * rows
    return _ENTRY.itemsize * entries_for(numbers)


def zeros(name: str, size: int, dtype: Any) -> npt.NDArray[Any]:
    """Return a zeroed array of its own, whatever its name."""
    return np.zeros(size, dtype)


class RowMap:
    """A number from 1 to 2**31 - 1 for some rows, 0 for the others.

    Several threads may look rows up at the same time; while numbers are set, none may, unless it
    believes nothing of what it finds.

    Attributes:
        places: what the core looks numbers up in, until the next change.
    """

    def __init__(
        self, rows: int, most: int | None = None, take: Take = zeros, *, by_row: bool = False
    ) -> None:
        """Start with no number.

        Args:
            rows: of the table.
            most: rows that have a number at the same time, at most; None if any number may: then
                memory is taken as rows get one.
            take: takes the memory; its arrays are replaced by others if the map grows.
            by_row: whether the map is an array in any case, for others that read it.
        """
        self._rows, self._most, self._by_row = rows, most, by_row
        self._held = 0
        self._room = _FIRST if most is None else most
        self._hashed = not by_row and is_hashed(rows, self._room)
        self.places: npt.NDArray[Any] = (
            take("entries", entries_for(self._room), _ENTRY)
            if self._hashed
            else take("numbers", rows, np.int32)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the map as it is."""
        return self.places.nbytes

    @property
    def array(self) -> Numbers | None:
        """The numbers by row `(rows,)`; None if the map is hashed."""
        return None if self._hashed else self.places

    @property
    def numbers(self) -> Numbers:
        """The numbers of all rows that have one, among zeros, in no order; may be written to."""
        return self.places["number"] if self._hashed else self.places

    def find(self, rows: Rows) -> Numbers:
        """Return the number of each of `rows` `(n,)`, less one, as a new array."""
        numbers = np.empty(rows.size, np.int32)
        find_slots(self.places, _MOST, np.ascontiguousarray(rows), numbers)
        return numbers

    def set(self, rows: Rows, numbers: Numbers | None, *, raises: bool = False) -> None:
        """Give `rows` `(n,)` their `numbers` `(n,)`, 0 or None for none; of equal rows the last.

        Where it `raises`, rows keep a number that is larger. Raises MemoryError before anything has
        changed.
        """
        rows = np.ascontiguousarray(rows)
        if numbers is not None and self._hashed and self._held + rows.size > self._room:
            fresh = find_slots(self.places, _MOST, rows, np.empty(rows.size, np.int32))
            if self._held + fresh > self._room:
                self._move(max(self._held + fresh, self._held * 3 // 2))
        for at in range(0, rows.size, _PART):
            part = slice(at, at + _PART)
            each = None if numbers is None else numbers[part]
            self._held = set_numbers(self.places, rows[part], each, raises, self._held)

    def grow(self, rows: int) -> None:
        """Have `rows` rows instead of fewer."""
        self._rows = rows
        if self._hashed:
            return
        if self._by_row or not is_hashed(rows, self._most or self._held):
            self.places.resize(rows, refcheck=False)  # remaps large memory, copies nothing
        else:
            self._move(self._most or self._held)

    def _move(self, numbers: int) -> None:
        """Move to memory in which so many rows may have a number, of whichever kind."""
        moved, old = RowMap(self._rows, numbers, by_row=self._by_row), self.places
        for at in range(0, old.size, _PART):
            part = old[at : at + _PART]
            if self._hashed:
                part = part.compress(part["number"] != 0)
                moved.set(part["row"].copy(), part["number"].copy())
            else:
                rows = np.flatnonzero(part)
                moved.set(rows + at, part.take(rows))
        self.places, self._hashed = moved.places, moved._hashed
        self._held, self._room = moved._held, moved._room
