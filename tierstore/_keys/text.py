"""Texts in bulk: UTF-8 in one array of bytes, and where each begins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _core
from tierstore._keys.strings import Strings
from tierstore.errors import InvalidInputError

MAX_TEXT_BYTES = 1 << 16
"""Most bytes of a text in UTF-8."""

_LONG = 256
"""Bytes beyond which a text is hashed by BLAKE2, for which texts of one hash cannot be chosen."""
_BLOCK = 1 << 13
"""Texts worked on at once: their temporary memory stays in the caches of a core."""

Positions = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts by number: all bytes one after another, and where each begins and the last ends."""

    blob: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Encode texts; raises InvalidInputError for one that is too long or not Unicode.

        Raises TypeError for what is no text.
        """
        listed = texts if isinstance(texts, list) else list(texts)
        ends, blobs, size = np.zeros(len(listed) + 1, np.int64), [], 0
        try:
            for start in range(0, len(listed), _BLOCK):
                part = ends[start + 1 : start + 1 + _BLOCK]
                blobs.append(_core.pack_texts(listed, start, MAX_TEXT_BYTES, part))
                part += size
                size += len(blobs[-1])
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"the key {error.object[:80]!r} is not Unicode text: {error.reason}"
            ) from None
        except ValueError:
            longest = max(listed, key=lambda text: len(text.encode("utf-8", "replace")))
            raise InvalidInputError(
                f"the key {longest[:20]!r}… has {len(longest.encode('utf-8', 'replace'))} bytes; a "
                f"key has at most {MAX_TEXT_BYTES}: use a hash of the text as key"
            ) from None
        return cls(np.frombuffer(blobs[0] if len(blobs) == 1 else b"".join(blobs), np.uint8), ends)

    @classmethod
    def packed(cls, strings: Strings) -> Texts:
        """Use strings that are packed already, without a copy; errors are those of `of`."""
        if len(strings) and int(np.diff(strings.offsets).max()) > MAX_TEXT_BYTES:
            return cls.of(strings)
        return cls(np.frombuffer(strings.blob, np.uint8), strings.offsets)

    def __len__(self) -> int:
        """Return the number of texts."""
        return self.offsets.size - 1

    def take(self, numbers: Positions) -> Texts:
        """Return some of the texts, in this order; copies them."""
        offsets = np.empty(len(numbers) + 1, np.int64)
        at = np.ascontiguousarray(numbers, np.int64)
        blob = _core.take_texts(self.blob, self.offsets, at, offsets)
        return Texts(np.frombuffer(blob, np.uint8), offsets)

    def followed_by(self, others: Texts) -> Texts:
        """Return these texts and the others; copies both."""
        offsets = np.concatenate([self.offsets, others.offsets[1:] + self.offsets[-1]])
        return Texts(np.concatenate([self.blob, others.blob]), offsets)

    def encoded(self, number: int) -> bytes:
        """Return the UTF-8 of one text."""
        begin, end = self.offsets[number : number + 2].tolist()
        return self.blob[begin:end].tobytes()

    def hashes(self) -> npt.NDArray[np.uint64]:
        """Return a 64-bit hash of each text, the same everywhere."""
        out = np.empty(len(self), np.uint64)
        for start in range(0, len(self), _BLOCK):
            part = out[start : start + _BLOCK]
            offsets = self.offsets[start : start + part.size + 1]
            if _core.hash_texts(self.blob, offsets, _LONG, part):
                for number in (start + np.flatnonzero(np.diff(offsets) > _LONG)).tolist():
                    digest = hashlib.blake2b(self.encoded(number), digest_size=8).digest()
                    out[number] = int.from_bytes(digest, "little")
        return out

    def equal(self, others: Texts) -> bool:
        """Whether others are the same texts in the same order."""
        return np.array_equal(np.diff(self.offsets), np.diff(others.offsets)) and np.array_equal(
            self.blob[self.offsets[0] : self.offsets[-1]],
            others.blob[others.offsets[0] : others.offsets[-1]],
        )
