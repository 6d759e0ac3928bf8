"""Follows the versions that a writer commits.

A commit adds an entry to the directory of the store, so one `fstat` of the directory tells whether
there may be a new version; only then is the directory listed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore import _io

Rows = npt.NDArray[np.int64]

_COARSEST_SECONDS = 2.5
"""Two changes within this time may leave the same time in a directory, as on FAT and old ext3."""


@dataclass(frozen=True)
class NewVersion:
    """A version that a reader has switched to.

    Attributes:
        version: its number.
        step: the step that was committed with it.
        since: the version that the reader had before.
        rows: the ascending ids of the rows that changed since then, by table, as `Store.changed`
            returns them.
    """

    version: int
    step: int | None
    since: int
    rows: dict[str, Rows]


class DirectoryWatch:
    """Waits for changes of the entries of a directory."""

    def __init__(self, directory: _io.Directory, timeout: float | None, every: float) -> None:
        """Watch an open directory, looking every so many seconds, `timeout` seconds at most."""
        self._directory = directory
        self._timeout = timeout
        self._every = every
        self._changed = -1
        self._unsure_until = 0.0
        self.restart()

    def restart(self) -> None:
        """Count the timeout from now on."""
        self._until = None if self._timeout is None else time.monotonic() + self._timeout

    def may_have_changed(self) -> bool:
        """Whether an entry may have been added or removed since the last call."""
        changed = self._directory.changed_ns
        if changed != self._changed:
            self._changed = changed
            self._unsure_until = time.monotonic() + _COARSEST_SECONDS
            return True
        return time.monotonic() < self._unsure_until

    def wait(self) -> bool:
        """Wait until there may be a change; return False if the time is up first."""
        while True:
            left = self._every if self._until is None else self._until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(self._every, left))
            if self.may_have_changed():
                return True


def union(one: dict[str, Rows], other: dict[str, Rows]) -> dict[str, Rows]:
    """Return the rows that are in either of two results, by table."""
    empty = np.empty(0, np.int64)
    return {
        name: np.union1d(one.get(name, empty), other.get(name, empty))
        for name in [*one, *(name for name in other if name not in one)]
    }
