"""From one stored element type to another."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import bfloat16
from tierstore.errors import InvalidInputError
from tierstore.spec import DTYPES

__all__ = ["Converter", "convert", "held_dtype"]

Array = npt.NDArray[Any]


def convert(block: Array, source: str, target: str) -> Array:
    """Return a block stored as `source` stored as `target`: rounded to nearest, ties to even.

    The block itself, not a copy, where nothing changes. Values beyond the range of the target
    become infinite.
    """
    if source == target:
        return block
    values = _floats(block, source)
    if target == "bfloat16":
        with np.errstate(over="ignore"):
            return bfloat16.from_float32(values)
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[target], copy=False)


def held_dtype(dtype: str, holds: Sequence[str], what: str) -> str:
    """Return the element type that a file which `holds` these has for values of `dtype`.

    That is `dtype` itself or, for the two half precisions, float32, which holds them exactly.
    Raises InvalidInputError where precision would be lost unasked.
    """
    if dtype in holds:
        return dtype
    if dtype in ("float16", "bfloat16") and "float32" in holds:
        return "float32"
    raise InvalidInputError(
        f"{what} cannot hold {dtype}; convert to one of {', '.join(holds)} (--dtype)"
    )


class Converter:
    """Converts blocks of one stored type to another and counts what overflows.

    Attributes:
        overflowed: finite values so far that became infinite.
    """

    def __init__(self, source: str, target: str) -> None:
        """Convert from `source` to `target`."""
        self._source = source
        self._target = target
        self.overflowed = 0

    def __call__(self, block: Array) -> Array:
        """Return the block stored as the target; itself, not a copy, where nothing changes."""
        converted = convert(block, self._source, self._target)
        if converted is not block:
            after = int(np.isinf(_floats(converted, self._target)).sum())
            if after:
                self.overflowed += after - int(np.isinf(_floats(block, self._source)).sum())
        return converted

    def warn(self, what: str) -> None:
        """Warn the caller's caller if anything overflowed."""
        if self.overflowed:
            warnings.warn(
                f"{self.overflowed} values of {what} are too large for {self._target} and became "
                "infinite",
                stacklevel=3,
            )


def _floats(block: Array, dtype: str) -> Array:
    """Return a stored block as floats: bfloat16 widened, others as they are."""
    return bfloat16.to_float32(block) if dtype == "bfloat16" else block
