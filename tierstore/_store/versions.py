"""The versions of a store: finds and reads its manifests.

The manifest with the highest number is the current state of the store. Manifests never change, and
their numbers are never reused.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tierstore import _io
from tierstore._disk.manifest import MANIFEST_NAME, MAX_BYTES, Identity, Manifest, manifest_name
from tierstore.errors import (
    AccessError,
    CorruptStoreError,
    ExistsError,
    FormatError,
    InvalidInputError,
    NewerVersionError,
    NotAStoreError,
    StoreIOError,
    TierStoreError,
    UpkeepWarning,
    VersionError,
    warn,
)

STORE, LOCK = "STORE.json", "LOCK"


_TRIES = 8
"""How often manifests are listed anew while a writer publishes and removes some."""


class History:
    """The manifests in a store's directory, read on demand."""

    def __init__(self, directory: _io.Directory, store: str) -> None:
        """Refer to the open directory of the store with this uuid."""
        self._directory = directory
        self._store = store
        self._known: Manifest | None = None

    def _numbers(self) -> list[int]:
        """Return the numbers of all manifests, ascending.

        The numbers after the highest are probed by name, because a listing may not show them yet.
        """
        numbers = [*map(_number, manifest_names(self._directory))]
        while numbers and self._directory.exists(name := manifest_name(numbers[-1] + 1)):
            if is_stray(self._directory, name):
                break
            numbers.append(numbers[-1] + 1)
        return numbers

    def _load(self, seq: int) -> Manifest:
        name = manifest_name(seq)
        path = self._directory.join(name)
        manifest = Manifest.decode(self._directory.read_file(name, MAX_BYTES), path, self._known)
        if manifest.uuid != self._store:
            raise FormatError(f"{path} belongs to another store, {manifest.uuid}")
        if manifest.seq != seq:
            raise FormatError(f"{path} contains the manifest number {manifest.seq}")
        return manifest

    def last_number(self) -> int:
        """Return the highest number that a name has, of a manifest or of a stray entry; 0 if none.

        No later manifest can have any of them.
        """
        return max(
            map(_number, filter(MANIFEST_NAME.fullmatch, self._directory.names())), default=0
        )

    def time_of(self, manifest: Manifest) -> int | None:
        """Return when the file of a manifest was written, in seconds since 1970 UTC, if known."""
        with contextlib.suppress(OSError, TierStoreError):
            return int(self._directory.status(manifest_name(manifest.seq)).st_mtime)
        return None

    def newest(self) -> Manifest:
        """Return the current manifest.

        An unreadable manifest is an error, never a reason to use an older one; one of a newer
        version of this library is no reason to name older ones either.
        """
        for _ in range(_TRIES):
            numbers = self._numbers()
            if not numbers:
                raise NotAStoreError(
                    f"{self._directory.path} has a {STORE} but no manifest: a store that was never "
                    "completed, or lost its manifests; restore it from a copy, or remove it and "
                    "create it again",
                    filename=self._directory.path,
                )
            try:
                if self._known is None or self._known.seq != numbers[-1]:
                    self._known = self._load(numbers[-1])
                return self._known
            except FileNotFoundError:
                continue  # a writer published and removed files between listing and reading
            except FormatError as error:  # of a newer version, listing the others raises again
                raise FormatError(f"{error}{self._alternatives()}") from None
        raise StoreIOError(f"{self._directory.path} changes faster than it can be read; try again")

    def _alternatives(self) -> str:
        """Return the versions with a readable manifest, as the end of a message."""
        versions = _openable(*self._read())
        if not versions:
            return ""
        listed = ", ".join(map(str, versions))
        return (
            f"; versions that can be opened, with tierstore.open(path, version=N): {listed}; "
            f"`tierstore repair {shlex.quote(self._directory.path)} DEST` copies what is intact"
        )

    def read_all(self) -> dict[int, Manifest | FormatError]:
        """Return the manifests, or their errors, by number, ascending.

        Raises NewerVersionError for one that is intact and has what this version does not know: it
        says that there is more than can be read here, so nothing is read, removed or repaired.

        A writer that removes one between listing and reading has published another by then, perhaps
        of the same version: they are listed anew.
        """
        manifests: dict[int, Manifest | FormatError] = {}
        for _ in range(_TRIES):
            numbers, manifests = self._numbers(), {}
            for seq in numbers:
                try:
                    manifests[seq] = self._load(seq)
                except FileNotFoundError:
                    continue
                except NewerVersionError:
                    raise
                except FormatError as error:
                    manifests[seq] = error
            if len(manifests) == len(numbers):
                break
        return manifests

    def _read(self) -> tuple[list[Manifest], dict[int, FormatError]]:
        """Return the manifests, ascending, and the errors of unreadable ones."""
        found = self.read_all()
        manifests = [each for each in found.values() if isinstance(each, Manifest)]
        errors = {seq: each for seq, each in found.items() if isinstance(each, FormatError)}
        return manifests, errors

    def versions(self) -> dict[int, Manifest]:
        """Return the manifest of each version that can be opened, ascending by version."""
        manifests, damage = self._read()
        if not manifests:
            self.newest()  # raises the reason
        return _openable(manifests, damage)

    def manifests(self) -> list[Manifest]:
        """Return all readable manifests, ascending."""
        return self._read()[0]

    def floor(self) -> int:
        """Return an upper bound of the versions that a fold has started to merge into the base.

        If the newest manifest is unreadable, it may be any remaining version.
        """
        try:
            return self.newest().floor
        except FormatError:
            return max((manifest.version for manifest in self.manifests()), default=0)

    def damaged(self) -> list[str]:
        """Return the names of unreadable manifests."""
        return [manifest_name(seq) for seq in self._read()[1]]

    def version(self, version: int | str) -> Manifest:
        """Return the manifest of a version, by number or name; raises VersionError."""
        return chosen(self.versions(), version)

    def part(self, version: int, mark: str) -> Manifest:
        """Return the manifest of what a root names of this store, a partition.

        See `number_in_part`. Raises VersionError, and CorruptStoreError for another version of that
        number.
        """
        kept = self.versions()
        manifest = chosen(kept, number_in_part(marks_of(kept), version, mark))
        if manifest.mark != mark:
            raise CorruptStoreError(
                f"version {version} of {self._directory.path} is of another moment than the "
                "store's manifest; partitions belong together: restore all from one copy"
            )
        return manifest


def _number(name: str) -> int:
    """Return the number in the name of a manifest."""
    match = MANIFEST_NAME.fullmatch(name)
    return int(match.group(1)) if match else 0


def manifest_names(directory: _io.Directory) -> list[str]:
    """Return the names of the manifests in a directory, readable or not, ascending by number.

    A directory or a pipe of such a name is none, since no writer made it: a warning names it. A
    link stays, and is not read: a program may have put it in the place of a manifest.
    """
    names, strays = list[str](), list[str]()
    for name in filter(MANIFEST_NAME.fullmatch, directory.names()):
        (strays if is_stray(directory, name) else names).append(name)
    if strays:
        what = (
            "is no file, and so no manifest" if len(strays) == 1 else "are no files, nor manifests"
        )
        warn(f"{directory.path}: {', '.join(strays)} {what}: remove what is foreign", UpkeepWarning)
    return names


def is_stray(directory: _io.Directory, name: str) -> bool:
    """Whether an entry that has the name of a manifest is none."""
    try:
        return not directory.may_be_file(name)
    except FileNotFoundError:
        return False  # a writer removed it meanwhile, as the manifest that it was


def chosen(kept: Mapping[int, Manifest], version: int | str) -> Manifest:
    """Return the manifest of a kept version, by its number or name.

    Raises VersionError, which lists the kept versions.
    """
    names = max(kept.values(), key=lambda manifest: manifest.seq).names if kept else {}
    number = names.get(version) if isinstance(version, str) else version
    if number is None or number not in kept:
        listed = ", ".join(map(str, kept)) or "none"
        named = ", ".join(f"{name!r} ({number})" for name, number in names.items())
        what = (
            f"no version is kept as {version!r}"
            if isinstance(version, str)
            else f"version {version} is not kept"
        )
        raise VersionError(f"{what}; there are: {listed}{f', of them {named}' if named else ''}")
    return kept[number]


def marks_of(kept: Mapping[int, Manifest]) -> dict[int, str]:
    """Return the marks of versions."""
    return {version: each.mark for version, each in kept.items()}


def number_in_part(marks: Mapping[int, str], version: int, mark: str) -> int:
    """Return which kept version of a partition has the contents that a root names.

    `marks` are those of its versions, ascending. Where the version of that number is gone, the
    newest with the same mark has the same contents: it restored that one, as earlier programs did
    where a change of tables failed, and had that other one removed. If none has, it is `version`.
    """
    if marks.get(version) == mark:
        return version
    return max((number for number, each in marks.items() if each == mark), default=version)


def _openable(manifests: list[Manifest], damage: Collection[int]) -> dict[int, Manifest]:
    """Return the newest manifest of each version that can be opened, ascending by version.

    Versions that a fold has merged into others, and those that a writer dropped when it went back
    to an older version, cannot be opened.
    """
    found = {manifest.version: manifest for manifest in manifests}
    floor = max((manifest.floor for manifest in manifests), default=0)
    is_newest = bool(manifests) and max(damage, default=0) < manifests[-1].seq
    limit = manifests[-1].version if is_newest else max(found, default=0)
    return {version: found[version] for version in sorted(found) if floor <= version <= limit}


def open_directory(path: Path | _io.Objects) -> _io.Directory:
    """Open a directory or a location of objects; raises NotAStoreError or StoreIOError."""
    if isinstance(path, _io.Objects):
        return path.open()
    try:
        return _io.Directory.open(path)
    except FileNotFoundError:
        store, _, table = str(path).rpartition(":")
        advice = (
            f"{store} is a store, of which a table is chosen by its name: store[{table!r}], --table"
            if store and os.path.isfile(os.path.join(store, STORE))
            else "check the path, or create a store with tierstore.create or 'tierstore init'"
        )
        raise NotAStoreError(f"{path} does not exist; {advice}", filename=path) from None
    except NotADirectoryError:
        raise NotAStoreError(f"{path} is a file; a store is a directory", filename=path) from None


def has_manifests(directory: _io.Directory) -> bool:
    """Return whether a directory holds a manifest, readable or not."""
    return bool(manifest_names(directory))


def check_free(where: str | Path, of_store: str = "") -> None:
    """Raise ExistsError for a path that is taken: what is there, and what else to do with a store.

    A store is never replaced, not even by force. Raises InvalidInputError for one inside a store.
    """
    path = Path(os.path.abspath(where))
    if not os.path.lexists(path):
        refuse_inside_store(path)
        return
    instead = ""
    if path.is_symlink():
        kind = "a symbolic link"
    elif (path / STORE).exists():
        kind, instead = "a store", of_store and f", or {of_store}"
    else:
        kind = "a directory" if path.is_dir() else "a file"
    raise ExistsError(
        f"{path} exists and is {kind}; choose another name{instead}", filename=str(path)
    )


def refuse_inside_store(path: Path) -> None:
    """Raise InvalidInputError for a path inside a store."""
    for parent in path.resolve().parents:
        if os.path.isfile(parent / STORE):
            raise InvalidInputError(f"{path} is inside the store {parent}; write it elsewhere")


def check_readable(directory: _io.Directory) -> None:
    """Raise AccessError for a file or directory that this process may not read.

    It may be intact, so it must not be reported as damaged.
    """
    for name in directory.names():
        try:
            if directory.is_directory(name):
                with directory.directory(name) as inside:
                    check_readable(inside)
            else:
                directory.open_file(name).close()
        except AccessError:
            raise
        except (OSError, FormatError):
            continue  # gone meanwhile, or damage for the caller to find


def read_identity(directory: _io.Directory) -> Identity:
    """Return the contents of STORE.json; raises NotAStoreError or FormatError."""
    try:
        return Identity.decode(directory.read_file(STORE, 1 << 16), directory.join(STORE))
    except FileNotFoundError:
        raise NotAStoreError(
            f"{directory.path} is not a store: it has no {STORE}; create one with "
            "tierstore.create or 'tierstore init'",
            filename=directory.path,
        ) from None


@dataclass(frozen=True)
class Survey:
    """The manifests of a store.

    Attributes:
        uuid: the uuid of the store.
        history: reads its manifests.
        versions: the manifest of each version that can be opened, ascending.
        damage: the errors of STORE.json and of other manifests.
    """

    uuid: str
    history: History
    versions: dict[int, Manifest]
    damage: list[str] = field(default_factory=list)

    def choose(self, version: int | str | None) -> Manifest:
        """Return the manifest of a version, by number or name, or the newest.

        Raises VersionError.
        """
        if version is None:
            return max(self.versions.values(), key=lambda manifest: manifest.seq)
        return chosen(self.versions, version)


def survey(directory: _io.Directory) -> Survey:
    """Read all readable manifests of a store.

    Raises NotAStoreError if there are none, FormatError if none is intact, NewerVersionError if any
    was written by a newer version.
    """
    names = manifest_names(directory)[::-1]
    damage: list[str] = []
    uuid = ""
    try:
        uuid = read_identity(directory).uuid
    except NewerVersionError:
        raise
    except TierStoreError as error:
        if not names:
            raise
        damage.append(str(error))
    history = History(directory, uuid)
    if names and not (uuid and history.manifests()):
        found = _uuid_of_manifests(directory, names)
        if uuid and found != uuid:
            damage.append(f"{directory.join(STORE)} belongs to another store, {uuid}")
        uuid, history = found, History(directory, found)
    return Survey(uuid, history, history.versions(), damage + history.damaged())


def _uuid_of_manifests(directory: _io.Directory, names: Sequence[str]) -> str:
    """Return the uuid in the newest intact manifest; their names are descending."""
    for name in names:
        try:
            data = directory.read_file(name, MAX_BYTES)
            return Manifest.decode(data, directory.join(name)).uuid
        except NewerVersionError:
            raise
        except (FormatError, FileNotFoundError):
            continue
    raise FormatError(
        f"none of the {len(names)} manifests in {directory.path} is intact, and only they describe "
        "the files of its tables; restore one from a copy"
    )
