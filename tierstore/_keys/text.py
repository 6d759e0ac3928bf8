"""Texts in bulk: UTF-8 in one array of bytes, hashed and compared many at once.

Loops are over the words of a text, not over texts. Long texts are few, and are handled one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._keys.hashmap import Same
from tierstore._keys.strings import Strings
from tierstore.errors import InvalidInputError

__all__ = ["MAX_TEXT_BYTES", "Texts"]

MAX_TEXT_BYTES = 1 << 16
"""Most bytes of a text in UTF-8."""

_LONG = 256
_BLOCK = 1 << 13
"""Texts worked on at once: their temporary memory stays in the caches of a core."""
_WORD = 8
_MASKS = np.array([(1 << 8 * count) - 1 for count in range(_WORD + 1)], np.uint64)

Positions = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts by number: all bytes one after another, and where each begins and the last ends."""

    blob: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Encode texts; raises InvalidInputError for one that is too long or not Unicode."""
        blob = bytearray()
        lengths: list[npt.NDArray[np.int64]] = [np.zeros(1, np.int64)]
        for block in _blocks(texts):
            try:
                encoded = [text.encode() for text in block]
            except UnicodeEncodeError as error:
                raise InvalidInputError(
                    f"the key {error.object[:80]!r} is not Unicode text: {error.reason}"
                ) from None
            lengths.append(np.fromiter(map(len, encoded), np.int64, len(encoded)))
            if lengths[-1].max() > MAX_TEXT_BYTES:
                longest = int(lengths[-1].argmax())
                raise InvalidInputError(
                    f"the key {block[longest][:20]!r}… has {len(encoded[longest])} bytes; a key "
                    f"has at most {MAX_TEXT_BYTES}: use a hash of the text as key"
                )
            blob += b"".join(encoded)
        return cls(np.frombuffer(blob, np.uint8), np.cumsum(np.concatenate(lengths)))

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
        begins = self.offsets[numbers]
        lengths = self.offsets[1:][numbers] - begins
        offsets = np.zeros(len(numbers) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        blob = np.empty(int(offsets[-1]), np.uint8)
        for start in range(0, len(numbers), _BLOCK):
            part = slice(start, min(start + _BLOCK, len(numbers)))
            first, end = offsets[[part.start, part.stop]].tolist()
            shifts = (begins[part] - offsets[:-1][part]).repeat(lengths[part])
            blob[first:end] = self.blob[np.arange(first, end) + shifts]
        return Texts(blob, offsets)

    def followed_by(self, others: Texts) -> Texts:
        """Return these texts and the others; copies both."""
        offsets = np.concatenate([self.offsets, others.offsets[1:] + self.offsets[-1]])
        return Texts(np.concatenate([self.blob, others.blob]), offsets)

    def encoded(self, number: int) -> bytes:
        """Return the UTF-8 of one text."""
        begin, end = self.offsets[number : number + 2].tolist()
        return self.blob[begin:end].tobytes()

    def hashes(self) -> Words:
        """Return a 64-bit hash of each text, the same everywhere."""
        out = np.empty(len(self), np.uint64)
        for start in range(0, len(self), _BLOCK):
            stop = min(start + _BLOCK, len(self))
            begins = self.offsets[start:stop]
            lengths = self.offsets[start + 1 : stop + 1] - begins
            out[start:stop] = _murmur(self.blob, begins, lengths)
            for number in (start + np.flatnonzero(lengths > _LONG)).tolist():
                digest = hashlib.blake2b(self.encoded(number), digest_size=_WORD).digest()
                out[number] = int.from_bytes(digest, "little")
        return out

    def same_as(self, others: Texts) -> Same:
        """Return a comparison of texts with others that have the same hash."""
        return Same(
            lambda at, rows: self.equal(at, others, rows),
            lambda at: [self.encoded(number) for number in at.tolist()],
        )

    def equal(
        self, numbers: Positions, others: Texts, other_numbers: Positions
    ) -> npt.NDArray[np.bool_]:
        """Compare texts with others one by one."""
        begins, other_begins = self.offsets[numbers], others.offsets[other_numbers]
        lengths = self.offsets[1:][numbers] - begins
        other_lengths = others.offsets[1:][other_numbers] - other_begins
        equal: npt.NDArray[np.bool_] = lengths == other_lengths
        left = np.flatnonzero(equal & (lengths <= _LONG))
        done = 0
        while left.size:
            masks = _MASKS[np.minimum(lengths[left] - done, _WORD)]
            differ = _words(self.blob, begins[left] + done) ^ _words(
                others.blob, other_begins[left] + done
            )
            is_same = differ & masks == 0
            equal[left[~is_same]] = False
            done += _WORD
            left = left[is_same & (lengths[left] > done)]
        for at in np.flatnonzero(equal & (lengths > _LONG)).tolist():
            equal[at] = self.encoded(numbers[at]) == others.encoded(other_numbers[at])
        return equal


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    listed = texts if isinstance(texts, list) else list(texts)
    for start in range(0, len(listed), _BLOCK):
        yield listed[start : start + _BLOCK]


def _words(blob: npt.NDArray[np.uint8], begins: Positions) -> Words:
    """Return the eight bytes at each position as a number; beyond the end they are undefined."""
    if blob.size < _WORD:
        blob = np.concatenate([blob, np.zeros(_WORD, np.uint8)])
    every: Words = np.ndarray((blob.size - _WORD + 1,), "<u8", blob, strides=(1,))
    at = np.minimum(begins, every.size - 1)
    beyond = np.minimum(begins - at, _WORD - 1).astype(np.uint64)
    words: Words = every[at].astype(np.uint64, copy=False) >> (beyond * np.uint64(8))
    return words


_C1, _C2 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
_N1, _N2 = np.uint64(0x52DCE729), np.uint64(0x38495AB5)


def _murmur(
    blob: npt.NDArray[np.uint8], begins: Positions, lengths: Positions
) -> npt.NDArray[np.uint64]:
    """Return the first half of MurmurHash3_x64_128, seed 0, of texts that are not long."""
    first, second = np.zeros((2, begins.size), np.uint64)
    lengths = np.minimum(lengths, _LONG)
    for done in range(0, int(lengths.max(initial=0)), 16):
        active = np.flatnonzero(lengths >= done + 16)
        if not active.size:
            break
        at = begins[active] + done
        one, two = first[active], second[active]
        one ^= _scrambled(_words(blob, at), _C1, 31, _C2)
        one = (_rotated(one, 27) + two) * np.uint64(5) + _N1
        two ^= _scrambled(_words(blob, at + _WORD), _C2, 33, _C1)
        two = (_rotated(two, 31) + one) * np.uint64(5) + _N2
        first[active], second[active] = one, two
    at, rest = begins + lengths // 16 * 16, lengths % 16
    low = _words(blob, at) & _MASKS[np.minimum(rest, _WORD)]
    high = _words(blob, at + _WORD) & _MASKS[np.maximum(rest - _WORD, 0)]
    second ^= _scrambled(high, _C2, 33, _C1)
    first ^= _scrambled(low, _C1, 31, _C2)
    first ^= lengths.astype(np.uint64)
    second ^= lengths.astype(np.uint64)
    first += second
    second += first
    return _finished(first) + _finished(second)


def _rotated(words: Words, bits: int) -> Words:
    return (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))


def _scrambled(words: Words, before: np.uint64, bits: int, after: np.uint64) -> Words:
    return _rotated(words * before, bits) * after


def _finished(words: Words) -> Words:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        words = words ^ (words >> np.uint64(33))
        words = words * np.uint64(factor)
    return words ^ (words >> np.uint64(33))
