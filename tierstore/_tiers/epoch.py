"""How long a lease may live: from when it was taken to when its tiers drop what they hold."""

from __future__ import annotations

from tierstore.errors import ClosedError

__all__ = ["GONE", "OPENED_ANEW", "REFRESHED", "ROLLED_BACK", "Epoch", "lease_ended"]

ROLLED_BACK = "the store was rolled back"
REFRESHED = "the store was refreshed"
OPENED_ANEW = "the table got other fields or rows, or another version,"
GONE = "the table was renamed or dropped"


class Epoch:
    """A time within which records keep their places for those who lease them.

    A lease refers to the epoch it was taken in. When tiers drop what they hold they end the epoch,
    and with it every lease, without looking for them; the next epoch is another object.

    Attributes:
        ended: what ended it; empty while it lasts.
    """

    def __init__(self) -> None:
        """Begin."""
        self.ended = ""

    def end(self, reason: str) -> None:
        """End every lease of this epoch; the first reason counts."""
        self.ended = self.ended or reason

    def check_open(self) -> None:
        """Raise ClosedError for a call that comes too late for its tiers."""
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
