"""The distinct values of an array of integers, by sorting."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["unique"]

Integer = TypeVar("Integer", bound=np.integer[Any])


def unique(values: npt.NDArray[Integer]) -> npt.NDArray[Integer]:
    """Return each of `values` `(n,)` once, ascending, as a new array.

    `np.unique` hashes integers since NumPy 2.3: 5 ms for 32k that are mostly distinct, 850 ms for
    a million. A sort takes 0.2 and 11 (NumPy 2.4.6).
    """
    ordered = np.sort(values)
    first = np.ones(ordered.size, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered if first.all() else ordered.compress(first)
