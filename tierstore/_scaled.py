"""Elements of 8 bits with a scale for each block of a row: how a scaled field is stored and read.

The record of a scaled field holds its elements, then its scales. A value is its element times its
scale, both as float32, rounded once to the type that is asked for.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import ElementType
from tierstore.errors import InvalidInputError

Array = npt.NDArray[Any]


class ScaleType:
    """Scales stored as float32."""

    stored: np.dtype[Any] = np.dtype("<f4")
    kernel = "F32"

    def covering(self, largest: Array) -> Array:
        """Return scales, float32, of which none is less than `largest`, except by rounding."""
        tiny = np.float32(np.finfo(np.float32).tiny)
        return np.where(largest > 0, np.maximum(largest, tiny), np.float32(1)).astype(np.float32)

    def encode(self, scales: Array) -> Array:
        """Convert scales of this type from float32."""
        return scales.astype(self.stored)

    def decode(self, stored: Array) -> Array:
        """Convert to float32."""
        return stored


class _PowersOfTwo(ScaleType):
    """Scales stored as the 8 bits of a power of two's exponent, float8_e8m0fnu; 255 is NaN."""

    stored = np.dtype("u1")
    kernel = "E8M0"

    def covering(self, largest: Array) -> Array:
        fraction, exponent = np.frexp(largest.astype(np.float64))
        exponent = np.clip(exponent - (fraction == 0.5), -127, 127)
        return np.ldexp(np.float32(1), np.where(largest > 0, exponent, 0)).astype(np.float32)

    def encode(self, scales: Array) -> Array:
        codes = np.frexp(scales)[1] + 126
        return np.where(np.isnan(scales), 255, codes).astype(np.uint8)

    def decode(self, stored: Array) -> Array:
        bits = stored.astype(np.uint32) << np.uint32(23)
        bits[stored == 0] = 0x00400000
        bits[stored == 255] = 0x7FC00000
        return bits.view(np.float32)


SCALE_TYPES: dict[str, ScaleType] = {"float32": ScaleType(), "e8m0": _PowersOfTwo()}
"""The types of scales, by name."""


class ScaledElements(ElementType):
    """What a scaled field stores, as bytes of a row; users read and write float32.

    Attributes:
        element: the type of the elements.
        scale: the type of the scales.
        dim: elements of a row.
        block: elements that share a scale; the last block of a row may have fewer.
        blocks: scales of a row.
        scales_at: the byte at which they begin.
        nbytes: bytes of a row.
    """

    trainable = False
    beyond = "the largest of their block, or NaN beside a NaN"

    def __init__(self, element: ElementType, scale: ScaleType, dim: int, block: int) -> None:
        """Lay the elements and scales of a row out."""
        super().__init__(element.name, "|u1", safetensors=element.safetensors)
        self.numpy: np.dtype[Any] = np.dtype("<f4")
        self.element = element
        self.scale = scale
        self.dim = dim
        self.block = block
        self.blocks: int = -(-dim // block)
        size = scale.stored.itemsize
        self.scales_at: int = -(-dim // size) * size
        self.nbytes: int = self.scales_at + self.blocks * size

    def encode(self, values: Array) -> Array:
        """Quantise floats `(…, dim)` to bytes `(…, nbytes)`.

        The largest finite number of a block sets its scale, and the others are rounded to nearest,
        ties to even. Infinities become the largest number of their block where the type has none.
        NaN makes its whole block NaN where the type has none. Raises InvalidInputError for negative
        numbers where the type has none.
        """
        given = np.ascontiguousarray(values, np.float32).reshape(-1, self.dim)
        most = np.float32(self.element.largest)
        if self.element.stored.kind == "u" and self.element.integer and (given < 0).any():
            raise InvalidInputError(
                f"{self.name} with a scale holds no negative numbers; use int8, which does"
            )
        starts = np.arange(0, self.dim, self.block)
        sizes = np.where(np.isfinite(given), np.abs(given), np.float32(0))
        scales = self.scale.covering(np.maximum.reduceat(sizes, starts, axis=1) / most)
        with np.errstate(over="ignore", invalid="ignore"):
            parts = given / self._spread(scales)
        if self.element.integer:
            blank = np.logical_or.reduceat(np.isnan(given), starts, axis=1)
            scales[blank] = np.nan
        finite = ~np.isinf(given) | (not self._infinite)
        parts = np.where(finite, np.clip(parts, -most, most), parts)
        out = np.zeros((len(given), self.nbytes), np.uint8)
        out[:, : self.dim] = self.element.encode(parts).view(np.uint8)
        out[:, self.scales_at :].view(self.scale.stored)[:] = self.scale.encode(scales)
        return out.reshape(*values.shape[:-1], self.nbytes)

    def decode(self, stored: Array) -> Array:
        """Return the float32 `(…, dim)` of bytes `(…, nbytes)`."""
        rows = np.ascontiguousarray(stored).reshape(-1, self.nbytes)
        elements = np.ascontiguousarray(rows[:, : self.dim]).view(self.element.stored)
        scales = np.ascontiguousarray(rows[:, self.scales_at :]).view(self.scale.stored)
        values = self.element.decode(elements).astype(np.float32, copy=not self.element.as_bits)
        scales = self.scale.decode(scales)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.dim % self.block:
                values *= self._spread(scales)
            else:
                values.reshape(-1, self.blocks, self.block)[:] *= scales[:, :, None]
        return values.reshape(*stored.shape[:-1], self.dim)

    def overflowed(self, values: Array, stored: Array) -> int:
        """Count the infinities and numbers that became something else."""
        found = self.decode(stored)
        lost = np.isinf(values) & ~np.isinf(found) | np.isfinite(values) & ~np.isfinite(found)
        return int(lost.sum())

    def nan(self) -> Any:
        """Return the bytes of a row whose elements are all NaN."""
        nans = self.scale.encode(np.full(self.blocks, np.nan, np.float32)).view(np.uint8)
        return np.concatenate([np.zeros(self.scales_at, np.uint8), nans])

    def torch_dtype(self) -> Any:
        """Return float32; imports torch."""
        import torch

        return torch.float32

    def to_torch(self, stored: Array) -> Any:
        """Return the values of bytes `(…, nbytes)`, float32."""
        import torch

        return torch.from_numpy(self.decode(stored))

    def to_cupy(self, data: Any) -> Any:
        """Return the values of bytes `(…, nbytes)` in memory of CuPy, float32."""
        import cupy

        return cupy.asarray(self.decode(data.get()))

    @cached_property
    def _infinite(self) -> bool:
        """Whether the type of the elements has infinities."""
        infinity = self.element.encode(np.array([np.inf], np.float32))
        return bool(np.isinf(self.element.decode(infinity))[0])

    def _spread(self, scales: Array) -> Array:
        """Repeat `(n, blocks)` scales for the elements of their blocks, `(n, dim)`."""
        return scales if self.blocks == 1 else np.repeat(scales, self.block, 1)[:, : self.dim]
