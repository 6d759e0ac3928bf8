"""What the ranks have ready for a version, and what they must agree on before it is published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierstore._disk.manifest import TableInfo, Written
from tierstore.errors import InvalidInputError


class Prepared(NamedTuple):
    """What one rank has ready for a version, or all of them together.

    Attributes:
        partitions: by number, the version and mark that the version is to name.
        tables: what its manifest is to state of the tables that changed.
        last_version: the highest version a leader's root ever had; 0 for the other ranks.
        mark: that of the coming version; the first rank's counts.
        written: what it changes or adds.
    """

    partitions: dict[int, tuple[int, str]]
    tables: dict[str, TableInfo]
    last_version: int
    mark: str
    written: Written

    def in_order(self) -> tuple[tuple[int, str], ...]:
        """Return the version and mark of each partition, as a manifest has them."""
        return tuple(mark for _, mark in sorted(self.partitions.items()))


def agreed(prepared: Sequence[Prepared]) -> Prepared:
    """Return what all ranks have ready.

    Raises InvalidInputError where they differ in what the tables are.
    """
    partitions: dict[int, tuple[int, str]] = {}
    for rank, each in enumerate(prepared):
        partitions |= each.partitions
        if each.tables != prepared[0].tables:
            raise InvalidInputError(
                f"ranks disagree on what the tables are: the scalars or fields of rank {rank} are "
                "not those of rank 0; every rank takes every step"
            )
    last = max(each.last_version for each in prepared)
    written = Written.total([each.written for each in prepared])
    return prepared[0]._replace(partitions=partitions, last_version=last, written=written)
