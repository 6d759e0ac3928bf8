"""A map from keys to rows by open addressing, of which the core finds and enters whole batches.

The key of a row is not in the map: its 64-bit *code* is in an array by row. The code of an integer
is the integer itself, that of a text a hash, so rows with equal codes may have different texts,
which are compared. A place of the map contains a row + 1, or 0 if it is empty. All probes of a key
follow from the 32 bits that its code is hashed to (`_core/keys.c`). The map does not repeat these
bits beside the row: in the same memory it has twice the places, so that nine of ten keys are at
their first place, and a key with another's place costs one more access, to the code of that row.

Places are in segments, and the probes of a key stay in one. The map grows by linear hashing (Litwin
1980): one segment after another is split into itself and a new one after the last, by one more bit
of the hash. So a batch of new keys moves about as many old ones in a map of any size, which is
never copied and never exists twice.

Keys whose first probes are all taken, because an attacker chose them, are in a dict instead: each
takes a bounded time, not the time of all earlier keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore import _core
from tierstore._keys.memory import Memory
from tierstore._keys.text import Texts
from tierstore.errors import CapacityError

Codes: TypeAlias = npt.NDArray[np.uint64]
Rows: TypeAlias = npt.NDArray[np.int64]
Places: TypeAlias = npt.NDArray[np.uint32]

_BITS = 14
"""Of a place within a segment, whose 64 KiB the caches of a core hold."""
_LEAST_BITS = 4
_LOAD = 0.15
"""Share of the places that are in use; in the segments that are split next, up to twice as much."""
_MOST_SEGMENTS = 1 << (32 - _BITS)
_MOST_ROWS = (1 << 32) - 2
_MOST_PROBES = 64
_AT_ONCE = 1 << 17
"""Keys of a call of the core: some 10 ms, for which Ctrl-C waits."""
_SHRUNK = 0.7
"""Share of the rows below which a map of the kept rows is built again, in less memory."""
_SPLIT = 16
"""Segments split at once."""


def shape_for(rows: int) -> tuple[int, int]:
    """Return the segments of a map of so many rows, and the bits of a place within each."""
    bits = max(_LEAST_BITS, min(_BITS, int(rows / (2 * _LOAD)).bit_length()))
    segments = 1 if bits < _BITS else -int(-rows // (_LOAD * (1 << _BITS)))
    return max(1, min(segments, _MOST_SEGMENTS)), bits


class HashMap:
    """A map from keys to rows, numbered in the order in which keys arrive.

    Not for several threads at once.
    """

    def __init__(self, texts: Callable[[], Texts] | None = None) -> None:
        """Start without keys.

        `texts` returns the texts by row, of which codes are the hashes; None for integers.
        """
        self._texts = texts
        self._codes = Memory()
        self._rows = self._expected = 0
        self._clear()

    def _clear(self) -> None:
        self._places = Memory(np.uint32)
        self._segments, self._bits = 1, _LEAST_BITS
        self._far: dict[Any, int] = {}

    @classmethod
    def of(cls, codes: Codes, texts: Texts | None) -> tuple[HashMap, Rows]:
        """Return a map of rows with these keys, and for each row the first that has its key.

        A key that repeats is in the map once. Keeps the arrays.
        """
        made = cls(None if texts is None else lambda: texts)
        made._codes.array, made._rows = codes, codes.size
        return made, made._built()

    @classmethod
    def restored(
        cls, places: Places, far: Rows, codes: Codes, texts: Texts | None = None
    ) -> HashMap:
        """Return a map from `places` and `far` of another one; it is only read."""
        made = cls(None if texts is None else lambda: texts)
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

    def find(self, codes: Codes, texts: Texts | None = None) -> Rows:
        """Return the row of each key of a batch, or -1 where no row has it.

        `texts` are the keys themselves where the map is of texts.
        """
        codes, rows = np.ascontiguousarray(codes), np.empty(codes.size, np.int64)
        for start in range(0, codes.size, _AT_ONCE):
            part = slice(start, min(start + _AT_ONCE, codes.size))
            _core.find_keys(*self._map(), codes[part], rows[part], *self._compared(texts, part))
        if self._far:
            for at in np.flatnonzero(rows < 0).tolist():
                rows[at] = self._far.get(_name(codes, texts, at), -1)
        return rows

    def add(self, codes: Codes) -> Rows:
        """Return the row of each key; keys that are new get the next rows, in their order.

        For codes that are keys; texts that `find` misses are given to `append`.
        """
        self.reserve(self._rows + min(self._expected, self._rows // _SPLIT))
        rows = self.find(codes)
        missing = np.flatnonzero(rows < 0)
        if missing.size:
            rows[missing] = self.append(codes[missing])
        self._expected = missing.size
        return rows

    def append(self, codes: Codes) -> Rows:
        """Give the next rows to keys, and return for each the first row that has it.

        A code that is a key and is there already gets no row; texts have rows already.
        """
        first = self._rows
        self.reserve(first + codes.size)
        self._codes.array[first : first + codes.size] = codes
        return self._entered(first, codes.size, dense=self._texts is None)

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

    def _map(self) -> tuple[Places, int, int, Codes]:
        """Return what the core takes as a map."""
        return self.places, self._bits, _MOST_PROBES, self._codes.array

    def _compared(self, texts: Texts | None, part: slice) -> tuple[npt.NDArray[Any], ...]:
        """Return the texts of rows and those of a part of a batch, as the core takes them."""
        if texts is None or self._texts is None:
            return ()
        own = self._texts()
        return own.blob, own.offsets, texts.blob, texts.offsets[part.start : part.stop + 1]

    def _built(self) -> Rows:
        """Enter all rows again; return for each the first row with its key."""
        rows, self._rows = self._rows, 0
        self._clear()
        self.reserve(rows)
        return self._entered(0, rows, dense=False)

    def _entered(self, first: int, count: int, *, dense: bool) -> Rows:
        """Enter keys whose codes stand from `first` on, and count their rows.

        Returns for each key the first row that has it. Where `dense`, a key that is there already
        takes no row.
        """
        texts = None if self._texts is None else self._texts()
        own = () if texts is None else (texts.blob, texts.offsets)
        rows, codes, at = np.empty(count, np.int64), self._codes.array, 0
        progress = np.array([0, first])
        while at < count:
            part = rows[: at + _AT_ONCE]
            at = _core.enter_keys(*self._map(), first, dense, part, progress, *own)
            if at < part.size:  # a key without a place
                row, name = int(progress[1]), _name(codes, texts, first + at)
                rows[at] = holder = self._far.setdefault(name, row)
                if dense:
                    codes[row] = codes[first + at]
                at += 1
                progress[:] = at, row + (holder == row or not dense)
        self._rows = int(progress[1])
        return rows

    def _taken_out(self, first: int, count: int) -> Places:
        """Empty some segments, and return their entries."""
        block = self._places.array[first << self._bits : (first + count) << self._bits]
        entries: Places = block[block != 0]
        block[:] = 0
        return entries

    def _put(self, entries: Places) -> None:
        """Enter rows with keys of their own in segments that are empty."""
        left = np.empty(entries.size, np.int64)
        rows = left[: _core.place_keys(*self._map(), entries, left)]
        if rows.size:
            self._far.update(zip(self._names(rows), rows.tolist(), strict=True))

    def _names(self, rows: Rows) -> list[Any]:
        """Return the keys of rows as keys of the dict."""
        texts = None if self._texts is None else self._texts()
        return [_name(self._codes.array, texts, row) for row in rows.tolist()]


def _name(codes: Codes, texts: Texts | None, at: int) -> Any:
    """Return a key as one of the dict."""
    return int(codes[at]) if texts is None else texts.encoded(at)
