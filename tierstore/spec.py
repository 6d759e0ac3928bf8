"""What a table is: its rows, its fields and how one row's fields lie in a record.

Nothing here touches a file or moves a byte.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInputError, InvalidTypeError, UnknownNameError
from tierstore.initializers import Initializer

__all__ = ["BACKENDS", "DTYPES", "Field", "RecordLayout", "TableSpec", "check_name"]

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
"""The element types of fields, and the NumPy dtype each is stored as."""

BACKENDS = ("memmap", "zarr")
COMPRESSIONS = ("zstd", "lz4")

RECORD_ALIGNMENT = 16
MAX_ROWS = 2**40
MAX_RECORD_BYTES = 2**24
MAX_TABLE_BYTES = 2**50
MAX_CHUNKS = 2**20
MAX_DECODED_CHUNK_BYTES = 2**28

TABLE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)


def check_name(name: object, kind: str = "table") -> str:
    """Return `name` if a table or field may bear it; raise InvalidInputError otherwise."""
    pattern = TABLE_NAME if kind == "table" else _FIELD_NAME
    if not isinstance(name, str) or pattern.fullmatch(name) is None:
        allowed = "A-Z a-z 0-9 _ -" if kind == "table" else "A-Z a-z 0-9 _, no digit first"
        raise InvalidInputError(f"not a {kind} name: {name!r}; 1 to 64 characters of {allowed}")
    return name


def _check_count(value: object, what: str, most: int) -> int:
    if isinstance(value, bool):
        raise InvalidTypeError(f"{what} must be a whole number, not {value!r}")
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidTypeError(f"{what} must be a whole number, not {value!r}") from None
    if not 1 <= count <= most:
        raise InvalidInputError(f"{what} must lie in 1..{most}, not {count}")
    return count


def check_dtype(dtype: object) -> str:
    """Return the name of an element type given as a name, a NumPy dtype or a torch dtype."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str | None) and name not in DTYPES:  # np.dtype(None) is float64
        try:
            name = np.dtype(dtype).name  # type: ignore[call-overload]
        except TypeError:
            name = str(dtype)
    if name not in DTYPES:
        raise InvalidInputError(f"not an element type: {dtype!r}; choose from {', '.join(DTYPES)}")
    return name


@dataclass(frozen=True)
class Field:
    """A named, typed vector in every record.

    `dim` is the number of elements, `dtype` one of DTYPES, `init` the initializer of its first
    values (zeros if None), which does not count when fields are compared.
    """

    dim: int
    dtype: str = "float32"
    init: Initializer | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check the numbers and turn the dtype into its name."""
        object.__setattr__(self, "dim", _check_count(self.dim, "dim", MAX_RECORD_BYTES))
        object.__setattr__(self, "dtype", check_dtype(self.dtype))
        if self.init is not None and not isinstance(self.init, Initializer):
            raise InvalidTypeError(
                f"init must be an initializer such as tierstore.zeros(), not {self.init!r}"
            )

    @cached_property
    def storage(self) -> np.dtype[Any]:
        """The NumPy dtype of one stored element."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one record."""
        return self.dim * self.storage.itemsize


@dataclass(frozen=True)
class RecordLayout:
    """Where each field lies in a record.

    Fields follow one another in order, each at a multiple of its element size, and the record is
    padded with zeros to a multiple of 16 bytes: the unit the GPU reads in.
    """

    fields: tuple[tuple[str, Field], ...]

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First byte of each field in the record."""
        offsets, end = {}, 0
        for name, item in self.fields:
            size = item.storage.itemsize
            offsets[name] = -(-end // size) * size
            end = offsets[name] + item.nbytes
        return offsets

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of one record, padding included."""
        name, item = self.fields[-1]
        end = self.offsets[name] + item.nbytes
        return -(-end // RECORD_ALIGNMENT) * RECORD_ALIGNMENT

    @cached_property
    def _by_name(self) -> dict[str, Field]:
        return dict(self.fields)

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        return {n: (self.offsets[n], self.offsets[n] + item.nbytes) for n, item in self.fields}

    def field(self, name: str) -> Field:
        """Return a field; raises UnknownNameError, a KeyError, naming those there are."""
        item = self._by_name.get(name)
        if item is not None:
            return item
        names = ", ".join(known for known, _ in self.fields)
        raise UnknownNameError(f"there is no field {name!r} in these records; they have {names}")

    def span(self, name: str) -> tuple[int, int]:
        """Return the byte range `(lo, hi)` of a field in the record; raises UnknownNameError."""
        if name not in self._spans:
            self.field(name)
        return self._spans[name]

    def view(self, records: npt.NDArray[np.uint8], name: str) -> npt.NDArray[Any]:
        """View one field of records `(n, record_bytes)` as `(n, dim)`, without a copy."""
        lo, hi = self.span(name)
        return records[:, lo:hi].view(self.field(name).storage)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of a record: plain elements for one unpadded field, else structured.

        A plain `np.load` of the base file shows rows as this dtype.
        """
        if len(self.fields) == 1 and self.fields[0][1].nbytes == self.record_bytes:
            return self.fields[0][1].storage
        return np.dtype(
            {
                "names": [name for name, _ in self.fields],
                "formats": [(item.storage, (item.dim,)) for _, item in self.fields],
                "offsets": [self.offsets[name] for name, _ in self.fields],
                "itemsize": self.record_bytes,
            }
        )

    @cached_property
    def element(self) -> np.dtype[Any]:
        """The dtype all fields share, or uint8: the element of the one zarr array."""
        kinds = {item.storage for _, item in self.fields}
        return kinds.pop() if len(kinds) == 1 else np.dtype("u1")


@dataclass(frozen=True)
class TableSpec:
    """What a table is made of.

    Either `dim` and `dtype` (one field called `weight`), or `fields`, a dict from name to Field.

    Args:
        rows: number of rows, 1..2**40.
        dim: elements of `weight`.
        dtype: element type of `weight`: float16, bfloat16, float32 or float64.
        init: the initializer of the first values of `weight`, or of the first of `fields`.
        backend: "memmap" (a plain .npy file) or "zarr" (one zarr v3 array).
        fields: named fields, in the order they lie in the record.
        sparse: leave the files as holes until rows are written; only with zeros.
        compression: None, "zstd" or "lz4"; zarr only, for tables that are read more than trained.
        chunk_rows: rows of one zarr chunk; None chooses. A compressed chunk has at most 256 MiB,
            and an array that is not compressed at most 2**20 chunks.
    """

    rows: int
    dim: int | None = None
    dtype: str | None = None
    init: Initializer | None = field(default=None, compare=False)
    backend: str = "memmap"
    fields: Mapping[str, Field] = field(default_factory=dict)
    sparse: bool = False
    compression: str | None = None
    chunk_rows: int | None = None

    def __post_init__(self) -> None:
        """Check the spec as a whole and bring it into one form: `fields` filled in."""
        object.__setattr__(self, "rows", _check_count(self.rows, "rows", MAX_ROWS))
        object.__setattr__(self, "fields", self._resolved_fields())
        first = next(iter(self.fields.values()))
        object.__setattr__(self, "dim", first.dim)
        object.__setattr__(self, "dtype", first.dtype)
        object.__setattr__(self, "init", first.init)
        self._check_sizes()
        self._check_backend()

    def _resolved_fields(self) -> dict[str, Field]:
        if not self.fields:
            if self.dim is None:
                raise InvalidInputError("a table needs dim=, or fields= with at least one field")
            return {"weight": Field(self.dim, self.dtype or "float32", self.init)}
        fields = {}
        for name, item in self.fields.items():
            if not isinstance(item, Field):
                raise InvalidTypeError(f"field {name!r} must be a tierstore.Field, not {item!r}")
            fields[check_name(name, "field")] = item
        first = next(iter(fields))
        dim, dtype = fields[first].dim, fields[first].dtype
        if (self.dim or dim, self.dtype or dtype) != (dim, dtype):
            raise InvalidInputError("give dim and dtype, or fields, not both")
        if self.init is not None:
            fields[first] = Field(dim, dtype, self.init)
        return fields

    def _check_sizes(self) -> None:
        if self.layout.record_bytes > MAX_RECORD_BYTES:
            raise InvalidInputError(
                f"a record would take {self.layout.record_bytes} bytes; at most {MAX_RECORD_BYTES}"
            )
        if self.nbytes > MAX_TABLE_BYTES:
            raise InvalidInputError(f"the table would take {self.nbytes} bytes; at most 2**50")

    def _check_backend(self) -> None:
        if self.backend not in BACKENDS:
            raise InvalidInputError(f"not a backend: {self.backend!r}; choose memmap or zarr")
        if self.compression is not None and self.compression not in COMPRESSIONS:
            raise InvalidInputError(f"not a compression: {self.compression!r}; zstd or lz4")
        if self.compression is not None and self.backend != "zarr":
            raise InvalidInputError("compression needs backend='zarr'")
        if self.chunk_rows is not None:
            self._check_chunks(_check_count(self.chunk_rows, "chunk_rows", MAX_ROWS))
        if self.sparse and any(not f.init.is_zero for f in self.fields.values() if f.init):
            raise InvalidInputError("sparse=True starts from zeros; leave init out")

    def _check_chunks(self, chunk_rows: int) -> None:
        """Bound what a chunk takes: memory where it is decoded, a file and a mapping where not."""
        nbytes, count = chunk_rows * self.layout.record_bytes, -(-self.rows // chunk_rows)
        if self.compression is not None and nbytes > MAX_DECODED_CHUNK_BYTES:
            raise InvalidInputError(
                f"a compressed chunk of {chunk_rows} rows would take {nbytes} bytes, at most "
                f"{MAX_DECODED_CHUNK_BYTES} are decoded at a time; choose fewer chunk_rows"
            )
        if self.backend == "zarr" and self.compression is None and count > MAX_CHUNKS:
            raise InvalidInputError(
                f"{self.rows} rows in chunks of {chunk_rows} would make {count} files, at most "
                f"{MAX_CHUNKS} are opened; choose more chunk_rows"
            )

    @cached_property
    def layout(self) -> RecordLayout:
        """Where the fields lie in a record."""
        return RecordLayout(tuple(self.fields.items()))

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.rows * self.layout.record_bytes
