"""The versions of a store: which manifests there are, publishing the next, sweeping up the rest.

The manifest with the highest number is the store as it is now. A version is committed by giving a
complete, synced manifest its name with a hard link, which never replaces a file, and syncing the
directory: before that moment a crash leaves the version before, after it the new one.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from tierstore import io
from tierstore.disk.generation import sweep_generation
from tierstore.errors import (
    CommitFailedError,
    ConcurrentWriterError,
    FormatError,
    InvalidInputError,
    NotAStoreError,
    StoreIOError,
    TierStoreError,
    VersionError,
)
from tierstore.manifest import (
    GENERATION_NAME,
    MANIFEST_NAME,
    MAX_BYTES,
    PAYLOAD_NAME,
    TEMPORARY_NAME,
    Identity,
    Manifest,
    TableInfo,
    manifest_name,
)
from tierstore.spec import TABLE_NAME

__all__ = [
    "FOLD",
    "LOCK",
    "STORE",
    "History",
    "open_directory",
    "read_identity",
    "write_skeleton",
]

STORE, LOCK, FOLD = "STORE.json", "LOCK", "FOLD"


class History:
    """The manifests in a store's directory."""

    def __init__(self, directory: io.Directory, store: str) -> None:
        """Refer to the open directory of the store with this uuid."""
        self._directory = directory
        self._store = store
        self._parsed: dict[int, tuple[bytes, Manifest]] = {}

    def _numbers(self) -> list[int]:
        found = map(MANIFEST_NAME.fullmatch, self._directory.names())
        return sorted(int(match.group(1)) for match in found if match)

    def _load(self, seq: int) -> Manifest:
        name = manifest_name(seq)
        path = self._directory.join(name)
        data = self._directory.read_file(name, MAX_BYTES)
        known = self._parsed.get(seq)
        if known is not None and known[0] == data:
            return known[1]
        manifest = Manifest.decode(data, path)
        if manifest.uuid != self._store:
            raise FormatError(f"{path} belongs to another store, {manifest.uuid}")
        if manifest.seq != seq:
            raise FormatError(f"{path} bears the number {manifest.seq} inside")
        self._parsed[seq] = data, manifest
        return manifest

    def newest(self) -> Manifest:
        """Return the store as it is now.

        A manifest that cannot be read is an error, never a reason to go back to an older one.
        """
        for _ in range(8):
            numbers = self._numbers()
            if not numbers:
                raise NotAStoreError(
                    f"{self._directory.path} has no manifest: it is not a store, or was never "
                    "completed; remove it and create it again"
                )
            try:
                newest = self._load(numbers[-1])
                self._parsed = {seq: self._parsed[seq] for seq in numbers if seq in self._parsed}
                return newest
            except FileNotFoundError:
                continue  # a writer published and swept between the listing and the reading
            except FormatError as error:
                older = len(numbers) > 1
                hint = "; an older version may open: tierstore.open(path, version=N)"
                raise FormatError(f"{error}{hint if older else ''}") from None
        raise StoreIOError(f"{self._directory.path} changes faster than it can be read; try again")

    def _read(self) -> tuple[list[Manifest], dict[int, FormatError]]:
        """Return the manifests, ascending, and what is wrong with those that cannot be read."""
        manifests: list[Manifest] = []
        damage: dict[int, FormatError] = {}
        for seq in self._numbers():
            try:
                manifests.append(self._load(seq))
            except FileNotFoundError:
                continue  # swept between the listing and the reading
            except FormatError as error:
                damage[seq] = error
        self._parsed = {each.seq: self._parsed[each.seq] for each in manifests}
        return manifests, damage

    def versions(self) -> dict[int, Manifest]:
        """Return the manifest of each version that can be opened, ascending by version."""
        manifests, damage = self._read()
        if not manifests:
            self.newest()  # says what is wrong
        return _openable(manifests, damage)

    def last(self) -> int:
        """Return the highest number of a manifest, readable or not."""
        return max(self._numbers())

    def manifests(self) -> list[Manifest]:
        """Return all manifests that can be read, ascending."""
        return self._read()[0]

    def floor(self) -> int:
        """Return the newest version a fold has begun to merge into the base."""
        return max((manifest.floor for manifest in self.manifests()), default=0)

    def damaged(self) -> list[str]:
        """Return the names of manifests that cannot be read."""
        return [manifest_name(seq) for seq in self._read()[1]]

    def version(self, number: int) -> Manifest:
        """Return the manifest of a version; raises VersionError if it is not kept."""
        kept = self.versions()
        if number not in kept:
            listed = ", ".join(map(str, kept)) or "none"
            raise VersionError(f"version {number} is not kept; there are: {listed}")
        return kept[number]

    def publish(self, manifest: Manifest, settle: Callable[[], object] = lambda: None) -> None:
        """Make a manifest the store as it is now.

        `settle` makes those of its files durable that are not so yet. It is called when the disk
        has the manifest too, so that all of it is on its way together, and before the manifest gets
        its name.

        Raises InvalidInputError for one that could not be read back, StoreFullError or StoreIOError
        if nothing was published, ConcurrentWriterError if another writer was faster, and
        CommitFailedError if it cannot be told.
        """
        name = manifest_name(manifest.seq)
        temporary = f"{name}.{uuid.uuid4().hex[:8]}.tmp"
        data = manifest.encode()
        parsed = _checked(data)
        try:
            with self._directory.create(temporary) as file:
                file.write(data, 0)
                file.start_writing(0, len(data))
                settle()
                file.sync()
            published = self._directory.put_if_absent(temporary, name)
        except TierStoreError:
            with contextlib.suppress(OSError):
                self._directory.unlink(temporary)
            if not self._is_published(name, data):
                raise
            published = True
        if not published and not self._is_published(name, data):
            with contextlib.suppress(OSError):
                self._directory.unlink(temporary)
            raise ConcurrentWriterError(
                f"another writer published {name} in between; this store was open for writing "
                "twice, which the lock should prevent; open it again"
            )
        self._directory.sync()
        self._parsed[manifest.seq] = data, parsed

    def _is_published(self, name: str, data: bytes) -> bool:
        """Read back whether a publication whose answer was lost took place."""
        try:
            return self._directory.read_file(name, MAX_BYTES) == data
        except FileNotFoundError:
            return False
        except TierStoreError as error:
            raise CommitFailedError(
                f"cannot tell whether {name} was published ({error}); open the store again"
            ) from error

    def discard(self, after: int, before: int) -> None:
        """Remove the manifests between two numbers, readable or not."""
        for seq in self._numbers():
            if after < seq < before:
                self._directory.unlink(manifest_name(seq))
        self._directory.sync()

    def sweep(
        self,
        keep: int,
        live: Collection[str] = (),
        is_read: Callable[[Iterable[int]], bool] = lambda kept: False,
    ) -> list[int]:
        """Remove the versions that need not be kept, and files no kept version names.

        Kept are the newest `keep` versions and all from the last confirmed one on. A manifest among
        them that cannot be read stays, and all files with it: it may name any of them. Only files
        whose names this format gives are touched, and not the `live` ones, which a version to come
        may name; a base that no version names stays while versions are read other than the kept
        ones, as `is_read(kept)` says: its chunks are opened when they are needed.
        Returns the versions that went.
        """
        manifests, damage = self._read()
        if not manifests or max(damage, default=0) > manifests[-1].seq:
            self.newest()  # says what is wrong
        newest = manifests[-1]
        kept = _openable(manifests, damage)
        wanted = set(sorted(kept)[-keep:]) | {v for v in kept if v >= newest.confirmed}
        alive = {kept[version].seq for version in wanted} | {newest.seq}
        unknown = {seq for seq in damage if seq > min(alive)}
        gone = ({each.seq for each in manifests} | set(damage)) - alive - unknown
        for seq in sorted(gone):
            self._directory.unlink(manifest_name(seq))
        # A manifest may come back after a power cut: none of its files may go before it is synced.
        leaving = _named(each for each in manifests if each.seq in gone)
        if gone & damage.keys() or leaving - _named(kept[version] for version in wanted):
            self._directory.sync()
        if not unknown:
            stay = [kept[version] for version in sorted(wanted)]
            self._sweep_files(stay, live, lambda: is_read(wanted))
        return sorted(set(kept) - wanted)

    def _sweep_files(
        self, manifests: list[Manifest], live: Collection[str], is_read: Callable[[], bool]
    ) -> None:
        payloads = {info.name for each in manifests for info in each.payload.values()}.union(live)
        for name in self._directory.names():
            unnamed = PAYLOAD_NAME.fullmatch(name) and name not in payloads
            if unnamed or TEMPORARY_NAME.fullmatch(name):
                self._directory.unlink(name)
            elif TABLE_NAME.fullmatch(name) and self._directory.is_directory(name):
                infos = [each.tables[name] for each in manifests if name in each.tables]
                swept = self._sweep_table(name, infos, live, is_read)
                if swept and not infos:
                    self._directory.remove_directory(name)

    def _sweep_table(
        self,
        name: str,
        infos: list[TableInfo],
        live: Collection[str],
        is_read: Callable[[], bool],
    ) -> bool:
        """Sweep the generations of a table; return whether there were any."""
        with self._directory.directory(name) as table:
            generations = list(filter(GENERATION_NAME.fullmatch, table.names()))
            for generation in generations:
                here = [info for info in infos if info.generation == generation]
                named = {delta.name for info in here for delta in info.deltas}
                named.update(*(info.keys.files for info in here if info.keys), live)
                if here or not is_read():
                    opened = generation in live
                    sweep_generation(table, generation, named, used=bool(here), is_open=opened)
        return bool(generations)


def _named(manifests: Iterable[Manifest]) -> set[str]:
    """Return the names of all files and generations that manifests name."""
    names: set[str] = set()
    for each in manifests:
        names.update(info.name for info in each.payload.values())
        for table in each.tables.values():
            names.add(table.generation)
            names.update(delta.name for delta in table.deltas)
            names.update(table.keys.files if table.keys else ())
    return names


def _openable(manifests: list[Manifest], damage: Collection[int]) -> dict[int, Manifest]:
    """Return the newest manifest of each version that can be opened, ascending by version.

    Not openable are versions that a fold has merged into others, and those that were newer than the
    version a writer went back to.
    """
    found = {manifest.version: manifest for manifest in manifests}
    floor = max((manifest.floor for manifest in manifests), default=0)
    is_newest = bool(manifests) and max(damage, default=0) < manifests[-1].seq
    limit = manifests[-1].version if is_newest else max(found, default=0)
    return {version: found[version] for version in sorted(found) if floor <= version <= limit}


def _checked(data: bytes) -> Manifest:
    """Parse the bytes of a manifest; InvalidInputError if nobody could open the store by it."""
    if len(data) > MAX_BYTES:
        raise InvalidInputError(
            f"this version's manifest would have {len(data)} bytes, at most {MAX_BYTES} are read; "
            "fold the store, or keep large values in the payload"
        )
    try:
        return Manifest.decode(data, "this version's manifest")
    except FormatError as error:
        raise InvalidInputError(f"{error}; nothing was committed") from None


def write_skeleton(directory: io.Directory, identity: Identity, manifest: Manifest) -> None:
    """Write the files that make a directory with complete tables a store."""
    directory.write_file(LOCK, b"")
    directory.write_file(STORE, identity.encode())
    History(directory, identity.uuid).publish(manifest)


def open_directory(path: Path | io.Objects) -> io.Directory:
    """Open the directory at a path, or of objects; raises NotAStoreError or StoreIOError."""
    if isinstance(path, io.Objects):
        return path.open()
    try:
        return io.Directory.open(path)
    except FileNotFoundError:
        raise NotAStoreError(f"{path} does not exist; tierstore.create makes a store") from None
    except NotADirectoryError:
        raise NotAStoreError(f"{path} is a file; a store is a directory") from None
    except OSError as error:
        raise StoreIOError(f"cannot open {path}: {error.strerror}") from error


def read_identity(directory: io.Directory) -> Identity:
    """Return what STORE.json says; raises NotAStoreError or FormatError."""
    try:
        return Identity.decode(directory.read_file(STORE, 1 << 16), directory.join(STORE))
    except FileNotFoundError:
        raise NotAStoreError(
            f"{directory.path} is not a store: it has no {STORE}; tierstore.create makes one"
        ) from None
