"""Random values of every kind a field can hold, in the NumPy type that reads give back."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.reference.elements import element


def values(rng: np.random.Generator, shape: Any, dtype: str = "float32") -> npt.NDArray[Any]:
    """Return random values of many magnitudes that the element type holds exactly."""
    drawn = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, shape)
    return element(dtype).exact(drawn)


def records(rng: np.random.Generator, count: int, record_bytes: int) -> npt.NDArray[np.uint8]:
    """Return random records."""
    return rng.integers(0, 256, (count, record_bytes), np.uint8)
