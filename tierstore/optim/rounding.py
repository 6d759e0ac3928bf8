"""Stochastic rounding of float32 to bfloat16, by random bits that step, row and column decide."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["COLUMNS", "Rounding", "noise", "rounded_at_random"]

_ALL = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_SEEDS = 0x85EBCA6B
COLUMNS = 1 << 24
"""Columns of a field, for random bits: those of state number k begin at column k * COLUMNS."""


@dataclass(frozen=True)
class Rounding:
    """What an optimizer rounds at random.

    Attributes:
        weights: bfloat16 weights, trained in float32.
        states: the type for what it keeps of a row, computed in float32: "bfloat16", "float8" or
            None for float32.
        seed: another one rounds otherwise.
    """

    weights: bool = False
    states: str | None = None
    seed: int = 0

    def __bool__(self) -> bool:
        """Whether anything is rounded at random."""
        return self.weights or self.states is not None

    def columns(self, states: tuple[str, ...] | list[str]) -> dict[str, int]:
        """Return the first column of each state; the order of the names does not matter."""
        return {name: number * COLUMNS for number, name in enumerate(sorted(states), start=1)}


def rounded_at_random(
    values: Tensor, rows: Tensor, step: int, *, seed: int = 0, column: int = 0
) -> Tensor:
    """Return float32 `values` `(n, dim)` of `rows` `(n,)` as bfloat16, on average the same.

    A number between two of bfloat16 becomes the one farther from zero with a probability that is
    its part of the way there: otherwise, a step smaller than half the gap would be lost every time.
    Only seed, step, row and column decide, so rows round alike on every device and with any budget;
    the first value of a row is in column `column`. Infinities and NaN stay.
    """
    bits = values.contiguous().view(torch.int32)
    drawn = noise(rows, values.shape[1], step, seed, column, bits=16)
    up = (bits + drawn) & ~0xFFFF
    return torch.where(values.isnan(), values, up.view(torch.float32)).to(torch.bfloat16)


def noise(rows: Tensor, dim: int, step: int, seed: int, column: int, *, bits: int) -> Tensor:
    """Return random numbers of `bits` bits for the elements, int32 `(n, dim)`; step.cu has them."""
    rows = rows.to(torch.int64)
    low, high = rows & _ALL, (rows >> 32) + (seed * _SEEDS & _ALL)
    key = _mixed((_mixed((low + step * _GOLDEN) & _ALL) + high) & _ALL)
    columns = torch.arange(column, column + dim, device=rows.device) * _GOLDEN & _ALL
    return (_mixed(key[:, None] ^ columns) >> 32 - bits).to(torch.int32)


def _mixed(x: Tensor) -> Tensor:
    """Return a number of 32 bits, in int64, of which every bit depends on every bit of another.

    Shifts and factors: lowbias32, found by C. Wellons' hash prospector (2018, public domain).
    """
    x = (x ^ x >> 16) * 0x7FEB352D & _ALL
    x = (x ^ x >> 15) * 0x846CA68B & _ALL
    return x ^ x >> 16
