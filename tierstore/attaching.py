"""Attach other programs' files as tables: rows are read in place, nothing is copied or written.

    tables = tierstore.attach({"ple": "model.safetensors.index.json:model.ple.weight"},
                              budget="24GiB")
    rows = tables["ple"].read(ids)

For tables that another program wrote and that are only read, such as the row memories of language
models.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from tierstore._closing import Closing
from tierstore._disk.base import Base
from tierstore._disk.foreign import (
    ChunkedColumn,
    ForeignBase,
    JoinedColumn,
    MappedColumn,
    Watch,
)
from tierstore._disk.foreign import (
    Column as StoredColumn,
)
from tierstore._disk.foreign_checksums import open_checksums
from tierstore._disk.generation import Generation
from tierstore._disk.tier import DiskTier
from tierstore._door import Door, internal_errors
from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats import (
    Source,
    Stored,
    StoredChunks,
    StoredParts,
    open_source,
    split_name,
)
from tierstore._formats.files import open_input
from tierstore._html import brief
from tierstore._io import File
from tierstore._memory_table import Unversioned
from tierstore._table.backing import Backing
from tierstore._table.home import Touched
from tierstore._table.prefetch import Prefetcher
from tierstore._table.table import Table
from tierstore._tiers.base import LowestTier, MappedTier
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.placement import Placement, check_names, find_device
from tierstore._tiers.split import Selected, Selection
from tierstore.budget import Budget, Size
from tierstore.errors import (
    ClosedError,
    FilledRowsWarning,
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    UnknownNameError,
    warn,
)
from tierstore.policy import Policies
from tierstore.spec import DeviceName, Field, Scale, TableSpec, check_name

if TYPE_CHECKING:
    import torch

__all__ = ["Attached", "attach"]

Place: TypeAlias = str | os.PathLike[str]
"""A file, or `FILE:NAME` for one of its matrices."""

Matrix: TypeAlias = Place | Sequence[Place]
"""The place of a matrix, or those of its ranges of rows, in order."""

Column: TypeAlias = Matrix | tuple[Matrix, Matrix] | tuple[Matrix, Field]
"""A matrix, 8-bit elements and their scales, or the bytes of a field in one piece."""

_FIELD = "weight"
_REFUSAL = "is only read; tierstore.import_table makes a table that can be written of a file"
_SCALES: Mapping[str, Literal["float32", "e8m0"]] = {
    "float32": "float32",
    "float8_e8m0fnu": "e8m0",
    "uint8": "e8m0",
}
"""The scales that elements of 8 bits may have, by the type of their matrix."""


class Attached(Closing, Mapping[str, Table]):
    """Read-only tables of rows in other programs' files, by name. Make it with `tierstore.attach`.

    Tables read, prefetch, lease, warm, scan and search as those of a store do. They have no
    versions, and checksums only on request; writing raises ReadOnlyError.
    """

    sync_checks = False
    store = None

    def __init__(
        self,
        tables: Mapping[str, Column | Mapping[str, Column]],
        budget: Budget,
        policy: Policies | None,
        device: Device | None,
        checksums: Path | None = None,
    ) -> None:
        """Open and map the files, and place the tables in memory; see `attach`."""
        self._given = tables, budget, policy, None, checksums  # as `__reduce__` needs it
        attached = f"what is attached as {', '.join(tables)}"
        self.door: Door = Door(attached, writable=False, refusal=_REFUSAL)
        self.prefetcher: Prefetcher = Prefetcher(self.door)
        self.touched: Touched = Touched()
        with contextlib.ExitStack() as opened:
            specs: dict[str, TableSpec] = {}
            bases: dict[str, ForeignBase] = {}
            for name, given in tables.items():
                specs[name], bases[name] = _opened(name, given)
                opened.callback(bases[name].close)
            check_names(specs, budget, policy)
            if checksums is not None:
                described = {name: _described(spec) for name, spec in specs.items()}
                for name, each in open_checksums(checksums, described, bases).items():
                    bases[name].checksums = each
            # The disk tier asks a base without deltas only to read, to place and to close.
            tiers = {n: DiskTier(cast(Base, base), [], table=n) for n, base in bases.items()}
            placement = Placement(budget, policy, device, writable=False)
            self._tables: dict[str, Table] = {}
            for part in placement.plan(specs):
                space = placement.place(part, tiers, functools.partial(_selected, opened, bases))
                opened.callback(space.close)
                for extent in space.extents:
                    name = extent.table
                    files = Unversioned(specs[name], tiers[name], _place(tables[name]))
                    on = Backing(self, name, cast(Generation, files), space, extent)
                    self._tables[name] = Table(on)
            self._tables = {name: self._tables[name] for name in tables}
            self._opened = opened.pop_all()

    def __getitem__(self, name: str) -> Table:
        """Return a table; raises UnknownNameError, a KeyError."""
        try:
            return self._tables[name]
        except (KeyError, TypeError):
            raise UnknownNameError(
                f"no table {name!r} is attached; there are: {', '.join(self._tables)}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the tables."""
        return iter(self._tables)

    def __len__(self) -> int:
        """Return the number of tables."""
        return len(self._tables)

    def __repr__(self) -> str:
        """Name the tables."""
        return f"Attached({brief([*self._tables])}{', closed' if self.door.closed else ''})"

    def __reduce__(self) -> tuple[Callable[..., Attached], tuple[object, ...]]:
        """Pickle as what to attach again: in host memory, as a worker must not use the GPU."""
        return Attached, self._given

    def close(self) -> None:
        """Free the memory and close the files, which stay as they are; may be called again."""
        self.prefetcher.close()
        with contextlib.suppress(ClosedError), self.door.use():
            self.door.close()
            self.prefetcher.wait_for_advice()
            self._opened.close()


def attach(
    tables: Mapping[str, Column | Mapping[str, Column]],
    *,
    budget: Budget | Size | None = None,
    policy: Policies | None = None,
    device: DeviceName | torch.device | Device = "cpu",
    checksums: str | os.PathLike[str] | None = None,
) -> Attached:
    """Read matrices of other programs in place, through the tiers of a store.

    Args:
        tables: for each table the file of its rows, as `FILE` or `FILE:NAME`: `.npy`,
            `.safetensors`, the `.json` index of several of those, or the directory of a `.zarr`. A
            list of files has the rows of one matrix, one range after another. A
            dict from field to file makes one record of several matrices with as many rows, such as
            keys and values. A single matrix is the field "weight". A tuple (elements, scales) of
            two matrices, 8-bit elements and the scales of their blocks, is a field that reads as
            floats; see `Scale`. A tuple (bytes, Field) is a field whose rows are stored in one
            piece, a matrix of uint8 or int8 with as many columns as the field has bytes: elements,
            then scales. NAME may follow one colon or two.
        budget: memory for the tiers; see Budget for the defaults. A size such as "24GiB" applies to
            the host tier.
        policy: the replacement policy of the tiers, as in `tierstore.open`.
        device: the device of the nearest tier, as in `tierstore.open`.
        checksums: a file with the checksums of all rows, against which rows are checked when they
            are read from the disk. If it is missing, every row is read once to make it.

    Nothing is copied, so opening takes the time of reading the headers. Chunks of zarr that are
    compressed, or do not fill whole pages, are decoded whole when one of their rows is read, and
    the last few are kept. The files must stay as they are while they are attached: a read of a file
    that vanished, was replaced, or changed in size or time raises CorruptStoreError.

    Raises FormatError for files that are damaged or cannot be read in place, such as columns first
    or the wrong byte order (import these), InvalidInputError for other kinds of files, matrices of
    different rows and checksums of other tables, UnknownNameError for a budget or a policy that
    names another table, MissingFileError, InvalidTypeError, CapacityError, DeviceError for a GPU
    that is not there, and MissingExtraError for one without CuPy.
    """
    with internal_errors():
        if not isinstance(tables, Mapping):
            raise InvalidTypeError(f"tables must be a dict from name to file, not {tables!r}")
        if not tables:
            raise InvalidInputError("nothing to attach; give a dict from name to file")
        for name in tables:
            check_name(name)
        path = None if checksums is None else Path(os.path.abspath(checksums))
        return Attached(tables, Budget.of(budget), policy, find_device(device), path)


def _selected(
    opened: contextlib.ExitStack,
    bases: Mapping[str, ForeignBase],
    tier: LowestTier,
    selection: Selection,
) -> MappedTier:
    """Return a tier of some bytes of each record, which reads only their matrices if possible.

    What it opens is closed with `opened`.
    """
    whole = cast(DiskTier, tier)
    base = bases[whole.table].select(selection.pieces, selection.nbytes)
    if base is None:
        return Selected(tier, selection)
    opened.callback(base.close)
    selected = DiskTier(cast(Base, base), [], table=whole.table)
    selected.stats = whole.stats
    return selected


def _described(spec: TableSpec) -> dict[str, Any]:
    """Describe the files that the checksums of a table depend on."""
    fields = {name: [item.form, item.dim] for name, item in spec.fields.items()}
    return {"rows": spec.rows, "fields": fields}


def _opened(name: str, given: object) -> tuple[TableSpec, ForeignBase]:
    """Return the spec of a table and its rows."""
    matrices = given if isinstance(given, Mapping) else {_FIELD: given}
    if not matrices:
        raise InvalidInputError(f"table {name!r} needs at least one matrix")
    with contextlib.ExitStack() as opened:
        sources: dict[str, list[Source]] = {}
        declared: dict[str, Field] = {}
        for field, matrix in matrices.items():
            parts = matrix if isinstance(matrix, tuple) else (matrix,)
            if not 1 <= len(parts) <= 2:
                raise InvalidInputError(
                    f"field {field!r} is a matrix, (elements, scales) or (bytes, Field)"
                )
            if isinstance(parts[-1], Field):
                declared[field], parts = parts[-1], parts[:-1]
            found = [opened.enter_context(_source(name, part)) for part in parts]
            sources[check_name(field, "field")] = found
            for each in found:
                for note in each.filled:
                    warn(f"{each.path}: {note}", FilledRowsWarning)
        counts = {field: [each.rows for each in found] for field, found in sources.items()}
        rows = next(iter(counts.values()))[0]
        if any(count != rows for found in counts.values() for count in found):
            raise InvalidInputError(
                f"the matrices of table {name!r} have different numbers of rows: "
                + ", ".join(f"{field!r} {' and '.join(map(str, n))}" for field, n in counts.items())
            )
        stored = {field: [_stored(each) for each in found] for field, found in sources.items()}
        fields = {
            field: _field(found, stored[field], declared.get(field))
            for field, found in sources.items()
        }
        spec = TableSpec(rows, fields=fields)
        columns = []
        for field, places in stored.items():
            start = spec.layout.offsets[field]
            columns += [
                _column(rows, place, start + lo, start + hi)
                for place, (lo, hi) in zip(places, _spans(fields[field], places), strict=True)
            ]
        return spec, ForeignBase(rows, spec.layout.record_bytes, columns)


def _field(
    sources: Sequence[Source],
    stored: Sequence[Stored],
    declared: Field | None,
) -> Field:
    """Return the field for a matrix, for elements and their scales, or for declared bytes."""
    dim, dtype = sources[0].dim, stored[0].dtype
    if declared is not None:
        if dtype not in ("uint8", "int8") or dim != declared.nbytes:
            raise FormatError(
                f"{sources[0].path} has rows of {dim} {dtype}; the field takes {declared.nbytes} "
                "bytes, as uint8 or int8"
            )
        return declared
    if len(sources) == 1:
        if dtype not in ELEMENT_TYPES:
            raise FormatError(
                f"{sources[0].path} holds {dtype}, which can only be scales: (elements, scales)"
            )
        return Field(dim, dtype)
    blocks, kind = sources[1].dim, _SCALES.get(stored[1].dtype)
    if kind is None or dim % blocks:
        raise FormatError(
            f"{sources[1].path}: {blocks} scales of {stored[1].dtype} for {dim} elements; need "
            f"float32, float8_e8m0fnu or uint8, and a number that divides {dim}"
        )
    return Field(dim, dtype, scale=Scale(kind, "row" if blocks == 1 else dim // blocks))


def _spans(field: Field, places: Sequence[object]) -> list[tuple[int, int]]:
    """Return the bytes of a field that each of its matrices fills."""
    scaled = field.scaled
    if scaled is None or len(places) == 1:
        return [(0, field.nbytes)]
    return [(0, scaled.dim), (scaled.scales_at, scaled.nbytes)]


def _source(name: str, matrix: Any) -> Source:
    if isinstance(matrix, list):
        return open_source([_named(name, each) for each in matrix], expand=True)
    return open_source(_named(name, matrix), expand=True)  # nothing is reserved for it


def _named(name: str, matrix: Any) -> str:
    if not isinstance(matrix, str | os.PathLike):
        raise InvalidTypeError(f"table {name!r} is attached to a file or FILE:NAME, not {matrix!r}")
    file, within = split_name(os.fspath(matrix))
    return str(file) if within is None else f"{file}:{within}"


def _place(given: Column | Mapping[str, Column]) -> str:
    """Return where the matrices of a table are, in one text, the same in every process."""
    matrices = given if isinstance(given, Mapping) else {_FIELD: given}
    parts = {
        field: [
            os.path.abspath(place)
            for each in whole
            if not isinstance(each, Field)
            for place in (each if isinstance(each, list) else [each])
        ]
        for field, column in matrices.items()
        for whole in [column if isinstance(column, tuple) else (column,)]
    }
    return ", ".join(f"{field} of {' and '.join(parts[field])}" for field in sorted(parts))


def _stored(source: Source) -> Stored:
    """Return the files or chunks in which rows of a source can be read at random."""
    stored = source.stored()
    if stored is None:
        raise FormatError(
            f"{source.path} cannot be read in place, which takes one matrix row by row in little-"
            "endian numbers: .npy, .safetensors, an index of those, .fbin, or a .zarr directory; "
            "import it with tierstore.import_table"
        )
    return stored


def _column(rows: int, stored: Stored, start: int, stop: int) -> StoredColumn:
    """Open the files of a matrix as bytes `start:stop` of records."""
    if isinstance(stored, StoredParts):
        pairs = [(each, own) for each, own in zip(stored.parts, stored.rows, strict=True) if own]
        columns = [_column(own, each, start, stop) for each, own in pairs]
        return JoinedColumn(columns, [own for _, own in pairs], start, stop)
    if isinstance(stored, StoredChunks):
        watch, step = Watch(stored.files), stored.rows_per_chunk
        return ChunkedColumn(stored.decode, watch, start, stop, rows=rows, rows_per_chunk=step)
    watch = Watch([[file] for file in stored.files])
    with contextlib.closing(_each_open(stored.files)) as files:
        return MappedColumn(
            files,
            watch,
            start,
            stop,
            rows=rows,
            offset=stored.offset,
            rows_per_file=stored.rows_per_file,
        )


def _each_open(files: Iterable[Path]) -> Generator[File]:
    """Yield the files; each stays open until the next iteration."""
    for path in files:
        with open_input(path) as found:
            yield found.file
