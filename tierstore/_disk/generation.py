"""A generation: the directory with one base of a table, its deltas and its keys.

Changing a table's fields or backend writes a new generation; the old one remains as long as a kept
version names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._closing import call_each
from tierstore._disk.backends import backend_of, backends
from tierstore._disk.base import (
    CHECKSUMS,
    DIGEST_ROWS,
    Base,
    block_sums,
    foreign_blocks,
    padded,
    read_digest,
    write_digest,
)
from tierstore._disk.behind import Behind
from tierstore._disk.delta import Delta, LiveDelta
from tierstore._disk.key_log import append_keys, load_keys
from tierstore._disk.keys import KeyFile, Keys, open_index, open_keys, write_index
from tierstore._disk.manifest import (
    DELTA_NAME,
    DIGEST_NAME,
    KEYS_NAME,
    PARTIAL_NAME,
    DeltaInfo,
    DigestInfo,
    KeysInfo,
    TableInfo,
    unique_name,
)
from tierstore._disk.merging import Compaction
from tierstore._disk.partitioning import Shard
from tierstore._disk.records import RecordFiles
from tierstore._disk.tier import DiskTier
from tierstore._keys.growing import KeyMap, StoredKeys, key_map
from tierstore._progress import Progress
from tierstore._threads import Worker
from tierstore.errors import CorruptStoreError, InvalidInputError, TierStoreError
from tierstore.initializers import BLOCK_ROWS, zeros
from tierstore.spec import EXTENT_ROWS, TableSpec

Rows = npt.NDArray[np.int64]

_CHECKED_BYTES = 256 << 20
"""Maximum number of row checksums compared when a table is opened."""
_FILLED_AHEAD = 1 << 22
"""Keys from which on their map is filled before its first use; fewer take negligible time."""
_FILLED_BYTES = 64 << 20
"""Records that are distributed to partitions at a time."""
_FORMS = (DELTA_NAME, KEYS_NAME, DIGEST_NAME, PARTIAL_NAME)
_NAMES = re.compile("|".join(form.pattern for form in _FORMS), re.ASCII)


def initial_records(spec: TableSpec, start: int = 0) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the initial records of a table from row `start` on, in blocks.

    If the spec is seeded, the bytes of a row do not depend on `start`.
    """
    spec = spec.seeded()
    layout = spec.layout
    for block in range(start // BLOCK_ROWS, -(-spec.rows // BLOCK_ROWS)):
        count = min(BLOCK_ROWS, spec.rows - block * BLOCK_ROWS)
        records = np.zeros((count, layout.record_bytes), np.uint8)
        for number, (name, item) in enumerate(layout.fields):
            initializer = item.init or zeros()
            if not initializer.is_zero:
                values = initializer.block(block, count, (spec.rows, item.dim), number)
                layout.view(records, name)[:] = item.element.encode(values)
        yield records[max(0, start - block * BLOCK_ROWS) :]


def first_records(
    spec: TableSpec, codes: npt.NDArray[np.uint64], names: Collection[str] | None = None
) -> npt.NDArray[np.uint8]:
    """Return the first records of keys by their codes `(n,)`; other fields than `names` are zero.

    They depend on the initializers and the key alone.
    """
    layout = spec.layout
    records = np.zeros((codes.size, layout.record_bytes), np.uint8)
    for number, (name, item) in enumerate(layout.fields if codes.size else ()):
        if item.init is not None and not item.init.is_zero and (names is None or name in names):
            values = item.init.of_keys(codes, item.dim, number)
            layout.view(records, name)[:] = item.element.encode(values)
    return records


def create(
    table: _io.Directory,
    spec: TableSpec,
    seq: int,
    blocks: Iterable[npt.NDArray[np.uint8]] | None = None,
    progress: Progress | None = None,
) -> TableInfo:
    """Create a generation in a table's directory and fill it; it is durable on return.

    Without `blocks` of records, the initializers of the fields provide them.
    """
    spec = backend_of(spec).completed(spec)
    name = unique_name("g", seq)
    if spec.keys is not None:
        spec = spec.seeded()
    if blocks is None:
        spec = spec.seeded()
        blocks = () if spec.sparse else initial_records(spec)
    with table.make_directory(name) as directory:
        try:
            Base.create(directory, spec, blocks, progress).close()
            digest = _bound(directory, spec, seq)
        except BaseException:
            remove_generation(table, name)
            raise
        directory.sync()
    table.sync()
    return TableInfo(_with_kept_initializers(spec), name, digest=digest)


def _bound(directory: _io.Directory, spec: TableSpec, seq: int) -> DigestInfo:
    """Write the digest of a base that is complete."""
    sums = block_sums(directory, spec.rows)
    return write_digest(directory, sums, unique_name("digest-", seq, ".crc"))


def create_partitions(
    tables: Sequence[_io.Directory],
    shard: Shard,
    spec: TableSpec,
    blocks: Iterable[npt.NDArray[np.uint8]] | None = None,
    progress: Progress | None = None,
    of: Shard | None = None,
) -> list[TableInfo]:
    """Create the generation of a table in each partition of a shard, one directory each.

    `spec` is that of the whole table, and `blocks` are all its records in order, or those of the
    shard `of`; without them the fields' seeded initializers provide them. Rows that stand for no id
    are zero. All partitions are filled together, so that records are made once. Returns the entry
    in the manifest of each partition; after an error nothing of it is left.
    """
    part = backend_of(spec).completed(of_partition(spec, shard))
    name = unique_name("g", 1)
    with contextlib.ExitStack() as unless_made, contextlib.ExitStack() as stack:
        unless_made.callback(_remove_each, tables, name)
        made = [stack.enter_context(table.make_directory(name)) for table in tables]
        bases = [Base.begin(directory, part) for directory in made]
        for base in bases:
            stack.callback(base.close)
        if blocks is not None or not spec.sparse:
            of = dataclasses.replace(shard, first=0, count=shard.partitions) if of is None else of
            drawn = initial_records(spec) if blocks is None else blocks
            if (filled := _fill(bases, shard, of, drawn, progress)) != of.ids and not spec.sparse:
                raise InvalidInputError(f"the blocks hold {filled} rows, the table {of.ids}")
        for base in bases:
            base.sync()
        digests = [_bound(directory, part, 1) for directory in made]
        for directory, table in zip(made, tables, strict=True):
            directory.sync()
            table.sync()
        unless_made.pop_all()
    return [TableInfo(part, name, digest=digest) for digest in digests]


def _remove_each(tables: Sequence[_io.Directory], name: str) -> None:
    """Remove a generation that was begun, wherever it is."""
    for table in tables:
        with contextlib.suppress(TierStoreError, OSError):
            remove_generation(table, name)


def of_partition(spec: TableSpec, shard: Shard) -> TableSpec:
    """Return the spec of a table in each partition, which starts from given records.

    For a table by key, it is the initial spec. Raises InvalidInputError for a table by key that
    does not grow: no partition knows the total number of keys.
    """
    if spec.keys is not None and not spec.grows:
        raise InvalidInputError(
            "a table by key in partitions has as many rows as keys come: leave rows= out"
        )
    rows = shard.blocks if spec.keys is None else EXTENT_ROWS
    fields = {name: dataclasses.replace(each, init=None) for name, each in spec.fields.items()}
    return dataclasses.replace(spec, rows=rows, fields=fields, init=None)


def _fill(
    bases: Sequence[Base],
    shard: Shard,
    of: Shard,
    blocks: Iterable[npt.NDArray[np.uint8]],
    progress: Progress | None,
) -> int:
    """Write the records of a shard, `of`, to those of some partitions that have them.

    Returns how many there were.
    """
    waiting: list[npt.NDArray[np.uint8]] = []
    done, first = [0] * len(bases), 0

    def hand_out() -> None:
        nonlocal first
        records = np.concatenate(waiting)
        rows = np.arange(first, first + len(records))
        partitions = shard.partition_of(of.ids_of(rows)) - shard.first
        for number, base in enumerate(bases):
            block = records[partitions == number]
            base.append(done[number], block)
            done[number] += len(block)
        first += len(records)
        waiting.clear()
        if progress is not None:
            progress(first, of.ids)

    held = 0
    for block in blocks:
        waiting.append(block)
        held += block.nbytes
        if held >= _FILLED_BYTES:
            hand_out()
            held = 0
    if waiting:
        hand_out()
    for number, base in enumerate(bases):
        if missing := shard.blocks - done[number]:
            base.append(done[number], np.zeros((missing, base.record_bytes), np.uint8))
    return first


def as_kept(spec: TableSpec) -> TableSpec:
    """Return a spec as a manifest keeps it: complete, and without parts that it cannot keep."""
    return _with_kept_initializers(backend_of(spec).completed(spec))


def _with_kept_initializers(spec: TableSpec) -> TableSpec:
    """Return the spec without initializers that a manifest cannot record, such as arrays."""
    fields = {
        name: item if item.init is None or item.init.text else dataclasses.replace(item, init=None)
        for name, item in spec.fields.items()
    }
    return dataclasses.replace(spec, fields=fields, init=None)


class Later(NamedTuple):
    """A later manifest's entry of an open generation, for a reader, and its files.

    Attributes:
        info: the entry.
        deltas: all of its deltas, oldest first.
        changed: the ascending rows whose committed image may differ; see `DiskTier.changed`.
        digest: that of the base, if it is intact.
        keys: the mapped files of its keys.
    """

    info: TableInfo
    deltas: Sequence[Delta]
    changed: Rows
    digest: npt.NDArray[np.uint32] | None
    keys: dict[str, KeyFile]


class Generation:
    """An open generation: its disk tier, and its entry in the newest manifest.

    Attributes:
        examined: whether the base and its digest were examined.
    """

    moves_rows = True
    """Whether code that removes keys also moves the rows of others into their places."""

    def __init__(
        self,
        table: _io.Directory,
        info: TableInfo,
        *,
        store: str,
        next_seq: Callable[[], int] | None,
        on_write: Callable[[], object] = lambda: None,
        examined: bool = True,
        behind: Behind | None = None,
    ) -> None:
        """Open a generation from its table's directory.

        `store` is the uuid in deltas. `next_seq` returns the number of the next manifest, which the
        names of its files contain; None opens read-only, and holds every file that a writer may
        remove meanwhile. `on_write` is called when a row is written for the first time since a
        commit; `behind` writes rows that are handed down. Unless `examined`, the base and its
        digest are left to `examine`. Raises CorruptStoreError.
        """
        try:
            self.directory: _io.Held[_io.Directory] = _io.hold_directory(
                table.directory(info.generation)
            )
        except FileNotFoundError:
            raise CorruptStoreError(
                f"{table.join(info.generation)} is missing; restore it from a copy"
            ) from None
        self.info: TableInfo = info
        self.examined: bool = examined
        self._table = os.path.basename(table.path)
        self._store = bytes.fromhex(store)
        self._next_seq = next_seq
        self._on_write = on_write
        self._behind = behind
        self._held: dict[str, KeyFile] = {}
        self._map: StoredKeys | None = None
        self._map_lock = threading.RLock()
        self._switch = threading.Lock()  # guards the source of keys, and the loaded keys
        self._filler: Worker | None = None
        self._filled: KeyMap | None = None
        self._closing = False
        self._grown: TableSpec | None = None
        self._has_moved_keys = False
        self._coming: list[Delta] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.directory.close)
            with self.directory.use() as directory:
                if next_seq is not None:
                    directory.copy_up()
                self._digest = self._read_digest(info) if examined else None
                self.tier: DiskTier = self._open_tier()
                undo.callback(self.tier.close)
                if next_seq is None and directory.removable:
                    self._held = self._hold_keys(info)
            undo.pop_all()

    def _read_digest(self, info: TableInfo) -> npt.NDArray[np.uint32] | None:
        """Return the digest named by the manifest, or None if it is missing or damaged."""
        if info.digest is None:
            return None
        with self.directory.use() as directory:
            return read_digest(directory, info.digest, info.spec)

    @property
    def spec(self) -> TableSpec:
        """The spec of the table, with the rows that it has grown to since the last commit."""
        spec = self.info.spec
        if self.tier.rows <= spec.rows:
            return spec
        if self._grown is None or self._grown.rows != self.tier.rows:
            self._grown = spec.with_rows(self.tier.rows)
        return self._grown

    def _open_tier(self) -> DiskTier:
        spec, write = self.info.spec, self._next_seq is not None
        base = Base(self.directory, spec)
        if not write:
            base.check_other = partial(_check_other, weakref.proxy(self))  # type: ignore[method-assign]
        if self.examined:
            base.examine()
        try:
            deltas = [self._open_delta(info) for info in self.info.deltas]
            new_live = self._new_live if write else None
            return DiskTier(base, deltas, new_live=new_live, table=self._table)
        except BaseException:
            base.close()
            raise

    def _open_delta(self, info: DeltaInfo) -> Delta:
        width = self.info.spec.layout.record_bytes
        with self.directory.use() as directory:
            return Delta.open(directory, info, store=self._store, record_bytes=width)

    def _new_live(self) -> LiveDelta:
        self._on_write()
        tier, name = self.tier, self._new_name("delta-", ".bin")
        room, behind = tier.queue_bytes, self._behind
        return LiveDelta(
            self.directory, name, tier.record_bytes, rows=tier.rows, room=room, behind=behind
        )

    def _new_name(self, kind: str, ending: str) -> str:
        return unique_name(kind, 0 if self._next_seq is None else self._next_seq(), ending)

    def seal(self, version: int) -> DeltaInfo | None:
        """Seal the live delta and map it; return None if nothing was written."""
        self._coming, live = [], self.tier.live
        if live is None or not live.segments.alive:
            return None
        sealed = live.seal(store=self._store, version=version)
        self._coming = [sealed]
        return sealed.info

    def sync(self) -> None:
        """Make the sealed delta and its name durable."""
        if self._coming and self.tier.live is not None:
            self.tier.live.sync()
            self.directory.sync()

    def compact(self, deltas: Sequence[Delta]) -> Compaction:
        """Return the compaction of consecutive committed deltas, oldest first, into one file."""
        name = self._new_name("delta-", ".bin")
        return Compaction(self.directory, name, deltas, rows=self.tier.rows, store=self._store)

    def adopt(self, delta: Delta) -> None:
        """Use a compacted delta, which the next manifest names in place of others."""
        self._coming = [*self._coming, delta]

    def open_deltas(self, info: TableInfo) -> list[Delta]:
        """Open the deltas of a later manifest that are not open yet; return all deltas in order.

        Raises CorruptStoreError.
        """
        known = {delta.info.name: delta for delta in [*self.tier.deltas, *self._coming]}
        deltas = []
        for each in info.deltas:
            delta = known.get(each.name)
            is_open = delta is not None and (delta.info is each or delta.info == each)
            deltas.append(delta if is_open and delta is not None else self._open_delta(each))
        return deltas

    def is_of(self, info: TableInfo) -> bool:
        """Whether a later manifest has the same base and keys, so only deltas may differ.

        On overlayfs, a writer may have copied the base up since, and elsewhere files that had other
        names too; the mapping does not show that.
        """
        if info.generation != self.info.generation:
            return False
        if info.keys != self.info.keys and info.spec.keys is None:
            return False
        with self.directory.use() as directory:
            if directory.filesystem == "overlay":
                return False
        return info.digest == self.info.digest or self.tier.is_named()

    def continues_keys_of(self, before: Generation) -> bool:
        """Whether its version has the keys of another, in the same rows, and perhaps more."""
        return _continues(self.info.keys, before.info.keys)

    def later(self, info: TableInfo, folded: int) -> Later:
        """Open files that a later manifest names and that are not open yet; check `is_of` first.

        No state changes, so rows may be read meanwhile. Deltas of versions up to `folded` were
        merged into the base. Raises CorruptStoreError.
        """
        deltas, digest, keys = self.open_deltas(info), self._digest, self._held
        if info.digest != self.info.digest:
            digest = None
            with contextlib.suppress(CorruptStoreError):  # a writer may have removed it
                digest = self._read_digest(info)
        if info.keys != self.info.keys:
            keys = self._hold_keys(info)
        changed = self.tier.changed(deltas, folded, info.spec.rows)
        return Later(info, deltas, changed, digest, keys)

    def follow(self, later: Later) -> None:
        """Switch a reader to a later manifest; reads nothing from the disk."""
        info = later.info
        if info.spec.rows > self.tier.rows:
            self.tier.grow(info.spec.rows)
        self.tier.follow(later.deltas)
        with self._switch:
            if info.keys != self.info.keys and not _continues(info.keys, self.info.keys):
                self._map = None
            self._held, self._digest, self.info = later.keys, later.digest, info

    @property
    def bases(self) -> tuple[str, ...]:
        """The names that identify the base: rows of generations with the same differ by deltas."""
        return (self.info.generation,)

    def delta_rows(self) -> dict[str, Rows]:
        """Return the rows of each committed delta, by its name."""
        return {delta.info.name: np.asarray(delta.ids) for delta in self.tier.deltas}

    def committed(self, info: TableInfo) -> None:
        """Adopt a published manifest: the sealed delta is committed, others may be removed."""
        if info.deltas is not self.info.deltas:
            live = self.tier.live
            for delta in self._coming:
                if live is not None and delta.info.name == live.name and delta.info in info.deltas:
                    self.tier.adopt(delta)
            if [delta.info for delta in self.tier.deltas] != list(info.deltas):
                self.tier.follow(self.open_deltas(info))
        if info.digest != self.info.digest:
            self._digest = self._read_digest(info)
        has_moved = self._has_moved_keys and info.keys == self.info.keys
        self._coming = []
        with self._switch:  # together: a reader would load keys that the version has no longer
            self.info, self._has_moved_keys = info, has_moved

    def _hold_keys(self, info: TableInfo) -> dict[str, KeyFile]:
        """Map the files of keys, which a writer may remove."""
        with self.directory.use() as directory:
            return {} if info.keys is None else open_keys(directory, info.keys)

    @property
    def key_map(self) -> KeyMap:
        """The map of a table by key, filled from its files at its first use."""
        return cast(KeyMap, self.stored_keys)  # but of a partition; see `share_keys`

    @property
    def stored_keys(self) -> StoredKeys:
        """The keys of the generation, loaded from its files."""
        if not self._lacks_keys and self._map is not None:
            return self._map
        with self._map_lock:
            while (found := self._loaded()) is None:  # `follow` changed the version meanwhile
                pass
            return found

    def _loaded(self) -> StoredKeys | None:
        """Return the map with the keys of the open version; None if that changed meanwhile."""
        with self._switch:
            info, loaded, held = self.info, self._map, self._held
            has_moved = self._has_moved_keys
        keys = info.keys
        if loaded is None:
            loaded = key_map(info.spec.keys or "int64")
        lacks = keys is not None and len(loaded) < keys.count and not has_moved
        if keys is not None and lacks and isinstance(loaded, KeyMap):
            with self._switch:
                self._filled, loaded.abandoned = loaded, self._closing
            try:
                load_keys(loaded, held or self._hold_keys(info), keys, self.tier.rows)
            except BaseException as error:
                with self._switch:
                    if self._map is loaded:
                        self._map = None  # after the failure it may lack keys that it had before
                    is_other = self.info is not info
                if is_other and isinstance(error, CorruptStoreError):
                    return None  # a writer has removed the files meanwhile
                raise
        with self._switch:
            if self.info.keys != keys:
                return None
            self._map = loaded
        return loaded

    @property
    def _lacks_keys(self) -> bool:
        """Whether keys of the open version remain to be loaded."""
        known = 0 if self._map is None else len(self._map)
        return known < self.key_count and not self._has_moved_keys

    @property
    def keys_in_use(self) -> int:
        """The number of keys, known without loading those of the version."""
        if self._lacks_keys or self._map is None:
            return self.key_count
        return len(self._map)

    def fill_ahead(self) -> None:
        """Begin to fill the map of many keys; rows are read by number meanwhile."""
        if self._filler is None and self._map is None and self.key_count >= _FILLED_AHEAD:
            with contextlib.suppress(TierStoreError):  # then the first use of a key fills it
                self._filler = Worker(self._fill, "load keys")

    def _fill(self) -> None:
        with contextlib.suppress(TierStoreError, OSError, MemoryError):  # a later use fails again
            _ = self.key_map

    @property
    def key_count(self) -> int:
        """The number of keys in the open version."""
        return 0 if self.info.keys is None else self.info.keys.count

    @property
    def has_new_keys(self) -> bool:
        """Whether keys were added or removed since the last commit."""
        added = self._map is not None and len(self._map) != self.key_count
        return added or self._has_moved_keys

    def seal_keys(self) -> KeysInfo | None:
        """Make added keys durable; return their entry for the next version.

        Raises ClosedError for keys that are half removed.
        """
        keys, info = self._map, self.info.keys
        if keys is None or not self.has_new_keys:
            return info
        keys.check_whole()
        with self.directory.use() as directory:
            continued = None if self._has_moved_keys else info
            return append_keys(directory, self.info.spec.keys or "int64", continued, keys)

    def share_keys(self, keys: StoredKeys) -> None:
        """Store the keys that a map has for this partition among others, from now on."""
        self._map = keys

    def keep_keys(self, rows: Rows) -> None:
        """Keep only the keys of these rows, in this order, after `note_moved_keys`."""
        self.key_map.keep(rows)

    def note_moved_keys(self) -> None:
        """Note that keys get other rows: the next commit writes all of them.

        Call it first: another thread would load keys of the version that are gone, and a rollback
        only drops later ones.
        """
        self._has_moved_keys = True

    def drop_new_keys(self) -> None:
        """Go back to the keys of the last commit."""
        if self._has_moved_keys:
            self._map, self._has_moved_keys = None, False
        elif self._map is not None:
            self._map.truncate(self.key_count)

    def keys(self, info: KeysInfo | None) -> Keys | None:
        """Open external keys, if any; a writer replaces an index that is missing or damaged."""
        if info is None or self.info.spec.keys is not None:
            return None

        def index() -> KeyFile:
            with self.directory.use() as directory:
                return open_index(directory, info)

        def rewrite(parts: Sequence[npt.NDArray[np.uint8]]) -> None:
            with self.directory.use() as directory:
                write_index(directory, info, parts)

        rows, new_index = self.info.spec.rows, None if self._next_seq is None else rewrite
        if self._held:
            return Keys(self._held, info, rows, index=index)
        with self.directory.use() as directory:
            return Keys(open_keys(directory, info), info, rows, index=index, rewrite=new_index)

    def bind(self, upto: int) -> DigestInfo:
        """Write a durable digest of the base after merging the deltas up to a version."""
        rows = self.info.spec.rows
        with self.directory.use() as directory:
            if self._digest is None:
                sums = block_sums(directory, rows)
            else:
                touched = self.tier.touched(upto, DIGEST_ROWS)
                sums = padded(self._digest, rows).copy()
                sums[touched] = block_sums(directory, rows, touched)
            info = write_digest(directory, sums, self._new_name("digest-", ".crc"))
            directory.sync()
        return info

    def is_bound(self, upto: int) -> bool:
        """Whether merging the deltas up to a version leaves the current digest valid."""
        return self._digest is not None and not self.tier.touched(upto, DIGEST_ROWS).size

    def unbind(self, digest: DigestInfo) -> None:
        """Remove a digest that no manifest names."""
        with contextlib.suppress(TierStoreError, OSError), self.directory.use() as directory:
            directory.unlink(digest.name)

    def examine(self, floor: int | None) -> None:
        """Examine the base and its digest, which opening left for later; see `check_base`.

        With None as `floor`, the digest is not compared with the base. Raises CorruptStoreError.
        """
        self.tier.examine()
        if floor is not None:
            self._digest = self._read_digest(self.info)
            self.check_base(floor)
        self.examined = True

    def check_base(self, floor: int) -> None:
        """Raise CorruptStoreError if the base belongs to a different time than the manifest.

        For a large table, only some evenly spread blocks of row checksums are compared. Blocks
        touched by deltas up to the `floor` are not: a fold may be in progress.
        """
        most = _CHECKED_BYTES // (4 * DIGEST_ROWS)
        foreign = self.foreign_blocks(floor, most)
        if foreign:
            first = foreign[0] * DIGEST_ROWS
            last = min(first + DIGEST_ROWS, self.info.spec.rows) - 1
            raise CorruptStoreError(
                f"the base in {self.directory.path} belongs to a different time than the manifest: "
                f"{len(foreign)} blocks of its checksums differ, the first with rows {first} "
                f"to {last}; restore all files of the store from one copy"
            )

    def foreign_blocks(self, floor: int, most: int | None = None) -> list[int]:
        """Return the blocks of row checksums that do not match the digest; see `check_base`."""
        if self._digest is None:
            return []
        touched = self.tier.touched(floor, DIGEST_ROWS)
        rows = self.info.spec.rows
        digest = padded(self._digest, rows)
        with self.directory.use() as directory:
            return foreign_blocks(directory, self.tier, rows, digest, touched, most=most)

    def damaged_binding(self, floor: int) -> list[str]:
        """Return the damage to the digest, and all mismatches between digest and base.

        Blocks of checksums touched by deltas up to the `floor` are skipped.
        """
        if not self.examined:
            self._digest = self._read_digest(self.info)
        bad = [
            f"{CHECKSUMS}: rows from {block * DIGEST_ROWS} on are from a different time"
            for block in self.foreign_blocks(floor)
        ]
        digest = self.info.digest
        with self.directory.use() as directory:
            if self._digest is None and digest is not None and directory.exists(digest.name):
                bad.append(digest.name)
        return bad

    @property
    def disk_bytes(self) -> int:
        """Bytes of the base and its checksums."""
        spec = self.info.spec
        return backend_of(spec).disk_bytes(self.directory, spec) + 4 * spec.rows

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the files of the generation take on the disk; `disk_bytes` for objects."""
        path = self.directory.path
        return _io.allocated_bytes(path) if os.path.isdir(path) else self.disk_bytes

    @property
    def base_path(self) -> str:
        """Path of the base file or array."""
        return self._path(backend_of(self.info.spec).entry)

    def _path(self, name: str) -> str:
        return os.path.join(self.directory.path, name)

    def close(self) -> None:
        """Close every file and remove uncommitted ones."""
        with self._switch:
            self._closing = True
            if self._filled is not None:
                self._filled.abandoned = True
        if self._filler is not None:
            self._filler.join()
        self._held = {}
        call_each(self.tier.close, self.directory.close)


def _check_other(generation: Generation, files: RecordFiles) -> None:
    """Examine a base that got other files between examination and first use.

    The writer copies files that have other names too; see `RecordFiles.own`. Raises
    CorruptStoreError for files of a different time.
    """
    newest = max((each.version for each in generation.info.deltas), default=0)
    if generation._digest is None or generation.foreign_blocks(newest):
        raise files.replaced()


def _continues(keys: KeysInfo | None, before: KeysInfo | None) -> bool:
    """Whether the first keys of a table by key are those of another version."""
    if keys is None or before is None:
        return before is None
    return keys.files.keys() == before.files.keys() and keys.count >= before.count


def remove_generation(table: _io.Directory, name: str) -> None:
    """Remove a generation and all its files; other files and their directories remain."""
    files, inner, _ = _entries()
    with contextlib.suppress(FileNotFoundError), table.directory(name) as directory:
        for entry in directory.names():
            pattern = inner.get(entry)
            if pattern is not None and directory.is_directory(entry):
                _remove_files(directory, entry, pattern)
                directory.remove_directory(entry)
            elif entry in files or _NAMES.fullmatch(entry) is not None:
                directory.unlink(entry)
    table.remove_directory(name)


@cache
def _entries() -> tuple[set[str], dict[str, re.Pattern[str]], dict[str, re.Pattern[str]]]:
    """Return the file names of bases, by directory the patterns of those within, and by entry those
    of the temporary files of a fold.
    """
    known = list(backends())
    files = {CHECKSUMS, *(each.entry for each in known if each.inner is None)}
    inner = {each.entry: each.inner for each in known if each.inner is not None}
    partial = {each.entry: each.partial for each in known if each.partial is not None}
    return files, inner, partial


def may_have_partial_files(names: Collection[str]) -> bool:
    """Whether a generation of these entries may have files that a fold did not finish."""
    return not _entries()[2].keys().isdisjoint(names)


def remove_partial_files(table: _io.Directory, name: str) -> None:
    """Remove the temporary files of an interrupted fold."""
    with table.directory(name) as directory:
        for entry, pattern in _entries()[2].items():
            if directory.exists(entry):
                _remove_files(directory, entry, pattern)


def _remove_files(generation: _io.Directory, name: str, pattern: re.Pattern[str]) -> None:
    with generation.directory(name) as directory:
        for entry in filter(pattern.fullmatch, directory.names()):
            directory.unlink(entry)
