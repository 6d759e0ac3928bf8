"""Element types: what one element of a field is on disk, in NumPy, in torch and in other files.

An element type is one `ElementType`, registered under its name in ELEMENT_TYPES. Other modules ask
it and never compare names, so that one more type changes this module alone. Types that NumPy lacks
are stored as unsigned integers of the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInputError, OverflowedValuesWarning

__all__ = [
    "DEFAULT_DTYPE",
    "ELEMENT_TYPES",
    "Converter",
    "DTypeName",
    "ElementType",
    "check_dtype",
    "convert",
    "held_dtype",
]

Array = npt.NDArray[Any]

DTypeName: TypeAlias = Literal["float16", "bfloat16", "float32", "float64"] | str
"""The name of an element type: one of these, which editors complete, or a registered one."""

DEFAULT_DTYPE: DTypeName = "float32"
"""The element type where none is named: of fields, and of numbers in text."""


class ElementType:
    """A floating type that NumPy has; a subclass says how another type differs.

    Attributes:
        name: the name for users, in manifests, and in NumPy and torch where they have the type.
        stored: the NumPy dtype of a stored element, little-endian.
        numpy: the dtype of the arrays that NumPy users read and write.
        safetensors: the code in safetensors files.
        held_by: types that hold each of its values exactly, the narrowest first. Fields of those
            take its values, and files that lack the type hold them instead.
        kernel: its name in the CUDA kernels of `optim`; None if they cannot compute with it.
        trainable: whether torch computes gradients of this type.
        stochastic: whether training may round to it at random.
        beyond: what a value beyond its range becomes, for warnings.
    """

    kernel: str | None = None
    trainable = True
    stochastic = False
    beyond = "infinite"

    def __init__(
        self,
        name: str,
        stored: str,
        *,
        safetensors: str,
        held_by: tuple[str, ...] = (),
        kernel: str | None = None,
    ) -> None:
        """Describe a type; `stored` is a NumPy type code."""
        self.name = name
        self.stored: np.dtype[Any] = np.dtype(stored)
        self.numpy = self.stored
        self.safetensors = safetensors
        self.held_by = held_by
        self.kernel = kernel

    @cached_property
    def as_bits(self) -> bool:
        """Whether NumPy lacks the type, so that elements are stored as their bits."""
        return self.numpy != self.stored

    def accepts(self, name: str) -> bool:
        """Whether a field takes values of the torch or CuPy type `name` without losing digits."""
        return name == self.name or (
            name in ELEMENT_TYPES and self.name in ELEMENT_TYPES[name].held_by
        )

    def accepts_array(self, dtype: np.dtype[Any]) -> bool:
        """Whether a field takes NumPy values of `dtype` without losing digits."""
        return dtype.kind == self.numpy.kind and np.can_cast(dtype, self.numpy, "safe")

    def from_numbers(self, array: Array) -> Array:
        """Return an array that NumPy made of Python numbers as `numpy` values, where it can."""
        return array.astype(self.numpy) if array.dtype.kind in "if" else array

    def encode(self, values: Array) -> Array:
        """Return numbers of any shape as stored elements, rounded to nearest, ties to even.

        The array itself where nothing changes. Values beyond the range become infinite.
        """
        with np.errstate(over="ignore"):
            return values.astype(self.stored, copy=False)

    def decode(self, stored: Array) -> Array:
        """Return stored elements as `numpy` values, exactly; the array itself where it is that."""
        return stored

    def overflowed(self, values: Array, stored: Array) -> int:
        """Count the `values` whose `stored` elements are not the nearest number: out of range."""
        after = int(np.isinf(self.decode(stored)).sum())
        return after - int(np.isinf(values).sum()) if after else 0

    def nan(self) -> np.generic | None:
        """Return the stored element that says that there is no value; None if the type has none."""
        stored: np.generic = self.encode(np.array([np.nan], np.float32))[0]
        return stored

    def torch_dtype(self) -> Any:
        """Return torch's dtype; imports torch."""
        import torch

        return getattr(torch, self.name)

    def to_torch(self, stored: Array) -> Any:
        """Return stored elements as a tensor that shares their memory."""
        import torch

        tensor = torch.from_numpy(stored)
        return tensor.view(self.torch_dtype()) if self.as_bits else tensor

    def from_torch(self, tensor: Any) -> Array:
        """Return a CPU tensor of this type as stored elements that share its memory."""
        import torch

        if self.as_bits:
            tensor = tensor.contiguous().view(getattr(torch, self.stored.name))
        array: Array = tensor.numpy()
        return array

    def to_cupy(self, data: Any) -> Any:
        """Return a contiguous CuPy array of stored elements or bytes as one of this type."""
        import cupy

        return data.view(cupy.dtype(self.name))

    def from_cupy(self, array: Array) -> Array:
        """Return an array of this type that CuPy copied to the host as stored elements."""
        return array.view(self.stored) if self.as_bits else array


class _BFloat16(ElementType):
    """The upper half of a float32, which NumPy users read and write as float32."""

    stochastic = True

    def __init__(self) -> None:
        super().__init__(
            "bfloat16", "<u2", safetensors="BF16", held_by=("float32", "float64"), kernel="BF16"
        )
        self.numpy = np.dtype("<f4")

    def encode(self, values: Array) -> Array:
        """Round, as fresh bits; other types than float32 go through it first.

        NaN stays NaN: its quiet bit is set, so that dropping the low half cannot turn it into an
        infinity.
        """
        with np.errstate(over="ignore"):
            bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
            even = (bits >> np.uint32(16)) & np.uint32(1)
            rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.where(is_nan, quiet, rounded).astype(np.uint16)

    def decode(self, stored: Array) -> Array:
        """Widen to a fresh float32 array."""
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def to_cupy(self, data: Any) -> Any:
        """Return the array as one of `ml_dtypes.bfloat16`, which CuPy uses."""
        import ml_dtypes

        return data.view(ml_dtypes.bfloat16)


ELEMENT_TYPES: dict[str, ElementType] = {
    each.name: each
    for each in (
        ElementType(
            "float16", "<f2", safetensors="F16", held_by=("float32", "float64"), kernel="F16"
        ),
        _BFloat16(),
        ElementType("float32", "<f4", safetensors="F32", held_by=("float64",), kernel="F32"),
        ElementType("float64", "<f8", safetensors="F64"),
    )
}
"""The element types of fields, by name, narrow ones first."""


def check_dtype(dtype: object) -> str:
    """Return the name of an element type given as a name, a NumPy dtype or a torch dtype.

    Raises InvalidInputError for any other type.
    """
    if isinstance(dtype, str) and dtype in ELEMENT_TYPES:
        return dtype
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str | None) and name not in ELEMENT_TYPES:  # np.dtype(None) is float64
        try:
            name = np.dtype(dtype).name  # type: ignore[call-overload]
        except TypeError:
            name = str(dtype)
    if name not in ELEMENT_TYPES:
        known = ", ".join(ELEMENT_TYPES)
        raise InvalidInputError(f"not an element type: {dtype!r}; choose from {known}")
    return name


def convert(block: Array, source: str, target: str) -> Array:
    """Return a block stored as `source` stored as `target`: rounded to nearest, ties to even.

    The block itself, not a copy, where nothing changes.
    """
    if source == target:
        return block
    return ELEMENT_TYPES[target].encode(ELEMENT_TYPES[source].decode(block))


def held_dtype(dtype: str, held: Collection[str], what: str) -> str:
    """Return the element type in which a file that can hold `held` takes values of `dtype`.

    That is `dtype` itself or the narrowest that holds its values exactly. Raises InvalidInputError
    where digits would be lost unasked; `what` is the file, for the message.
    """
    for name in (dtype, *ELEMENT_TYPES[dtype].held_by):
        if name in held:
            return name
    raise InvalidInputError(
        f"{what} cannot hold {dtype}; convert to one of {', '.join(held)} (--dtype)"
    )


class Converter:
    """Converts blocks of one stored type to another and counts what is out of range.

    Attributes:
        overflowed: values so far that are beyond the range of the target.
    """

    def __init__(self, source: str, target: str) -> None:
        """Convert from `source` to `target`."""
        self._source = ELEMENT_TYPES[source]
        self._target = ELEMENT_TYPES[target]
        self.overflowed = 0

    def __call__(self, block: Array) -> Array:
        """Return the block stored as the target; itself, not a copy, where nothing changes."""
        if self._source is self._target:
            return block
        values = self._source.decode(block)
        converted = self._target.encode(values)
        self.overflowed += self._target.overflowed(values, converted)
        return converted

    def warn(self, what: str) -> None:
        """Warn the caller's caller if any value was out of range."""
        if self.overflowed:
            warnings.warn(
                f"{self.overflowed} values of {what} are too large for {self._target.name} and "
                f"became {self._target.beyond}",
                OverflowedValuesWarning,
                stacklevel=3,
            )
