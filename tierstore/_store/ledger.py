"""The writer's ledger: publishes manifests, and removes them with the files that only they name.

A complete, synced manifest gets its name by a hard link, which never replaces a file, and the
directory is synced. A crash before that leaves the previous version, a crash after it the new one.

A writer knows which files become unused with a manifest and removes exactly those. Leftovers of a
crash are searched for once, when a writer opens the store, and only if the directory listing
contains the files that the manifests name: an incomplete listing does not prove that a file is
unused.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import uuid
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

from tierstore import _io
from tierstore._disk import generation as generations
from tierstore._disk.manifest import (
    DELTA_NAME,
    DIGEST_NAME,
    GENERATION_NAME,
    KEYS_NAME,
    MANIFEST_NAME,
    MAX_BYTES,
    MAX_VERSION,
    PARTIAL_NAME,
    PAYLOAD_NAME,
    TEMPORARY_NAME,
    Identity,
    Manifest,
    Partitions,
    manifest_name,
)
from tierstore._store.lineage import Forks, descends, newest_common
from tierstore._store.versions import LOCK, STORE, History, is_stray
from tierstore.errors import (
    CommitFailedError,
    ConcurrentWriterError,
    FormatError,
    InvalidInputError,
    TierStoreError,
    UpkeepWarning,
    warn,
)
from tierstore.spec import TABLE_NAME

_NUMBER = re.compile(r"\d{20}", re.ASCII)


def publish(
    directory: _io.Directory,
    manifest: Manifest,
    make_durable: Callable[[], object] = lambda: None,
) -> None:
    """Publish a manifest as the current state of the store.

    `make_durable` waits for files that are not durable yet. It is called after the manifest was
    written and before it gets its name.

    Raises InvalidInputError for a manifest that could not be read back, StoreFullError or
    StoreIOError if nothing was published, ConcurrentWriterError if another writer was faster, and
    CommitFailedError if the outcome is unknown.
    """
    name = manifest_name(manifest.seq)
    temporary = f"{name}.{uuid.uuid4().hex[:8]}.tmp"
    data = _encoded(manifest)
    try:
        with directory.create(temporary) as file:
            file.write(data, 0)
            file.start_writing(0, len(data))
            make_durable()
            file.sync()
        published = directory.put_if_absent(temporary, name)
    except TierStoreError:
        with contextlib.suppress(OSError):
            directory.unlink(temporary)
        if not _is_published(directory, name, data):
            raise
        published = True
    if not published and not _is_published(directory, name, data):
        with contextlib.suppress(OSError):
            directory.unlink(temporary)
        raise ConcurrentWriterError(
            f"another writer published {name} meanwhile; the store was open for writing twice, "
            "which the lock should prevent; open it again"
        )
    try:
        if directory.filesystem not in _io.TESTED:
            with directory.open_file(name) as file:
                file.sync()  # FUSE, for example, need not pass on the sync of a directory
        directory.sync()
    except CommitFailedError:
        raise
    except TierStoreError as error:
        raise CommitFailedError(
            f"cannot tell whether {name} is durable ({error}); open the store again"
        ) from error


def _is_published(directory: _io.Directory, name: str, data: bytearray) -> bool:
    """Read back whether a publication with an unknown result took place."""
    try:
        return directory.read_file(name, MAX_BYTES) == data
    except FileNotFoundError:
        return False
    except TierStoreError as error:
        raise CommitFailedError(
            f"cannot tell whether {name} was published ({error}); open the store again"
        ) from error


def _encoded(manifest: Manifest) -> bytearray:
    """Serialize a manifest; raise InvalidInputError if a reader would reject it."""
    if manifest.version > MAX_VERSION:
        raise InvalidInputError(f"{manifest.version} is above the last version, {MAX_VERSION}")
    if manifest.step is not None and abs(manifest.step) > 2**63 - 1:
        raise InvalidInputError(f"step {manifest.step} does not fit in 64 bits")
    data = manifest.encode()
    if len(data) > MAX_BYTES:
        raise InvalidInputError(
            f"the manifest of this version would have {len(data)} bytes; at most {MAX_BYTES}: "
            "fold the store, or keep large values in the payload"
        )
    return data


def write_skeleton(directory: _io.Directory, identity: Identity, manifest: Manifest) -> None:
    """Write the files that turn a directory with complete tables into a store."""
    directory.write_file(LOCK, b"")
    directory.write_file(STORE, identity.encode())
    publish(directory, manifest)


class NeededFiles:
    """Tracks which manifests name which files.

    Manifests in a row that name a file are a run of it; there is another one where a version that a
    writer goes back to names it again. A file is needed as long as some manifest of some run is
    kept. Memory and time grow with the number of changed names, not with the number of kept
    manifests.
    """

    def __init__(self) -> None:
        """Start without manifests."""
        self._numbers: list[int] = []
        self._runs: dict[str, int] = {}
        """The number of runs of each file."""
        self._open: dict[str, int] = {}
        """The first manifest of each run that the newest manifest is in, by file."""
        self._ending: dict[int, dict[str, int]] = {}
        """By the last manifest of other runs, the first one of each, by file."""

    def __contains__(self, path: str) -> bool:
        """Whether any manifest names a file."""
        return path in self._runs

    def paths(self) -> set[str]:
        """Return all files named by any manifest."""
        return set(self._runs)

    def add(self, number: int, new: set[str], gone: set[str]) -> None:
        """Add a manifest that is newer than all others.

        `new` are the names that the previous manifest lacks, `gone` those that only that one has.
        """
        if self._numbers:
            self._ending[self._numbers[-1]] = {path: self._open.pop(path) for path in gone}
        for path in new:
            self._open[path] = number
            self._runs[path] = self._runs.get(path, 0) + 1
        self._numbers.append(number)

    def remove(self, number: int) -> set[str]:
        """Remove a manifest other than the newest; return the files that no other one names."""
        at = bisect_left(self._numbers, number)
        if self._numbers[at : at + 1] != [number]:
            return set()
        del self._numbers[at]
        before = self._numbers[at - 1] if at else 0
        gone = set()
        for path, first in self._ending.pop(number, {}).items():
            if first <= before:
                self._ending[before][path] = first
                continue
            self._runs[path] -= 1
            if not self._runs[path]:
                del self._runs[path]
                gone.add(path)
        return gone


class Ledger:
    """The versions of a store that is open for writing.

    Attributes:
        seq: the highest manifest number.
        last_version: the highest version number ever assigned.
        floor: the newest version that a fold has started to merge into the base.
        confirmed: the newest confirmed version.
        names: the versions kept under a name.
    """

    def __init__(self, directory: _io.Directory, history: History) -> None:
        """Read all manifests of the store."""
        self._directory = directory
        self.seq: int = 0
        self.last_version: int = 0
        self.floor: int = 0
        self.confirmed: int = 0
        self.names: dict[str, int] = {}
        self._kept: dict[int, int] = {}  # manifest number by version, both ascending
        self._forks_of: dict[int, Forks] = {}
        self._mark_of: dict[int, str] = {}
        self._partitions_of: dict[int, Partitions] = {}  # by number of a manifest that is there
        self._superseded: set[int] = set()
        self._damaged: set[int] = set()
        self._needed = NeededFiles()
        self._dead: set[str] = set()
        self._unsynced = False
        self._newest: Manifest | None = None
        for seq, found in history.read_all().items():
            if isinstance(found, FormatError):
                self._damaged.add(seq)
                self.last_version += 1  # it may have been a new version
                self.seq = seq
            else:
                self._enter(found)
        self._next = max(self.seq, history.last_number()) + 1

    def _enter(self, manifest: Manifest) -> None:
        """Add a manifest that is newer than all others."""
        self.last_version = max(self.last_version, manifest.last_version, manifest.version)
        self.floor = max(self.floor, manifest.floor)
        self.confirmed = manifest.confirmed
        self.names = manifest.names
        self._forks_of[manifest.version] = manifest.forks
        self._mark_of[manifest.version] = manifest.mark
        self._partitions_of[manifest.seq] = manifest.partitions
        while self._kept and self.newest >= manifest.version:
            self._superseded.add(self._kept.pop(self.newest))
        self._kept[manifest.version] = manifest.seq
        self._supersede(lambda oldest: oldest < self.floor)
        if self._newest is None:
            self._needed.add(manifest.seq, manifest.paths(), set())
        else:
            self._needed.add(manifest.seq, *manifest.changed_paths(self._newest))
        self._newest = manifest
        self.seq, self._next = manifest.seq, manifest.seq + 1

    def _supersede(self, is_past: Callable[[int], bool]) -> None:
        """Stop keeping versions older than those that exist."""
        for oldest in list(itertools.takewhile(is_past, self._kept)):
            self._superseded.add(self._kept.pop(oldest))

    def next_number(self) -> int:
        """Return the number of the next manifest: no entry had it when the store was opened."""
        return self._next

    @property
    def versions(self) -> Collection[int]:
        """The versions that can be opened, ascending."""
        return self._kept.keys()

    @property
    def marks(self) -> dict[int, str]:
        """The marks of the versions that can be opened, ascending by version."""
        return {version: self._mark_of[version] for version in self._kept}

    @property
    def named(self) -> list[Partitions]:
        """What the manifests that there are name of partitions, those to be removed yet as well."""
        return [*self._partitions_of.values()]

    @property
    def newest(self) -> int:
        """The version of the newest manifest."""
        return next(reversed(self._kept))

    @property
    def oldest(self) -> int:
        """The oldest version that can be opened."""
        return next(iter(self._kept))

    def common_past(self, readers: Iterable[int]) -> int:
        """Return the newest common ancestor of all kept and read versions.

        A version that is read, not kept, and no ancestor of the newest one may share only the base
        with it.
        """
        line = self.newest, self._forks_of[self.newest]
        past = [newest_common(line, (each, self._forks_of[each])) for each in self._kept]
        others = (each for each in readers if each not in self._kept)
        past += [each if descends(*line, each) else self.floor for each in others]
        return min(past)

    def unconfirmed(self) -> int:
        """Return the number of versions after the newest confirmed one."""
        return len(self._kept) - bisect_right(list(self._kept), self.confirmed)

    def publish(self, manifest: Manifest, make_durable: Callable[[], object]) -> None:
        """Publish a manifest; see `publish`."""
        if self._newest is not None:
            manifest.share(self._newest)
        publish(self._directory, manifest, make_durable)
        self._enter(manifest)

    def has_next(self) -> bool:
        """Whether the manifest after that of this ledger exists."""
        return self._directory.exists(manifest_name(self._next))

    def check_newest(self) -> None:
        """Raise ConcurrentWriterError if another writer has published after this one."""
        if self.has_next():
            raise ConcurrentWriterError(
                f"another writer has published {manifest_name(self.next_number())} in "
                f"{self._directory.path}: data that was published before it here may be lost; "
                "open it again"
            )

    def forget_damaged(self, after: int) -> None:
        """Remove unreadable manifests with numbers above a given one."""
        damaged = {seq for seq in self._damaged if seq > after}
        self._superseded |= damaged
        self._damaged -= damaged

    def keep_newest(
        self, keep: int, confirmed: int, claimed: Iterable[tuple[int, str]] = ()
    ) -> set[int]:
        """Keep the newest `keep` versions, all from the `confirmed` one on, and those with a name.

        Those `claimed`, by number and mark, are kept as well. `sweep` removes the others, which are
        returned.
        """
        needed = {*self.names.values()}
        needed.update(version for version, mark in claimed if self._mark_of.get(version) == mark)
        spare = itertools.islice(self._kept, max(0, len(self._kept) - keep))
        dropped = {*itertools.takewhile(confirmed.__gt__, spare)} - needed
        self._drop(sorted(dropped))
        return dropped

    def keep_only(self, versions: Collection[int]) -> None:
        """Keep these versions and that of the newest manifest; `sweep` removes the others."""
        self._drop([each for each in self._kept if each not in (*versions, self.newest)])

    def _drop(self, versions: Iterable[int]) -> None:
        for version in versions:
            self._superseded.add(self._kept.pop(version))
            self._forks_of.pop(version, None)
            self._mark_of.pop(version, None)

    def sweep(self, is_read: Callable[[Iterable[int]], bool] = lambda kept: False) -> None:
        """Remove versions that are not kept, and the files that only they need.

        If a manifest among those that are kept is unreadable, it and all files remain, since it may
        name any of them. Generations remain while `is_read(kept)` reports readers of versions that
        are not kept, since readers open chunks on demand. Failed removals are retried the next
        time.
        """
        if self._damaged:
            first = self._kept[self.oldest]
            self._superseded |= {seq for seq in self._damaged if seq < first}
        for seq in sorted(self._superseded):
            self._directory.unlink(manifest_name(seq))
            self._partitions_of.pop(seq, None)
            self._unsynced = True
            self._dead |= self._needed.remove(seq)
            self._superseded.discard(seq)
            self._damaged.discard(seq)
        if self._damaged or not self._dead:
            return
        if self._unsynced:  # a manifest may reappear after a power failure: its files must exist
            self._directory.sync()
            self._unsynced = False
        self._remove_dead(is_read)

    def _remove_dead(self, is_read: Callable[[Iterable[int]], bool]) -> None:
        going = {path for path in self._dead if path.count("/") == 1}  # generations
        if going and not is_read(self._kept):
            tables = {} if self._newest is None else self._newest.tables
            for path in sorted(going):
                table, _, generation = path.partition("/")
                _remove_generation(self._directory, table, generation, is_last=table not in tables)
                self._dead = {each for each in self._dead if not each.startswith(path)}
            going = set()
        _remove_paths(self._directory, self._dead - going)
        self._dead = going

    def sweep_leftovers(self, is_read: Callable[[Iterable[int]], bool]) -> None:
        """Remove leftovers of a killed writer; call it before anything is written."""
        if self._newest is not None and not self._damaged:
            needed, is_read_now = self._needed.paths() | self._dead, is_read(self.versions)
            _remove_leftovers(self._directory, self._newest, needed, is_read=is_read_now)


def _remove_paths(directory: _io.Directory, paths: Collection[str]) -> None:
    """Remove files by their path in the store, if they exist."""
    if not paths:
        return
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(paths):
        parent, _, name = path.rpartition("/")
        found[parent].append(name)
    for parent, names in found.items():
        if not parent:
            for name in names:
                directory.unlink(name)
            continue
        table_name, _, generation = parent.partition("/")
        try:
            with (
                directory.directory(table_name) as table,
                table.directory(generation) as within,
            ):
                for name in names:
                    within.unlink(name)
        except FileNotFoundError:
            continue


def _remove_generation(
    directory: _io.Directory, table_name: str, generation: str, *, is_last: bool = True
) -> None:
    """Remove a generation and all its files, and the table's directory if it is then empty."""
    try:
        with directory.directory(table_name) as table:
            generations.remove_generation(table, generation)
    except FileNotFoundError:
        return
    if is_last:
        directory.remove_directory(table_name)


def _remove_leftovers(
    directory: _io.Directory, newest: Manifest, needed: Collection[str], *, is_read: bool
) -> None:
    """Remove leftovers of a killed writer: files of this format that no manifest names.

    Nothing is removed, with a warning, if the directory lacks files that the manifests name or
    contains files of a later manifest. Generations remain while `is_read` reports readers of
    versions that are not kept.
    """
    halves: set[str] = set()
    found = set(_files(directory, halves))
    derived = {path for path in needed if path.endswith(".index")}
    lacking = sorted({manifest_name(newest.seq), *needed} - derived - found)
    left = {path for path in found - set(needed) if MANIFEST_NAME.fullmatch(path) is None}
    latest = {path: newest.seq + (path in left) for path in found}
    ahead = sorted(path for path in found if _number(path) > latest[path])
    if lacking or ahead:
        what = f"lacks {lacking[0]}" if lacking else f"holds {ahead[0]}"
        warn(
            f"{directory.path} {what}, which contradicts {manifest_name(newest.seq)}, the "
            "newest manifest: nothing was removed; run 'tierstore verify'",
            UpkeepWarning,
        )
        return
    unused = {path for path in left if _is_generation(path)}
    for path in sorted(unused):
        if not is_read:
            table_name, _, name = path.partition("/")
            _remove_generation(directory, table_name, name)
    _remove_paths(
        directory, {path for path in left - unused if path.rpartition("/")[0] not in unused}
    )
    for path in sorted(halves.intersection(needed)):
        table_name, _, name = path.partition("/")
        with directory.directory(table_name) as table:
            generations.remove_partial_files(table, name)


def _is_generation(path: str) -> bool:
    return GENERATION_NAME.fullmatch(path.rpartition("/")[2]) is not None


def _files(directory: _io.Directory, halves: set[str]) -> Iterator[str]:
    """Yield the paths of all entries whose names this format gives, but the files of bases.

    Generations in which a fold that was cut short may have left files are added to `halves`.
    """
    for name in directory.names():
        if any(form.fullmatch(name) for form in (PAYLOAD_NAME, TEMPORARY_NAME)):
            yield name
        elif MANIFEST_NAME.fullmatch(name):
            if not is_stray(directory, name):
                yield name
        elif TABLE_NAME.fullmatch(name) and directory.is_directory(name):
            with directory.directory(name) as table:
                for generation in filter(GENERATION_NAME.fullmatch, table.names()):
                    yield from _generation(table, f"{name}/{generation}", generation, halves)


def _generation(table: _io.Directory, path: str, name: str, halves: set[str]) -> Iterator[str]:
    """Yield the path of a generation and of its files; nothing, with a warning, for another."""
    try:
        with table.directory(name) as directory:
            names = directory.names()
    except FormatError as error:
        warn(f"{error}: it is not removed", UpkeepWarning)
        return
    yield path
    if generations.may_have_partial_files(names):
        halves.add(path)
    for entry in names:
        if any(
            form.fullmatch(entry) for form in (DELTA_NAME, KEYS_NAME, DIGEST_NAME, PARTIAL_NAME)
        ):
            yield f"{path}/{entry}"


def _number(path: str) -> int:
    """Return the manifest number in a file name, or 0 if it has none."""
    found = _NUMBER.search(path.rpartition("/")[2])
    return int(found[0]) if found else 0
