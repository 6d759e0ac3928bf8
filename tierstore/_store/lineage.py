"""The ancestry of versions, in stores that were restored to older versions.

Version numbers only increase, and normally a version descends from all versions before it. A
version that restores an older one descends from that and its ancestors, but not from the versions
in between. Such a fork is a pair: the number of the restoring version and that of the restored one.
A manifest lists the forks of its own history.

Kept versions share only the deltas of their common ancestors. A fold merges no other deltas, since
these would change the contents of versions on other branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Forks = Sequence[tuple[int, int]]
"""Ascending pairs (version, restored version)."""


def _spans(version: int, forks: Forks) -> list[tuple[int, int]]:
    """Return the version and its ancestors as spans (first, last), newest first."""
    spans, last = [], version
    for restoring, restored in reversed(forks):
        spans.append((restoring, last))
        last = restored
    return [*spans, (0, last)]


def descends(version: int, forks: Forks, other: int) -> bool:
    """Whether a version is the other one, or descends from it."""
    return any(first <= other <= last for first, last in _spans(version, forks))


def newest_common(one: tuple[int, Forks], other: tuple[int, Forks]) -> int:
    """Return the newest common ancestor of two versions, or 0 if there is none."""
    common = [
        min(last, until)
        for first, last in _spans(*one)
        for begin, until in _spans(*other)
        if max(first, begin) <= min(last, until)
    ]
    return max(common, default=0)


def pruned(forks: Iterable[tuple[int, int]], floor: int) -> tuple[tuple[int, int], ...]:
    """Return the forks that are relevant for versions from the floor on."""
    return tuple(fork for fork in forks if fork[0] > floor)
