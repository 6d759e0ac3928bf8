"""The numbers of a block of text, parsed and written by pyarrow where it is installed.

It parses the same numbers as Python, to the last bit, and many times faster. The plain reader
parses what pyarrow might read in another way: quotes, texts for numbers, infinities, rows of other
lengths.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._formats._cells import BLANKS, line_edges, only_keys_are_quoted
from tierstore._formats._layout import Layout

MIN_BYTES = 1 << 18
"""Blocks that are smaller are parsed before pyarrow is imported."""
_MAX_COLUMNS = 4096
"""A column costs pyarrow some kilobytes, even an empty one."""
_TRIES = 4
_MANTISSA = 23
"""Bits of a float32 below its exponent."""
_NEAR = 2.0**-15
"""How far a float64 below 2**35 may be from the number that it is the nearest to, and more."""
_AT_ONCE = 1 << 13
"""Values whose float64 stay in a cache."""
_EXPONENTS = np.arange(-127, 129)
# Nine digits and one more, as a number and its neighbour may differ in their first place.
_POWERS = 10.0 ** (9 - np.floor(_EXPONENTS * np.log10(2)))
_POWERS[[0, -1]] = 0  # of zero, and of what is no number
_HALVES = 2.0 ** (_EXPONENTS - _MANTISSA - 1) * _POWERS


@cache
def _installed() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


class BlockParser:
    """Parses blocks of rows of one layout, or returns None."""

    def __init__(self, layout: Layout, *, blank_null: bool) -> None:
        """Parse rows of `layout`; `blank_null` is true if some texts mean NaN."""
        self._layout = layout
        self._able = layout.columns <= _MAX_COLUMNS and not blank_null and layout.vector is None
        self._tried = 0
        self._failed = 0

    def __call__(self, block: bytes) -> npt.NDArray[np.float64] | None:
        """Return the numbers of a block of whole lines `(n, dim)`; None for the plain reader."""
        table = self._parsed(block)
        if table is None:
            return None
        numbers = np.empty((table.num_columns, table.num_rows))
        for column, into in zip(table.columns, numbers, strict=True):
            # Its to_numpy imports pandas, which takes longer than most files.
            np.concatenate([np.from_dlpack(part) for part in column.chunks], out=into)
        if np.isfinite(numbers).all():
            return numbers.T
        self._failed += 1
        return None

    def _is_plain(self, block: bytes, quoted: bool) -> bool:
        if self._layout.sep == BLANKS:
            return b"\t" not in block and ord(" ") not in line_edges(block)[0]
        return not quoted or only_keys_are_quoted(block, self._layout.sep)

    def _parsed(self, block: bytes) -> Any:
        """Return the numbers of a block as a table of pyarrow, or None."""
        if not self._able or len(block) < MIN_BYTES or not _installed():
            return None
        if 2 * self._failed > self._tried + _TRIES:
            return None
        self._tried += 1
        quoted = self._layout.sep != BLANKS and b'"' in block  # between blanks it is a character
        parsed = self._table(block, quoted) if self._is_plain(block, quoted) else None
        self._failed += parsed is None
        return parsed

    def _table(self, block: bytes, quoted: bool) -> Any:
        import pyarrow
        import pyarrow.csv

        layout = self._layout
        if b"\r" in block:
            block = block.replace(b"\r\n", b"\n")
            if b"\r" in block:
                return None
        if layout.sep == BLANKS and ord(" ") in line_edges(block)[1]:
            block = re.sub(rb" +\n", b"\n", block)
        names = [str(at) for at in range(layout.columns)]
        chosen = [names[at] for at in layout.values]
        try:
            return pyarrow.csv.read_csv(
                _copied(block),
                pyarrow.csv.ReadOptions(column_names=names, use_threads=False),
                pyarrow.csv.ParseOptions(delimiter=layout.sep, quote_char='"' if quoted else False),
                pyarrow.csv.ConvertOptions(
                    column_types=dict.fromkeys(chosen, pyarrow.float64()),
                    include_columns=chosen,
                    null_values=[],
                    decimal_point=layout.decimal,
                ),
                memory_pool=pyarrow.system_memory_pool(),
            )
        except (pyarrow.lib.ArrowException, MemoryError):
            return None


class _Pieces(io.RawIOBase):
    """Keeps what is written, in the pieces in which it comes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self.written.append(bytes(piece))  # its memory is used again
        return len(piece)


def lines_of(words: Sequence[bytes], block: npt.NDArray[Any], sep: bytes) -> bytes | None:
    """Return the rows of a block as lines of numbers in few digits, or None for the plain writer.

    Each begins with its word, if there are `words`, of which none has a quote. Readers that parse
    float64 and round it to float32 get the same float32.
    """
    rows, columns = block.shape
    if block.nbytes < MIN_BYTES or columns > _MAX_COLUMNS or not _installed():
        return None
    with np.errstate(invalid="ignore"):
        if block.dtype == np.float32 and _may_round_twice(block):
            return None
    import pyarrow
    import pyarrow.csv

    cells = list(np.ascontiguousarray(block.T))
    if words:
        cells.insert(0, pyarrow.array(words, pyarrow.binary()))
    sink = _Pieces()
    pyarrow.csv.write_csv(
        pyarrow.table(cells, [str(at) for at in range(len(cells))]),
        sink,
        pyarrow.csv.WriteOptions(
            include_header=False,
            batch_size=max(1, rows),
            delimiter=sep.decode(),
            quoting_style="none",
        ),
    )
    return b"".join(sink.written)


def _may_round_twice(block: npt.NDArray[np.float32]) -> bool:
    """Whether the few digits of an element, parsed as float64, round to another float32.

    Then this float64 is halfway between the two. The digits are nine at most, so that nothing is
    left behind the point of the halfway number times the power of ten that gives it so many places.
    """
    for start in range(0, block.size, _AT_ONCE):
        values = block.reshape(-1)[start : start + _AT_ONCE]
        bits = values.view(np.int32)
        exponents = (bits >> _MANTISSA) & 0xFF
        scaled = values * _POWERS[exponents]
        half = _HALVES[exponents]
        near = bits & ((1 << _MANTISSA) - 1) == 0  # of powers of two one neighbour is nearer
        for middle in (scaled + half, scaled - half):
            middle -= np.rint(middle)
            near |= np.abs(middle, out=middle) <= _NEAR
        some = np.unique(values[near & np.isfinite(values) & (bits << 1 != 0)])
        if any(np.float32(float(str(each))) != each for each in some):
            return True
    return False


def _copied(block: bytes) -> Any:
    """Return `block` in memory of pyarrow.

    Threads of pyarrow may hold what they read for a moment longer than the call. If that were an
    object of Python and the interpreter ended in that moment, the process would be aborted.
    """
    import pyarrow

    copy = pyarrow.allocate_buffer(len(block), memory_pool=pyarrow.system_memory_pool())
    np.frombuffer(copy, np.uint8)[:] = np.frombuffer(block, np.uint8)
    return copy
