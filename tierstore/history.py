"""The versions of a store: which manifests there are, publishing the next, sweeping up the rest.

The manifest with the highest number is the store as it is now. A version is committed by giving a
complete, synced manifest its name with a hard link, which never replaces a file, and syncing the
directory: before that moment a crash leaves the version before, after it the new one.
"""

from __future__ import annotations

import contextlib
import uuid

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
    manifest_name,
)
from tierstore.spec import TABLE_NAME

__all__ = ["FOLD", "LOCK", "STORE", "History", "write_skeleton"]

STORE, LOCK, FOLD = "STORE.json", "LOCK", "FOLD"


class History:
    """The manifests in a store's directory."""

    def __init__(self, directory: io.Directory, store: str) -> None:
        """Refer to the open directory of the store with this uuid."""
        self._directory = directory
        self._store = store

    def _numbers(self) -> list[int]:
        found = map(MANIFEST_NAME.fullmatch, self._directory.names())
        return sorted(int(match.group(1)) for match in found if match)

    def _load(self, seq: int) -> Manifest:
        name = manifest_name(seq)
        path = self._directory.join(name)
        manifest = Manifest.decode(self._directory.read_file(name, MAX_BYTES), path)
        if manifest.uuid != self._store:
            raise FormatError(f"{path} belongs to another store, {manifest.uuid}")
        if manifest.seq != seq:
            raise FormatError(f"{path} bears the number {manifest.seq} inside")
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
                return self._load(numbers[-1])
            except FileNotFoundError:
                continue  # a writer published and swept between the listing and the reading
            except FormatError as error:
                older = len(numbers) > 1
                hint = "; an older version may open: tierstore.open(path, version=N)"
                raise FormatError(f"{error}{hint if older else ''}") from None
        raise StoreIOError(f"{self._directory.path} changes faster than it can be read; try again")

    def versions(self) -> dict[int, Manifest]:
        """Return the manifest of each version that can be opened, ascending by version."""
        found: dict[int, Manifest] = {}
        unread = []
        for seq in self._numbers():
            try:
                manifest = self._load(seq)
            except (FormatError, FileNotFoundError) as error:
                unread.append(error)
                continue
            found[manifest.version] = manifest
        if not found and unread:
            raise unread[0]
        floor = max((manifest.floor for manifest in found.values()), default=0)
        newest = max(found.values(), key=lambda manifest: manifest.seq, default=None)
        limit = newest.version if newest is not None and not unread else 2**63
        return {version: found[version] for version in sorted(found) if floor <= version <= limit}

    def version(self, number: int) -> Manifest:
        """Return the manifest of a version; raises VersionError if it is not kept."""
        kept = self.versions()
        if number not in kept:
            listed = ", ".join(map(str, kept)) or "none"
            raise VersionError(f"version {number} is not kept; there are: {listed}")
        return kept[number]

    def publish(self, manifest: Manifest) -> None:
        """Make a manifest, all of whose files are durable, the store as it is now.

        Raises InvalidInputError for one that could not be read back, StoreFullError or StoreIOError
        if nothing was published, ConcurrentWriterError if another writer was faster, and
        CommitFailedError if it cannot be told.
        """
        name = manifest_name(manifest.seq)
        temporary = f"{name}.{uuid.uuid4().hex[:8]}.tmp"
        data = _readable(manifest.encode())
        try:
            self._directory.write_file(temporary, data)
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

    def sweep(self, keep: int) -> list[int]:
        """Remove the versions that need not be kept, and files no kept version names.

        Kept are the newest `keep` versions and all from the last confirmed one on. Only files whose
        names this format gives are touched. Returns the versions that went.
        """
        newest = self.newest()
        kept = self.versions()
        wanted = set(sorted(kept)[-keep:]) | {v for v in kept if v >= newest.confirmed}
        alive = {kept[version].seq for version in wanted} | {newest.seq}
        gone = [seq for seq in self._numbers() if seq not in alive and seq < newest.seq]
        for seq in gone:
            self._directory.unlink(manifest_name(seq))
        if gone:
            self._directory.sync()
        self._sweep_files([kept[version] for version in sorted(wanted)])
        return sorted(set(kept) - wanted)

    def _sweep_files(self, manifests: list[Manifest]) -> None:
        payloads = {info.name for each in manifests for info in each.payload.values()}
        for name in self._directory.names():
            unnamed = PAYLOAD_NAME.fullmatch(name) and name not in payloads
            if unnamed or TEMPORARY_NAME.fullmatch(name):
                self._directory.unlink(name)
            elif TABLE_NAME.fullmatch(name) and self._directory.is_directory(name):
                infos = [each.tables[name] for each in manifests if name in each.tables]
                with self._directory.directory(name) as table:
                    for generation in filter(GENERATION_NAME.fullmatch, table.names()):
                        named = {
                            each
                            for info in infos
                            if info.generation == generation
                            for each in (
                                *(delta.name for delta in info.deltas),
                                *(info.keys.files if info.keys else ()),
                            )
                        }
                        used = any(info.generation == generation for info in infos)
                        sweep_generation(table, generation, named, used=used)
                if not infos:
                    self._directory.remove_directory(name)


def _readable(data: bytes) -> bytes:
    """Return the bytes of a manifest; InvalidInputError if nobody could open the store by it."""
    if len(data) > MAX_BYTES:
        raise InvalidInputError(
            f"this version's manifest would have {len(data)} bytes, at most {MAX_BYTES} are read; "
            "fold the store, or keep large values in the payload"
        )
    try:
        Manifest.decode(data, "this version's manifest")
    except FormatError as error:
        raise InvalidInputError(f"{error}; nothing was committed") from None
    return data


def write_skeleton(directory: io.Directory, identity: Identity, manifest: Manifest) -> None:
    """Write the files that make a directory with complete tables a store."""
    directory.write_file(LOCK, b"")
    directory.write_file(FOLD, b"")
    directory.write_file(STORE, identity.encode())
    History(directory, identity.uuid).publish(manifest)
