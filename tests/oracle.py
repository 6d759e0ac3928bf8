"""Random values of every kind a field can hold, in the NumPy type that reads give back."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _bfloat16

READS_AS = {
    "float16": np.dtype("f2"),
    "bfloat16": np.dtype("f4"),
    "float32": np.dtype("f4"),
    "float64": np.dtype("f8"),
}
"""The NumPy dtype a field's rows are read and written as."""

DTYPES = tuple(READS_AS)


def values(rng: np.random.Generator, shape: Any, dtype: str = "float32") -> npt.NDArray[Any]:
    """Return random values of many magnitudes that the element type holds exactly."""
    drawn = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, shape)
    if dtype == "bfloat16":
        return _bfloat16.to_float32(_bfloat16.from_float32(drawn))
    return drawn.astype(READS_AS[dtype])


def records(rng: np.random.Generator, count: int, record_bytes: int) -> npt.NDArray[np.uint8]:
    """Return random records."""
    return rng.integers(0, 256, (count, record_bytes), np.uint8)
