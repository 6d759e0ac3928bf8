"""The seams between tiers: whole records by row, what kernels reach, and how long leases live."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tierstore._rowcopy import Target
from tierstore.errors import ClosedError
from tierstore.stats import TierStats

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Tier(Protocol):
    """What a tier needs from the tier below: whole records of distinct, valid rows.

    Rows to `read` and `stream` ascend as well: a disk reads faster in order, and the table of a row
    is found faster. `read`, `stream`, `write` and `stage` may be called by several threads at a
    time, and each sees and leaves whole records; all other calls must run alone.
    """

    rows: int
    record_bytes: int
    stats: TierStats

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy the records of `rows` `(n,)` into `out` `(n, record_bytes)`, which is contiguous."""

    def stream(self, rows: Rows) -> Generator[tuple[slice, Bytes]]:
        """Yield the records of `rows` part by part; an array is good until the next one."""

    def write(self, rows: Rows, records: Bytes, *, resident: bool = False) -> None:
        """Write `records` `(n, record_bytes)` over those of `rows` `(n,)`, in any order.

        `resident`: the tier above keeps the records, so that they are not read from here soon, and
        a caller waits until they are in a file.
        """

    def stage(self, rows: Rows) -> Callable[[], None] | None:
        """Return a call that brings `rows` nearer, or None; make it without holding a lock."""

    def flush(self) -> None:
        """Write every changed record to the tier below."""


@runtime_checkable
class Delivering(Protocol):
    """A tier that copies records from where they are to where they go."""

    def deliver(self, rows: Rows, target: Target) -> None:
        """Copy the records of ascending `rows` to a target; after an error these are undefined."""


@runtime_checkable
class Collecting(Protocol):
    """A tier that copies the records to write from where they are, part by part."""

    def collect(
        self, rows: Rows, get: Callable[[Any, Bytes], object], *, resident: bool = False
    ) -> None:
        """Write the records of distinct `rows` as `write` does, which `get` copies.

        `get` is called for parts of them, with a slice of `rows` or positions there, and the memory
        for them.
        """


class Held(NamedTuple):
    """Where the rows of a lease are, until it ends.

    Attributes:
        slots: those of the distinct rows that are in the tier, in their order.
        whole: whether these are all rows of the lease.
    """

    slots: npt.NDArray[np.integer[Any]]
    whole: bool


class Renewed(NamedTuple):
    """The new records of rows that have changed in the tier below.

    Attributes:
        changed: the ascending rows that have changed.
        rows: those of them that are given, ascending.
        records: the records of these, uint8 `(n, record_bytes)`.
    """

    changed: Rows
    rows: Rows
    records: Bytes


class Changed(Protocol):
    """Records that no version has yet."""

    @property
    def ids(self) -> Rows:
        """Their rows."""


class MappedTier(Tier, Protocol):
    """A tier that may map files to read from them."""

    def let_go(self, rows: Rows) -> None:
        """Unmap the memory that was mapped to read ascending `rows`, from the first to the last."""


class LowestTier(MappedTier, Protocol):
    """The lowest tier of a table: the disk or its substitute. Its `flush` does nothing.

    Attributes:
        queue_bytes: bytes of records that may wait in memory to be written.
    """

    queue_bytes: int

    @property
    def live(self) -> Changed | None:
        """The records written here since the last commit."""

    def discard(self) -> Rows:
        """Drop the records written here since the last commit; return their rows."""


class DeviceView(NamedTuple):
    """The memory of a host tier that kernels read and write directly.

    Attributes:
        records: uint8 `(slots, record_bytes)`.
        dirty: uint8 `(slots,)`, whether a record has changed.
        slot_of: int32 `(rows,)`, one more than the slot of each row, 0 without one; None where
            slot = row, and where the map of very many rows is no array.
    """

    records: Bytes
    dirty: npt.NDArray[np.uint8]
    slot_of: npt.NDArray[np.int32] | None


ROLLED_BACK = "the store was rolled back"
REFRESHED = "the store was refreshed"
OPENED_ANEW = "the table got other fields or rows, or another version,"
REMOVED = "keys were removed"
REPLACED = "the rows of the table were replaced"
RESTORED = "another version was restored"
UNDONE = frozenset({ROLLED_BACK, RESTORED})
"""The reasons that drop what is not committed, gradients that wait for a step among it."""
GONE = "the table was renamed or dropped"


class Epoch:
    """A period in which a table's records keep their places, and its rows their meaning.

    A lease refers to the epoch in which it began. Whatever drops records from a tier ends the
    epoch, which ends every lease without a search; the next epoch is a new object. So an epoch
    stands for a number of `places`, which every end raises.

    Some ends also raise `names`: a row may then mean something else, as after a removal of keys or
    a rollback. A row number, or a gradient, holds as long as `names` is the number with which it
    was found; see `names_hold`. Where only places have changed, the rows are leased anew.

    Attributes:
        ended: the reason why it ended; empty while it lasts.
        names: how often rows of the table got another meaning before.
        renamed: why rows get another meaning with the end of this epoch, else why they last did.
    """

    __slots__ = ("_renames", "ended", "names", "renamed")

    def __init__(self, names: int = 0, renamed: str = "") -> None:
        """Begin."""
        self.ended: str = ""
        self.names: int = names
        self.renamed: str = renamed
        self._renames = False

    def end(self, reason: str, *, names: bool) -> None:
        """End every lease of this epoch; the first reason counts, of `names` the last.

        With `names`, call it before the first row or key changes, and begin the next epoch after
        the last: what was found in between holds in neither.
        """
        self.ended = self.ended or reason
        if names:
            self.renamed, self._renames = reason, True

    def next(self) -> Epoch:
        """Return the next epoch of the same table."""
        return Epoch(self.names + self._renames, self.renamed)

    def names_hold(self, names: int) -> bool:
        """Whether rows still mean what they meant at that number, given the present epoch."""
        return self.names == names and not self._renames

    def renamed_since(self, names: int) -> str:
        """Return why rows may mean something else than at that number; empty if they do not."""
        return "" if self.names_hold(names) else self.renamed

    def check_open(self) -> None:
        """Raise ClosedError for a call whose tiers have changed meanwhile."""
        if self.ended == GONE:
            raise ClosedError(f"{GONE}; take a table that the store has, such as store['name']")
        if self.ended:
            raise ClosedError(f"{self.ended} while this call waited for another thread; repeat it")


def lease_ended(epoch: Epoch) -> ClosedError:
    """Return the error for a lease of this epoch, which has ended, or that was released."""
    if epoch.ended:
        return ClosedError(
            f"{epoch.ended} since this lease began, which ended it; take a new one with "
            "table.lease(ids), or run the forward pass again"
        )
    return ClosedError("this lease has ended; take a new one with table.lease(ids)")
