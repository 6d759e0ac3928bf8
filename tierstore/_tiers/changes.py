"""Copy records without the lock of their tier, and tell whether a copy is whole."""

from __future__ import annotations

from collections import deque

from tierstore.stats import TierStats


class Changes:
    """How often records of a tier changed, or lost the slots they were in.

    A thread finds slots with the lock held, copies their records without it, and takes it again: if
    `number` is the same, every record it copied is whole, and is the one it looked for. A thread
    that changes bytes of a slot that others may have found increments `number`: while it holds the
    lock for the change, or earlier, while it holds the lock to take the slot from its row. So does
    one that enters rows in the map, whose entries move.

    A thread may do so without ever holding the lock where slots are known and `number` is `rested`:
    the bytes of all changes up to that one have been written.

    Attributes:
        number: of changes so far.
        rested: the number when a thread that held the lock looked last.
        copies: an entry for each copy under way without the lock.
        read: of batches that were read so and not counted yet their counters, rows and bytes.

    Hold the lock to change the numbers. To add or remove an entry of the others is a single step of
    the interpreter, and needs none.
    """

    __slots__ = ("copies", "number", "read", "rested")

    def __init__(self) -> None:
        """Start with none."""
        self.number = 0
        self.rested = 0
        self.copies: list[None] = []
        self.read: deque[tuple[TierStats, int, int]] = deque()

    def rest(self) -> bool:
        """Whether no record changed since the last call, so that a change is unlikely.

        If a record changes during a copy, the copy must be repeated.
        """
        same = self.number == self.rested
        self.rested = self.number
        return same
