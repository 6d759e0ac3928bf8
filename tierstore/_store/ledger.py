"""The writer's ledger: the kept versions, and the files that each still needs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from itertools import takewhile

from tierstore import _io
from tierstore._disk.manifest import GENERATION_NAME, Manifest, manifest_name
from tierstore._store.publish import publish
from tierstore._store.sweeping import remove_generation, remove_leftovers, remove_paths
from tierstore._store.versions import History
from tierstore.errors import ConcurrentWriterError, FormatError

__all__ = ["Ledger", "NeededFiles"]


class NeededFiles:
    """Files by path, and the manifests that name them, by number.

    A file that a manifest stops to name is not named again by a later one, so it is needed as long
    as any manifest is kept from the first that names it to the last. What this holds, and what a
    new manifest costs, grows with the names that change and not with the manifests that are kept.
    """

    def __init__(self) -> None:
        """Know no manifest."""
        self._numbers: list[int] = []
        self._first: dict[str, int] = {}
        self._ending: dict[int, set[str]] = {}
        self._newest: set[str] = set()

    def __contains__(self, path: str) -> bool:
        """Whether any manifest names a file."""
        return path in self._first

    def paths(self) -> set[str]:
        """Return all files that any manifest names."""
        return set(self._first)

    def add(self, number: int, paths: set[str]) -> None:
        """Take note of a manifest that is newer than all before, and of what it names."""
        if self._numbers:
            self._ending[self._numbers[-1]] = self._newest - paths
        for path in paths - self._newest:
            if path in self._first:  # of a version that a writer went back to
                for ending in self._ending.values():
                    ending.discard(path)
            else:
                self._first[path] = number
        self._numbers.append(number)
        self._newest = paths

    def remove(self, number: int) -> set[str]:
        """Forget a manifest, not the newest; return the files that no other one names."""
        at = bisect_left(self._numbers, number)
        if self._numbers[at : at + 1] != [number]:
            return set()
        del self._numbers[at]
        before = self._numbers[at - 1] if at else 0
        gone = set()
        for path in self._ending.pop(number, ()):
            if self._first[path] <= before:
                self._ending[before].add(path)
            else:
                del self._first[path]
                gone.add(path)
        return gone


class Ledger:
    """The versions of a store that is open for writing.

    Attributes:
        seq: the highest number of a manifest.
        last_version: the highest number that was ever given to a version.
        floor: the newest version that a fold has begun to merge into the base.
        confirmed: the newest version that was confirmed.
    """

    def __init__(self, directory: _io.Directory, history: History) -> None:
        """Read all manifests of the store."""
        self._directory = directory
        self.seq = self.last_version = self.floor = self.confirmed = 0
        self._kept: dict[int, int] = {}  # number of the manifest by version, both ascending
        self._superseded: set[int] = set()
        self._damaged: set[int] = set()
        self._needed = NeededFiles()
        self._dead: set[str] = set()
        self._unsynced = False
        for seq, found in history.read_all():
            if isinstance(found, FormatError):
                self._damaged.add(seq)
                self.last_version += 1  # it may have been a new version
                self.seq = seq
            else:
                self._enter(found)

    def _enter(self, manifest: Manifest) -> None:
        """Take note of a manifest that is newer than all before."""
        self.last_version = max(self.last_version, manifest.last_version, manifest.version)
        self.floor = max(self.floor, manifest.floor)
        self.confirmed = manifest.confirmed
        while self._kept and (newest := next(reversed(self._kept))) >= manifest.version:
            self._superseded.add(self._kept.pop(newest))
        self._kept[manifest.version] = manifest.seq
        while self.oldest < self.floor:
            self._superseded.add(self._kept.pop(self.oldest))
        self._needed.add(manifest.seq, manifest.paths())
        self.seq = manifest.seq

    @property
    def versions(self) -> Collection[int]:
        """The versions that can be opened, ascending."""
        return self._kept.keys()

    @property
    def oldest(self) -> int:
        """The oldest version that can be opened."""
        return next(iter(self._kept))

    def unconfirmed(self) -> int:
        """Return how many versions wait to be confirmed, or for one after them to be."""
        return sum(1 for _ in takewhile(lambda each: each > self.confirmed, reversed(self._kept)))

    def publish(self, manifest: Manifest, settle: Callable[[], object]) -> None:
        """Publish a manifest; see `publishing.publish`."""
        publish(self._directory, manifest, settle)
        self._enter(manifest)

    def check_newest(self) -> None:
        """Raise ConcurrentWriterError if another writer has published after this one."""
        name = manifest_name(self.seq + 1)
        if self._directory.exists(name):
            raise ConcurrentWriterError(
                f"another writer has published {name} in {self._directory.path}: what was "
                "published before it here may be lost; open it again"
            )

    def forget_damaged(self, after: int) -> None:
        """Let manifests that cannot be read go, of numbers above one."""
        damaged = {seq for seq in self._damaged if seq > after}
        self._superseded |= damaged
        self._damaged -= damaged

    def sweep(
        self,
        keep: int,
        confirmed: int,
        is_read: Callable[[Iterable[int]], bool] = lambda kept: False,
    ) -> None:
        """Remove the versions that need not be kept, and the files that no other one needs.

        Kept are the newest `keep` versions and all from the `confirmed` one on. A manifest among
        them that cannot be read stays, and all files with it: it may name any of them. A generation
        stays while `is_read(kept)` says that versions are read that are not kept: its chunks are
        opened when they are needed. What could not be removed is tried again the next time.
        """
        while len(self._kept) > keep and self.oldest < confirmed:
            self._superseded.add(self._kept.pop(self.oldest))
        first = self._kept[self.oldest]
        going = sorted(self._superseded | {seq for seq in self._damaged if seq < first})
        for seq in going:
            self._directory.unlink(manifest_name(seq))
            self._unsynced = True
            self._dead |= self._needed.remove(seq)
            self._superseded.discard(seq)
            self._damaged.discard(seq)
        if self._damaged or not self._dead:
            return
        if self._unsynced:  # a manifest may come back after a power cut: its files must be there
            self._directory.sync()
            self._unsynced = False
        self._remove_dead(is_read)

    def _remove_dead(self, is_read: Callable[[Iterable[int]], bool]) -> None:
        generations = {p for p in self._dead if GENERATION_NAME.fullmatch(p.rpartition("/")[2])}
        files = self._dead - generations
        remove_paths(self._directory, files)
        self._dead -= files
        if generations and not is_read(self.versions):
            for path in sorted(generations):
                remove_generation(self._directory, path)
            self._dead -= generations

    def sweep_leftovers(self, newest: Manifest, is_read: Callable[[Iterable[int]], bool]) -> None:
        """Remove what a writer that was killed left; only before anything is written."""
        if not self._damaged:
            needed = self._needed.paths() | self._dead
            remove_leftovers(self._directory, newest, needed, is_read=is_read(self.versions))
