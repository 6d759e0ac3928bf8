"""State of rows in 8 bits: elements of float8, and for each row a power of two that scales them.

The largest number of a row chooses the power, so that it fits; all others are rounded at random.
step.cu does the same on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tierstore import initializers
from tierstore.optim.rounding import noise
from tierstore.spec import Field, Scale

__all__ = ["SIGNED", "SIZES", "Float8"]

_NAN = 0x7F


@dataclass(frozen=True)
class Float8:
    """A type for the state of rows.

    Attributes:
        name: the type of the elements.
        mantissa: bits of it.
        bias: what is added to exponents.
        largest: the exponent of the largest number, which is 1.75 times that power of two.
        infinity: the code of what is infinite.
        positive: whether positive values stay positive. An optimizer divides by such a state, and a
            row whose size became zero would leap.
    """

    name: str
    mantissa: int
    bias: int
    largest: int
    infinity: int
    positive: bool

    def field(self, dim: int, initial: float) -> Field:
        """Return the field for states of `dim` numbers, which start from the nearest ones."""
        return Field(dim, self.name, initializers.constant(initial), Scale("float32"))

    def rounded(self, values: Tensor, rows: Tensor, step: int, *, seed: int, column: int) -> Tensor:
        """Return float32 `values` `(n, dim)` of `rows` `(n,)` as bytes of the field `(n, nbytes)`.

        On average they are the same, but for sizes below the least that the row can hold. The bits
        are drawn as by `rounded_at_random`. NaN stays; so does infinity, or becomes NaN.
        """
        n, dim = values.shape
        sizes = values.abs()
        finite = torch.where(sizes.isfinite(), sizes, 0)
        scales = self._scales(finite.amax(1, keepdim=True))
        parts, dropped = finite / scales, 23 - self.mantissa
        # Numbers of the least exponent, and those below, are evenly spaced.
        even = parts < 2.0 ** (1 - self.bias)
        steps = torch.where(even, parts, 0) * 2.0 ** (self.bias - 1 + self.mantissa + dropped)
        floats = parts.view(torch.int32) - ((127 - self.bias) << 23)
        whole = torch.where(even, steps.to(torch.int32), floats)
        codes = (whole + noise(rows, dim, step, seed, column, bits=dropped)) >> dropped
        if self.positive:
            codes = torch.where(sizes > 0, codes.clamp(min=1), codes)
        codes = torch.where(sizes.isinf(), self.infinity, codes)
        codes = torch.where(sizes.isnan(), _NAN, codes) | values.signbit().to(torch.int32) << 7
        out = values.new_zeros((n, self.field(dim, 0).nbytes), dtype=torch.uint8)
        out[:, :dim] = codes.to(torch.uint8)
        out[:, -4:] = scales.view(torch.uint8)
        return out

    def values(self, stored: Tensor, dim: int) -> Tensor:
        """Return the float32 `(n, dim)` of bytes of the field `(n, nbytes)`."""
        elements = stored[:, :dim].contiguous().view(getattr(torch, self.name))
        return elements.float() * stored[:, -4:].contiguous().view(torch.float32)

    def _scales(self, most: Tensor) -> Tensor:
        """Return the least powers of two by which `most` `(n, 1)` is not too large; 1 for 0."""
        bits = most.view(torch.int32)
        beyond = (bits & 0x7FFFFF) > 0x600000
        exponents = (bits >> 23) + beyond.to(torch.int32) - self.largest
        exponents = torch.where(most > 0, exponents.clamp(min=1), 127)
        return (exponents << 23).view(torch.float32)


SIGNED = Float8("float8_e4m3fn", 3, bias=7, largest=8, infinity=_NAN, positive=False)
"""For what may be negative."""
SIZES = Float8("float8_e5m2", 2, bias=15, largest=15, infinity=0x7C, positive=True)
"""For sums and averages of squares, and other sizes, which differ more within a row."""
