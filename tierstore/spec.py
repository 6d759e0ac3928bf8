"""The specification of a table: its rows, its fields and the layout of a record.

This module accesses no files and moves no data.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import DEFAULT_DTYPE, ELEMENT_TYPES, DTypeName, ElementType, check_dtype
from tierstore._registry import Registry
from tierstore._scaled import SCALE_TYPES, ScaledElements
from tierstore.errors import InvalidInputError, InvalidTypeError, UnknownNameError
from tierstore.initializers import Initializer, as_initializer

__all__ = [
    "BACKENDS",
    "DTYPES",
    "BackendName",
    "CompressionName",
    "DTypeName",
    "DeviceName",
    "Field",
    "KeyName",
    "RecordLayout",
    "Scale",
    "TableSpec",
    "check_name",
]

DTYPES: dict[str, np.dtype[Any]] = {name: each.stored for name, each in ELEMENT_TYPES.items()}
"""The element types of fields, and the NumPy dtype each is stored as."""


class BackendKind(Protocol):
    """What can be asked of a backend without its files; those who have them know all of it.

    Attributes:
        compressions: the supported compressions.
        on_objects: the backend for copies in object stores, whose files can be uploaded whole.
    """

    compressions: ClassVar[tuple[str, ...]]
    on_objects: ClassVar[str]

    def check(self, spec: TableSpec) -> None:
        """Raise InvalidInputError if the backend does not support a spec."""

    def opening_line(self, layout: RecordLayout, path: str) -> str:
        """Return a line of Python that opens the first field without tierstore."""


BACKENDS: Registry[BackendKind] = Registry("backend", "tierstore._disk.backends")
"""The backends of tables, by name."""

BackendName: TypeAlias = Literal["memmap", "zarr"] | str
"""The name of a backend: one of these (for completion in editors), or a registered one."""

CompressionName: TypeAlias = Literal["lz4", "zstd"] | str
"""The name of a compression that a backend offers."""

DeviceName: TypeAlias = Literal["cpu", "cuda", "auto"] | str
"""The name of a device: one of these (for completion in editors), or "cuda:1" and so on."""

if TYPE_CHECKING:

    class FirstValues:
        """What `init` takes, of which an initializer is made."""

        def __set__(self, spec: object, init: Initializer | float | None) -> None: ...

        def __get__(self, spec: object, kind: type | None = None) -> Initializer | None: ...

else:
    FirstValues: TypeAlias = Initializer | float | None

KeyName: TypeAlias = Literal["int64", "text"]
"""The kinds of keys of a table by key."""

RECORD_ALIGNMENT = 16
MAX_ROWS = 2**40
MAX_RECORD_BYTES = 2**24
MAX_TABLE_BYTES = 2**50
EXTENT_ROWS = 1 << 16
"""Least rows by which a table without a capacity grows, and those that it has at first."""

TABLE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)


def check_name(name: object, kind: str = "table") -> str:
    """Return `name` if it is a valid table or field name; raise InvalidInputError otherwise."""
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
        raise InvalidInputError(f"{what} must be in 1..{most}, not {count}")
    return count


@dataclass(frozen=True)
class Scale:
    """The scales of a field of 8-bit elements, kept in the same record.

    `dtype` is "float32", or "e8m0" for powers of two in a byte. `block` is the number of
    neighbouring elements that share a scale, or "row".
    """

    dtype: Literal["float32", "e8m0"] = "float32"
    block: int | Literal["row"] = "row"

    def __post_init__(self) -> None:
        """Validate the values."""
        if self.dtype not in SCALE_TYPES:
            known = ", ".join(SCALE_TYPES)
            raise InvalidInputError(f"not a type of scales: {self.dtype!r}; choose from {known}")
        if self.block != "row":
            block = _check_count(self.block, "block", MAX_RECORD_BYTES)
            object.__setattr__(self, "block", block)


@dataclass(frozen=True)
class Field:
    """A named, typed vector in every record.

    `dim` is the number of elements, `dtype` one of DTYPES and `init` the initializer of the first
    values; a number is `constant` of it, None zeros. Comparisons of fields ignore `init`. `scale`
    is for 8-bit elements: rows are then float32 to users, and an element times its scale in the
    file.
    """

    dim: int
    dtype: DTypeName = DEFAULT_DTYPE
    init: FirstValues = field(default=None, compare=False)  # type: ignore[assignment]
    scale: Scale | None = None

    def __post_init__(self) -> None:
        """Validate the values and replace the dtype by its name."""
        object.__setattr__(self, "dim", _check_count(self.dim, "dim", MAX_RECORD_BYTES))
        object.__setattr__(self, "dtype", check_dtype(self.dtype))
        object.__setattr__(self, "init", as_initializer(self.init))
        if self.scale is not None and not isinstance(self.scale, Scale):
            raise InvalidTypeError(f"scale must be a tierstore.Scale, not {self.scale!r}")
        if self.scale is not None and ELEMENT_TYPES[self.dtype].largest is None:
            able = ", ".join(name for name, each in ELEMENT_TYPES.items() if each.largest)
            raise InvalidInputError(f"{self.dtype} takes no scale; the types that do are {able}")

    @cached_property
    def element(self) -> ElementType:
        """The type of one element; of a scaled field, that of a row's elements and scales."""
        element = ELEMENT_TYPES[self.dtype]
        if self.scale is None:
            return element
        block = self.dim if self.scale.block == "row" else min(self.scale.block, self.dim)
        return ScaledElements(element, SCALE_TYPES[self.scale.dtype], self.dim, block)

    def of_dtype(self, dtype: DTypeName) -> Field:
        """Return the field for the same values in another element type.

        Scales stay where the type can have some. Floats that become whole numbers get one a row.
        """
        element = ELEMENT_TYPES[check_dtype(dtype)]
        scale = self.scale if element.largest is not None else None
        if scale is None and element.integer and not ELEMENT_TYPES[self.dtype].integer:
            scale = Scale()
        return replace(self, dtype=element.name, scale=scale)

    @property
    def scaled(self) -> ScaledElements | None:
        """The elements and scales of a scaled field, otherwise None."""
        return self.element if isinstance(self.element, ScaledElements) else None

    @property
    def form(self) -> str:
        """The dtype, with the scales of a scaled field; two fields of one form store alike."""
        if self.scale is None:
            return self.dtype
        return f"{self.dtype} * {self.scale.dtype}[{self.scale.block}]"

    @cached_property
    def storage(self) -> np.dtype[Any]:
        """The NumPy dtype of one stored element."""
        return self.element.stored

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one record."""
        return self.width * self.storage.itemsize

    @cached_property
    def width(self) -> int:
        """Stored elements of the field in one record; of a scaled field all bytes."""
        return self.dim if self.scaled is None else self.scaled.nbytes

    @property
    def alignment(self) -> int:
        """Bytes of which the field's offset in the record is a multiple."""
        return (self.storage if self.scaled is None else self.scaled.scale.stored).itemsize


USES = "uses"
"""The field of tables that track uses: their number, and the version of the last one."""
USES_FIELD = Field(2, "float64")


@dataclass(frozen=True)
class RecordLayout:
    """The offset of each field in a record.

    Fields are stored in order, each aligned to its element size, or to that of its scales. The
    record is padded with zeros to a multiple of 16 bytes, the unit in which the GPU reads.
    """

    fields: tuple[tuple[str, Field], ...]

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each field in the record."""
        offsets, end = {}, 0
        for name, item in self.fields:
            size = item.alignment
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
        """Return a field; raise UnknownNameError (a KeyError) that lists the known fields."""
        item = self._by_name.get(name)
        if item is not None:
            return item
        names = ", ".join(known for known, _ in self.fields)
        raise UnknownNameError(f"the records have no field {name!r}; their fields are {names}")

    def span(self, name: str) -> tuple[int, int]:
        """Return the byte range `(lo, hi)` of a field in the record; raises UnknownNameError."""
        if name not in self._spans:
            self.field(name)
        return self._spans[name]

    def column(self, name: str) -> tuple[int, int] | None:
        """Return the byte range of a field, or of the scales of a field as `"field.scale"`.

        None if there is no such column.
        """
        if name in self._spans:
            return self._spans[name]
        field = name.removesuffix(".scale")
        item = self._by_name.get(field)
        if item is None or item.scaled is None:
            return None
        lo, hi = self._spans[field]
        return lo + item.scaled.scales_at, hi

    def view(self, records: npt.NDArray[np.uint8], name: str) -> npt.NDArray[Any]:
        """View one field of records `(n, record_bytes)` as `(n, width)`, without a copy."""
        lo, hi = self.span(name)
        return records[:, lo:hi].view(self.field(name).storage)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of a record, plain elements for one unpadded field and else structured.

        `np.load` of the base file returns rows of this dtype.
        """
        if len(self.fields) == 1 and self.fields[0][1].nbytes == self.record_bytes:
            return self.fields[0][1].storage
        return np.dtype(
            {
                "names": [name for name, _ in self.fields],
                "formats": [(item.storage, (item.width,)) for _, item in self.fields],
                "offsets": [self.offsets[name] for name, _ in self.fields],
                "itemsize": self.record_bytes,
            }
        )

    @cached_property
    def element(self) -> np.dtype[Any]:
        """The dtype that all fields share or else uint8; the zarr array has elements of it."""
        kinds = {item.storage for _, item in self.fields}
        return kinds.pop() if len(kinds) == 1 else np.dtype("u1")


class _OfDim(dict[str, Field]):
    """The fields that `dim` and `dtype` stand for, which `dataclasses.replace` makes anew."""


@dataclass(frozen=True)
class TableSpec:
    """The rows and fields of a table and how they are stored.

    Give either `dim` and `dtype` (a single field called `weight`), or `fields`, a dict from name to
    Field.

    Args:
        rows: number of rows, 1..2**40. Left out for a table by key, the table `grows`.
        dim: number of elements of `weight`.
        dtype: element type of `weight`, one of DTYPES; float32 if None.
        init: the initializer of `weight`, or of the first of `fields`; a number is `constant` of
            it, None zeros.
        backend: "memmap" (a plain .npy file) or "zarr" (one zarr v3 array).
        fields: the fields by name, in record order.
        sparse: leave holes in the files until rows are written; requires zeros as first values.
        compression: None, "zstd" or "lz4"; zarr only, for tables read more often than trained.
        chunk_rows: rows per zarr chunk; None chooses a number. A compressed chunk is limited to 256
            MiB, an uncompressed array to 2**20 chunks.
        keys: "int64" or "text" for a table by key: `rows` is how many keys it can hold. A key gets
            a row when it is first written or trained, and starts from a row drawn from the seed of
            `init` and the key. Rows without a key take no space on the disk.
        grows: whether rows are added as keys arrive, an eighth of the table at a time; True for a
            table by key without `rows`. The numbers of rows are multiples of 65,536 then. Only for
            memmap.
        track_uses: whether a field `uses`, two float64, keeps how often each key of a table by key
            was trained, leased or written, and the version that used it last; for `expire`.
        admit_after: the use with which a key gets a row; before, it reads as its first row, and its
            gradient is dropped. Only in training: `write` and `lease` give it one at once.
    """

    rows: int = None  # type: ignore[assignment]  # may be left out, and is filled in
    dim: int | None = None
    dtype: DTypeName | None = None
    init: FirstValues = field(default=None, compare=False)  # type: ignore[assignment]
    backend: BackendName = "memmap"
    fields: Mapping[str, Field] = field(default_factory=dict, hash=False)
    sparse: bool = False
    compression: CompressionName | None = None
    chunk_rows: int | None = None
    keys: KeyName | None = None
    grows: bool = False
    track_uses: bool = False
    admit_after: int | None = None

    def __post_init__(self) -> None:
        """Validate the spec and normalize it: `rows` and `fields` are always filled in."""
        given: int | None = self.rows
        if given is None and self.keys is not None:
            object.__setattr__(self, "grows", True)
            object.__setattr__(self, "rows", EXTENT_ROWS)
        if self.rows is None:
            raise InvalidTypeError(
                "a table has a number of rows: give rows=, or keys= for a table by key"
            )
        object.__setattr__(self, "rows", _check_count(self.rows, "rows", MAX_ROWS))
        if self.grows:
            self._check_growing()
        object.__setattr__(self, "fields", self._resolved_fields())
        first = next(iter(self.fields.values()))
        object.__setattr__(self, "dim", first.dim)
        object.__setattr__(self, "dtype", first.dtype)
        object.__setattr__(self, "init", first.init)
        self._check_sizes()
        if self.keys is not None:
            self._check_keys()
        elif self.track_uses or self.admit_after is not None:
            raise InvalidInputError("track_uses and admit_after are for tables by key; give keys=")
        self._check_backend()

    def _resolved_fields(self) -> dict[str, Field]:
        if not self.fields or isinstance(self.fields, _OfDim):
            if self.dim is None:
                raise InvalidInputError("a table needs dim=, or fields= with at least one field")
            only = {"weight": Field(self.dim, self.dtype or DEFAULT_DTYPE, self.init)}
            return _OfDim(only | ({USES: USES_FIELD} if self.track_uses else {}))
        fields = {}
        for name, item in self.fields.items():
            if not isinstance(item, Field):
                raise InvalidTypeError(f"field {name!r} must be a tierstore.Field, not {item!r}")
            fields[check_name(name, "field")] = item
        if self.track_uses and fields.setdefault(USES, USES_FIELD) != USES_FIELD:
            raise InvalidInputError(f"track_uses=True needs the name {USES!r} for its own field")
        first = next(iter(fields))
        dim, dtype = fields[first].dim, fields[first].dtype
        if (self.dim or dim, self.dtype or dtype) != (dim, dtype):
            raise InvalidInputError(
                f"give dim and dtype, or fields, not both; {first!r} of the fields is {dim} {dtype}"
            )
        if self.init is not None:
            fields[first] = replace(fields[first], init=self.init)
        return fields

    def _check_sizes(self) -> None:
        if self.layout.record_bytes > MAX_RECORD_BYTES:
            raise InvalidInputError(
                f"a record would take {self.layout.record_bytes} bytes; at most {MAX_RECORD_BYTES}"
            )
        if self.nbytes > MAX_TABLE_BYTES:
            raise InvalidInputError(f"the table would take {self.nbytes} bytes; the limit is 2**50")

    def _check_backend(self) -> None:
        backend = BACKENDS.find(self.backend)
        if self.compression is not None:
            self._check_compression(backend)
        if self.chunk_rows is not None:
            _check_count(self.chunk_rows, "chunk_rows", MAX_ROWS)
        backend.check(self)
        drawn = [f.init for f in self.fields.values() if f.init and not f.init.is_zero]
        if self.sparse and self.keys is None and drawn:
            raise InvalidInputError("sparse=True starts from zeros; leave init out")

    def _check_growing(self) -> None:
        if self.keys is None:
            raise InvalidInputError("grows=True is for tables by key; store.grow adds rows by id")
        if self.backend != "memmap":
            raise InvalidInputError(
                f"backend {self.backend!r} has a fixed number of rows: give rows=, the keys that "
                "the table can hold, or use backend='memmap'"
            )
        object.__setattr__(self, "rows", -(-self.rows // EXTENT_ROWS) * EXTENT_ROWS)

    def _check_keys(self) -> None:
        if self.keys not in get_args(KeyName):
            raise InvalidInputError(f"keys are 'int64' or 'text', not {self.keys!r}")
        for name, item in self.fields.items():
            if item.init is not None and not (item.init.draws_by_key or item.init.text):
                raise InvalidInputError(
                    f"the first values of field {name!r} go by row, and a table by key has no "
                    "order of rows; write them with table.write(keys, rows)"
                )
        object.__setattr__(self, "sparse", True)
        if self.admit_after is not None:
            _check_count(self.admit_after, "admit_after", 2**31)

    def _check_compression(self, backend: BackendKind) -> None:
        if self.compression in backend.compressions:
            return
        offered = {name: each.compressions for name, each in BACKENDS.items() if each.compressions}
        able = [name for name, each in offered.items() if self.compression in each]
        if able:
            raise InvalidInputError(f"compression {self.compression!r} needs backend={able[0]!r}")
        known = ", ".join(compression for each in offered.values() for compression in each)
        raise InvalidInputError(f"not a compression: {self.compression!r}; choose from {known}")

    @cached_property
    def layout(self) -> RecordLayout:
        """The layout of a record."""
        return RecordLayout(tuple(self.fields.items()))

    def with_rows(self, rows: int) -> TableSpec:
        """Return the spec of a table that has grown to at least so many rows."""
        return self if rows <= self.rows else replace(self, rows=rows)

    def bound(self, table: str) -> TableSpec:
        """Return the spec with the initializers that a new table of this name uses."""
        fields = {
            name: replace(item, init=item.init and item.init.bound(table, (self.rows, item.dim)))
            for name, item in self.fields.items()
        }
        return replace(self, fields=fields, init=None)

    def seeded(self) -> TableSpec:
        """Return the spec with a seed drawn for each random initializer that has none."""
        fields = {
            name: item if item.init is None else replace(item, init=item.init.seeded())
            for name, item in self.fields.items()
        }
        if all(item.init is self.fields[name].init for name, item in fields.items()):
            return self
        return replace(self, fields=fields, init=None)

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.rows * self.layout.record_bytes
