"""Initializers: the first values of a field.

Each table's seed is a hash of the table's name and the seed that was given or drawn, so tables are
independent of each other; the manifest records it. Random values are drawn in fixed blocks of 4,096
rows, each from a Philox generator keyed by (seed, field, block), so the initial bytes of a table do
not depend on chunk size, backend or order.

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import re
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import check_unmasked
from tierstore.errors import FormatError, InvalidInputError, InvalidTypeError, MissingFileError

__all__ = [
    "BLOCK_ROWS",
    "INITIALIZERS",
    "Constant",
    "Initializer",
    "Normal",
    "Random",
    "Uniform",
    "XavierUniform",
    "Zeros",
    "as_initializer",
    "constant",
    "from_array",
    "from_call",
    "from_file",
    "normal",
    "parse_initializer",
    "syntax",
    "uniform",
    "xavier_uniform",
    "zeros",
]

BLOCK_ROWS = 4096
"""Rows drawn from one generator state."""

Floats = npt.NDArray[np.floating[Any]]


class Initializer(ABC):
    """Produces the first values of a field, one block of rows at a time.

    A subclass with a name, as in `class Normal(Initializer, name="normal")`, can be written as
    text: `normal(0,0.01)`. It is a dataclass of numbers, plus `seed` if it is random.

    Attributes:
        is_zero: whether every value is zero, so that files may stay sparse.
    """

    is_zero: bool = False
    draws_by_key: ClassVar[bool] = False
    """Whether `of_keys` is implemented, so that tables by key can use it."""
    _name: ClassVar[str] = ""

    def __init_subclass__(cls, *, name: str | None = None) -> None:
        """Register the initializer under its name, if it has one."""
        if name is not None:
            cls._name = name
            INITIALIZERS[name] = cls

    def seeded(self) -> Initializer:
        """Return the initializer, with a seed drawn if it is random and has none."""
        return self

    @functools.cached_property
    def text(self) -> str:
        """The call that creates it, such as "normal(mean=0.0, std=0.01, seed=7)"; "" for arrays."""
        if not self._name:
            return ""
        given = [each.name for each in dataclasses.fields(self) if each.init]  # type: ignore[arg-type]
        given.sort(key=lambda name: name == "seed")
        return f"{self._name}({', '.join(f'{name}={getattr(self, name)!r}' for name in given)})"

    def bound(self, table: str, shape: tuple[int, int]) -> Initializer:
        """Return the initializer for a new table of this name, and for rows that it grows by later.

        Its random values are independent of those of other tables with the same seed.
        """
        return self

    @abstractmethod
    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        """Return rows `block * BLOCK_ROWS …` as a fresh `(count, dim)` array of floats.

        `shape` is (rows, dim) of the whole field, `field` its position in the record.
        """

    def of_keys(self, codes: npt.NDArray[np.uint64], dim: int, field: int) -> Floats:
        """Return the first rows of keys by their codes `(n,)`, a fresh `(n, dim)` array of floats.

        A row depends on the seed, the field and its own key alone.
        """
        raise InvalidInputError(f"{self!r} has values by row, and rows of keys have no order")


INITIALIZERS: dict[str, type[Initializer]] = {}
"""The initializers that text can name."""


@dataclass(frozen=True)
class Constant(Initializer, name="constant"):
    """A constant; some optimizers initialize their state with one."""

    draws_by_key = True
    value: float

    def __post_init__(self) -> None:
        """Check the value."""
        _make_finite(self)

    @property
    def is_zero(self) -> bool:  # type: ignore[override]
        """Whether the value is +0."""
        return self.value == 0 and not math.copysign(1, self.value) < 0

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        """Return `count` rows of the value."""
        return np.full((count, shape[1]), self.value, np.float64)

    def of_keys(self, codes: npt.NDArray[np.uint64], dim: int, field: int) -> Floats:
        """Return a row of the value for each key."""
        return np.full((codes.size, dim), self.value, np.float64)


@dataclass(frozen=True)
class Zeros(Constant, name="zeros"):
    """Zeros."""

    value: float = dataclasses.field(default=0.0, init=False)


@dataclass(frozen=True)
class Random(Initializer):
    """Random values that are a function of seed, field and row.

    Attributes:
        seed: 0..2**64-1. With None, a new table uses the seed of `torch.manual_seed`, or draws one
            if that was not called.
    """

    draws_by_key = True
    seed: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check the seed and the numbers."""
        _make_finite(self)
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise InvalidInputError(f"a seed must be in 0..2**64-1, not {self.seed}")

    def seeded(self) -> Initializer:
        """Return the initializer with a seed."""
        return (
            self if self.seed is not None else dataclasses.replace(self, seed=secrets.randbits(64))
        )

    def bound(self, table: str, shape: tuple[int, int]) -> Initializer:
        """Return the same distribution with the table's own seed."""
        seed = _default_seed() if self.seed is None else self.seed
        digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
        return dataclasses.replace(self, seed=int.from_bytes(digest))

    def generator(self, block: int, field: int) -> np.random.Generator:
        """Return the generator for a block of rows."""
        if self.seed is None:
            raise InvalidInputError(f"{self.text} has no seed yet; call its seeded() first")
        key = np.array([self.seed, (field << 48) | block], np.uint64)
        return np.random.Generator(np.random.Philox(key=key))

    def bits(
        self, codes: npt.NDArray[np.uint64], columns: int, field: int
    ) -> npt.NDArray[np.uint64]:
        """Return 64 random bits for each key and column, `(n, columns)`.

        SplitMix64 that starts from seed, field and key: Steele, Lea and Flood, "Fast splittable
        pseudorandom number generators", OOPSLA'14.
        """
        if self.seed is None:
            raise InvalidInputError(f"{self.text} has no seed yet; call its seeded() first")
        stream = _mixed(np.array([self.seed], np.uint64) + np.uint64(field) * _GAMMA)
        start = _mixed(codes ^ stream)
        return _mixed(start[:, None] + np.arange(1, columns + 1, dtype=np.uint64) * _GAMMA)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _default_seed() -> int:
    """Return the seed that `torch.manual_seed` set, or draw one if torch is not seeded."""
    asked = getattr(sys.modules.get("torch"), "initial_seed", None)
    seed = _TORCH_SEED if asked is None else asked()
    return secrets.randbits(64) if seed == _TORCH_SEED else int(seed)


_TORCH_SEED = 67280421310721
"""The initial seed of torch, if it was not seeded."""


@dataclass(frozen=True)
class Uniform(Random, name="uniform"):
    """Uniform on [low, high), drawn in float32."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        """Check that the numbers are finite and in order."""
        super().__post_init__()
        if self.low > self.high:
            raise InvalidInputError(f"low must not exceed high: {self.low} > {self.high}")

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        """Draw `count` rows."""
        draw = self.generator(block, field).random((BLOCK_ROWS, shape[1]), np.float32)[:count]
        return draw * np.float32(self.high - self.low) + np.float32(self.low)

    def of_keys(self, codes: npt.NDArray[np.uint64], dim: int, field: int) -> Floats:
        """Draw a row for each key."""
        draw = (self.bits(codes, dim, field) >> np.uint64(40)).astype(np.float32)
        return draw * np.float32((self.high - self.low) / 2**24) + np.float32(self.low)


@dataclass(frozen=True)
class Normal(Random, name="normal"):
    """Normal with the given mean and standard deviation, drawn in float32."""

    mean: float = dataclasses.field(default=0.0, kw_only=True)
    std: float = dataclasses.field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        """Check that the numbers are finite and the deviation is not negative."""
        super().__post_init__()
        if self.std < 0:
            raise InvalidInputError(f"std cannot be negative: {self.std}")

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        """Draw `count` rows."""
        generator = self.generator(block, field)
        draw = generator.standard_normal((BLOCK_ROWS, shape[1]), np.float32)[:count]
        return draw * np.float32(self.std) + np.float32(self.mean)

    def of_keys(self, codes: npt.NDArray[np.uint64], dim: int, field: int) -> Floats:
        """Draw a row for each key: Box and Muller's method, two values from 64 bits."""
        bits = self.bits(codes, -(-dim // 2), field)
        radius = np.sqrt(-2 * np.log(((bits >> np.uint64(32)) + 0.5) / 2**32))
        angle = (bits & np.uint64(0xFFFFFFFF)) * (2 * math.pi / 2**32)
        draw = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
        draw = draw.reshape(codes.size, -1)[:, :dim].astype(np.float32)
        return draw * np.float32(self.std) + np.float32(self.mean)


@dataclass(frozen=True)
class XavierUniform(Random, name="xavier_uniform"):
    """Uniform within ±gain·√(6 / (rows + dim)): Glorot and Bengio, AISTATS 2010."""

    gain: float = 1.0
    draws_by_key = False  # but `bound` makes it one that does

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        """Draw `count` rows."""
        return self._uniform(shape).block(block, count, shape, field)

    def bound(self, table: str, shape: tuple[int, int]) -> Initializer:
        """Return the uniform distribution for the first shape, with the table's own seed."""
        return self._uniform(shape).bound(table, shape)

    def _uniform(self, shape: tuple[int, int]) -> Uniform:
        bound = self.gain * math.sqrt(6 / (shape[0] + shape[1]))
        return Uniform(-bound, bound, seed=self.seed)


@dataclass(frozen=True)
class Unknown(Initializer):
    """An initializer recorded in a table that this program does not know."""

    call: str

    @functools.cached_property
    def text(self) -> str:
        """The call that creates it, as recorded in the manifest."""
        return self.call

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        """Raise InvalidInputError: the initializer is not known."""
        raise InvalidInputError(
            f"the table uses {self.call}, an initializer that is not registered: import "
            "the module that defines it, or pass init="
        )


def from_call(text: str) -> Initializer:
    """Parse `Initializer.text`; return Unknown for an initializer that is not registered."""
    match = re.fullmatch(r"(\w+)\((.*)\)", text)
    kind = INITIALIZERS.get(match[1]) if match else None
    if match is None or kind is None:
        return Unknown(text)
    given = dict(part.split("=", 1) for part in match[2].split(", ") if "=" in part)
    try:
        numbers = {
            name: int(each) if name == "seed" else float(each) for name, each in given.items()
        }
        return kind(**numbers)
    except (TypeError, ValueError):
        return Unknown(text)


constant: type[Constant] = Constant
normal: type[Normal] = Normal
uniform: type[Uniform] = Uniform
xavier_uniform: type[XavierUniform] = XavierUniform
zeros: type[Zeros] = Zeros


@dataclass(frozen=True, eq=False)
class _Array(Initializer):
    values: npt.NDArray[Any]

    def __repr__(self) -> str:
        return f"from_array({self.values.dtype} {self.values.shape})"

    def block(self, block: int, count: int, shape: tuple[int, int], field: int) -> Floats:
        if self.values.shape != shape:
            raise InvalidInputError(f"the array has shape {self.values.shape}, the field {shape}")
        start = block * BLOCK_ROWS
        return np.array(self.values[start : start + count])


def from_array(values: Any) -> Initializer:
    """The rows of a floating-point `(rows, dim)` array, read while the table is created.

    Accepts NumPy arrays, torch tensors and parameters, and lists of numbers.
    """
    if hasattr(values, "detach"):  # a tensor, and a parameter in particular
        values = values.detach().cpu()
        values = (values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy()
    check_unmasked(values, "values")
    given, values = values, np.asarray(values)
    if values.dtype.kind in "iu" and not isinstance(given, np.ndarray):
        values = values.astype(np.float64)
    if values.ndim != 2 or values.dtype.kind != "f":
        raise InvalidInputError(
            f"need a 2-D array of floats, not {values.dtype} of shape {values.shape}"
        )
    return _Array(values)


def from_file(path: str | os.PathLike[str]) -> Initializer:
    """The rows of a 2-D floating-point `.npy` file, mapped and read while the table is created.

    Raises MissingFileError, and FormatError for a file of another kind.
    """
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file", filename=path) from None
    except ValueError as error:
        raise FormatError(f"{path}: not a .npy file of plain numbers ({error})") from None
    if not isinstance(values, np.ndarray):
        raise FormatError(f"{path}: not a .npy file; import other formats with tierstore load")
    return from_array(values)


def as_initializer(init: object) -> Initializer | None:
    """Return what is given as `init`: an initializer, a number for `constant` of it, or None.

    Raises InvalidTypeError for other objects, naming the function for the name of an initializer.
    """
    if init is None or isinstance(init, Initializer):
        return init
    if isinstance(init, int | float | np.integer | np.floating) and not isinstance(init, bool):
        return Constant(float(init))
    wanted = "tierstore.zeros() or tierstore.constant(0.5), or a number"
    if isinstance(init, str) and (found := re.match(r"\s*(\w+)", init)):
        kind = INITIALIZERS.get(found[1])
        if kind is not None:
            wanted = f"tierstore.{found[1]}({', '.join(_numbers(kind))})"
    raise InvalidTypeError(f"init must be an initializer such as {wanted}, not {init!r}")


def syntax() -> str:
    """Return the text syntax of all initializers, sorted by name: `normal(mean,std)|…`."""
    return "|".join(
        f"{name}({','.join(numbers)})" if (numbers := _numbers(kind)) else name
        for name, kind in sorted(INITIALIZERS.items())
    )


def parse_initializer(text: str) -> Callable[[int], Initializer]:
    """Parse text such as "normal(0,0.01)"; return a function from a seed to the initializer.

    Give all numbers, or none for the defaults. Raises InvalidInputError.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    kind = INITIALIZERS.get(match[1]) if match else None
    if match is None or kind is None:
        raise InvalidInputError(f"not an initializer: {text!r}; choose from {syntax()}")
    seeded = issubclass(kind, Random)
    try:
        given = [float(number) for number in match[2].split(",")] if match[2] else []
        numbers = dict(zip(_numbers(kind), given, strict=True)) if given else {}
        kind(**numbers)
    except InvalidInputError as error:
        raise InvalidInputError(f"{text!r}: {error}") from None
    except (TypeError, ValueError):
        raise InvalidInputError(f"{text!r} has the wrong numbers; write {syntax()}") from None
    return lambda seed: kind(**numbers, **({"seed": seed} if seeded else {}))


def _numbers(kind: type[Initializer]) -> list[str]:
    """Return the names of an initializer's numeric parameters."""
    names = [each.name for each in dataclasses.fields(kind) if each.init]  # type: ignore[arg-type]
    return [name for name in names if name != "seed"]


def _make_finite(initializer: Initializer) -> None:
    """Convert the parameters of an initializer to floats; raise InvalidInputError if invalid."""
    for name in _numbers(type(initializer)):
        value = getattr(initializer, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise InvalidInputError(f"{name} must be a finite number, not {value!r}")
        object.__setattr__(initializer, name, float(value))
