"""Rounding to bfloat16 at random, by numbers that only the row, the element and the step decide.

A step smaller than half of what bfloat16 tells apart would be lost every time; rounded up as often
as it deserves, it is not. The same rows round the same way on every device and with any budget.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rounded_at_random"]

_ALL = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def rounded_at_random(values: Tensor, rows: Tensor, step: int) -> Tensor:
    """Return float32 `values` `(n, dim)` of `rows` `(n,)` as bfloat16, on average the same.

    A number between two of bfloat16 becomes the one farther from zero in as many of all cases as
    it is on the way there. Infinities and NaN stay.
    """
    bits = values.contiguous().view(torch.int32)
    up = (bits + _noise(rows.to(torch.int64), values.shape[1], step)) & ~0xFFFF
    return torch.where(values.isnan(), values, up.view(torch.float32)).to(torch.bfloat16)


def _noise(rows: Tensor, dim: int, step: int) -> Tensor:
    """Return 16 random bits for each element, int32 `(n, dim)`; step.cu draws the same."""
    low, high = rows & _ALL, rows >> 32
    key = _mixed((_mixed((low + step * _GOLDEN) & _ALL) + high) & _ALL)
    elements = torch.arange(dim, device=rows.device) * _GOLDEN & _ALL
    return (_mixed(key[:, None] ^ elements) >> 16).to(torch.int32)


def _mixed(x: Tensor) -> Tensor:
    """Return a number of 32 bits, in int64, of which every bit depends on every bit of another.

    Shifts and factors: lowbias32, found by C. Wellons' hash prospector (2018, public domain).
    """
    x = (x ^ x >> 16) * 0x7FEB352D & _ALL
    x = (x ^ x >> 15) * 0x846CA68B & _ALL
    return x ^ x >> 16
