"""Element types: how an element is represented on disk, in NumPy, in torch and in other files.

Each type is an `ElementType`, registered under its name in ELEMENT_TYPES. Other modules query these
objects and never compare names, so adding a type changes only this module. Types that NumPy lacks
are stored as unsigned integers with the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore.errors import (
    InvalidInputError,
    InvalidTypeError,
    OverflowedValuesWarning,
    counted,
    warn,
)

Array = npt.NDArray[Any]

DTypeName: TypeAlias = (
    Literal[
        "float8_e4m3fn",
        "float8_e5m2",
        "int8",
        "uint8",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ]
    | str
)
"""The name of an element type: one of these (for completion in editors), or a registered one."""

DEFAULT_DTYPE: DTypeName = "float32"
"""The default element type, of fields and of numbers in text files."""


class ElementType:
    """A type of numbers, by default floats that NumPy supports; subclasses override what differs.

    Attributes:
        name: the name for users, in manifests, and in NumPy and torch if they have the type.
        stored: the little-endian NumPy dtype of a stored element.
        numpy: the dtype of the arrays that users read and write.
        safetensors: the code in safetensors files.
        held_by: types that represent all its values exactly, narrowest first. Fields of these types
            accept its values, and files without the type use them instead.
        kernel: its name in the CUDA kernels of `optim`; None if they do not support it.
        scaled_kernel: its name in the kernels of fields with scales; None without such fields.
        trainable: whether torch computes gradients of this type.
        integer: whether it holds whole numbers; files of such are read as floats.
        largest: its largest number if it can have a scale, otherwise None.
        stochastic: whether training may use stochastic rounding to it.
        beyond: the result for values out of range, for warnings.
    """

    kernel: str | None = None
    scaled_kernel: str | None = None
    trainable = True
    integer = False
    largest: float | None = None
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
        self.numpy: np.dtype[Any] = self.stored
        self.safetensors = safetensors
        self.held_by = held_by
        self.kernel = kernel

    @cached_property
    def as_bits(self) -> bool:
        """Whether NumPy lacks the type, so that the bits of elements are stored."""
        return self.numpy != self.stored

    def accepts(self, name: str) -> bool:
        """Whether a field represents values of the torch or CuPy type `name` exactly."""
        return name == self.name or (
            name in ELEMENT_TYPES and self.name in ELEMENT_TYPES[name].held_by
        )

    def accepts_array(self, dtype: np.dtype[Any]) -> bool:
        """Whether a field represents NumPy values of `dtype` exactly."""
        return dtype.kind == self.numpy.kind and np.can_cast(dtype, self.numpy, "safe")

    def from_numbers(self, array: Array) -> Array:
        """Convert an array that NumPy made of Python numbers to `numpy` values, if possible."""
        return array.astype(self.numpy) if array.dtype.kind in "if" else array

    def encode(self, values: Array) -> Array:
        """Convert numbers of any shape to stored elements, rounding to nearest, ties to even.

        Returns the array itself if nothing changes. Values out of range become infinite.
        """
        with np.errstate(over="ignore"):
            return values.astype(self.stored, copy=False)

    def decode(self, stored: Array) -> Array:
        """Convert stored elements to `numpy` values exactly, without a copy if possible."""
        return stored

    def overflowed(self, values: Array, stored: Array) -> int:
        """Count the `values` that were out of range when converted to `stored` elements."""
        after = int(np.isinf(self.decode(stored)).sum())
        return after - int(np.isinf(values).sum()) if after else 0

    def nan(self) -> np.generic | None:
        """Return the stored element that marks a missing value; None if the type has none."""
        stored: np.generic = self.encode(np.array([np.nan], np.float32))[0]
        return stored

    def torch_dtype(self) -> Any:
        """Return the torch dtype; imports torch."""
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
        """View a contiguous CuPy array of stored elements or bytes as an array of this type.

        CuPy takes types that NumPy lacks from `ml_dtypes`.
        """
        if self.as_bits:
            import ml_dtypes

            return data.view(getattr(ml_dtypes, self.name))
        import cupy

        return data.view(cupy.dtype(self.name))

    def from_cupy(self, array: Array) -> Array:
        """View an array of this type that CuPy copied to the host as stored elements."""
        return array.view(self.stored) if self.as_bits else array


class _BFloat16(ElementType):
    """bfloat16, the upper half of a float32; NumPy users read and write it as float32."""

    stochastic = True

    def __init__(self) -> None:
        super().__init__(
            "bfloat16", "<u2", safetensors="BF16", held_by=("float32", "float64"), kernel="BF16"
        )
        self.numpy = np.dtype("<f4")

    def encode(self, values: Array) -> Array:
        """Round to new bits; types other than float32 are converted to float32 first.

        NaN stays NaN: its quiet bit is set, so dropping the low half cannot make it an infinity.
        """
        with np.errstate(over="ignore"):
            bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
            even = (bits >> np.uint32(16)) & np.uint32(1)
            rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.where(is_nan, quiet, rounded).astype(np.uint16)

    def decode(self, stored: Array) -> Array:
        """Convert to a new float32 array."""
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)


class _EightBitFloat(ElementType):
    """An 8-bit float; NumPy users read and write it as float32.

    One sign bit, then the exponent, then `mantissa` bits. With infinities the last exponent is
    theirs and NaN's as in IEEE 754, otherwise only the last code of each sign is NaN.
    """

    trainable = False

    def __init__(self, name: str, code: str, mantissa: int, *, infinities: bool) -> None:
        wider = ("float16", "bfloat16", "float32", "float64")
        super().__init__(name, "|u1", safetensors=code, held_by=wider)
        self.numpy = np.dtype("<f4")
        self.beyond = "infinite" if infinities else "its largest value"
        self.scaled_kernel = name.removeprefix("float8_").upper()
        self._mantissa = mantissa
        self._bias = (1 << (6 - mantissa)) - 1
        self._infinities = infinities
        self.largest = 57344.0 if infinities else 448.0

    @cached_property
    def _values(self) -> Array:
        """The float32 of each of the 256 codes."""
        codes = np.arange(128)
        exponent, fraction = codes >> self._mantissa, codes & ((1 << self._mantissa) - 1)
        normal = exponent > 0
        whole = fraction + (normal << self._mantissa)
        power = np.where(normal, exponent, 1) - self._bias - self._mantissa
        values = np.ldexp(whole.astype(np.float32), power).astype(np.float32)
        if self._infinities:
            values[exponent == exponent[-1]] = np.nan
            values[(exponent == exponent[-1]) & (fraction == 0)] = np.inf
        else:
            values[-1] = np.nan
        return np.concatenate([values, -values])

    def encode(self, values: Array) -> Array:
        """Round to new codes, ties to even; other types are converted to float32 first.

        What is too large becomes infinite or, without infinities, the largest value, as in torch.
        """
        with np.errstate(over="ignore"):
            bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        sign = (bits >> np.uint32(24)) & np.uint32(0x80)
        size = bits & np.uint32(0x7FFFFFFF)
        dropped = 23 - self._mantissa
        first_normal = (128 - self._bias) << 23
        even = (size >> np.uint32(dropped)) & np.uint32(1)
        half = np.uint32((1 << (dropped - 1)) - 1)
        rebias = np.uint32((127 - self._bias) << 23)
        normal = (np.maximum(size, first_normal) - rebias + half + even) >> np.uint32(dropped)
        # Adding this power of two leaves the code of a smaller value in the last bits, rounded.
        magic = np.uint32((128 - self._bias + dropped) << 23)
        small = np.minimum(size, np.uint32(first_normal)).view(np.float32)
        subnormal = (small + magic.view(np.float32)).view(np.uint32) - magic
        infinity = np.uint32(((1 << (7 - self._mantissa)) - 1) << self._mantissa)
        last = infinity if self._infinities else np.uint32(0x7E)
        code = np.where(size < first_normal, subnormal, np.minimum(normal, last))
        code = np.where(size > np.uint32(0x7F800000), np.uint32(0x7F), code)
        return (sign | code).astype(np.uint8)

    def decode(self, stored: Array) -> Array:
        """Convert to a new float32 array."""
        return np.asarray(self._values.take(stored))

    def overflowed(self, values: Array, stored: Array) -> int:
        """Count the `values` beyond the largest; infinities where there are none."""
        if self._infinities:
            return super().overflowed(values, stored)
        largest, next_smaller = self._values[[0x7E, 0x7D]]
        return int((np.abs(values) > largest + (largest - next_smaller) / 2).sum())


class _Integer(ElementType):
    """Whole numbers of 8 bits, which do not train and have no NaN."""

    trainable = False
    integer = True
    beyond = "the nearest whole number that it holds (0 for NaN)"

    def __init__(self, name: str, stored: str, code: str) -> None:
        wider = ("float16", "bfloat16", "float32", "float64")
        super().__init__(name, stored, safetensors=code, held_by=wider)
        self.scaled_kernel = code
        self._range = np.iinfo(self.stored).min, np.iinfo(self.stored).max
        self.largest = float(self._range[1])

    def from_numbers(self, array: Array) -> Array:
        """Convert whole numbers in the range of the type."""
        fits = array.dtype.kind in "iu" and (
            not array.size or (self._range[0] <= array.min() and array.max() <= self._range[1])
        )
        return array.astype(self.stored) if fits else array

    def encode(self, values: Array) -> Array:
        """Round to the nearest whole number, ties to even; clip to the range; NaN becomes 0."""
        if values.dtype.kind == "f":
            values = np.nan_to_num(np.rint(values), nan=0.0, posinf=np.inf, neginf=-np.inf)
        clipped: Array = np.clip(values, *self._range)
        return clipped.astype(self.stored)

    def overflowed(self, values: Array, stored: Array) -> int:
        """Count the `values` that were out of range, or NaN."""
        least, most = self._range
        rounded = np.rint(values)
        return int((~((least <= rounded) & (rounded <= most))).sum())

    def nan(self) -> None:
        """Return None: there is none."""


ELEMENT_TYPES: dict[str, ElementType] = {
    each.name: each
    for each in (
        _EightBitFloat("float8_e4m3fn", "F8_E4M3", 3, infinities=False),
        _EightBitFloat("float8_e5m2", "F8_E5M2", 2, infinities=True),
        _Integer("int8", "|i1", "I8"),
        _Integer("uint8", "|u1", "U8"),
        ElementType(
            "float16", "<f2", safetensors="F16", held_by=("float32", "float64"), kernel="F16"
        ),
        _BFloat16(),
        ElementType("float32", "<f4", safetensors="F32", held_by=("float64",), kernel="F32"),
        ElementType("float64", "<f8", safetensors="F64"),
    )
}
"""The element types of fields by name, narrowest first."""


def check_dtype(dtype: object) -> str:
    """Return the name of an element type given as a name, a NumPy dtype or a torch dtype.

    Raises InvalidInputError for other types.
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
    """Convert a block stored as `source` to `target`, rounding to nearest, ties to even.

    Returns the block itself, not a copy, if nothing changes.
    """
    if source == target:
        return block
    return ELEMENT_TYPES[target].encode(ELEMENT_TYPES[source].decode(block))


def held_dtype(dtype: str, held: Collection[str], what: str) -> str:
    """Return the element type for values of `dtype` in a file that supports only `held`.

    This is `dtype` itself or the narrowest type that represents its values exactly. Raises
    InvalidInputError if precision would be lost without a request; messages call the file `what`.
    """
    for name in (dtype, *ELEMENT_TYPES[dtype].held_by):
        if name in held:
            return name
    raise InvalidInputError(
        f"{what} cannot hold {dtype}; convert to one of {', '.join(held)} (--dtype)"
    )


def imported_class(module: str, name: str) -> Any:
    """Return a class for `isinstance`, or none while its module is not imported.

    A module that another thread is importing lacks the class, of which there is no instance yet.
    """
    return getattr(sys.modules.get(module), name, ())


def check_unmasked(values: object, what: str) -> None:
    """Raise InvalidTypeError for a masked array that masks any of its elements."""
    if isinstance(values, imported_class("numpy.ma", "MaskedArray")):
        hidden = int(np.ma.getmaskarray(values).sum())
        if hidden:
            raise InvalidTypeError(
                f"{what}: a masked array whose mask hides {counted(hidden, 'element')}; give those "
                "that it shows, by compressed(), or others in their place, by filled()"
            )


class Converter:
    """Converts blocks between stored types and counts values out of range.

    Attributes:
        overflowed: number of values so far that were out of range of the target type.
    """

    def __init__(self, source: ElementType, target: ElementType) -> None:
        """Convert from `source` to `target`."""
        self._source = source
        self._target = target
        self.overflowed = 0

    def __call__(self, block: Array) -> Array:
        """Convert a block to the target type; return the block itself if nothing changes."""
        if self._source is self._target:
            return block
        values = self._source.decode(block)
        converted = self._target.encode(values)
        self.overflowed += self._target.overflowed(values, converted)
        return converted

    def warn(self, what: str) -> None:
        """Issue a warning if any value was out of range."""
        if self.overflowed:
            warn(
                f"{what}: {counted(self.overflowed, 'value is', 'values are')} too large for "
                f"{self._target.name} and became {self._target.beyond}",
                OverflowedValuesWarning,
            )
