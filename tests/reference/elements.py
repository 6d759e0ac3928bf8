"""What tests know of each element type: its NumPy types and values that it holds.

Every type of the registry needs an entry; `element` raises where one is missing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.reference import entry
from tierstore._dtypes import ELEMENT_TYPES

BFLOAT16 = ELEMENT_TYPES["bfloat16"]
"""Shown by tests/test_dtypes.py, for every value, to round and widen as torch does."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Element:
    """One element type.

    Attributes:
        reads_as: the NumPy dtype of rows that are read and written.
        stored: the NumPy dtype on disk.
        exponent: the decimal exponent of its largest values, about.
        smallest: its smallest positive value, or one as small as is worth testing.
        exact: returns the nearest values that it holds, in `reads_as`.
        encode: returns floats as stored elements, rounded to nearest.
    """

    reads_as: np.dtype[Any]
    stored: np.dtype[Any]
    exponent: int
    smallest: float
    exact: Callable[[Array], Array]
    encode: Callable[[Array], Array]


def _float(code: str, exponent: int) -> Element:
    dtype = np.dtype(code)
    smallest = float(np.finfo(dtype).smallest_subnormal)
    return Element(
        dtype, dtype, exponent, smallest, lambda v: v.astype(dtype), lambda v: v.astype(dtype)
    )


def _float8(name: str, exponent: int, smallest: float) -> Element:
    """Shown by tests/test_dtypes.py to round as torch does."""
    kind = ELEMENT_TYPES[name]
    return Element(
        np.dtype("<f4"),
        np.dtype("u1"),
        exponent,
        smallest,
        lambda v: kind.decode(kind.encode(v)),
        lambda v: kind.encode(v.astype(np.float32)),
    )


def _integer(code: str) -> Element:
    dtype, limits = np.dtype(code), np.iinfo(code)

    def exact(values: Array) -> Array:
        return np.rint(values).clip(limits.min, limits.max).astype(dtype)

    return Element(dtype, dtype, 2, 1, exact, exact)


ELEMENTS = {
    "float8_e4m3fn": _float8("float8_e4m3fn", 2, 2.0**-9),
    "float8_e5m2": _float8("float8_e5m2", 4, 2.0**-16),
    "int8": _integer("i1"),
    "uint8": _integer("u1"),
    "float16": _float("<f2", 4),
    "bfloat16": Element(
        np.dtype("<f4"),
        np.dtype("<u2"),
        37,
        1e-40,
        lambda v: BFLOAT16.decode(BFLOAT16.encode(v)),
        lambda v: BFLOAT16.encode(v.astype(np.float32)),
    ),
    "float32": _float("<f4", 37),
    "float64": _float("<f8", 300),
}

DTYPES = tuple(ELEMENT_TYPES)
"""The element types of the registry: what tests are parametrised over."""


def element(dtype: str) -> Element:
    """Return what tests know of a type; raises for one without an entry."""
    return entry(ELEMENTS, dtype)
