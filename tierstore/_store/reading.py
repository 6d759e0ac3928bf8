"""The state of a store that is only read: one version of it, which is protected from folds."""

from __future__ import annotations

import contextlib

from tierstore._disk.manifest import Manifest
from tierstore._door import interrupts_deferred
from tierstore._store.locking import ReaderLock, WriterLock
from tierstore._store.payload import Payload, Payloads
from tierstore._store.state import State
from tierstore._store.tables import Opening
from tierstore._tiers.base import REFRESHED
from tierstore.errors import CorruptStoreError

_MOST_HELD = 64
"""Maximum payload values that a reader holds open; others are readable until they are removed."""


class Reading(State):
    """The state of a store that is open for reading.

    A writer may publish and remove files meanwhile, so what it opens is looked at twice.

    Attributes:
        reader: protects the versions that it holds.
    """

    def _open(self, lock: WriterLock | None) -> None:
        self._identify()
        self.reader: ReaderLock = ReaderLock(self.directory)
        self.locks.append(self.reader)
        self._start(self._options.version)

    def _begin(self, version: int | str | None) -> None:
        """Do nothing: nothing is written."""

    def _tidy(self) -> None:
        """Do nothing: the writer removes files."""

    @property
    def _next_seq(self) -> None:
        return None

    def _find(self, version: int | str | None) -> Manifest:
        """Return the manifest of a version, or of the newest.

        The version is protected from folds. A second look detects a fold that started
        before the protection. None did where an older version is protected, which it would merge.
        """
        while True:
            manifest = self._wanted(version)
            if manifest.version not in self.reader.held:
                is_safe = min(self.reader.held, default=manifest.version) < manifest.version
                self.reader.hold(manifest.version)
                if not is_safe:
                    continue
            self._floor = manifest.floor if version is None else self.history.floor()
            return manifest

    def _hold_only_what_is_open(self) -> None:
        super()._hold_only_what_is_open()
        self.reader.hold_only(self.manifest.version)

    def _found_again(self, before: Manifest, version: int | str | None) -> Manifest | None:
        """Return the manifest that a writer published meanwhile, if missing files may be no damage.

        It may be the same, where only partitions or the floor are others.
        """
        seen = before.seq, self._floor
        found = self._find(version)
        moved = (found.seq, self._floor) != seen or self._opener.has_moved(before)
        return found if moved else None

    def _lacks_payload(self, opening: Opening) -> bool:
        """Open the payload of the manifest for a reader, since a writer may remove it.

        Returns whether a file is missing; reading its value then raises an error.
        """
        is_missing, held = False, opening.payload
        for name, info in opening.manifest.payload.items():
            try:
                held[name] = Payload(self.directory, info, hold=len(held) < _MOST_HELD)
            except CorruptStoreError:
                held[name] = Payload(self.directory, info)
                is_missing = True
        return is_missing

    @property
    def payload(self) -> Payloads:
        """The values committed with the open version, by name."""
        return Payloads(self._held)

    def prepare(self, version: int | str | None) -> Opening | None:
        """Open and read what a reader needs to switch to a version, or to the newest.

        Nothing changes, so other calls continue; an error leaves the store unchanged. The cost
        depends on the changes: a table with the same base keeps it and its deltas. Returns None if
        the version is open.
        """
        try:
            manifest = self._find(version)
            if manifest.seq == self.manifest.seq:
                self._hold_only_what_is_open()
                return None
            opening = self._open_all(manifest, version)
            with contextlib.ExitStack() as unless_prepared:
                unless_prepared.callback(opening.close)
                opening.damaged = self._explained(opening)
                for name in filter(self.tables.__contains__, opening.damaged):
                    raise opening.damaged[name]
                opening.renewed = self.spaces.read_ahead(opening.later)
                unless_prepared.pop_all()
        except BaseException:
            self._hold_only_what_is_open()
            raise
        opening.before = self.manifest
        return opening

    def switch(self, opening: Opening) -> bool:
        """Switch every table to what `prepare` returned; cached rows that did not change stay.

        Reads nothing from the disk but tables that are new. Returns False, having done nothing, if
        the store is no longer what that was prepared for.
        """
        if opening.before is not self.manifest or opening.manifest.version not in self.reader.held:
            return False
        with interrupts_deferred():
            try:
                self.manifest, self._held = opening.manifest, opening.take_payload()
                for name in self.tables.keys() - self.manifest.tables.keys():
                    self.spaces.drop(name)
                self.spaces.follow(opening.later, opening.renewed)
                self._attach(opening, REFRESHED)
                self.damaged = opening.damaged
            except BaseException as error:
                self.door.close(f"a refresh failed in the middle ({error})")
                raise
        self._hold_only_what_is_open()
        return True
