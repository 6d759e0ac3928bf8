"""What is left of a store: the manifests that can be read, and what is wrong with the others.

For `verify` and `repair`, which must find their way where a store does not open.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from tierstore import _io
from tierstore._disk.manifest import MANIFEST_NAME, MAX_BYTES, Manifest
from tierstore._store.versions import STORE, History, read_identity
from tierstore.errors import FormatError, NotAStoreError, TierStoreError, VersionError

__all__ = ["Survey", "survey"]


@dataclass(frozen=True)
class Survey:
    """The manifests of a store.

    Attributes:
        uuid: the store's.
        history: what reads its manifests.
        versions: the manifest of each version that can be opened, ascending.
        damage: what is wrong with STORE.json and with other manifests.
    """

    uuid: str
    history: History
    versions: dict[int, Manifest]
    damage: list[str] = field(default_factory=list)

    def choose(self, version: int | None) -> Manifest:
        """Return the manifest of a version, or the newest; raises VersionError."""
        if version is None:
            return max(self.versions.values(), key=lambda manifest: manifest.seq)
        if version not in self.versions:
            listed = ", ".join(map(str, self.versions))
            raise VersionError(f"version {version} is not kept; there are: {listed}")
        return self.versions[version]


def survey(directory: _io.Directory) -> Survey:
    """Read what can be read of a store's manifests.

    Raises NotAStoreError where there are none, FormatError where none is whole.
    """
    damage: list[str] = []
    uuid = ""
    try:
        uuid = read_identity(directory).uuid
    except TierStoreError as error:
        damage.append(str(error))
    history = History(directory, uuid)
    if not uuid or not history.manifests():
        found = _uuid_of_manifests(directory)
        if uuid and found != uuid:
            damage.append(f"{directory.join(STORE)} belongs to another store, {uuid}")
        uuid, history = found, History(directory, found)
    return Survey(uuid, history, history.versions(), damage + history.damaged())


def _uuid_of_manifests(directory: _io.Directory) -> str:
    """Return the uuid that the newest whole manifest bears."""
    names = sorted(filter(MANIFEST_NAME.fullmatch, directory.names()), reverse=True)
    for name in names:
        with contextlib.suppress(FormatError, FileNotFoundError):
            data = directory.read_file(name, MAX_BYTES)
            return Manifest.decode(data, directory.join(name)).uuid
    if not names:
        raise NotAStoreError(
            f"{directory.path} has no manifest: it is not a store, or was never completed; remove "
            "it and create it again"
        )
    raise FormatError(
        f"none of the {len(names)} manifests in {directory.path} is whole, and they alone say what "
        "the files of its tables hold; restore one from a copy"
    )
