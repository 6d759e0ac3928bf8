"""A number for each row, in memory that is taken as rows get one.

Zero stands for no number, so that a map needs no filling: the system provides zeroed pages when
they are first touched. In a large table even that costs: rows touched at random each take a page,
of 2 MiB where the system provides huge ones. There, numbers are stored in blocks of 64 rows, in the
order in which the blocks are first used, and the numbers of blocks in the same way, in groups of 64
blocks: only the numbers of the groups, 1 MB in a table of a billion rows, are touched at random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._core import find_slots
from tierstore._rowcopy import unique

Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]
Take = Callable[[str, int, Any], npt.NDArray[Any]]
"""Hands out a named, zeroed array of a size and dtype."""

_DENSE_ROWS = 1 << 26
"""Most rows of a map without blocks, which takes less time to look up."""
_MOST = 2**31 - 1
_SHIFT = 6
_WITHIN = (1 << _SHIFT) - 1


class SparseMap:
    """An int32 for each row, which `slots_of` reads, less one.

    Attributes:
        numbers: those of the rows of block after block; the first block is of rows without any.
        nbytes: most bytes that the map can take.
    """

    def __init__(self, rows: int, take: Take) -> None:
        """Start with 0 for every row."""
        groups, blocks, numbers = _sizes(rows)
        self._groups: Numbers = take("groups", groups, np.int32)
        self._blocks: Numbers = take("blocks", blocks, np.int32)
        self.numbers: Numbers = take("numbers", numbers, np.int32)
        self.nbytes: int = self.bytes_for(rows)
        self._used_groups = self._used = 1

    @property
    def places(self) -> tuple[Numbers, Numbers, Numbers]:
        """What the core looks numbers up in, until `resize`: of groups, of blocks, of rows."""
        return self._groups, self._blocks, self.numbers

    @staticmethod
    def bytes_for(rows: int) -> int:
        """Return `nbytes` of a map of so many rows."""
        return 4 * sum(_sizes(rows))

    def resize(self, rows: int) -> None:
        """Have `rows` rows instead of fewer, in memory of its own."""
        groups, blocks, numbers = _sizes(rows)
        self._groups = _extended(self._groups, self._groups.size, groups)
        self._blocks = _extended(self._blocks, self._used_groups << _SHIFT, blocks)
        self.numbers = _extended(self.numbers, self.size, numbers)
        self.nbytes = self.bytes_for(rows)

    @property
    def size(self) -> int:
        """Elements of `numbers` that were ever set, and those of their blocks."""
        return self._used << _SHIFT

    def __setitem__(self, rows: Rows, numbers: Numbers | int) -> None:
        """Set the numbers of distinct `rows` `(n,)`."""
        self.numbers[self.reserve(rows)] = numbers

    def reserve(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Return where the numbers of `rows` are, in blocks that are used from now on."""
        return _places(self._numbered(rows >> _SHIFT), rows)

    def reserve_run(self, start: int, stop: int) -> slice | npt.NDArray[np.int64]:
        """Return where the numbers of rows `start` to `stop` are, as `reserve` does."""
        first = start >> _SHIFT
        blocks = self._numbered(np.arange(first, ((stop - 1) >> _SHIFT) + 1))
        if (blocks[1:] - blocks[:-1] == 1).all():
            begin = (int(blocks[0]) << _SHIFT) | (start & _WITHIN)
            return slice(begin, begin + stop - start)
        rows = np.arange(start, stop)
        return _places(blocks.take((rows >> _SHIFT) - first), rows)

    def _numbered(self, blocks: Rows) -> Numbers:
        """Return the numbers of `blocks` `(n,)`, which may repeat; each has one from now on."""
        groups, self._used_groups = _counted(self._groups, blocks >> _SHIFT, self._used_groups)
        found, self._used = _counted(self._blocks, _places(groups, blocks), self._used)
        return found


def _sizes(rows: int) -> tuple[int, int, int]:
    """Return the most elements of groups, blocks and numbers; 0 is the number of one of each."""
    blocks = -(-rows >> _SHIFT)
    groups = -(-blocks >> _SHIFT)
    return groups, (groups + 1) << _SHIFT, (blocks + 1) << _SHIFT


def _counted(numbers: Numbers, at: Rows, used: int) -> tuple[Numbers, int]:
    """Return the numbers at `at`, and how many are used; those without one get the next."""
    found = numbers.take(at, mode="clip")
    if not found.all():
        fresh = unique(at.compress(found == 0))
        numbers[fresh] = np.arange(used, used + fresh.size, dtype=np.int32)
        used += fresh.size
        found = numbers.take(at, mode="clip")
    return found, used


def _places(blocks: Numbers, rows: Rows) -> npt.NDArray[np.int64]:
    return (blocks.astype(np.int64) << _SHIFT) | (rows & _WITHIN)


def _extended(numbers: Numbers, used: int, size: int) -> Numbers:
    """Return the first `used` numbers and zeros after them, whose pages nothing touches."""
    found = np.zeros(size, np.int32)
    found[:used] = numbers[:used]
    return found


RowMap = Numbers | SparseMap


def slots_of(rows: Rows, numbers: RowMap) -> Numbers:
    """Return the number of each of `rows` `(n,)` less one, so -1 for none, as a new array."""
    places = numbers.places if isinstance(numbers, SparseMap) else numbers
    found = np.empty(rows.size, np.int32)
    find_slots(places, _MOST, np.ascontiguousarray(rows), found)
    return found


def zeros(name: str, size: int, dtype: Any) -> npt.NDArray[Any]:
    """Return a zeroed array of its own, whatever its name."""
    return np.zeros(size, dtype)


def row_map(rows: int, take: Take = zeros) -> RowMap:
    """Return a map of so many rows: an array, in large tables of blocks."""
    return take("numbers", rows, np.int32) if rows <= _DENSE_ROWS else SparseMap(rows, take)


def resize(numbers: RowMap, rows: int) -> None:
    """Have `rows` rows instead of fewer, the new ones without a number.

    The memory is the map's own, as that of `zeros` is, and no other thread uses the map meanwhile.
    """
    if isinstance(numbers, SparseMap):
        numbers.resize(rows)
    else:
        numbers.resize(rows, refcheck=False)  # remaps large memory, copies nothing


def bytes_for(rows: int) -> int:
    """Return the most bytes that the map of so many rows takes."""
    return 4 * rows if rows <= _DENSE_ROWS else SparseMap.bytes_for(rows)
