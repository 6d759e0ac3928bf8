"""bfloat16 for NumPy, which has none: the upper half of a float32, held as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["from_float32", "to_float32"]


def to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widen bfloat16 bits of any shape to a fresh float32 array, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float32(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Round floats of any shape to the nearest bfloat16, ties to even, as fresh uint16 bits.

    Other float types go through float32 first. NaN stays NaN: its quiet bit is set, so that
    dropping the low half cannot turn it into an infinity.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)
