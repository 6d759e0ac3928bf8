"""The index of a table's keys: a file with their map, so that processes need not build it.

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
from tierstore._keys.hashmap import Codes, HashMap, Rows, shape_for
from tierstore._keys.text import Texts
from tierstore.errors import CorruptStoreError

_MAGIC = b"tierkeys"
_HEADER = struct.Struct("<8sIIQQQ20xI")
_FORM = 3


@dataclass(frozen=True, eq=False)
class KeyIndex:
    """The read-only map of a table's keys.

    Attributes:
        map: by the codes of the keys.
    """

    map: HashMap

    @classmethod
    def of(cls, keys: npt.NDArray[Any] | Texts) -> tuple[KeyIndex, tuple[int, int] | None]:
        """Build the map of keys; also return the first row that repeats a key, and which row."""
        made, first = HashMap.of(_codes(keys), _texts(keys))
        twice = np.flatnonzero(first != np.arange(first.size))
        return cls(made), (int(twice[0]), int(first[twice[0]])) if twice.size else None

    def find(self, codes: Codes, texts: Texts | None) -> Rows:
        """Return the row of each key of a batch, or -1; see `HashMap.find`."""
        return self.map.find(codes, texts)

    def of_all(self, keys: npt.NDArray[Any] | Texts) -> Rows:
        """Return the row of each of some stored keys, or -1."""
        return self.find(_codes(keys), _texts(keys))

    def encode(self, info: KeysInfo) -> Sequence[npt.NDArray[np.uint8]]:
        """Return the parts of the file's bytes; the codes of integers are the keys themselves."""
        places, far = self.map.places, self.map.far
        parts = [places.view(np.uint8), far.view(np.uint8)]
        if info.kind == "str":
            parts.append(self.map.codes.view(np.uint8))
        known = _MAGIC, _FORM, _sum(info), len(self.map), places.size, far.size
        total = crc32c(_HEADER.pack(*known, 0))
        for part in parts:
            total = crc32c(part, total)
        return [np.frombuffer(_HEADER.pack(*known, total), np.uint8), *parts]

    @classmethod
    def decode(
        cls, data: npt.NDArray[np.uint8], info: KeysInfo, keys: npt.NDArray[Any] | Texts
    ) -> KeyIndex:
        """Return the map in a file's bytes.

        Raises CorruptStoreError if it is not of these keys, and FileNotFoundError if it was written
        in a form that this program does not read.
        """
        if data.size < _HEADER.size:
            raise CorruptStoreError(f"it has {data.size} bytes, less than a header")
        header = data[: _HEADER.size].copy()
        magic, form, *found, far, total = _HEADER.unpack(header.tobytes())
        header[-4:] = 0
        if magic != _MAGIC or crc32c(data[_HEADER.size :], crc32c(header)) != total:
            raise CorruptStoreError("it does not match its checksum")
        if form != _FORM:
            raise FileNotFoundError(f"it is an index of the form {form}, not {_FORM}")
        rows, is_text = len(keys), isinstance(keys, Texts)
        segments, bits = shape_for(rows)
        if found != [_sum(info), rows, segments << bits]:
            raise CorruptStoreError("it is the index of other keys")
        ends = np.cumsum([_HEADER.size, 4 * (segments << bits), 8 * min(far, rows)]).tolist()
        if far > rows or data.size != ends[-1] + (8 * rows if is_text else 0):
            raise CorruptStoreError(f"it has {data.size} bytes, which do not fit {rows} keys")
        places = data[ends[0] : ends[1]].view("<u4")
        others = data[ends[1] : ends[2]].view("<i8")
        most = places.max(initial=0)
        is_whole = np.count_nonzero(places) + far == rows and most <= rows
        if not is_whole or (others < 0).any() or (others >= rows).any():
            raise CorruptStoreError(f"it does not map {rows} rows")
        codes = data[ends[2] :].view("<u8") if is_text else keys.view(np.uint64)  # type: ignore[union-attr]
        return cls(HashMap.restored(places, others, codes, _texts(keys)))


def _codes(keys: npt.NDArray[Any] | Texts) -> Codes:
    return keys.hashes() if isinstance(keys, Texts) else keys.view(np.uint64)


def _texts(keys: npt.NDArray[Any] | Texts) -> Texts | None:
    return keys if isinstance(keys, Texts) else None


def _sum(info: KeysInfo) -> int:
    """Return one checksum of all files of keys."""
    return crc32c(repr(sorted(info.files.items())).encode())
