"""Many strings in little memory: the UTF-8 of all in one piece, and where each begins.

A list takes about 60 bytes for each string besides its characters, this class 8.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar, overload

import numpy as np
import numpy.typing as npt

_BLOCK = 1 << 14


class Strings(Sequence[str]):
    """A sequence of strings that can grow; a slice of it is a list."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        """Take copies of `strings`, which UTF-8 must be able to hold."""
        self._blob = bytearray()
        self._ends = array("q", [0])
        for each in strings:
            self.append(each)

    @property
    def blob(self) -> memoryview:
        """The UTF-8 of all strings; while it is in use, none can be added."""
        return memoryview(self._blob)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where each string begins in the blob, and where the last ends; as `blob`, a view."""
        return np.frombuffer(self._ends, np.int64)

    def append(self, string: str) -> None:
        """Add a string; raises UnicodeEncodeError for one that UTF-8 cannot hold."""
        self._blob += string.encode()
        self._ends.append(len(self._blob))

    def extend_packed(self, blob: bytes, offsets: npt.NDArray[np.int64]) -> None:
        """Add strings that are packed in the same way; raises UnicodeDecodeError.

        `offsets` ascend from 0 to the length of `blob`.
        """
        for start in range(0, len(offsets) - 1, _BLOCK):
            bounds = offsets[start : start + _BLOCK + 1].tolist()
            for low, high in pairwise(bounds):
                blob[low:high].decode()
        first = len(self._blob)
        self._blob += blob
        self._ends.frombytes((offsets[1:] + first).astype(np.int64, copy=False).tobytes())

    def __len__(self) -> int:
        """Return the number of strings."""
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return a string, or a list of those of a slice."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index if index >= 0 else index + len(self)
        if not 0 <= at < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return self._blob[self._ends[at] : self._ends[at + 1]].decode()

    def __iter__(self) -> Iterator[str]:
        """Yield the strings."""
        for low, high in pairwise(self._ends):
            yield self._blob[low:high].decode()

    def __eq__(self, other: object) -> bool:
        """Whether a sequence holds the same strings."""
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Strings({len(self)} of {len(self._blob)} bytes)"


def may_repeat(keys: npt.NDArray[Any] | Sequence[str]) -> bool:
    """Whether a key, or in rare cases only its hash, occurs more than once; takes 8 bytes a key."""
    values = (
        keys.copy()
        if isinstance(keys, np.ndarray) and keys.dtype != object
        else np.fromiter(map(hash, keys), np.int64, len(keys))
    )
    values.sort()
    step = 1 << 20
    parts = (values[at : at + step + 1] for at in range(0, len(values) - 1, step))
    return any(bool((part[1:] == part[:-1]).any()) for part in parts)
