"""Which versions a version was made from, where a store was brought back to an older one.

Numbers of versions only grow, and as a rule a version is made from all before it. One that restores
an older version is made from that and what came before it, not from the versions in between: such a
fork is a pair, the number of the version that restores and that of the version restored. A manifest
lists the forks of its own past.

Versions that are kept share the deltas of their common past alone. A fold merges no others: they
would change what the versions beside the newest one hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Forks", "descends", "newest_common", "pruned"]

Forks = Sequence[tuple[int, int]]
"""Pairs (version, the version it restores), ascending."""


def _spans(version: int, forks: Forks) -> list[tuple[int, int]]:
    """Return the version and all it was made from as spans (first, last), the newest first."""
    spans, last = [], version
    for restoring, restored in reversed(forks):
        spans.append((restoring, last))
        last = restored
    return [*spans, (0, last)]


def descends(version: int, forks: Forks, other: int) -> bool:
    """Whether a version is the other one, or was made from it."""
    return any(first <= other <= last for first, last in _spans(version, forks))


def newest_common(one: tuple[int, Forks], other: tuple[int, Forks]) -> int:
    """Return the newest version that both are, or were made from; 0 where there is none."""
    common = [
        min(last, until)
        for first, last in _spans(*one)
        for begin, until in _spans(*other)
        if max(first, begin) <= min(last, until)
    ]
    return max(common, default=0)


def pruned(forks: Iterable[tuple[int, int]], floor: int) -> tuple[tuple[int, int], ...]:
    """Return the forks that still matter where versions below the floor cannot be opened."""
    return tuple(fork for fork in forks if fork[0] > floor)
