"""A map from keys to rows by open addressing, in which a whole batch takes each probe at once.

A place of the map contains a row + 1, or 0 if it is empty. The key of a row is not in the map: its
64-bit *code* is in an array by row. The code of an integer is the integer itself, that of a text a
hash, so that rows with equal codes may have different keys and the caller compares those. At most
half of the places are in use. The distance between the probes of a key depends on other bits of its
code than the first place, so codes that share one do not follow each other through the map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Codes", "HashMap", "Rows", "Same", "build", "capacity_for", "claim", "find"]

Codes: TypeAlias = npt.NDArray[np.uint64]
Rows: TypeAlias = npt.NDArray[np.int64]
Places: TypeAlias = npt.NDArray[Any]
Same: TypeAlias = Callable[[npt.NDArray[np.intp], Rows], npt.NDArray[np.bool_]]
"""Compares the keys at positions of a batch with those of rows that have equal codes."""

_LEAST_PLACES = 16
_MIX = [(np.uint64(30), 0xBF58476D1CE4E5B9), (np.uint64(27), 0x94D049BB133111EB)]
_STEP_BITS = np.uint64(32)
_AHEAD = 0.77
"""Share of the rows that places can take from which on those of a larger map are filled."""
_TOUCHED = 64
"""Places whose memory is provided in the time in which a row moves."""
_BLOCK = 1 << 13
"""Keys worked on at once: what they take meanwhile stays in the caches of a core."""
_FURTHER_CODES = 1 << 22
"""Most codes for which memory is taken ahead."""


def capacity_for(rows: int) -> int:
    """Return the number of places of a map for so many rows: a power of two, twice as many."""
    return max(_LEAST_PLACES, 1 << (2 * rows - 1).bit_length()) if rows else _LEAST_PLACES


def _empty(capacity: int) -> Places:
    """Return empty places, whose memory the system provides as they are filled."""
    return np.zeros(capacity, np.uint32 if capacity < 1 << 32 else np.uint64)


def _probes(codes: Codes, capacity: int) -> tuple[Rows, Codes]:
    """Return the first place of each code, and its mixed bits."""
    mixed = codes.copy()
    for shift, factor in _MIX:
        mixed ^= mixed >> shift
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return (mixed & np.uint64(capacity - 1)).view(np.int64), mixed


def _steps(mixed: Codes) -> Rows:
    """Return the odd distance between the probes of each code."""
    return ((mixed >> _STEP_BITS) | np.uint64(1)).view(np.int64)


def find(places: Places, stored: Codes, codes: Codes, same: Same | None = None) -> Rows:
    """Return the row of each key of a batch, or -1 where no row has it.

    Args:
        places: the map.
        stored: the codes of the rows.
        codes: the codes of the batch.
        same: tells keys with equal codes apart; None if equal codes are equal keys.
    """
    if not stored.size:
        return np.full(codes.size, -1, np.int64)
    at, mixed = _probes(codes, places.size)
    found, left = _probed(places, stored, codes, at, None, same)
    at, mixed, codes = at[left], mixed[left], codes[left]
    steps = _steps(mixed)
    while left.size:
        at = (at + steps) & (places.size - 1)
        found[left], on = _probed(places, stored, codes, at, left, same)
        left, at, steps, codes = left[on], at[on], steps[on], codes[on]
    return found


def _probed(
    places: Places,
    stored: Codes,
    codes: Codes,
    at: Rows,
    left: npt.NDArray[np.intp] | None,
    same: Same | None,
) -> tuple[Rows, npt.NDArray[np.intp]]:
    """Return the row of each code that is at its place, else -1, and which are to go on.

    `left` are the positions in the batch that `same` is asked about; None for all in order.
    """
    rows = places.take(at).astype(np.int64)
    rows -= 1
    other = stored.take(rows, mode="wrap") != codes
    if same is not None:
        asked = np.flatnonzero(~other & (rows >= 0))
        other[asked] = ~same(asked if left is None else left[asked], rows[asked])
    on = np.flatnonzero(other & (rows >= 0))
    np.copyto(rows, -1, where=other)
    return rows, on


def claim(
    places: Places,
    stored: Codes,
    rows: Rows,
    same: Callable[[Rows, Rows], Any] | None = None,
    *,
    known: int = 0,
) -> tuple[Rows, Rows]:
    """Enter rows, ascending, by their stored codes; the first row with a key keeps it.

    Returns for each row the one that has its key, which is itself if it was entered, and the place
    of that. `same` compares the keys of rows with those of other rows. Rows before `known` are
    known to have other keys.
    """
    codes = stored[rows]
    at, mixed = _probes(codes, places.size)
    holders, taken = rows.copy(), at.copy()
    left, on = np.arange(rows.size), _claimed(places, stored, rows, codes, at, holders, same, known)
    steps = _steps(mixed[on])
    while on.size:
        left, codes, at = left[on], codes[on], (at[on] + steps) & (places.size - 1)
        taken[left] = at
        held = holders[left]
        on = _claimed(places, stored, rows[left], codes, at, held, same, known)
        holders[left] = held
        steps = steps[on]
    return holders, taken


def _claimed(
    places: Places,
    stored: Codes,
    rows: Rows,
    codes: Codes,
    at: Rows,
    holders: Rows,
    same: Callable[[Rows, Rows], Any] | None,
    known: int,
) -> npt.NDArray[np.intp]:
    """Enter rows at places that are free; return which are to go on.

    Rows whose key a place has already get that row as holder.
    """
    held = places.take(at)
    free = np.flatnonzero(held == 0)
    if free.size:
        back = free[::-1]  # of rows that meet in a place the first takes it
        to = at.take(back)
        places[to] = rows.take(back) + 1
        held[back] = places.take(to)
    others = held.astype(np.int64)
    others -= 1
    rest = np.flatnonzero(others != rows)
    others = others.take(rest)
    equal = np.flatnonzero(others >= known)
    equal = equal[stored.take(others.take(equal)) == codes.take(rest.take(equal))]
    if same is not None:
        equal = equal[same(rows[rest[equal]], others[equal])]
    holders[rest[equal]] = others[equal]
    goes_on = np.ones(rest.size, np.bool_)
    goes_on[equal] = False
    left: Rows = rest[goes_on]
    return left


def _enter_distinct(places: Places, stored: Codes, rows: Rows) -> None:
    """Enter rows whose keys are known to differ from each other and from those that are there."""
    at, mixed = _probes(stored[rows], places.size)
    while rows.size:
        free = np.flatnonzero(places.take(at) == 0)
        places[at.take(free)] = rows.take(free) + 1
        on = np.flatnonzero(places.take(at) != rows + 1)  # of rows that meet the last takes it
        rows, mixed = rows.take(on), mixed.take(on)
        at = (at.take(on) + _steps(mixed)) & (places.size - 1)


def build(
    stored: Codes, same: Callable[[Rows, Rows], Any] | None = None
) -> tuple[Places, tuple[int, int] | None]:
    """Return a map of all rows, and the first row whose key an earlier one has, with that row."""
    places = _empty(capacity_for(stored.size))
    twice = None
    for start in range(0, stored.size, _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, stored.size))
        holders, _ = claim(places, stored, rows, same)
        if twice is None and (holders != rows).any():
            first = int(np.flatnonzero(holders != rows)[0])
            twice = int(rows[first]), int(holders[first])
    return places, twice


class HashMap:
    """A map from keys to rows, numbered in the order in which keys arrive.

    It grows by doubling. Before it is full, rows are entered in the larger map as well, some with
    each new key, so that keys are always found in one map and no batch waits for the growth. Not
    for several threads at once.

    Attributes:
        numbering: another object each time that keys lost their rows or got others.
    """

    def __init__(self, same_rows: Callable[[Rows, Rows], Any] | None = None) -> None:
        """Start without keys.

        `same_rows` compares the keys of rows with those of other rows that have equal codes; None
        if equal codes are equal keys.
        """
        self._same_rows = same_rows
        self._codes: Codes = np.empty(_LEAST_PLACES, np.uint64)
        self._rows = 0
        self._places = _empty(_LEAST_PLACES)
        self._next: Places | None = None
        self._touched = self._moved = 0
        self.numbering: object = object()

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the map and its keys take."""
        more = 0 if self._next is None else self._next.nbytes
        return self._codes.nbytes + self._places.nbytes + more

    @property
    def codes(self) -> Codes:
        """The keys by row; a copy."""
        return self._codes[: self._rows].copy()

    def codes_of(self, rows: Rows) -> Codes:
        """Return the keys of rows, which are in the map."""
        return self._codes[: self._rows][rows]

    def find(self, codes: Codes, same: Same | None = None) -> Rows:
        """Return the row of each key of a batch, or -1; see `hashmap.find`."""
        return find(self._places, self._codes[: self._rows], codes, same)

    def add(self, codes: Codes) -> Rows:
        """Return the row of each key; keys that are new get the next rows, in their order.

        For codes that are keys; where codes may be equal and keys not, `append` what `find` misses.
        """
        found = self.find(codes)
        missing = np.flatnonzero(found < 0)
        if missing.size:
            self._reserve(self._rows + missing.size)
            found[missing] = self._enter(codes[missing])
        return found

    def append(self, codes: Codes) -> Rows:
        """Give the next rows to keys that are distinct and not in the map."""
        self._reserve(self._rows + codes.size)
        return self._enter(codes)

    def reserve(self, rows: int) -> None:
        """Provide for this many keys, so that the map need not grow while they come."""
        self._reserve(rows)

    def truncate(self, rows: int) -> None:
        """Drop the keys of all rows from `rows` on."""
        self.numbering = object()
        self._rows = min(rows, self._rows)
        self._places, _ = build(self._codes[: self._rows], self._same_rows)
        self._next = None

    def keep(self, rows: Rows) -> None:
        """Keep the keys of these distinct rows alone, which are numbered in this order then."""
        self.numbering = object()
        self._codes = self._codes[: self._rows][rows]
        self._rows = rows.size
        self._places, _ = build(self._codes, self._same_rows)
        self._next = None

    def _enter(self, codes: Codes) -> Rows:
        """Give rows to keys that are not in the map, and may repeat."""
        start = self._rows
        rows = np.arange(start, start + codes.size)
        self._codes[start : start + codes.size] = codes
        holders, taken = rows.copy(), rows.copy()
        for at in range(0, rows.size, _BLOCK):
            part = slice(at, at + _BLOCK)
            holders[part], taken[part] = claim(
                self._places, self._codes, rows[part], self._same_rows, known=start
            )
        is_new = holders == rows
        count = int(is_new.sum())
        if count < codes.size:  # close the gaps in the numbers
            numbers = start - 1 + np.cumsum(is_new)
            self._codes[start : start + count] = codes[is_new]
            self._places[taken[is_new]] = numbers[is_new] + 1
            holders = numbers[holders - start]
        self._rows = start + count
        self._fill_next(count)
        return holders

    def _reserve(self, rows: int) -> None:
        """Provide places and memory for codes of this many rows."""
        if rows > self._codes.size:
            ahead = min(max(rows // 16, _LEAST_PLACES), _FURTHER_CODES)
            self._codes.resize(rows + ahead, refcheck=False)  # remaps large memory, copies nothing
        if 2 * rows > self._places.size:
            capacity = max(2 * self._places.size, capacity_for(rows))
            if self._next is None or self._next.size < capacity:
                self._next, self._touched, self._moved = _empty(capacity), capacity, 0
            self._move(self._next, self._rows - self._moved)
            self._places, self._next = self._next, None

    def _fill_next(self, count: int) -> None:
        """Do a part of the work on a larger map: all is done when this one is full.

        The system provides its memory first, and rows then move to it.
        """
        left = self._places.size // 2 - self._rows
        if left > (1 - _AHEAD) * self._places.size // 2:
            return
        if self._next is None:
            self._next, self._touched, self._moved = _empty(2 * self._places.size), 0, 0
        untouched = -(-(self._next.size - self._touched) // _TOUCHED)
        work = -(-(untouched + self._rows - self._moved) * count // max(1, left + count))
        end = self._touched + _TOUCHED * min(work, untouched)
        self._next[self._touched : end] = 0
        self._touched = min(end, self._next.size)
        self._move(self._next, min(max(0, work - untouched), self._rows - self._moved))

    def _move(self, to: Places, count: int) -> None:
        """Enter some more rows in the larger map."""
        end = self._moved + count
        for start in range(self._moved, end, _BLOCK):
            rows = np.arange(start, min(start + _BLOCK, end))
            _enter_distinct(to, self._codes, rows)
        self._moved = end
