"""Attach files of others as tables: rows are read in place, and nothing is copied or written.

    tables = tierstore.attach({"ple": "model.safetensors.index.json:model.ple.weight"},
                              budget="24GiB")
    rows = tables["ple"].read(ids)

For tables that another program wrote and that are only read, such as the row memories of language
models: opening takes no longer for 100 GB than for one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from tierstore._closing import Closing
from tierstore._disk.base import Base
from tierstore._disk.foreign import ForeignBase, ForeignField
from tierstore._disk.generation import Generation
from tierstore._disk.tier import DiskTier
from tierstore._door import Door, internal_errors
from tierstore._formats import SpanSource, open_source, split_name
from tierstore._memory_table import Unversioned
from tierstore._table.prefetch import Prefetcher
from tierstore._table.table import Table, Touched
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.placement import Placement, check_names, find_device
from tierstore.budget import Budget, Size
from tierstore.errors import (
    ClosedError,
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    UnknownNameError,
)
from tierstore.policy import Policies
from tierstore.spec import DeviceName, Field, TableSpec, check_name

if TYPE_CHECKING:
    import torch

__all__ = ["Attached", "attach"]

Matrix: TypeAlias = str | os.PathLike[str]
"""A file, or `FILE:NAME` for one of its matrices."""

_FIELD = "weight"


class Attached(Closing, Mapping[str, Table]):
    """Tables over files of others, by name; read-only. Make it with `tierstore.attach`.

    Tables read, prefetch, lease, warm, scan and search as those of a store do. They have no
    versions and no checksums; writing raises ReadOnlyError.

    Attributes:
        door, prefetcher, sync_checks, touched, store: for the tables.
    """

    sync_checks = False
    store = None

    def __init__(
        self,
        tables: Mapping[str, Matrix | Mapping[str, Matrix]],
        budget: Budget,
        policy: Policies | None,
        device: Device | None,
    ) -> None:
        """Open and map the files, and place the tables in memory; see `attach`."""
        self.door: Door = Door(f"what is attached as {', '.join(tables)}", writable=False)
        self.prefetcher: Prefetcher = Prefetcher(self.door)
        self.touched: Touched = Touched()
        with contextlib.ExitStack() as opened:
            specs: dict[str, TableSpec] = {}
            tiers: dict[str, DiskTier] = {}
            for name, given in tables.items():
                specs[name], base = _opened(name, given)
                opened.callback(base.close)
                # The disk tier asks a base without deltas only to read, to place and to close.
                tiers[name] = DiskTier(cast(Base, base), [], table=name)
            check_names(specs, budget, policy)
            placement = Placement(budget, policy, device)
            self._tables: dict[str, Table] = {}
            for part in placement.plan(specs):
                space = placement.place(part, tiers)
                opened.callback(space.close)
                for extent in space.extents:
                    name = extent.table
                    generation = cast(Generation, Unversioned(specs[name], tiers[name]))
                    self._tables[name] = Table(self, name, generation, space, extent)
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
        return f"Attached({list(self._tables)}{', closed' if self.door.closed else ''})"

    def close(self) -> None:
        """Free the memory and close the files, which stay as they are; may be called again."""
        self.prefetcher.close()
        with contextlib.suppress(ClosedError), self.door.use():
            self.door.close()
            self.prefetcher.wait_for_advice()
            self._opened.close()


def attach(
    tables: Mapping[str, Matrix | Mapping[str, Matrix]],
    *,
    budget: Budget | Size | None = None,
    policy: Policies | None = None,
    device: DeviceName | torch.device | Device = "cpu",
) -> Attached:
    """Read matrices of other programs in place, through the tiers of a store.

    Args:
        tables: for each table the file of its rows, as `FILE` or `FILE:NAME`: `.npy`,
            `.safetensors`, or the `.json` index of several of those. A dict from field to file
            makes one record of several matrices with as many rows, such as values and scales. A
            single matrix is the field "weight". NAME may follow one colon or two.
        budget: memory for the tiers; see Budget for the defaults. A size such as "24GiB" applies to
            the host tier.
        policy: the replacement policy of the tiers, as in `tierstore.open`.
        device: the device of the nearest tier, as in `tierstore.open`.

    Nothing is copied, so opening takes the time of reading the headers. The files must stay as they
    are while they are attached: they are checked for their size before each read, and have no
    checksums.

    Raises FormatError for files that are damaged or cannot be read in place, such as compressed
    ones, columns first or the wrong byte order (import these), InvalidInputError for other kinds of
    files and matrices of different rows, InvalidTypeError, CapacityError and DeviceError.
    """
    with internal_errors():
        if not isinstance(tables, Mapping):
            raise InvalidTypeError(f"tables must be a dict from name to file, not {tables!r}")
        if not tables:
            raise InvalidInputError("nothing to attach; give a dict from name to file")
        for name in tables:
            check_name(name)
        return Attached(tables, Budget.of(budget), policy, find_device(device))


def _opened(name: str, given: object) -> tuple[TableSpec, ForeignBase]:
    """Return the spec of a table and its rows; the base closes the files."""
    matrices = given if isinstance(given, Mapping) else {_FIELD: given}
    if not matrices:
        raise InvalidInputError(f"table {name!r} needs at least one matrix")
    with contextlib.ExitStack() as opened:
        sources: dict[str, SpanSource] = {}
        for field, matrix in matrices.items():
            sources[check_name(field, "field")] = source = _source(name, matrix)
            opened.callback(source.close)
        counts = {field: source.rows for field, source in sources.items()}
        if len(set(counts.values())) > 1:
            raise InvalidInputError(
                f"the matrices of table {name!r} have different numbers of rows: "
                + ", ".join(f"{field!r} {rows}" for field, rows in counts.items())
            )
        rows = next(iter(counts.values()))
        fields = {field: Field(each.dim, each.dtype) for field, each in sources.items()}
        spec = TableSpec(rows, fields=fields)
        layout = spec.layout
        spans = [
            ForeignField(each.file, each.offset, *layout.span(field))
            for field, each in sources.items()
        ]
        base = ForeignBase(rows, layout.record_bytes, spans)
        opened.pop_all()  # which the base closes
        return spec, base


def _source(name: str, matrix: Any) -> SpanSource:
    """Open a matrix, and check that its bytes are those of a field."""
    if not isinstance(matrix, str | os.PathLike):
        raise InvalidTypeError(f"table {name!r} is attached to a file or FILE:NAME, not {matrix!r}")
    file, within = split_name(os.fspath(matrix))
    source = open_source(file if within is None else f"{file}:{within.removeprefix(':')}")
    if not isinstance(source, SpanSource) or not source.in_place:
        source.close()
        raise FormatError(
            f"{source.path} cannot be read in place, which takes one matrix row by row in little-"
            "endian numbers: .npy, .safetensors or an index of those; import it with "
            "tierstore.import_table"
        )
    return source
