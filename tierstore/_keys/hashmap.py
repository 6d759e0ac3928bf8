"""A map from keys to rows by open addressing, in which a whole batch makes each probe at once.

The key of a row is not in the map: its 64-bit *code* is in an array by row. The code of an integer
is the integer itself, that of a text a hash, so rows with equal codes may have different keys,
which the caller compares. A place of the map contains a row + 1, or 0 if it is empty. All probes of
a key follow from the 32 bits that its code is hashed to. The map does not repeat these bits beside
the row: in the same memory it has twice the places, so that nine of ten keys are at their first
place, and a key with another's place costs one more access, to the code of that row.

Places are in segments, and the probes of a key stay in one. The map grows by linear hashing (Litwin
1980): one segment after another is split into itself and a new one after the last, by one more bit
of the hash. So a batch of new keys moves about as many old ones in a map of any size, which is
never copied and never exists twice.

Keys whose first probes are all taken, because an attacker chose them, are in a dict instead: each
takes a bounded time, not the time of all earlier keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore._keys.memory import Memory
from tierstore._parts import in_parts
from tierstore.errors import CapacityError

__all__ = ["Codes", "HashMap", "Places", "Rows", "Same", "shape_for"]

Codes: TypeAlias = npt.NDArray[np.uint64]
Rows: TypeAlias = npt.NDArray[np.int64]
Places: TypeAlias = npt.NDArray[np.uint32]
Hashes: TypeAlias = npt.NDArray[np.uint32]
Positions: TypeAlias = npt.NDArray[np.intp]


class Same(NamedTuple):
    """Tells keys with equal codes apart: those at positions of a batch, or of rows.

    Attributes:
        equal: compares the keys at positions with those of as many rows.
        names: returns the keys at positions as keys of a dict.
    """

    equal: Callable[[Any, Rows], npt.NDArray[np.bool_]]
    names: Callable[[Any], list[Any]]


_BITS = 14
"""Of a place within a segment, whose 64 KiB the caches of a core hold."""
_LEAST_BITS = 4
_LOAD = 0.15
"""Share of the places that are in use; in the segments that are split next, up to twice as much."""
_MOST_SEGMENTS = 1 << (32 - _BITS)
_MOST_ROWS = (1 << 32) - 2
_MOST_PROBES = 64
_FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_STEP = np.uint32(0x9E3779B1)
_HALF = np.uint64(32)
_BLOCK = 1 << 15
"""Keys worked on at once: their temporary memory stays in the caches of a core."""
_CACHED = 1 << 15
"""Keys that make a probe at once."""
_FOR_A_THREAD = 1 << 14
"""Keys that pay off a thread: for fewer, two threads wait for the interpreter's lock as long as
each saves."""
_SHRUNK = 0.7
"""Share of the rows below which a map of the kept rows is built again, in less memory."""
_SPLIT = 16
"""Segments split at once, likewise."""


def shape_for(rows: int) -> tuple[int, int]:
    """Return the segments of a map of so many rows, and the bits of a place within each."""
    bits = max(_LEAST_BITS, min(_BITS, int(rows / (2 * _LOAD)).bit_length()))
    segments = 1 if bits < _BITS else -int(-rows // (_LOAD * (1 << _BITS)))
    return max(1, min(segments, _MOST_SEGMENTS)), bits


class HashMap:
    """A map from keys to rows, numbered in the order in which keys arrive.

    Not for several threads at once.
    """

    def __init__(self, same_rows: Same | None = None) -> None:
        """Start without keys.

        `same_rows` compares the keys of rows with those of other rows that have equal codes; None
        if equal codes are equal keys.
        """
        self._same_rows = same_rows
        self._codes = Memory()
        self._rows = self._expected = 0
        self._clear()

    def _clear(self) -> None:
        self._places = Memory(np.uint32)
        self._segments, self._bits = 1, _LEAST_BITS
        self._far: dict[Any, int] = {}

    @classmethod
    def of(cls, codes: Codes, same_rows: Same | None) -> tuple[HashMap, tuple[int, int] | None]:
        """Return a map of rows with these codes, and the first whose key an earlier one has.

        Also returns that earlier row; such a key is in the map once.
        """
        made = cls(same_rows)
        made._codes.array, made._rows = codes, codes.size
        holders = made._built()
        twice = np.flatnonzero(holders != np.arange(codes.size))
        return made, (int(twice[0]), int(holders[twice[0]])) if twice.size else None

    @classmethod
    def restored(
        cls, places: Places, far: Rows, codes: Codes, same_rows: Same | None = None
    ) -> HashMap:
        """Return a map from `places` and `far` of another one; it is only read."""
        made = cls(same_rows)
        made._codes.array, made._rows = codes, codes.size
        made._places.array = places
        made._segments, made._bits = shape_for(codes.size)
        made._far = dict(zip(made._names(far), far.tolist(), strict=True))
        return made

    @property
    def places(self) -> Places:
        """The places in use."""
        return self._places.array[: self._segments << self._bits]

    @property
    def far(self) -> Rows:
        """The rows that are in no place."""
        return np.fromiter(self._far.values(), np.int64, len(self._far))

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the map and its keys take; a rough guess for those in a dict."""
        return 4 * (self._segments << self._bits) + 8 * self._rows + 200 * len(self._far)

    @property
    def codes(self) -> Codes:
        """The keys by row, in memory of the map until it changes."""
        return self._codes.array[: self._rows]

    def codes_of(self, rows: Rows) -> Codes:
        """Return the keys of rows that are in the map."""
        return self._codes.array[: self._rows][rows]

    def find(self, codes: Codes, same: Same | None = None) -> Rows:
        """Return the row of each key of a batch, or -1 where no row has it.

        `same` tells keys with equal codes apart; None if equal codes are equal keys.
        """
        return self._find(codes, same)

    def add(self, codes: Codes) -> Rows:
        """Return the row of each key; keys that are new get the next rows, in their order.

        For codes that are keys; if different keys may have equal codes, `append` the keys that
        `find` misses.
        """
        self.reserve(self._rows + min(self._expected, self._rows // _SPLIT))
        hashes, ends = np.empty(codes.size, np.uint32), np.empty(codes.size, np.int64)
        found = self._find(codes, None, hashes, ends)
        missing = np.flatnonzero(found < 0)
        if missing.size:
            codes, hashes, ends = codes[missing], hashes[missing], ends[missing]
            found[missing] = self._enter(codes, hashes, self._rows, ends)
        self._expected = missing.size
        return found

    def append(self, codes: Codes, *, known: bool = True) -> Rows:
        """Give the next rows to keys, of which one may repeat and gets one row.

        With `known`, none of them is in the map; otherwise a key in the map keeps its row.
        """
        return self._enter(codes, _hashed(codes), self._rows if known else 0)

    def reserve(self, rows: int) -> None:
        """Provide for this many keys, so that the map need not grow while they come."""
        if rows > _MOST_ROWS:
            raise CapacityError(
                f"a table by key holds at most {_MOST_ROWS} keys, and these would be {rows}: make "
                "it in partitions, or several tables"
            )
        self._codes.reserve(rows)
        segments, bits = shape_for(rows)
        self._places.reserve(segments << bits)
        if not self._rows:
            self._segments, self._bits = max((self._segments, self._bits), (segments, bits))
        if bits > self._bits:  # within the first segment
            entries = self._taken_out(0, 1)
            self._bits = bits
            self._put(entries)
        while self._segments < segments:
            half = 1 << (self._segments.bit_length() - 1)
            first = self._segments - half  # splits into itself and the one after the last
            count = min(segments - self._segments, half - first, _SPLIT)
            entries = self._taken_out(first, count)
            self._segments += count
            self._put(entries)

    def truncate(self, rows: int) -> None:
        """Drop the keys of all rows from `rows` on."""
        self._rows = min(rows, self._rows)
        self._built()

    def keep(self, rows: Rows) -> None:
        """Keep only the keys of these distinct rows, and number them in this order."""
        if rows.size < _SHRUNK * self._rows:
            codes, self._codes = self.codes_of(rows), Memory()
            self._codes.reserve(codes.size)
            self._codes.array[: codes.size] = codes
            self._rows = rows.size
            self._built()
            return
        numbers = np.arange(self._rows + 1, dtype=np.uint32)  # by row + 1 the new row + 1, or 0
        numbers[rows.size + 1 :] = 0
        others = np.flatnonzero(rows != np.arange(rows.size))  # few stay under another number
        sources = rows.take(others)
        numbers[others + 1] = 0
        numbers[sources + 1] = others + 1
        self._codes.array[others] = self._codes.array.take(sources)
        self._rows = rows.size
        far = [(name, int(numbers[row + 1])) for name, row in self._far.items()]
        self._far = {name: number - 1 for name, number in far if number}
        for first in range(0, self._segments, _SPLIT):
            entries = self._taken_out(first, min(_SPLIT, self._segments - first))
            kept = numbers.take(entries, mode="clip")
            self._put(kept[kept > 0])

    # -- finding

    def _find(
        self,
        codes: Codes,
        same: Same | None,
        hashes: Hashes | None = None,
        ends: Rows | None = None,
    ) -> Rows:
        """Return the row of each key or -1.

        `hashes` get those of the keys, and `ends` the places where probing for each ended.
        """
        found = np.empty(codes.size, np.int64)

        def find(part: slice) -> None:
            for start in range(part.start, part.stop, _CACHED):
                here = slice(start, min(start + _CACHED, part.stop))
                own = _hashed(codes[here])
                at = self._homes(own)
                if hashes is not None:
                    hashes[here] = own
                if ends is not None:
                    ends[here] = at
                found[here], on = self._probed(codes[here], at, same, start)
                self._find_others(on + start, own.take(on), at.take(on), codes, same, ends, found)

        in_parts(find, codes.size, codes.size, least=_FOR_A_THREAD)
        if self._far:
            lost = np.flatnonzero(found < 0)
            names = codes[lost].tolist() if same is None else same.names(lost)
            found[lost] = [self._far.get(name, -1) for name in names]
        return found

    def _find_others(
        self,
        left: Positions,
        hashes: Hashes,
        at: Rows,
        codes: Codes,
        same: Same | None,
        ends: Rows | None,
        found: Rows,
    ) -> None:
        """Probe again for keys at `left` of a batch, until each is found or at an empty place.

        `hashes` and the places `at` of the probes before are those of these keys.
        """
        steps, own = self._steps(hashes), codes.take(left)
        for _ in range(_MOST_PROBES - 1):
            if not left.size:
                break
            at = self._next(at, steps)
            found[left], on = self._probed(own, at, same, left)
            if ends is not None:
                ends[left] = at
            left, own, at, steps = left.take(on), own.take(on), at.take(on), steps.take(on)
        found[left] = -1

    def _probed(
        self, codes: Codes, at: Rows, same: Same | None, position: int | Positions
    ) -> tuple[Rows, Positions]:
        """Return the row at the place of each code, -1 if there is none, and which are to go on.

        Those are the ones of other keys. `position` is that of each key in its batch, or of the
        first of keys that follow it.
        """
        held = self._places.array.take(at, mode="clip")
        found = held.astype(np.int64)
        found -= 1
        is_taken = held != 0
        goes_on = is_taken & (self._codes.array.take(found, mode="clip") != codes)
        if same is not None:
            asked = np.flatnonzero(is_taken & ~goes_on)
            where = position + asked if isinstance(position, int) else position[asked]
            goes_on[asked] = ~same.equal(where, found[asked])
        return found, goes_on.nonzero()[0]

    # -- entering

    def _enter(self, codes: Codes, hashes: Hashes, known: int, ends: Rows | None = None) -> Rows:
        """Give rows to keys that may repeat; rows before `known` have other keys.

        `ends` are the places where probing for them ended.
        """
        start, shape = self._rows, (self._segments, self._bits)
        self.reserve(start + codes.size)
        self._codes.array[start : start + codes.size] = codes
        rows = np.arange(start, start + codes.size)
        if ends is None or shape != (self._segments, self._bits):
            holders, taken = self._claimed(rows, hashes, known)
        else:
            holders, taken = self._claimed_at(ends, rows, hashes, known)
        is_new = holders == rows
        count = int(is_new.sum())
        self._rows = start + count
        if count < codes.size:  # close the gaps in the numbers
            numbers = start - 1 + np.cumsum(is_new)
            self._codes.array[start : self._rows] = codes[is_new]
            placed = np.flatnonzero(is_new & (taken >= 0))
            self._places.array[taken[placed]] = numbers[placed] + 1
            for name, row in self._far.items():
                if row >= start:
                    self._far[name] = int(numbers[row - start])
            again = holders >= start
            holders[again] = numbers[holders[again] - start]
        return holders

    def _built(self) -> Rows:
        """Enter all rows again; return for each the first row with its key."""
        rows, self._rows = self._rows, 0
        self._clear()
        self.reserve(rows)
        self._rows = rows
        holders = np.empty(rows, np.int64)
        for start in range(0, rows, _BLOCK):
            part = slice(start, min(start + _BLOCK, rows))
            hashes = _hashed(self._codes.array[part])
            holders[part], _ = self._claim(np.arange(part.start, part.stop), hashes, 0)
        return holders

    def _claimed(self, rows: Rows, hashes: Hashes, known: int) -> tuple[Rows, Rows]:
        """Enter rows, ascending; the first row with a key keeps it.

        Returns for each row the one that has its key, which is itself if it was entered, and the
        place of that, or -1 for one in the dict. Rows before `known` have other keys.
        """
        holders, taken = np.empty((2, rows.size), np.int64)
        for start in range(0, rows.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            holders[part], taken[part] = self._claim(rows[part], hashes[part], known)
        return holders, taken

    def _claimed_at(self, ends: Rows, rows: Rows, hashes: Hashes, known: int) -> tuple[Rows, Rows]:
        """Enter rows like `_claimed`, given the place where probing ended, usually free."""
        places, entries = self._places.array, _entries(rows)
        free = np.flatnonzero(places.take(ends, mode="clip") == 0)[::-1]
        to = ends.take(free)
        places[to] = entries.take(free)  # of rows that meet in a place the first takes it
        left = np.flatnonzero(places.take(ends, mode="clip") != entries)
        holders, taken = rows.copy(), ends.copy()
        for start in range(0, left.size, _BLOCK):
            block = left[start : start + _BLOCK]
            holders[block], taken[block] = self._claim(rows[block], hashes[block], known)
        return holders, taken

    def _claim(self, rows: Rows, hashes: Hashes, known: int) -> tuple[Rows, Rows]:
        """Enter a block of rows as `_claimed` does."""
        places, entries, left = self._places.array, _entries(rows), np.arange(rows.size)
        holders, taken = rows.copy(), np.full(rows.size, -1, np.int64)
        at = self._homes(hashes)
        for _ in range(_MOST_PROBES):
            held = places.take(at, mode="clip")
            free = np.flatnonzero(held == 0)
            if free.size:
                back = free[::-1]  # of rows that meet in a place the first takes it
                to = at.take(back)
                places[to] = entries.take(back)
                held[back] = places.take(to)
            is_mine = held == entries
            taken[left[is_mine]] = at[is_mine]
            on = np.flatnonzero(~is_mine)
            if on.size:
                on = self._without_repeats(on, held, rows, left, holders, known)
            left = left.take(on)
            if not left.size:
                break
            entries, hashes = entries.take(on), hashes.take(on)
            at = self._next(at.take(on), self._steps(hashes))
        for number, name in zip(left.tolist(), self._names(rows[left]), strict=True):
            holders[number] = self._far.setdefault(name, int(rows[number]))
        return holders, taken

    def _without_repeats(
        self,
        on: Positions,
        held: Places,
        rows: Rows,
        left: Positions,
        holders: Rows,
        known: int,
    ) -> Positions:
        """Return which of the remaining keys are distinct; note the holders of the others."""
        others = held.take(on).astype(np.int64) - 1
        alike = np.flatnonzero(others >= known)
        if not alike.size:
            return on
        theirs, mine = others[alike], rows[left[on[alike]]]
        codes = self._codes.array
        equal = codes[theirs] == codes[mine]
        if self._same_rows is not None:
            asked = np.flatnonzero(equal)
            equal[asked] = self._same_rows.equal(mine[asked], theirs[asked])
        holders[left[on[alike[equal]]]] = theirs[equal]
        left_over: Positions = np.delete(on, alike[equal])
        return left_over

    def _taken_out(self, first: int, count: int) -> Places:
        """Empty some segments, and return their entries."""
        block = self._places.array[first << self._bits : (first + count) << self._bits]
        entries: Places = block[block != 0]
        block[:] = 0
        return entries

    def _put(self, entries: Places) -> None:
        """Enter rows with keys of their own in segments that are empty."""
        places = self._places.array
        hashes = _hashed(self._codes.array.take(entries.astype(np.int64) - 1, mode="clip"))
        at = self._homes(hashes)
        places[at] = entries
        for _ in range(_MOST_PROBES - 1):
            on = np.flatnonzero(places.take(at, mode="clip") != entries)
            if not on.size:
                return
            entries, hashes = entries.take(on), hashes.take(on)
            at = self._next(at.take(on), self._steps(hashes))
            free = np.flatnonzero(places.take(at, mode="clip") == 0)
            places[at.take(free)] = entries.take(free)
        on = np.flatnonzero(places.take(at, mode="clip") != entries)
        rows = entries[on].astype(np.int64) - 1
        self._far.update(zip(self._names(rows), rows.tolist(), strict=True))

    def _names(self, rows: Rows) -> list[Any]:
        """Return the keys of rows as keys of the dict."""
        if self._same_rows is not None:
            return self._same_rows.names(rows)
        names: list[int] = self._codes.array[rows].tolist()
        return names

    # -- probes

    def _homes(self, hashes: Hashes) -> Rows:
        """Return the first place of each key."""
        within = hashes >> np.uint32(32 - self._bits)
        if self._segments == 1:
            return within.astype(np.int64)
        every = 1 << (self._segments - 1).bit_length()
        at = hashes & np.uint32(every - 1)
        if self._segments < every:  # the last ones are not split yet
            at -= (at >= self._segments) * np.uint32(every >> 1)
        at <<= np.uint32(self._bits)
        at |= within
        return at.astype(np.int64)

    def _steps(self, hashes: Hashes) -> Hashes:
        """Return the odd distance between the places of each key."""
        return (hashes * _STEP >> np.uint32(32 - self._bits)) | np.uint32(1)

    def _next(self, at: Rows, steps: Hashes) -> Rows:
        """Return the next place of each key, in the same segment."""
        last = (1 << self._bits) - 1
        return (at & ~last) | ((at + steps) & last)


def _hashed(codes: Codes) -> Hashes:
    """Return 32 well mixed bits of each code."""
    mixed = codes * _FACTORS[0]
    mixed ^= mixed >> _HALF
    mixed *= _FACTORS[1]
    mixed >>= _HALF
    hashes: Hashes = mixed.astype(np.uint32)
    return hashes


def _entries(rows: Rows) -> Places:
    """Return the contents of the places of rows."""
    return (rows + 1).astype(np.uint32)
