"""Copies of records without the lock of their tier, and how to tell that one is whole."""

from __future__ import annotations

__all__ = ["Changes"]


class Changes:
    """How often records of a tier changed, or lost the slots they were in.

    A thread finds slots with the lock held, copies their records without it, and takes it again: if
    `number` is the same, every record it copied is whole, and is the one it looked for. For that,
    threads that change bytes of a slot which could have been found before count `number` up: in the
    hold of the lock in which they do so, or in the earlier one that took the slot from its row.

    All of it is for threads that hold the lock.

    Attributes:
        number: of changes so far.
        copies: how many are made without the lock right now.
    """

    __slots__ = ("_looked", "copies", "number")

    def __init__(self) -> None:
        """Start with none."""
        self.number = 0
        self.copies = 0
        self._looked = 0

    def rest(self) -> bool:
        """Whether there was none since this was last asked, so that none is likely to come.

        Where one comes, a copy has to be made twice.
        """
        same = self.number == self._looked
        self._looked = self.number
        return same
