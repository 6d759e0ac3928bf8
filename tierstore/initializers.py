"""Initializers: the first values of a field.

Random values are drawn in fixed blocks of 4,096 rows, each from a Philox generator keyed by (seed,
field, block), so a table's first bytes depend on neither chunk size, backend nor order.
Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tierstore.errors import FormatError, InvalidInputError

__all__ = [
    "BLOCK_ROWS",
    "Initializer",
    "constant",
    "from_array",
    "from_file",
    "normal",
    "uniform",
    "xavier_uniform",
    "zeros",
]

BLOCK_ROWS = 4096
"""Rows drawn from one generator state."""

Floats = npt.NDArray[np.floating[Any]]


@runtime_checkable
class Initializer(Protocol):
    """First values of a field, made a block at a time."""

    @property
    def is_zero(self) -> bool:
        """Whether every value is zero, so that files may stay sparse."""

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        """Return rows `block * BLOCK_ROWS …` as a fresh `(count, dim)` array of floats.

        `shape` is (rows, dim) of the whole field, `field` its position in the record.
        """


@dataclass(frozen=True)
class _Constant:
    value: float

    @property
    def is_zero(self) -> bool:
        return self.value == 0 and not math.copysign(1, self.value) < 0

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        return np.full((count, shape[1]), self.value, np.float64)


@dataclass(frozen=True)
class _Random:
    seed: int
    is_zero = False

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise InvalidInputError(f"a seed lies in 0..2**64-1, not {self.seed}")

    def _generator(self, block: int, field: int) -> np.random.Generator:
        key = np.array([self.seed, (field << 48) | block], np.uint64)
        return np.random.Generator(np.random.Philox(key=key))


@dataclass(frozen=True)
class _Uniform(_Random):
    low: float
    high: float

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        draw = self._generator(block, field).random((BLOCK_ROWS, shape[1]), np.float32)[:count]
        return draw * np.float32(self.high - self.low) + np.float32(self.low)


@dataclass(frozen=True)
class _Normal(_Random):
    mean: float
    std: float

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        generator = self._generator(block, field)
        draw = generator.standard_normal((BLOCK_ROWS, shape[1]), np.float32)[:count]
        return draw * np.float32(self.std) + np.float32(self.mean)


@dataclass(frozen=True)
class _XavierUniform(_Random):
    gain: float

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        bound = self.gain * math.sqrt(6 / (shape[0] + shape[1]))
        return _Uniform(self.seed, -bound, bound).block(block, count, shape, field)


@dataclass(frozen=True, eq=False)
class _Array:
    values: npt.NDArray[Any]
    is_zero = False

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        if self.values.shape != shape:
            raise InvalidInputError(f"the array is {self.values.shape}, the field {shape}")
        start = block * BLOCK_ROWS
        return np.array(self.values[start : start + count])


def zeros() -> Initializer:
    """Zeros."""
    return _Constant(0.0)


def constant(value: float) -> Initializer:
    """One value everywhere; some optimizers start their state from it."""
    return _Constant(_finite(value, "value"))


def uniform(low: float = 0.0, high: float = 1.0, *, seed: int = 0) -> Initializer:
    """Uniform on [low, high), drawn in float32."""
    low, high = _finite(low, "low"), _finite(high, "high")
    if low > high:
        raise InvalidInputError(f"low must not exceed high: {low} > {high}")
    return _Uniform(seed, low, high)


def normal(*, mean: float = 0.0, std: float = 1.0, seed: int = 0) -> Initializer:
    """Normal with the given mean and standard deviation, drawn in float32."""
    if _finite(std, "std") < 0:
        raise InvalidInputError(f"std cannot be negative: {std}")
    return _Normal(seed, _finite(mean, "mean"), std)


def xavier_uniform(gain: float = 1.0, *, seed: int = 0) -> Initializer:
    """Uniform within ±gain·√(6 / (rows + dim)): Glorot and Bengio, AISTATS 2010."""
    return _XavierUniform(seed, _finite(gain, "gain"))


def from_array(values: Any) -> Initializer:
    """The rows of a floating `(rows, dim)` array, which is read while the table is made.

    Takes NumPy arrays, torch tensors and parameters, and lists of numbers.
    """
    if hasattr(values, "detach"):  # a tensor, and a parameter in particular
        values = values.detach().cpu()
        values = (values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy()
    given, values = values, np.asarray(values)
    if values.dtype.kind in "iu" and not isinstance(given, np.ndarray):
        values = values.astype(np.float64)
    if values.ndim != 2 or values.dtype.kind != "f":
        raise InvalidInputError(
            f"need a 2-D array of floats, not {values.dtype} of shape {values.shape}"
        )
    return _Array(values)


def from_file(path: str | Path) -> Initializer:
    """The rows of a 2-D floating `.npy` file, mapped and read while the table is made."""
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise FormatError(f"{path}: not a .npy file of plain numbers ({error})") from None
    if not isinstance(values, np.ndarray):
        raise FormatError(f"{path}: not a .npy file; tierstore load reads other formats")
    return from_array(values)


def _finite(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInputError(f"{what} must be a finite number, not {value!r}")
    return float(value)
