"""Copies of scattered records, where they go, and the order of values."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore import _core

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.integer[Any]]
Integer = TypeVar("Integer", bound=np.integer[Any])

_BLOCK = 1 << 20
"""Values compared at a time."""
_SHORT = 1 << 32
"""Values below which four bytes hold each."""
_FEW = 512
"""Values up to which merging sorts in less time than any other way."""
_WORD = 63
"""Bits of a word to sort by, without the sign."""
_TRIED, _TRIALS = 8192, 3
"""Values sorted to find the faster way, and how often."""


def gather(records: Bytes, slots: Index, out: npt.NDArray[Any], lo: int = 0) -> None:
    """Copy bytes `lo …` of records `slots` `(n,)` into contiguous `out`, n items of any type.

    `records` is `(slots, record_bytes)` and may be mapped from a file. Raises IndexError for a slot
    that is none.
    """
    _core.gather(records, np.ascontiguousarray(slots), lo, out)


def scatter(records: Bytes, slots: Index, values: npt.NDArray[Any], lo: int = 0) -> None:
    """Copy contiguous `values`, n items of any type, to bytes `lo …` of distinct records `slots`.

    Raises IndexError for a slot that is none.
    """
    _core.scatter(records, np.ascontiguousarray(slots), lo, values)


def copy(records: Bytes, which: Any, out: Bytes) -> None:
    """Copy whole records, a slice or those at positions, into contiguous `out`."""
    if isinstance(which, slice):
        out[:] = records[which]
    else:
        gather(records, which, out)


class Target(NamedTuple):
    """Where n records go: to `records` `(n, bytes)`, or to the distinct `slots` `(n,)` of more."""

    records: Bytes
    slots: Index | None = None

    def of(self, which: slice | npt.NDArray[np.intp]) -> Target:
        """Return where some of the records go, a slice of them or those at positions."""
        if self.slots is not None:
            return Target(self.records, self.slots[which])
        if isinstance(which, slice):
            return Target(self.records[which])
        return Target(self.records, which)

    def put(self, values: Bytes) -> None:
        """Copy all n records from contiguous `values` `(n, bytes)`."""
        if self.slots is None:
            self.records[:] = values
        else:
            scatter(self.records, self.slots, values)


def call_at(
    call: Callable[[Any, Bytes], object],
    which: npt.NDArray[np.intp],
    part: Any,
    records: Bytes,
) -> None:
    """Call with records that are a part, a slice or positions, of those at positions `which`."""
    call(which[part], records)


def ascends(values: Index, *, strictly: bool = False) -> bool:
    """Whether no value of `(n,)` is less than the one before it; if `strictly`, every one is more.

    Values may be those of a damaged file: neighbours are compared, as differences could wrap.
    """
    starts = range(0, values.size, _BLOCK)
    blocks = (values[start : start + _BLOCK + 1] for start in starts)
    if strictly:
        return all(bool((each[1:] > each[:-1]).all()) for each in blocks)
    return all(bool((each[1:] >= each[:-1]).all()) for each in blocks)


def order(values: Index) -> npt.NDArray[np.intp]:
    """Return the order in which `values` `(n,)`, none negative, ascend; see `ordered`."""
    return ordered(values)[0]


def ordered(
    values: npt.NDArray[Integer],
) -> tuple[npt.NDArray[np.intp], npt.NDArray[Integer]]:
    """Return the order in which `values` `(n,)`, none negative, ascend, and the values in it.

    Equal ones stay in order.
    """
    if values.size <= _FEW:
        found = values.argsort(kind="stable")
        return found, values.take(found)
    most, bits = int(np.maximum.reduce(values)), (values.size - 1).bit_length()
    if most.bit_length() + bits < _WORD and _sorts_words():
        return _by_words(values, bits)
    found = _by_digits(values, most)
    return found, values.take(found)


def _by_words(
    values: npt.NDArray[Integer], bits: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[Integer]]:
    """Return the same of values whose place below `1 << bits` fits behind them in a word."""
    words = values.astype(np.int64)
    words <<= bits
    words |= np.arange(values.size)
    words.sort()
    places = words & ((1 << bits) - 1)
    words >>= bits
    return places.astype(np.intp, copy=False), words.astype(values.dtype, copy=False)


def _by_digits(values: Index, most: int) -> npt.NDArray[np.intp]:
    """Return the same order; NumPy sorts two bytes at a time by counting them."""
    order = values.astype(np.uint16).argsort(kind="stable")
    shift = 16
    while most >> shift:
        digits = (values >> shift).astype(np.uint16)
        order = order.take(digits.take(order).argsort(kind="stable"))
        shift += 16
    return order


@cache
def _sorts_words() -> bool:
    """Whether this machine sorts values of 64 bits faster than their digits; takes 1 ms.

    With AVX2 or Intel's AVX-512 it does, in two thirds of the time; where AVX-512 writes compressed
    vectors slowly (AMD's Zen 4, NumPy 2.4.6) in four times as much.
    """
    values = np.arange(_TRIED) * 0x9E3779B1 % (1 << 20)

    def least(way: Callable[[], object]) -> int:
        times = []
        for _ in range(_TRIALS):
            begin = time.perf_counter_ns()
            way()
            times.append(time.perf_counter_ns() - begin)
        return min(times)

    bits = (_TRIED - 1).bit_length()
    return least(lambda: _by_words(values, bits)) < least(lambda: _by_digits(values, 1 << 19))


def unique(values: npt.NDArray[Integer]) -> npt.NDArray[Integer]:
    """Return the distinct `values` `(n,)` in ascending order, as a new array.

    Since NumPy 2.3, `np.unique` hashes integers: 5 ms for 32k mostly distinct values, 850 ms for a
    million (NumPy 2.4.6). Sorting takes 0.3 ms and 14 ms. Values below 2³² are sorted as such:
    fewer bytes take less time.
    """
    if ascends(values, strictly=True):
        return values.copy()
    short = np.minimum.reduce(values) >= 0 and np.maximum.reduce(values) < _SHORT
    ascending = values.astype(np.uint32) if short else values.copy()
    ascending.sort()
    first = np.ones(ascending.size, np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return ascending.compress(first).astype(values.dtype, copy=False)


class Groups:
    """The ids of a batch grouped by row.

    Attributes:
        rows: the distinct rows `(m,)`, ascending.
        order: the positions of the ids `(n,)`, row by row, ascending within a row.
        starts: where each row's part of `order` begins, and its end, `(m + 1,)`.
    """

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        """Group ids `(n,)`; nothing refers to them afterwards."""
        count = ids.size
        by_row, ascending = ordered(ids)
        first = np.empty(count + 1, np.bool_)
        first[0] = first[count] = True
        np.not_equal(ascending[1:], ascending[:-1], out=first[1:-1])
        self.order: npt.NDArray[np.intp] = by_row
        self.starts: npt.NDArray[np.int64] = first.nonzero()[0]
        self.rows: npt.NDArray[np.int64] = ascending.take(self.starts[:-1])

    @cached_property
    def positions(self) -> npt.NDArray[np.intp]:
        """Which of the distinct rows each id `(n,)` is of."""
        numbers, repeats = np.empty(self.order.size, np.intp), self.starts[1:] - self.starts[:-1]
        numbers[self.order] = np.arange(self.rows.size).repeat(repeats)
        return numbers

    @property
    def repeats(self) -> npt.NDArray[np.int64]:
        """How many ids are of each row `(m,)`."""
        return self.starts[1:] - self.starts[:-1]
