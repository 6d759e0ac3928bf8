"""External keys: one int64 or string per row of a table, stored in files beside the base.

int64 keys are a plain .npy file. Strings are one UTF-8 blob plus int64 offsets of the start of each
string and the end of the last.
"""

from __future__ import annotations

import mmap
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._checksum import crc32c
from tierstore._disk.manifest import KeysInfo
from tierstore._strings import Strings, may_repeat
from tierstore.errors import (
    FILE_CURE,
    CorruptStoreError,
    InvalidInputError,
    InvalidTypeError,
    UnknownNameError,
)

__all__ = ["KeyFile", "Keys", "open_keys", "remove_keys", "write_keys"]

_HEADER = 128
_BLOCK = 1 << 20


class Keys(Sequence[Any]):
    """The keys of all rows, read on demand: an int index gives one key, others an array."""

    def __init__(self, files: Mapping[str, KeyFile], info: KeysInfo, rows: int) -> None:
        """Use the key files, by name, as mapped by `open_keys`.

        Raises CorruptStoreError if a size or checksum does not match, or if the files do not
        contain one key per row.
        """
        self.kind: str = info.kind
        self._rows = rows
        parts = {
            name.rpartition(".")[2]: files[name].checked(size, expected)
            for name, (size, expected) in info.files.items()
        }
        if info.kind == "int64":
            header = _npy_header(rows)
            self._whole(parts["npy"], len(header) + 8 * rows, files)
            if parts["npy"][:_HEADER].tobytes() != header:
                raise CorruptStoreError(f"{_path(files)}: the header does not match {rows} keys")
            self._ints: npt.NDArray[np.int64] = parts["npy"][_HEADER:].view("<i8")
        else:
            self._whole(parts["offsets"], 8 * (rows + 1), files)
            self._blob = parts["utf8"]
            self._offsets: npt.NDArray[np.int64] = parts["offsets"].view("<i8")
            ends = self._offsets[[0, -1]].tolist()
            if ends != [0, self._blob.size] or not _ascending(self._offsets):
                raise CorruptStoreError(f"{_path(files)}: the offsets do not delimit the strings")
        self._order: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None

    def _whole(
        self, data: npt.NDArray[np.uint8], expected: int, files: Mapping[str, KeyFile]
    ) -> None:
        if data.size != expected:
            raise CorruptStoreError(
                f"{_path(files)} has {data.size} bytes, keys of {self._rows} rows take {expected}"
            )

    def __repr__(self) -> str:
        return f"Keys({self._rows} of {self.kind})"

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._rows

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice | npt.NDArray[np.int64]) -> Any: ...

    def __getitem__(self, index: Any) -> Any:
        """Return the key of a row, or an array of keys for a slice or an array of ids."""
        if self.kind == "int64":
            found = self._ints[index]
            return int(found) if found.ndim == 0 else found.copy()
        rows = np.arange(self._rows)[index]
        if rows.ndim == 0:
            return self._text(int(rows))
        return np.array([self._text(row) for row in rows.tolist()], object)

    def _text(self, row: int) -> str:
        begin, end = self._offsets[row : row + 2].tolist()
        try:
            return self._blob[begin:end].tobytes().decode()
        except UnicodeDecodeError as error:
            raise CorruptStoreError(f"the key of row {row} is not UTF-8: {error.reason}") from None

    def lookup(self, keys: object) -> npt.NDArray[np.int64]:
        """Return the row id of each key, in the shape of `keys`.

        Raises UnknownNameError with the first key that no row has. The first call sorts the keys or
        their hashes and keeps 16 bytes per row from then on.
        """
        wanted = np.asarray(keys)
        if self.kind == "int64":
            if wanted.dtype.kind not in "iu" and wanted.size:
                raise InvalidTypeError(f"this table's keys are int64, not {wanted.dtype}")
            values = wanted.ravel().astype(np.int64)
        else:
            if wanted.dtype.kind not in "UO" and wanted.size:
                raise InvalidTypeError(f"this table's keys are strings, not {wanted.dtype}")
            values = _hashes(wanted.ravel().tolist())
        hashed, rows = self._sorted()
        found = np.full(values.size, -1, np.int64)
        left = np.searchsorted(hashed, values, side="left")
        right = np.searchsorted(hashed, values, side="right")
        for position, key in enumerate(wanted.ravel().tolist()):
            for candidate in rows[left[position] : right[position]].tolist():
                if self[candidate] == key:
                    found[position] = candidate
                    break
            else:
                raise UnknownNameError(f"no row has the key {key!r}")
        return found.reshape(wanted.shape)

    def _sorted(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._order is None:
            texts = (self._text(row) for row in range(self._rows))
            values = self._ints if self.kind == "int64" else _hashes(texts)
            rows = np.argsort(values, kind="stable")
            self._order = values[rows], rows
        return self._order


def _ascending(numbers: npt.NDArray[np.int64]) -> bool:
    """Whether numbers are in ascending order; compares them in blocks."""
    starts = range(0, numbers.size, _BLOCK)
    return all((np.diff(numbers[at : at + _BLOCK + 1]) >= 0).all() for at in starts)


def _hashes(texts: Iterable[str]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(hash, texts), np.int64)


@dataclass(frozen=True, eq=False)
class KeyFile:
    """A file of keys, mapped so that it stays readable after it is removed.

    Attributes:
        path: its name in messages.
        size: bytes of the file.
        data: the expected number of bytes, or fewer if the file is shorter.
    """

    path: str
    size: int
    data: npt.NDArray[np.uint8]

    @classmethod
    def open(cls, directory: _io.Directory, name: str, expected: int) -> KeyFile:
        """Map a file of an expected size; raises FileNotFoundError."""
        with directory.open_file(name) as file:
            size = file.size
            data = _io.map_files([file], min(size, expected), advice=mmap.MADV_NORMAL)
            return cls(file.path, size, data)

    def checked(self, size: int, expected: int) -> npt.NDArray[np.uint8]:
        """Return the bytes; raises CorruptStoreError unless size and checksum match."""
        if self.size != size:
            raise CorruptStoreError(f"{self.path} has {self.size} bytes, not {size}")
        if crc32c(self.data) != expected:
            raise CorruptStoreError(f"{self.path} does not match its checksum; {FILE_CURE}")
        return self.data


def open_keys(directory: _io.Directory, info: KeysInfo) -> dict[str, KeyFile]:
    """Map the files of keys by name; raises CorruptStoreError if one is missing."""
    try:
        return {name: KeyFile.open(directory, name, size) for name, (size, _) in info.files.items()}
    except FileNotFoundError as error:
        raise CorruptStoreError(
            f"a file of keys is missing: {error.filename}; {FILE_CURE}"
        ) from None


def _path(files: Mapping[str, KeyFile]) -> str:
    return next(iter(files.values())).path


def write_keys(directory: _io.Directory, keys: Sequence[Any], rows: int) -> KeysInfo:
    """Write the keys of a table's rows to new, durable files of its generation.

    `keys` are `rows` distinct ints or strings. Raises InvalidInputError or InvalidTypeError before
    anything is written.
    """
    if len(keys) != rows:
        raise InvalidInputError(f"a table of {rows} rows needs {rows} keys, not {len(keys)}")
    stem = f"keys.{uuid.uuid4().hex[:8]}."
    packed = _packed(keys)
    _check_distinct(packed)
    files: dict[str, bytes | memoryview]
    if isinstance(packed, Strings):
        offsets = packed.offsets.astype("<i8", copy=False).data.cast("B")
        kind, files = "str", {stem + "utf8": packed.blob, stem + "offsets": offsets}
    else:
        kind, files = "int64", {stem + "npy": _npy_header(rows) + packed.tobytes()}
    for name, data in files.items():
        directory.write_file(name, data)
    directory.sync()
    return KeysInfo(kind, {name: (len(data), crc32c(data)) for name, data in files.items()})


def _packed(keys: Any) -> npt.NDArray[np.int64] | Strings:
    """Return keys in little memory; raises InvalidInputError, InvalidTypeError."""
    if isinstance(keys, Strings):
        return keys
    if isinstance(keys, np.ndarray) and keys.dtype.kind == "i":
        return keys.astype("<i8", copy=False)
    listed: list[Any] = [int(key) if isinstance(key, np.integer) else key for key in keys]
    kinds: set[type] = {type(key) for key in listed}
    if kinds == {str}:
        return Strings(listed)
    if kinds != {int}:
        names = ", ".join(sorted(each.__name__ for each in kinds))
        raise InvalidTypeError(f"keys must be all ints or all strings, not {names}")
    try:
        return np.array(listed, "<i8")
    except OverflowError:
        raise InvalidInputError("keys must fit into int64; one of these is larger") from None


def remove_keys(directory: _io.Directory, info: KeysInfo) -> None:
    """Remove the files of keys that no version names."""
    for name in info.files:
        directory.unlink(name)


def _check_distinct(keys: npt.NDArray[np.int64] | Strings) -> None:
    if not may_repeat(keys):
        return
    seen: set[Any] = set()
    for key in keys.tolist() if isinstance(keys, np.ndarray) else keys:
        if key in seen:
            raise InvalidInputError(f"the key {key!r} occurs more than once")
        seen.add(key)


def _npy_header(rows: int) -> bytes:
    text = repr({"descr": "<i8", "fortran_order": False, "shape": (rows,)}).encode()
    magic = b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little")
    return magic + text.ljust(_HEADER - 11) + b"\n"
