"""Conversions between the bytes of fields and the arrays that users read and write."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import ELEMENT_TYPES, DTypeName, ElementType, check_dtype, check_unmasked
from tierstore._scaled import ScaledElements
from tierstore._table.address import Ids, as_dense, is_cupy, is_torch
from tierstore._tiers.gpu.abi import RECORDS, Arguments, Structure
from tierstore._tiers.gpu.launcher import Kernel, as_large_as_the_work
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.spec import Field, RecordLayout

_SOURCE = RECORDS.extended("tierstore._table", "columns.cu")
_SCALED = RECORDS.extended("tierstore._table", "scaled.cu")
_Scaled: Any = _SCALED.structure("Scaled")
Scales: Any = _SCALED.structure("Scales")
"""Scales stored separately from the elements of their rows, for kernels."""
Piece: TypeAlias = tuple[int, int, Any]
"""A byte range `lo, hi` of the records and its bytes `(n, hi - lo)`."""
Decoder: TypeAlias = Callable[..., Any]
"""Takes the bytes of a field, the field, ids and a type, and returns an array; see `from_bytes`."""
Encoder: TypeAlias = Callable[..., Any]
"""Takes values, a field, the shape of ids and a name, and returns bytes; see `to_bytes`."""


def read_dtype(item: Field) -> np.dtype[Any]:
    """Return the type in which NumPy reads a field."""
    return item.element.numpy


def is_plain(item: Field) -> bool:
    """Return whether NumPy reads a field as it is stored."""
    return not item.element.as_bits and item.scaled is None


def check_out(out: Any, item: Field, ids: Ids, device: str, name: str) -> ElementType:
    """Check that a read of a field can be written to `out`; raises as `to_bytes` does.

    Returns the type of its elements: the field's own, or for a scaled field any type of floats.
    """
    if ids.kind == "torch":
        if not is_torch(out):
            raise InvalidTypeError(f"{name} is read as a tensor; out is a {type(out).__name__}")
        out = as_dense(out, f"rows of out for {name}")
        found = str(out.dtype).removeprefix("torch.")
        able = {kind.name: kind for kind in _out_types(item)}
        fits = out.is_contiguous() and not out.requires_grad and str(out.device) == device
    elif ids.kind == "numpy":
        if not isinstance(out, np.ndarray):
            raise InvalidTypeError(f"{name} is read as an array; out is a {type(out).__name__}")
        check_unmasked(out, f"rows of out for {name}")
        found = out.dtype.str
        own = item.scaled is None
        able = {kind.numpy.str: kind for kind in _out_types(item) if own or not kind.as_bits}
        fits = out.flags.c_contiguous and out.flags.writeable
    else:
        raise InvalidInputError("out= takes NumPy or torch rows; CuPy ids give a fresh array")
    expected = (*ids.shape, item.dim)
    if found not in able or tuple(out.shape) != expected:
        raise InvalidInputError(
            f"{name} for these ids is {' or '.join(able)} {expected}, out is {found} "
            f"{tuple(out.shape)}"
        )
    if not fits:
        raise InvalidInputError(
            f"out for {name} must be contiguous, writable, without requires_grad and on {device}"
        )
    return able[found]


def _out_types(item: Field) -> list[ElementType]:
    """Return the types in which a field can be read into memory of the caller."""
    if item.scaled is None:
        return [item.element]
    return [kind for kind in ELEMENT_TYPES.values() if kind.trainable]


def writable_bytes(out: Any, item: Field) -> Any:
    """Return a checked `out` as bytes `(n, nbytes)` of its own memory, None if they differ."""
    if item.scaled is not None:
        return None
    if not isinstance(out, np.ndarray):
        import torch

        return out.view(-1, item.dim).view(torch.uint8) if out.numel() else None
    if read_dtype(item) != item.storage or not out.size:
        return None
    return out.reshape(-1, item.dim).view(np.uint8)


def from_bytes(
    data: npt.NDArray[np.uint8], item: Field, ids: Ids, dtype: DTypeName | None = None
) -> Any:
    """Return field bytes `(n, nbytes)` as the array `ids.shape + (dim,)` for these ids.

    The array has the field's own type unless a `dtype` is given. Copies bytes that are not
    contiguous, bfloat16 for NumPy, which becomes float32, and for CuPy.
    """
    flat = np.ascontiguousarray(data).reshape(-1)  # of a single row, strides may be anything
    stored = flat.view(item.storage).reshape(*ids.shape, item.width)
    if dtype is not None:
        return converted(from_bytes(data, item, ids), dtype)
    kind, element = ids.kind, item.element
    if kind == "torch":
        if element.as_bits:
            return element.to_torch(stored)
        import torch

        return torch.from_numpy(stored)
    if kind == "cupy":
        import cupy

        return element.to_cupy(cupy.asarray(stored))
    return element.decode(stored) if element.as_bits else stored


def converted(rows: Any, dtype: DTypeName) -> Any:
    """Return rows as another type of floats; raises InvalidInputError for other types.

    NumPy has no bfloat16.
    """
    name = check_dtype(dtype)
    if not ELEMENT_TYPES[name].trainable:
        able = ", ".join(each for each, kind in ELEMENT_TYPES.items() if kind.trainable)
        raise InvalidInputError(f"rows are converted to {able}, not to {name}; see raw=True")
    if is_torch(rows):
        return rows.to(ELEMENT_TYPES[name].torch_dtype())
    if ELEMENT_TYPES[name].as_bits:
        raise InvalidInputError(
            f"NumPy has no {name}; give torch ids or as_tensor=True, or read float32"
        )
    with np.errstate(over="ignore"):
        return rows.astype(ELEMENT_TYPES[name].numpy, copy=False)


def raw_rows(data: Any, item: Field, ids: Ids) -> Any:
    """Return field bytes `(n, nbytes)` as uint8 `ids.shape + (nbytes,)` for these ids."""
    rows = data.reshape(*ids.shape, item.nbytes)
    if ids.kind == "torch" and isinstance(rows, np.ndarray):
        import torch

        return torch.from_numpy(rows)
    if ids.kind == "cupy":
        import cupy

        return cupy.asarray(rows)
    return rows


def unscaling(
    scaled: ScaledElements,
    rows: int,
    out: int,
    count: int,
    kind: ElementType,
    apart: Any = None,
) -> tuple[Kernel, Arguments]:
    """Return the kernel that turns stored rows of a scaled field into floats, and its arguments.

    Args:
        scaled: the elements and scales.
        rows: address of `(count, nbytes)` bytes, a multiple of 16; of `(count, dim)` elements if
            the scales are `apart`.
        out: address of `(count, dim)` elements of `kind`, likewise.
        count: number of rows.
        kind: a type with a name in kernels.
        apart: the `Scales`, if they are not within the rows.
    """
    kernel = _unscale(scaled, kind.kernel, apart=apart is not None)
    return kernel, Arguments(_Scaled(rows=rows, out=out, count=count), apart or Scales())


@functools.cache
def _unscale(scaled: ScaledElements, out: str, *, apart: bool) -> Kernel:
    nbytes = scaled.dim if apart else scaled.nbytes
    macros = {
        "ELEMENT": ELEMENT_TYPES[scaled.name].scaled_kernel,
        "SCALE": scaled.scale.kernel,
        "OUT": out,
        "DIM": scaled.dim,
        "BLOCK": scaled.block,
        "SCALES": scaled.scales_at,
        "BYTES": nbytes,
        "VECTOR": math.gcd(16, scaled.dim, scaled.block, nbytes),
        "APART": int(apart),
    }
    return Kernel(_SCALED, "unscale", as_large_as_the_work, macros)


def to_bytes(values: Any, item: Field, shape: tuple[int, ...], name: str) -> npt.NDArray[np.uint8]:
    """Return values for rows of `shape` as field bytes `(n, nbytes)`, contiguous.

    Takes the field's own type and narrower floats; NumPy writes float32 to a bfloat16 field, which
    rounds to nearest even. Lists of numbers are taken too. Raises InvalidTypeError for a type that
    would lose digits, InvalidInputError for another shape: nothing is cast or broadcast silently.
    """
    given = tuple(values.shape) if hasattr(values, "shape") else None
    expected = (*shape, item.dim)
    if given is None or given == expected:
        stored = _stored(values, item, name)
        given = (*stored.shape[:-1], item.dim) if item.scaled is not None else stored.shape
    if given != expected:
        raise InvalidInputError(f"{name} for these ids is {expected}, not {given}")
    return np.ascontiguousarray(stored).reshape(-1, item.width).view(np.uint8)


def spread(values: Any, item: Field, ids: Any, name: str) -> Any:
    """Return values for the rows of `ids` as an array; one row or one number stands for all rows.

    Values of another shape are returned as they are.
    """
    if not (is_torch(values) or is_cupy(values)):
        values = _array(values, item.element, name)
    if values.ndim > 1:
        return values
    try:
        shape = (*np.shape(ids), item.dim)
        return values.expand(shape) if is_torch(values) else np.broadcast_to(values, shape)
    except (RuntimeError, ValueError):
        return values


def _stored(values: Any, item: Field, name: str) -> npt.NDArray[Any]:
    element = item.element
    if is_torch(values):
        values = as_dense(values, f"values of {name}").detach().cpu().resolve_conj().resolve_neg()
        given = ELEMENT_TYPES.get(str(values.dtype).removeprefix("torch."))
        array = given.from_torch(values) if given and given.as_bits else values.numpy()
    elif is_cupy(values):
        array = values.get()
        given = ELEMENT_TYPES.get(array.dtype.name)
        array = array if given is None else given.from_cupy(array)
    else:
        array, given = _array(values, element, name), None
    if given is element:
        return array
    if given is not None:
        array = given.decode(array)
    if not element.accepts_array(array.dtype):
        raise InvalidTypeError(
            f"{name} holds {item.dtype}, these values are {array.dtype}; "
            f"convert them first: values.astype({element.numpy.name!r})"
        )
    return element.encode(array)


def _array(values: Any, element: ElementType, name: str) -> npt.NDArray[Any]:
    """Return anything NumPy accepts as an array; Python numbers in the field's read type."""
    check_unmasked(values, f"values of {name}")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidInputError(f"{name}: not one array of numbers: {error}") from None
    if hasattr(values, "__array__"):  # as frames have, whose elements have a type of their own
        return array
    return element.from_numbers(array)


class Columns:
    """Fields of records of one layout, read or written together.

    A GPU copies them in one pass over the records of a batch: fewer launches, and a record is
    fetched once and whole.

    Attributes:
        layout: of the records.
        names: names of the fields, at least one.
        items, spans: their fields and byte ranges.
        lo, hi: the byte range from the first of them to the last.
        gapless: whether every byte of that range belongs to the fields.
        raw: whether fields with scales are read and written as stored bytes.
    """

    def __init__(self, layout: RecordLayout, names: Sequence[str], *, raw: bool = False) -> None:
        """Look the fields up; raises UnknownNameError."""
        self.layout = layout
        self.raw = raw
        self.names: tuple[str, ...] = tuple(names)
        self.items: list[Field] = [layout.field(name) for name in self.names]
        self.spans: list[tuple[int, int]] = [layout.span(name) for name in self.names]
        self.lo: int = min(lo for lo, _ in self.spans)
        self.hi: int = max(hi for _, hi in self.spans)
        self.gapless: bool = sum(hi - lo for lo, hi in set(self.spans)) == self.hi - self.lo
        whole = len(set(self.names)) == len(layout.fields)
        self._written = (0, layout.record_bytes) if whole else (self.lo, self.hi)
        ends = [self.lo, *(hi for _, hi in self.spans)]
        self._alike = (
            len({item.dtype for item in self.items}) == 1
            and not any(item.scaled for item in self.items)
            and all(lo == end for (lo, _), end in zip(self.spans, ends, strict=False))
        )
        """Whether the fields are consecutive, with elements of one type."""
        self._odd = functools.reduce(int.__or__, (lo | hi for lo, hi in self.spans), 16)
        self._kernels: dict[tuple[str, int], Kernel] = {}

    @functools.cached_property
    def torch_dtype(self) -> Any:
        """The type of the first field in torch."""
        return self.items[0].element.torch_dtype()

    def values(
        self,
        data: Any,
        ids: Ids,
        decoded: Decoder = from_bytes,
        dtype: DTypeName | None = None,
        *,
        raw: bool = False,
    ) -> dict[str, Any]:
        """Return the fields in bytes `lo:hi` of some records, each as the array for these ids.

        Args:
            data: `(n, hi - lo)`, in whatever form `decoded` takes if there is one field alone.
            ids: the ids, for the shape and kind of the arrays.
            decoded: makes an array of the bytes of a field, as `from_bytes` does.
            dtype: the floats to convert to; see `converted`.
            raw: return every field as its bytes.
        """
        arrays = {}
        for name, item, part in self.parts(data):
            if raw or self.is_raw(item):
                arrays[name] = raw_rows(part, item, ids)
            else:
                arrays[name] = decoded(part, item, ids, dtype)
        return arrays

    def checked(
        self, out: Mapping[str, Any], ids: Ids, place: str
    ) -> tuple[dict[str, ElementType], Any]:
        """Check that a read can be written to `out`; return its types of elements, by field.

        Also return the bytes of its memory if they are those of a single field, else None. Raises
        as `check_out` does.
        """
        fields = dict(zip(self.names, self.items, strict=True))
        kinds = {
            name: check_out(out[name], item, ids, place, name) for name, item in fields.items()
        }
        alone = writable_bytes(out[self.names[0]], self.items[0]) if len(fields) == 1 else None
        return kinds, alone

    def fill(
        self,
        out: Mapping[str, Any],
        data: Any,
        ids: Ids,
        decoded: Decoder,
        kinds: Mapping[str, ElementType],
    ) -> None:
        """Put what `values` returns in `out`, which is `checked`."""
        for name, item, part in self.parts(data):
            wanted = None if item.scaled is None else kinds[name].name
            rows = decoded(part, item, ids, wanted, wanted and out[name])
            if not is_torch(rows) or rows.data_ptr() != out[name].data_ptr():
                out[name][...] = rows

    def parts(self, data: Any) -> Iterator[tuple[str, Field, Any]]:
        """Yield the name and the bytes of each field, given bytes `lo:hi` of some records."""
        if len(self.names) == 1:
            yield self.names[0], self.items[0], data
            return
        for name, item, (lo, hi) in zip(self.names, self.items, self.spans, strict=True):
            yield name, item, data[:, lo - self.lo : hi - self.lo]

    def is_raw(self, item: Field) -> bool:
        """Whether a field is read and written as bytes `(n, nbytes)`."""
        return self.raw and item.scaled is not None

    def pieces(
        self,
        values: Mapping[str, Any],
        ids: Ids,
        encoded: Encoder = to_bytes,
        *,
        whole: bool = False,
    ) -> list[Piece]:
        """Return `ids.shape + (dim,)` values of the fields as pieces of records.

        Args:
            values: of each field.
            ids: the ids, for the shape and kind of the arrays.
            encoded: makes bytes of the values of a field, as `to_bytes` does, and raises what that
                does.
            whole: return one piece with the padding too where these are all fields: a tier reads
                nothing of records that are written whole.

        The result is one piece if the fields leave no gap.
        """
        given = list(map(values.__getitem__, self.names))
        pieces: list[Piece] = []
        if ids.kind == "torch" and self._alike and self._are_stored_so(given, ids.shape):
            import torch

            joined = torch.cat(given, -1).view(torch.uint8)
            pieces.append((self.lo, self.hi, joined.view(-1, self.hi - self.lo).numpy()))
        else:
            for name, item, (lo, hi), each in zip(
                self.names, self.items, self.spans, given, strict=True
            ):
                data = each.numpy() if self.is_raw(item) else encoded(each, item, ids.shape, name)
                pieces.append((lo, hi, data))
        begin, end = self._written if whole else (self.lo, self.hi)
        alike = len({type(data) for _, _, data in pieces}) == 1  # all on one device
        covered = self.gapless or (begin, end) != (self.lo, self.hi)
        if pieces[0][:2] == (begin, end) or not (alike and covered):
            return pieces
        first = pieces[0][2]
        shape = len(first), end - begin
        record = first.new_zeros(shape) if is_torch(first) else np.zeros(shape, np.uint8)
        for lo, hi, data in pieces:
            record[:, lo - begin : hi - begin] = data
        return [(begin, end, record)]

    def _are_stored_so(self, given: Sequence[Any], shape: tuple[int, ...]) -> bool:
        """Whether values for ids of a shape are tensors that `to_bytes` would take unchanged."""
        import torch

        for each, item in zip(given, self.items, strict=True):
            if not (
                type(each) is torch.Tensor
                and each.dtype is self.torch_dtype
                and each.shape == (*shape, item.dim)
                and each.is_cpu
                and not (each.requires_grad or each.is_neg())
            ):
                return False
        return True

    def copy(self, way: str, arrays: Mapping[str, int], rows: int) -> tuple[Kernel, Structure, int]:
        """Return the kernel that copies them between records and arrays, its argument, its items.

        Args:
            way: "gather" to the arrays, "scatter" from them.
            arrays: the address of each field's array, `(rows, nbytes)` without gaps.
            rows: at least as many as there are records.
        """
        addresses = [arrays[name] for name in self.names]
        odd = functools.reduce(int.__or__, addresses, self._odd)
        key = way, odd & -odd
        if key not in self._kernels:
            width = key[1]
            units = ",".join(str((hi - lo) // width) for lo, hi in self.spans)
            # One thread for each item: 5% faster than only as many blocks as run at once.
            macros = {"WIDTH": width, "UNITS": units}
            self._kernels[key] = Kernel(_SOURCE, way, as_large_as_the_work, macros)
        starts = [lo for lo, _ in self.spans]
        units_each = max(hi - lo for lo, hi in self.spans) // key[1]
        work = _argument(len(self.names))(tuple(addresses), tuple(starts))
        return self._kernels[key], work, rows * units_each


@functools.cache
def _argument(fields: int) -> type[Structure]:
    """Return `struct Columns` for so many fields."""
    return _SOURCE.structure("Columns", FIELDS=fields)  # type: ignore[no-any-return]
