"""The root of a partitioned store: the manifests that name a version of every partition.

Of the ranks that see the same directory one, their leader, has the root open as its writer. The
others take from it what it publishes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from tierstore import _io
from tierstore._disk.generation import remove_generation
from tierstore._disk.keys import write_keys
from tierstore._disk.manifest import KeysInfo, Manifest
from tierstore._store.commit import CommitDraft, clean_up
from tierstore._store.keeping import as_restored
from tierstore._store.options import Options
from tierstore._store.patching import Patch
from tierstore._store.store import Store
from tierstore._store.versions import History, open_directory, read_identity
from tierstore.budget import Budget
from tierstore.distributed.ranks import Ranks
from tierstore.errors import (
    CommitFailedError,
    InvalidInputError,
    NotAStoreError,
    TierStoreError,
    VersionError,
)

Partitions = tuple[tuple[int, str], ...]
"""The version and mark of each partition, as a root names them."""

NOTHING = Budget(host=0, gpu=0)
"""The budget of a store that has no tiers of its own."""


class _Seen(NamedTuple):
    """Which versions a leader sees: the store's uuid, marks by version, versions by name."""

    uuid: str
    marks: dict[int, str]
    names: dict[str, int]


class Root:
    """The root as this rank sees it.

    Attributes:
        manifest: the version that is open.
        uuid: what distinguishes the store from all others.
        store: the root itself, as its writer, on a leader alone; it has no tables.
    """

    manifest: Manifest
    uuid: str

    def __init__(self, options: Options, ranks: Ranks) -> None:
        """Open nothing yet."""
        self.store: Store | None = None
        self._path = cast(Path, options.path)
        self._options = options
        self._ranks = ranks
        self._directory: _io.Directory | None = None
        self._leader = 0
        self._several = False
        """Whether several leaders publish, each on a file system of its own."""

    def open(self) -> None:
        """Open the requested version, or the newest that all leaders have. Collective."""
        ranks = self._ranks
        ranks.together("open the directory of the store", self._open_directory)
        leaders = ranks.leaders(self._path)
        self._leader, self._several = leaders[ranks.rank], len(set(leaders)) > 1
        seen = ranks.together("read the versions of the store", self._read_versions)
        chosen = self._chosen([each for each in seen if each is not None])
        self._follow("open the root of the store", lambda: self._open_root(chosen))

    @property
    def leads(self) -> bool:
        """Whether this rank is a leader."""
        return self._leader == self._ranks.rank

    @property
    def directory(self) -> _io.Directory:
        """The directory of the store."""
        if self._directory is None:
            raise NotAStoreError(f"{self._path} is not open")
        return self._directory

    @property
    def last_version(self) -> int:
        """The highest version that a leader's root ever had; 0 for other ranks."""
        return 0 if self.store is None else self.store._state.ledger.last_version

    def versions(self) -> dict[int, Manifest]:
        """Return the manifests of the versions that can be opened, oldest first."""
        return self.history.versions()

    @property
    def history(self) -> History:
        """The manifests, as they are now."""
        return History(self.directory, self.uuid)

    # -- opening

    def _open_directory(self) -> None:
        self._directory = open_directory(self._path)
        self.uuid = read_identity(self._directory).uuid

    def _read_versions(self) -> _Seen | None:
        """Return, as a leader, which versions of the store can be opened."""
        if not self.leads:
            return None
        newest = History(self.directory, self.uuid).newest()
        if not newest.partitions:
            raise InvalidInputError(
                f"{self._path} has no partitions, so one process writes it, with "
                "tierstore.open(path, 'r+'); tierstore.distributed.create makes a store for ranks"
            )
        marks = {number: each.mark for number, each in self.versions().items()}
        return _Seen(self.uuid, marks, dict(newest.names))

    def _chosen(self, seen: Sequence[_Seen]) -> int:
        """Return the version to open: the requested one, or the newest that all leaders have.

        Raises InvalidInputError and VersionError.
        """
        uuids = {each.uuid for each in seen}
        if len(uuids) > 1:
            raise InvalidInputError(
                f"the ranks see different stores at their paths: {', '.join(sorted(uuids))}; each "
                "host needs the same store, or a share of it"
            )
        common = dict(set.intersection(*({*each.marks.items()} for each in seen)))
        if not common:
            raise InvalidInputError(
                f"the copies of the root of {self._path} have no version in common; copy the "
                "newest one to every host"
            )
        wanted = self._options.version
        if wanted is None:
            return max(common)
        number = seen[0].names.get(wanted) if isinstance(wanted, str) else wanted
        if number not in common:
            listed = ", ".join(map(str, sorted(common)))
            raise VersionError(
                f"version {wanted!r} of {self._path} is not kept; there are: {listed}"
            )
        return number

    def _open_root(self, chosen: int) -> None:
        """Open the root as its writer, as a leader, and go back to a version where it is ahead."""
        if not self.leads:
            return
        is_ahead = History(self.directory, self.uuid).newest().version != chosen
        back: dict[str, Any] = {"version": chosen if is_ahead else None, "discard_newer": is_ahead}
        self.store = Store(
            dataclasses.replace(
                self._options, budget=NOTHING, policy=None, device=None, root_only=True, **back
            )
        )

    # -- other versions

    def draft(
        self,
        step: int | None = None,
        payload: Mapping[str, object] | None = None,
        *,
        keep: str | None = None,
    ) -> CommitDraft | None:
        """Begin a version, as a leader; see `CommitDraft`."""
        if self.store is None:
            return None
        return CommitDraft(self.store._state, step, payload, confirm=True, keep=keep)

    def write_keys(
        self, name: str, generation: str, stem: str, keys: Sequence[Any], rows: int
    ) -> KeysInfo | None:
        """Write the external keys of a table to a generation, as a leader, durable on return."""
        if not self.leads:
            return None
        if not self.directory.exists(name):
            self.directory.make_directory(name).close()
        with (
            self.directory.directory(name) as table,
            table.make_directory(generation) as place,
        ):
            info = write_keys(place, keys, rows, stem)
            table.sync()
        self.directory.sync()
        return info

    def remove_keys(self, name: str, generation: str) -> None:
        """Remove a generation of keys that no version will name, as a leader."""
        if self.leads:
            with (
                contextlib.suppress(TierStoreError, OSError),
                self.directory.directory(name) as table,
            ):
                remove_generation(table, generation)

    def publish(self, changes: Mapping[str, Any], draft: CommitDraft | None) -> None:
        """Publish a version whose manifest has these changes. Collective.

        An error other than CommitFailedError and RanksError means that no leader has published.
        """

        def work(store: Store) -> None:
            if draft is None:
                return
            state = store._state
            numbers = {**draft.numbers, **changes, "previous": state.manifest.version}
            if draft.keep is not None:
                numbers["names"] = {**state.manifest.names, draft.keep: changes["version"]}
            with state.unless_published(draft.drop), state.unbroken():
                state.adopt(state.publish(**numbers, step=draft.step, payload=draft.payload))

        self._publish("publish the version", work)

    def _publish(self, what: str, work: Callable[[Store], None]) -> None:
        """Have each leader publish a version, and remove older ones once all have. Collective.

        One leader alone does both at once. If one of several fails where another has published,
        nobody can go on: that is CommitFailedError, and opening takes what all of them have.
        """
        before = self._seq

        def publish() -> None:
            if self.store is None:
                return
            with self.store._door.use(write=True), self.store._state.alone("commit"):
                work(self.store)
                if not self._several:
                    clean_up(self.store._state, self.store._folder)

        try:
            self._follow(what, publish)
        except Exception as error:
            if self._several and not self._ranks.broken:
                told = self._ranks.gather("tell what was published", self._seq != before)
                if any(told):
                    raise CommitFailedError(
                        f"some hosts have published the version and others have not ({error}); "
                        "open the store again on every rank, at what all have"
                    ) from error
            raise

    @property
    def _seq(self) -> int:
        return 0 if self.store is None else self.store._state.ledger.seq

    def settled(self) -> list[Partitions] | None:
        """Return what the roots that leaders keep name of the partitions. Collective.

        None where one root alone does, which `named` reads: no message goes between the ranks.
        Several leaders remove older versions here, when all have published.
        """
        if not self._several:
            return None

        def settle() -> list[Partitions]:
            if self.store is None:
                return []
            with self.store._door.use(write=True):
                clean_up(self.store._state, self.store._folder)
            return self.named()

        every = self._ranks.together("remove older versions", settle)
        return list(dict.fromkeys(each for found in every for each in found))

    def named(self) -> list[Partitions]:
        """Return what this rank's root names of the partitions, for each version it keeps."""
        return [each.partitions for each in self.versions().values()]

    def draft_of(self, patch: Patch) -> CommitDraft | None:
        """Begin the version that a patch leads to, as a leader."""
        return None if self.store is None else patch.draft(self.store._state)

    def version(self, version: int | str) -> Manifest:
        """Return the manifest of a kept version, by number or name; raises VersionError."""
        return History(self.directory, self.uuid).version(version)

    def restore(
        self, older: Manifest, number: int, partitions: tuple[tuple[int, str], ...]
    ) -> None:
        """Publish an older version again under a new number, as partitions have it. Collective."""

        def work(store: Store) -> None:
            state = store._state
            changes = as_restored(older, state.manifest, number)
            changes |= {name: getattr(older, name) for name in ("tables", "step", "payload")}
            with state.unbroken():
                state.adopt(state.publish(**changes, partitions=partitions))

        self._publish("restore the version", work)

    def rename(self, what: str, change: Callable[[Store], object]) -> None:
        """Change the names by which versions are kept. Collective."""

        def work() -> None:
            if self.store is not None:
                change(self.store)

        self._follow(what, work)

    def fold(self) -> None:
        """Drop all versions but the newest. Collective."""

        def work() -> None:
            if self.store is not None:
                self.store.fold()

        self._follow("drop older versions", work)

    def _follow(self, what: str, work: Callable[[], None]) -> None:
        """Do something that may publish, and take the manifest of this rank's leader.

        It goes from rank to rank as the bytes of its file, so that tables that stay are shared.
        """

        def publish() -> bytes | None:
            work()
            return None if self.store is None else bytes(self.store._state.manifest.encode())

        found = self._ranks.together(what, publish)
        if self.store is not None:
            self.manifest = self.store._state.manifest
            return
        like = getattr(self, "manifest", None)
        self.manifest = Manifest.decode(cast(bytes, found[self._leader]), str(self._path), like)

    # -- closing

    def stores(self) -> Iterable[Store]:
        """Return the stores that are open."""
        return [] if self.store is None else [self.store]

    def close(self) -> None:
        """Close the root; harmless when it was not open."""
        if self.store is not None:
            self.store.close()
        if self._directory is not None:
            self._directory.close()
