"""Keys and texts that somebody chose so that they meet."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.core.maps import C1, C2, FACTORS, N1, N2, mixed, rotated

State = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
_NOT_ASCII = np.uint64(0x8080808080808080)
_HALF = np.uint64(32)


def of_one_hash(hashed: int, count: int) -> npt.NDArray[np.uint64]:
    """Return distinct codes that a map hashes to the same 32 bits: it takes all steps back."""
    first, second = map(inverse, FACTORS)
    mixed = (np.uint64(hashed) << _HALF) + np.arange(count, dtype=np.uint64)
    mixed *= second
    mixed ^= mixed >> _HALF
    return mixed * first


def texts_of_one_hash(stages: int, variants: int) -> list[str]:
    """Return `variants ** stages` distinct texts that Texts.hashes gives the same 64 bits.

    A block of 16 bytes takes the state of MurmurHash3_x64_128 wherever one likes. So each stage
    has some pairs of blocks after which the state is the same: of random first blocks those whose
    second one is ASCII.
    """
    rng = np.random.default_rng(8)
    state, texts = (np.zeros(1, np.uint64), np.zeros(1, np.uint64)), [b""]
    for _ in range(stages):
        after = mixed(mixed(state, ascii_blocks(rng, 1)), ascii_blocks(rng, 1))
        found: list[bytes] = []
        while len(found) < variants:
            first = ascii_blocks(rng, 1 << 16)
            second = leading(mixed(state, first), after)
            good = np.flatnonzero((second[0] | second[1]) & _NOT_ASCII == 0)
            blocks = np.stack([*first, *second], 1)[good]
            found += [block.astype("<u8").tobytes() for block in blocks]
        texts = [text + more for text in texts for more in found[:variants]]
        state = after
    return [text.decode() for text in texts]


def ascii_blocks(rng: np.random.Generator, count: int) -> State:
    low, high = rng.integers(0, 1 << 63, (2, count), np.uint64) & ~_NOT_ASCII
    return low, high


def leading(state: State, to: State) -> State:
    """Return the block after which the state is `to`: it takes the steps of `mixed` back."""
    one = rotated((to[0] - N1) * inverse(5) - state[1], 64 - 27) ^ state[0]
    two = rotated((to[1] - N2) * inverse(5) - to[0], 64 - 31) ^ state[1]
    low = rotated(one * inverse(C2), 64 - 31) * inverse(C1)
    high = rotated(two * inverse(C1), 64 - 33) * inverse(C2)
    return low, high


def inverse(factor: object) -> np.uint64:
    return np.uint64(pow(int(factor), -1, 1 << 64))  # type: ignore[call-overload]
