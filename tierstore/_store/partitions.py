"""The partitions of a store for a reader: each is a separate store, held at a version.

The root's manifest says which version of each partition belongs together.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tierstore import _io
from tierstore._disk.generation import Generation
from tierstore._disk.keys import KeyFile, Keys, open_index, open_keys
from tierstore._disk.manifest import DeltaInfo, KeysInfo, Manifest, TableInfo, Written
from tierstore._disk.partitioned import PartitionedGeneration
from tierstore._disk.partitioned_keys import KeyedPartitionedGeneration, PartitionWriter
from tierstore._disk.partitioning import PARTITIONS, Shard, partition_name
from tierstore._store.locking import ReaderLock
from tierstore._store.versions import History, marks_of, number_in_part, read_identity
from tierstore.errors import (
    CorruptStoreError,
    TierStoreError,
    UpkeepWarning,
    VersionError,
    counted,
    warn,
)
from tierstore.stats import Version


@contextlib.contextmanager
def partition_directory(root: _io.Directory, number: int) -> Iterator[_io.Directory]:
    """Open the directory of a partition; raises CorruptStoreError where it is missing."""
    name = partition_name(number)
    try:
        with root.directory(PARTITIONS) as all_of_them:
            directory = all_of_them.directory(name)
    except FileNotFoundError:
        raise missing_partition(f"{root.path}/{PARTITIONS}/{name}", number) from None
    with directory:
        yield directory


def list_versions(directory: _io.Directory, history: History) -> list[Version]:
    """Return the versions of a store that can be opened, oldest first.

    What partitions on other hosts wrote is left out.
    """
    kept = history.versions()
    names = max(kept.values(), key=lambda manifest: manifest.seq).names
    parts: dict[int, list[tuple[Manifest, int]]] = {version: [] for version in kept}
    for number in range(max(len(each.partitions) for each in kept.values())):
        with contextlib.suppress(TierStoreError, OSError):
            _add_part(parts, directory, number, kept)
    return [
        _described(each, names, history.time_of(each), parts[version])
        for version, each in kept.items()
    ]


def _described(
    manifest: Manifest,
    names: Mapping[str, int],
    time: int | None,
    parts: Sequence[tuple[Manifest, int]],
) -> Version:
    """Describe the version of a manifest; `names` are those of all versions.

    `parts` are the manifests of its partitions, each with the version of the partition after which
    the deltas are its own.
    """
    deltas, own = [], []
    for each, before in [(manifest, manifest.version - 1), *parts]:
        found = [delta for info in each.tables.values() for delta in info.deltas]
        deltas += found
        own += [delta for delta in found if delta.version > before]
    written = manifest.written or Written(*_rows_and_bytes(own))
    return Version(
        manifest.version,
        manifest.step,
        manifest.seq,
        *_rows_and_bytes(deltas),
        tuple(name for name, version in names.items() if version == manifest.version),
        tuple(manifest.payload),
        time,
        written.rows,
        written.bytes,
        written.tables,
    )


def _rows_and_bytes(deltas: Sequence[DeltaInfo]) -> tuple[int, int]:
    """Return how many rows deltas have, and their bytes."""
    return sum(delta.rows for delta in deltas), sum(delta.size for delta in deltas)


def _add_part(
    parts: dict[int, list[tuple[Manifest, int]]],
    root: _io.Directory,
    number: int,
    kept: Mapping[int, Manifest],
) -> None:
    """Add the manifests of a partition to those of each version of a store."""
    with partition_directory(root, number) as directory:
        found = History(directory, read_identity(directory).uuid).versions()
    marks = marks_of(found)
    for version, each in kept.items():
        own, mark = each.partitions[number]
        before = kept.get(each.previous)
        own = number_in_part(marks, own, mark)
        if own in found:
            last = own - 1 if before is None else before.partitions[number][0]
            parts[version].append((found[own], last))


def missing_partition(path: str, number: int) -> CorruptStoreError:
    """Return the error for a partition that is missing."""
    return CorruptStoreError(
        f"{path} is missing, or not a store: it holds partition {number} of every table; restore "
        "it from a copy, or, where each host has its own disk, open the store on the hosts that "
        "have its partitions",
        filename=path,
    )


class WholeKeys:
    """The external keys of a partitioned table, in a generation of the root."""

    def __init__(self, root: _io.Directory, name: str, info: Callable[[], TableInfo]) -> None:
        """Open nothing yet; `info` returns the table's current entry in the root's manifest."""
        self._root = root
        self._name = name
        self._info = info
        self._opened: tuple[KeysInfo, Keys] | None = None
        self._held: dict[str, KeyFile] = {}

    def hold(self) -> None:
        """Map the files, which a writer may remove; raises CorruptStoreError."""
        info = self._info()
        if info.keys is not None:
            self._held = self._files(info, info.keys)

    def __call__(self) -> Keys | None:
        """Return the keys, or None; raises CorruptStoreError."""
        info = self._info()
        if info.keys is None or info.spec.keys is not None:
            return None
        if self._opened is None or self._opened[0] != info.keys:
            self._opened = info.keys, self._open(info, info.keys)
        return self._opened[1]

    def _open(self, info: TableInfo, keys: KeysInfo) -> Keys:
        def index() -> KeyFile:
            with self._directory(info) as directory:
                return open_index(directory, keys)

        return Keys(self._held or self._files(info, keys), keys, info.spec.rows, index=index)

    def _files(self, info: TableInfo, keys: KeysInfo) -> dict[str, KeyFile]:
        try:
            with self._directory(info) as directory:
                return open_keys(directory, keys)
        except FileNotFoundError as error:
            raise CorruptStoreError(
                f"{error.filename}, the keys of table {self._name!r}, is missing; set them again, "
                "or restore it from a copy"
            ) from None

    @contextlib.contextmanager
    def _directory(self, info: TableInfo) -> Iterator[_io.Directory]:
        """Open the directory of the keys; raises FileNotFoundError."""
        with (
            self._root.directory(self._name) as table,
            table.directory(info.generation) as directory,
        ):
            yield directory


class _Reader:
    """A partition that is held at a version."""

    def __init__(
        self, root: _io.Directory, number: int, version: int, mark: str, locks: list[Any]
    ) -> None:
        self._root = root
        self._number = number
        with partition_directory(root, number) as directory:
            uuid = read_identity(directory).uuid
            self.lock = ReaderLock(directory)
            locks.append(self.lock)
            self.lock.hold(version)
            history = History(directory, uuid)
            self.manifest = self._held_manifest(history, version, mark)
            self._floor = history.floor()

    def has_moved(self) -> bool:
        """Whether the version was removed or has different files, as after a fold."""
        before = self.manifest
        try:
            with partition_directory(self._root, self._number) as directory:
                history = History(directory, before.uuid)
                now = history.version(before.version)
                return (now.seq, history.floor()) != (before.seq, self._floor)
        except (VersionError, CorruptStoreError):
            return True

    def _held_manifest(self, history: History, version: int, mark: str) -> Manifest:
        try:
            return history.part(version, mark)
        except VersionError as error:
            where = f"{self._root.path}/{PARTITIONS}/{partition_name(self._number)}"
            raise CorruptStoreError(
                f"{where} has no version {version}, which the store needs: {error}"
            ) from None

    def generation(self, name: str) -> Generation:
        """Open the generation of a table."""
        if name not in self.manifest.tables:
            raise CorruptStoreError(
                f"partition {self._number} of {self._root.path} has no table {name!r}; restore it "
                "from a copy"
            )
        try:
            with (
                partition_directory(self._root, self._number) as directory,
                directory.directory(name) as table,
            ):
                info = self.manifest.tables[name]
                generation = Generation(table, info, store=self.manifest.uuid, next_seq=None)
        except FileNotFoundError as error:
            raise CorruptStoreError(
                f"{error.filename}, the directory of a table, is missing; restore partition "
                f"{self._number} from a copy"
            ) from None
        try:
            generation.check_base(self._floor)
        except BaseException:
            generation.close()
            raise
        return generation


class PartitionReaders:
    """All partitions of a store at the versions that a manifest of its root names.

    Attributes:
        seq: the number of that manifest.
    """

    def __init__(self, root: _io.Directory, manifest: Manifest, locks: list[Any]) -> None:
        """Hold every partition and add its lock to `locks`. Raises CorruptStoreError."""
        self.seq: int = manifest.seq
        self._root = root
        self._locks = locks
        self._readers: list[_Reader] = []
        try:
            for number, (version, mark) in enumerate(manifest.partitions):
                self._readers.append(_Reader(root, number, version, mark, locks))
        except BaseException:
            self.close()
            raise
        tell_renumbered(
            root.path, manifest, {n: each.manifest.version for n, each in enumerate(self._readers)}
        )

    def open(self, manifest: Manifest, name: str) -> PartitionedGeneration:
        """Open a table of the manifest; raises CorruptStoreError and FormatError."""
        info, count = manifest.tables[name], len(self._readers)
        keys = WholeKeys(self._root, name, lambda: info)
        if info.spec.keys is None:
            keys.hold()
        shard = Shard(info.spec.rows, count, 0, count)
        with contextlib.ExitStack() as unless_opened:
            parts = [
                unless_opened.enter_context(contextlib.closing(reader.generation(name)))
                for reader in self._readers
            ]
            found = generation_over(parts, info, shard, keys)
            unless_opened.pop_all()
        return found

    def have_moved(self) -> bool:
        """Whether any of their versions has different files; see `_Reader.has_moved`."""
        return any(reader.has_moved() for reader in self._readers)

    def close(self) -> None:
        """Release the versions of the partitions."""
        for reader in self._readers:
            reader.lock.close()
            self._locks.remove(reader.lock)
        self._readers.clear()


def renumbered(root: Manifest, versions: Mapping[int, int]) -> str:
    """Say which partitions have what a root names under another number; "" where none has.

    `versions` are the numbers by partition.
    """
    others = [number for number, each in versions.items() if each != root.partitions[number][0]]
    if not others:
        return ""
    return (
        f"{counted(len(others), 'partition has', 'partitions have')} the rows of version "
        f"{root.version} under another number, since a change of tables failed in an earlier "
        f"program: {partition_name(others[0])} has version {root.partitions[others[0]][0]} as "
        f"{versions[others[0]]}. Nothing of it is lost; the next version that changes those "
        "partitions names the numbers anew"
    )


def tell_renumbered(path: str, root: Manifest, versions: Mapping[int, int]) -> None:
    """Warn of `renumbered` partitions."""
    if told := renumbered(root, versions):
        warn(f"{path}: {told}", UpkeepWarning)


def generation_over(
    parts: Sequence[Generation],
    info: TableInfo,
    shard: Shard,
    keys: Callable[[], Keys | None],
    writers: Sequence[PartitionWriter] = (),
) -> PartitionedGeneration:
    """Return the generations of a table in the partitions of a shard as one.

    `info` is what the root states of the whole table, and `keys` returns its external keys. Raises
    CorruptStoreError.
    """
    for part in parts:
        _check_part(part, info, shard)
    if info.spec.keys is not None:
        own = dataclasses.replace(info)
        return KeyedPartitionedGeneration(own, shard.partitions, shard.first, parts, writers)
    own = dataclasses.replace(info, spec=dataclasses.replace(info.spec, rows=len(shard)))
    return PartitionedGeneration(own, shard, parts, keys)


def _check_part(part: Generation, info: TableInfo, shard: Shard) -> None:
    """Raise CorruptStoreError for a generation that cannot be a partition of this table."""
    rows, record_bytes = part.tier.rows, part.tier.record_bytes
    wanted = shard.blocks if info.spec.keys is None else rows, info.spec.layout.record_bytes
    of_part, of_whole = part.info.spec, info.spec
    is_alike = (of_part.keys, of_part.layout) == (of_whole.keys, of_whole.layout)
    if (rows, record_bytes) != wanted or not is_alike:
        raise CorruptStoreError(
            f"{part.directory.path} has {rows} rows of {record_bytes} bytes, not {wanted[0]} of "
            f"{wanted[1]}, or other fields or keys; restore all partitions from one copy"
        )
