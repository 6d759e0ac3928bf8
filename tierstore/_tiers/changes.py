"""Copy records without the lock of their tier, and tell whether a copy is whole."""

from __future__ import annotations

__all__ = ["Changes"]


class Changes:
    """How often records of a tier changed, or lost the slots they were in.

    A thread finds slots with the lock held, copies their records without it, and takes it again: if
    `number` is the same, every record it copied is whole, and is the one it looked for. A thread
    that changes bytes of a slot that others may have found increments `number`: while it holds the
    lock for the change, or earlier, while it holds the lock to take the slot from its row.

    Use this class only while holding the lock.

    Attributes:
        number: of changes so far.
        copies: number of copies under way without the lock.
    """

    __slots__ = ("_looked", "copies", "number")

    def __init__(self) -> None:
        """Start with none."""
        self.number = 0
        self.copies = 0
        self._looked = 0

    def rest(self) -> bool:
        """Whether no record changed since the last call, so that a change is unlikely.

        If a record changes during a copy, the copy must be repeated.
        """
        same = self.number == self._looked
        self._looked = self.number
        return same
