"""The index of a table's keys: a file beside them that spares every process to build the map.

It is derived from the keys, bears their checksums and its own, and is in no manifest. One that is
missing, damaged or of other keys is built anew.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._checksum import crc32c
from tierstore._disk.manifest import KeysInfo
from tierstore._keys.hashmap import Codes, Rows, Same, build, capacity_for, find
from tierstore._keys.text import Texts
from tierstore.errors import CorruptStoreError

__all__ = ["KeyIndex"]

_MAGIC = b"tierkeys"
_HEADER = struct.Struct("<8sIIQQ28xI")
_FORM = 1


@dataclass(frozen=True, eq=False)
class KeyIndex:
    """The map of a table's keys.

    Attributes:
        places: rows + 1 by open addressing; see `hashmap`.
        codes: the code of each row's key.
    """

    places: npt.NDArray[Any]
    codes: Codes

    @classmethod
    def of(cls, keys: npt.NDArray[Any] | Texts) -> tuple[KeyIndex, tuple[int, int] | None]:
        """Build the map of keys; also return the first row that repeats a key, and whose."""
        if isinstance(keys, Texts):
            codes = keys.hashes()
            places, twice = build(codes, lambda mine, rows: keys.equal(mine, keys, rows))
        else:
            codes = keys.view(np.uint64)
            places, twice = build(codes)
        return cls(places, codes), twice

    def find(self, codes: Codes, same: Same | None) -> Rows:
        """Return the row of each key of a batch, or -1; see `hashmap.find`."""
        return find(self.places, self.codes, codes, same)

    def encode(self, info: KeysInfo) -> Sequence[npt.NDArray[np.uint8]]:
        """Return the parts of the file's bytes; the codes of integers are the keys themselves."""
        parts = [self.places.view(np.uint8)]
        if info.kind == "str":
            parts.append(self.codes.view(np.uint8))
        rows, places = self.codes.size, self.places.size
        sums = _HEADER.pack(_MAGIC, _FORM, _sum(info), rows, places, 0)
        total = crc32c(sums)
        for part in parts:
            total = crc32c(part, total)
        header = _HEADER.pack(_MAGIC, _FORM, _sum(info), rows, places, total)
        return [np.frombuffer(header, np.uint8), *parts]

    @classmethod
    def decode(
        cls, data: npt.NDArray[np.uint8], info: KeysInfo, keys: npt.NDArray[Any] | Texts
    ) -> KeyIndex:
        """Return the map that a file has; raises CorruptStoreError if it is not of these keys."""
        rows = len(keys)
        capacity = capacity_for(rows)
        width = 4 if capacity < 1 << 32 else 8
        is_text = isinstance(keys, Texts)
        if data.size != _HEADER.size + width * capacity + (8 * rows if is_text else 0):
            raise CorruptStoreError(f"it has {data.size} bytes, which do not fit {rows} keys")
        *found, total = _HEADER.unpack(data[: _HEADER.size].tobytes())
        if found != [_MAGIC, _FORM, _sum(info), rows, capacity]:
            raise CorruptStoreError("it is the index of other keys")
        header = data[: _HEADER.size].copy()
        header[-4:] = 0
        if crc32c(data[_HEADER.size :], crc32c(header)) != total:
            raise CorruptStoreError("it does not match its checksum")
        end = _HEADER.size + width * capacity
        places = data[_HEADER.size : end].view(f"<u{width}")
        if np.count_nonzero(places) != rows or places.max(initial=0) > rows:
            raise CorruptStoreError(f"it does not map {rows} rows")
        return cls(places, data[end:].view("<u8") if is_text else keys.view(np.uint64))  # type: ignore[union-attr]


def _sum(info: KeysInfo) -> int:
    """Return one checksum of all files of keys."""
    return crc32c(repr(sorted(info.files.items())).encode())
