"""Some fields of a table's records, to be read or written together.

A GPU copies them in one pass over the records of a batch: fewer launches, and a record is fetched
once and whole.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from tierstore._tiers.gpu.abi import RECORDS, Structure
from tierstore._tiers.gpu.launcher import Kernel, as_large_as_the_work
from tierstore.spec import Field, RecordLayout

__all__ = ["Columns"]

_SOURCE = RECORDS.extended("tierstore._table", "columns.cu")


class Columns:
    """Fields of records of one layout.

    Attributes:
        layout: of the records.
        names: their names, at least one.
        items, spans: their fields and byte ranges.
        lo, hi: the byte range from the first of them to the last.
        gapless: whether no byte of it belongs to anything else.
    """

    def __init__(self, layout: RecordLayout, names: Sequence[str]) -> None:
        """Look the fields up; raises UnknownNameError."""
        self.layout = layout
        self.names: tuple[str, ...] = tuple(names)
        self.items: list[Field] = [layout.field(name) for name in self.names]
        self.spans: list[tuple[int, int]] = [layout.span(name) for name in self.names]
        self.lo: int = min(lo for lo, _ in self.spans)
        self.hi: int = max(hi for _, hi in self.spans)
        self.gapless: bool = sum(hi - lo for lo, hi in set(self.spans)) == self.hi - self.lo
        self._odd = functools.reduce(int.__or__, (lo | hi for lo, hi in self.spans), 16)
        self._argument = _argument(len(self.names))
        self._kernels: dict[tuple[str, int], Kernel] = {}

    def copy(self, way: str, arrays: Mapping[str, int], rows: int) -> tuple[Kernel, Structure, int]:
        """Return the kernel that copies them between records and arrays, its argument, its items.

        Args:
            way: "gather" to the arrays, "scatter" from them.
            arrays: the address of each field's array, `(rows, nbytes)` without gaps.
            rows: at least as many as there are records.
        """
        addresses = [arrays[name] for name in self.names]
        odd = functools.reduce(int.__or__, addresses, self._odd)
        key = way, odd & -odd
        if key not in self._kernels:
            width = key[1]
            units = ",".join(str((hi - lo) // width) for lo, hi in self.spans)
            # As many blocks as there is work for: a twentieth faster than as many as run at a time.
            macros = {"WIDTH": width, "UNITS": units}
            self._kernels[key] = Kernel(_SOURCE, way, as_large_as_the_work, macros)
        starts = [lo for lo, _ in self.spans]
        units_each = max(hi - lo for lo, hi in self.spans) // key[1]
        work = self._argument(tuple(addresses), tuple(starts))
        return self._kernels[key], work, rows * units_each


@functools.cache
def _argument(fields: int) -> type[Structure]:
    """Return `struct Columns` for so many fields."""
    return _SOURCE.structure("Columns", FIELDS=fields)  # type: ignore[no-any-return]
