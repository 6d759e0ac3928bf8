"""Which files the kept manifests need: of each, the first and the last manifest that names it."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["NeededFiles"]


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
