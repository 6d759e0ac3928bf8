"""The oracle of the core's maps: one key at a time, in plain Python, and MurmurHash3 in NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FACTORS = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
C1, C2 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
N1, N2 = np.uint64(0x52DCE729), np.uint64(0x38495AB5)
_ALL = (1 << 64) - 1

Words = npt.NDArray[np.uint64]


def hashed(code: int) -> int:
    """Return 32 well mixed bits of a code."""
    code = code * FACTORS[0] & _ALL
    return ((code ^ code >> 32) * FACTORS[1] & _ALL) >> 32


class Map:
    """Places of rows, and the codes of these; of texts, too, where there are some."""

    def __init__(
        self,
        segments: int,
        bits: int,
        probes: int,
        codes: Sequence[int],
        texts: Sequence[bytes] | None = None,
    ) -> None:
        self.segments, self.bits, self.probes = segments, bits, probes
        self.places = [0] * (segments << bits)
        self.codes = list(codes)
        self.texts = texts

    def probed(self, code: int) -> Iterator[int]:
        """Yield the places of a key."""
        hash_ = hashed(code)
        every = 1 << (self.segments - 1).bit_length()
        segment = hash_ % every
        if segment >= self.segments:
            segment -= every // 2
        at, size = hash_ >> (32 - self.bits), 1 << self.bits
        step = (hash_ * 0x9E3779B1 & 0xFFFFFFFF) >> (32 - self.bits) | 1
        for _ in range(self.probes):
            yield segment * size + at
            at = (at + step) % size

    def has(self, row: int, code: int, text: bytes | None) -> bool:
        """Whether a row has a key."""
        if not 0 <= row < len(self.codes) or self.codes[row] != code:
            return False
        return self.texts is None or (row < len(self.texts) and self.texts[row] == text)

    def find(self, code: int, text: bytes | None = None) -> int:
        """Return the row of a key, or -1."""
        for at in self.probed(code):
            if not self.places[at]:
                break
            if self.has(self.places[at] - 1, code, text):
                return self.places[at] - 1
        return -1

    def enter(self, first: int, count: int, *, dense: bool) -> tuple[list[int], int]:
        """Enter keys whose codes stand from `first` on; return their rows, and the next row.

        Ends before a key without a place.
        """
        found, row = [], first
        for at in range(first, first + count):
            code, text = self.codes[at], None if self.texts is None else self.texts[at]
            for place in self.probed(code):
                if not self.places[place]:
                    self.places[place], self.codes[row] = row + 1, code
                    found.append(row)
                    break
                if self.has(self.places[place] - 1, code, text):
                    found.append(self.places[place] - 1)
                    break
            else:
                break
            row += not dense or found[-1] == row
        return found, row

    def place(self, rows: Sequence[int]) -> list[int]:
        """Place rows with keys of their own; return those without a place."""
        left = []
        for row in rows:
            free = [at for at in self.probed(self.codes[row]) if not self.places[at]]
            if free:
                self.places[free[0]] = row + 1
            else:
                left.append(row)
        return left


def murmur(text: bytes) -> int:
    """Return the first half of MurmurHash3_x64_128, seed 0."""
    blocks = np.frombuffer(text.ljust(-(-len(text) // 16) * 16, b"\0"), "<u8").reshape(-1, 2)
    whole = len(text) // 16
    state = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    for low, high in blocks[:whole]:
        state = mixed(state, (low, high))
    first, second = state
    if whole < len(blocks):
        second = second ^ scrambled(blocks[whole, 1:], C2, 33, C1)
        first = first ^ scrambled(blocks[whole, :1], C1, 31, C2)
    first, second = first ^ np.uint64(len(text)), second ^ np.uint64(len(text))
    first = first + second
    second = second + first
    return int((_finished(first) + _finished(second))[0])


def mixed(state: tuple[Any, Any], block: tuple[Any, Any]) -> tuple[Words, Words]:
    """Return the state after a block of sixteen bytes."""
    one = state[0] ^ scrambled(block[0], C1, 31, C2)
    one = (rotated(one, 27) + state[1]) * np.uint64(5) + N1
    two = state[1] ^ scrambled(block[1], C2, 33, C1)
    two = (rotated(two, 31) + one) * np.uint64(5) + N2
    return one, two


def rotated(words: Any, bits: int) -> Words:
    turned: Words = (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))
    return turned


def scrambled(words: Any, before: np.uint64, bits: int, after: np.uint64) -> Words:
    return rotated(np.atleast_1d(words) * before, bits) * after


def _finished(words: Words) -> Words:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        words = words ^ (words >> np.uint64(33))
        words = words * np.uint64(factor)
    return words ^ (words >> np.uint64(33))
