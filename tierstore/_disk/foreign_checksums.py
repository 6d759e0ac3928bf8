"""A file with the checksums of the rows of attached tables, computed on request.

A header of whole pages, one line of JSON padded with blanks, describes the tables. The checksums
follow, a little-endian uint32 for each row, one table after the other.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _checksum, _io
from tierstore._disk.foreign import ForeignBase, Watch
from tierstore._disk.readahead import MappedRows
from tierstore._disk.tier import DiskTier
from tierstore.errors import CorruptRowError, FormatError, InvalidInputError, counted

_FORMAT = "tierstore checksums of attached tables 1"
_UNIT = 4096
"""The header takes a multiple of as many bytes, whatever a page is."""
_BLOCK_ROWS = 1 << 16

Rows = npt.NDArray[np.int64]


class ForeignChecksums:
    """The checksums of one table, `(rows, 4)` bytes of a mapping."""

    def __init__(self, table: str, path: Path, sums: npt.NDArray[np.uint8]) -> None:
        """Refer to the mapping; `path` is for messages."""
        self._table = table
        self._path = path
        self._watch = Watch([[path]])
        self._sums = sums

    def check(self, rows: Rows, records: npt.NDArray[np.uint8]) -> None:
        """Raise CorruptRowError for records `(n, record_bytes)` that do not match theirs."""
        self._watch.check([0])
        expected = self._sums.take(rows, axis=0, mode="clip").view("<u4").ravel()
        wrong = _checksum.mismatches(rows, records, expected)
        if wrong.size:
            bad = np.unique(rows[wrong]).tolist()
            raise CorruptRowError(
                f"{counted(len(bad), 'row does', 'rows do')} not match the checksums in "
                f"{self._path}, the first is row {bad[0]}; restore the attached files from a copy, "
                f"or remove {self._path} if they were replaced on purpose",
                rows=bad,
                file=str(self._path),
                table=self._table,
            )

    def places(self, rows: Rows) -> list[MappedRows]:
        """Return the mapping."""
        return [MappedRows(self._sums, rows)]

    def close(self) -> None:
        """Drop the mapping, which goes with its last view."""
        self._sums = np.empty((0, 4), np.uint8)


def open_checksums(
    path: Path, tables: Mapping[str, Any], bases: Mapping[str, ForeignBase]
) -> dict[str, ForeignChecksums]:
    """Return the checksums of each table in the file at `path`, which is made if it is missing.

    `tables` describes the tables in values of JSON. Making the file reads every row once. Raises
    InvalidInputError if the file belongs to other tables, FormatError if it is damaged.
    """
    header = _header(tables)
    if not path.exists():
        with _io.publish(path) as partial, partial.open("xb") as file:
            file.write(header)
            for name, base in bases.items():
                for sums in _computed(name, base):
                    file.write(sums.astype("<u4").tobytes())
    total = sum(base.rows for base in bases.values())
    real = path.resolve()
    with _io.Directory.open(real.parent) as parent, parent.open_file(real.name) as file:
        _check_header(path, file, header)
        nbytes = len(header) + 4 * total
        if file.size != nbytes:
            raise FormatError(
                f"{path}: {file.size} bytes instead of {nbytes}; remove it to make it anew"
            )
        data = _io.map_files([file], nbytes, advice=mmap.MADV_RANDOM, lasting=True)
    checksums, at = {}, len(header)
    for name, base in bases.items():
        part = data[at : at + 4 * base.rows].reshape(base.rows, 4)
        checksums[name], at = ForeignChecksums(name, path, part), at + part.nbytes
    return checksums


def _header(tables: Mapping[str, Any]) -> bytes:
    text = json.dumps({"format": _FORMAT, "tables": tables}, separators=(",", ":")).encode()
    return text.ljust(-(-(len(text) + 1) // _UNIT) * _UNIT - 1) + b"\n"


def _check_header(path: Path, file: _io.File, header: bytes) -> None:
    """Raise unless the file begins with `header`."""
    found = file.read(len(header))
    if found == header:
        return
    if not found.startswith(json.dumps({"format": _FORMAT})[:-1].replace(": ", ":").encode()):
        raise FormatError(f"{path}: not a file of checksums; name another, or remove it")
    raise InvalidInputError(
        f"{path} has the checksums of other tables, fields or numbers of rows; name another file, "
        "or remove it to make it anew"
    )


def _computed(name: str, base: ForeignBase) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield the checksums of all rows, in order."""
    tier = DiskTier(base, [], table=name)  # type: ignore[arg-type]  # which reads ahead
    for start in range(0, base.rows, _BLOCK_ROWS):
        rows = np.arange(start, min(start + _BLOCK_ROWS, base.rows), dtype=np.int64)
        for part, records in tier.stream(rows):
            yield _checksum.row_checksums(rows[part], records)
