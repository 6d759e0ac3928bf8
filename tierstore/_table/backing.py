"""What a table stands on: the files of its open version, its rows in the tiers, its scalars.

The table that users hold stays the same object while its home opens other files, fields, tiers or
versions: the home exchanges them here, and the table, its rows by number and what looks several
tables up as one see them at their next call.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from tierstore._disk.generation import Generation, Later
from tierstore._disk.keys import Keys
from tierstore._disk.manifest import KeysInfo, TableInfo
from tierstore._disk.tier import DiskTier
from tierstore._table.access import Access
from tierstore._table.gpu import DeviceAccess
from tierstore._table.home import Home
from tierstore._table.host import HostAccess
from tierstore._table.split import SplitAccess
from tierstore._table.trace import Recording
from tierstore._tiers.base import OPENED_ANEW
from tierstore._tiers.space import Extent, Space, WholeSpace
from tierstore.spec import Field, RecordLayout, TableSpec
from tierstore.stats import TableInformation, TierInformation


class Backing:
    """What one table stands on; see above.

    Attributes:
        home: the store, the memory or the attached files that the table belongs to.
        name: of the table.
        generation: the files of the open version.
        disk: its lowest tier.
        layout: of a record.
        spans: of each field, the field and where its bytes begin and end in a record.
        space, extent: the tiers, and which rows of them are the table's.
        access: to the rows.
        on_host: the access, if it is that of a host alone.
        scalars: the values of the whole table, in the dict that callers may hold.
        recording: of the ids of batches, if there is one.
    """

    by_key: ClassVar[bool] = False
    """Whether rows belong to keys, which get them as they come."""

    access: Access
    on_host: HostAccess | None
    _keys: tuple[Generation, KeysInfo | None, Keys | None] | None

    def __init__(
        self, home: Home, name: str, generation: Generation, space: Space, extent: Extent
    ) -> None:
        """Stand on the files of a table, and on its rows in a space."""
        self.home: Home = home
        self.name: str = name
        self.recording: Recording | None = None
        self.scalars: dict[str, Any] = {}
        self.extent: Extent = extent
        self.attach(generation, space, extent)

    def attach(
        self, generation: Generation, space: Space, extent: Extent, renamed: str = ""
    ) -> None:
        """Use these files from now on: the table grew, or has other fields or another version.

        `renamed` is why rows may mean something else then; empty where they do not.
        """
        if renamed:
            self.extent.epoch.end(renamed, names=True)
        self.generation = generation
        self.disk: DiskTier = generation.tier
        self.layout: RecordLayout = generation.info.spec.layout
        self.spans: dict[str, tuple[Field, int, int]] = {
            name: (item, *self.layout.span(name)) for name, item in self.layout.fields
        }
        self.forget_keys()
        self.reset_scalars()
        self.move(space, extent)

    def move(self, space: Space, extent: Extent) -> None:
        """Use these tiers from now on."""
        if extent is not self.extent:
            extent.epoch = self.extent.epoch.next()
        self.space = space
        self.extent = extent
        access = access_to(space, extent, self.layout, self.home)
        self.on_host = access if isinstance(access, HostAccess) else None
        self.access = access  # last: a call of another thread reads it before fields

    def moved_to(self, other: Backing) -> Self:
        """Use the files and tiers that another has opened; return this one."""
        self.home = other.home
        self.attach(other.generation, other.space, other.extent, OPENED_ANEW)
        return self

    @property
    def spec(self) -> TableSpec:
        """The spec of the table, with the rows that it has grown to."""
        return self.generation.spec

    def renamed_since(self, names: int, touched: object = None) -> str:
        """See `Epoch.renamed_since`; `touched` is for tables that are looked up as one."""
        return self.extent.epoch.renamed_since(names)

    def suits(self, spec: TableSpec) -> bool:
        """Whether a table of this spec can stand on it: by key as before, or not as before."""
        return self.by_key == (spec.keys is not None)

    @property
    def rows(self) -> int:
        """Number of rows, of a table by key of the keys that have one."""
        return self.spec.rows

    def can_follow(self, info: TableInfo) -> bool:
        """Whether a reader's table can follow a later manifest without being opened again.

        A table with a GPU tier is always opened again.
        """
        return self.space.gpu is None and self.generation.is_of(info)

    def follow(self, later: Later) -> None:
        """Switch a reader to a later manifest; the caller makes its tiers forget changed rows."""
        self.generation.follow(later)
        if self.disk.rows > self.space.nearest.rows and self.spec.grows:
            self.space.grow(self.disk.rows)
            self.move(self.space, self.extent)
        self.reset_scalars()

    def reset_scalars(self) -> None:
        """Take the scalars of the open version, into the dict that callers may hold."""
        committed = dict(self.generation.info.scalars)
        self.scalars.update(committed)
        for name in self.scalars.keys() - committed.keys():
            del self.scalars[name]

    @property
    def keys(self) -> Keys | None:
        """The external keys of the rows, opened at their first use, or None."""
        generation = self.generation
        info = self.home.touched.keys.get(self.name, generation.info.keys)
        held = self._keys
        if held is None or held[0] is not generation or held[1] != info:
            held = self._keys = generation, info, generation.keys(info)
        return held[2]

    def forget_keys(self) -> None:
        """Open the keys again at their next use: they have changed."""
        self._keys = None

    def information(self, tiers: tuple[TierInformation, ...]) -> TableInformation:
        """Return the table's part of `store.info()`; `tiers` are those of its space."""
        deltas = self.disk.deltas
        return TableInformation(
            name=self.name,
            rows=self.rows,
            dim=self.layout.fields[0][1].dim,
            dtype=self.layout.fields[0][1].dtype,
            fields=tuple(
                {"name": name, "dim": item.dim, "dtype": item.dtype}
                | {"init": (item.init and item.init.text) or None}
                | ({} if item.scale is None else {"scale": vars(item.scale)})
                for name, item in self.layout.fields
            ),
            backend=self.spec.backend,
            record_bytes=self.layout.record_bytes,
            disk_bytes=self.generation.disk_bytes,
            delta_rows=sum(delta.info.rows for delta in deltas),
            delta_bytes=sum(delta.info.size for delta in deltas),
            base=self.generation.base_path,
            index_bytes=self.disk.index_bytes,
            tiers=tiers,
            allocated_bytes=self.generation.allocated_bytes,
            keys=None if (keys := self.generation.info.keys) is None else keys.kind,
            sparse=self.spec.sparse,
            compression=self.spec.compression,
        )

    def close(self) -> None:
        """Close the files; the next writer removes uncommitted ones."""
        self.generation.close()


def access_to(
    space: Space, extent: Extent | WholeSpace, layout: RecordLayout, home: Home
) -> Access:
    """Return access to some rows of a space, from the side of its nearest tier."""
    gpu, whole, door = space.gpu, space.whole, home.door
    if gpu is None:
        return HostAccess(space, extent, layout, door)
    if whole is not None:
        return SplitAccess(gpu, extent, layout, door, whole, sync_checks=home.sync_checks)
    return DeviceAccess(gpu, extent, layout, door, sync_checks=home.sync_checks)
