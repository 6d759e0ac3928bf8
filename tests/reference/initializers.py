"""Every initializer as text, and what it gives in plain NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

SEED = 42
SHAPE = (3, 2)
_DRAWN = (4096, 2)


def _generator() -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([SEED, 0], np.uint64)))


def _normal() -> npt.NDArray[Any]:
    drawn = _generator().standard_normal(_DRAWN, np.float32)[: SHAPE[0]]
    return drawn * np.float32(0.5) + np.float32(1)


def _uniform(low: float, high: float) -> npt.NDArray[Any]:
    drawn = _generator().random(_DRAWN, np.float32)[: SHAPE[0]]
    return drawn * np.float32(high - low) + np.float32(low)


def _xavier() -> npt.NDArray[Any]:
    bound = 2 * np.sqrt(6 / sum(SHAPE))
    return _uniform(-bound, bound)


EXAMPLES: dict[str, tuple[str, Callable[[], npt.NDArray[Any]]]] = {
    "constant": ("constant(0.1)", lambda: np.full(SHAPE, 0.1)),
    "normal": ("normal(1,0.5)", _normal),
    "uniform": ("uniform(-1,3)", lambda: _uniform(-1, 3)),
    "xavier_uniform": ("xavier_uniform(2)", _xavier),
    "zeros": ("zeros", lambda: np.zeros(SHAPE)),
}
"""By name: the text, and the first values of a field of SHAPE at SEED."""
