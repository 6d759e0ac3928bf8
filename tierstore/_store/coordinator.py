"""What ranks that write one store do together; a process that writes alone is a rank by itself.

With one rank each call is the work itself, and sends nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

from tierstore.errors import InvalidInputError

T = TypeVar("T")


class Coordinator(ABC):
    """What all ranks do together; each makes the same calls, in the same order.

    Attributes:
        rank, count: which of how many this is.
        leads: whether this rank publishes on its file system, for all ranks that see it.
        several: whether several ranks do, each on a file system of its own.
        broken: what went wrong between the ranks; empty while they can still talk.
    """

    rank: int = 0
    count: int = 1
    leads: bool = True
    several: bool = False
    broken: str = ""

    @abstractmethod
    def agree(self, what: str, values: Mapping[str, object], *, after_fault: bool = False) -> None:
        """Raise InvalidInputError on every rank unless all give the same values.

        Raise RanksError for what a rank wrote in part, unless `after_fault`.
        """

    @abstractmethod
    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Do something on every rank, and return what each returned.

        An error on one rank is raised on all, once every rank is done: on that rank itself, on the
        others as the same class where it is an error of this library, naming the rank.
        """

    def each(self, what: str, work: Callable[[], T]) -> T:
        """Do something on every rank, as `together` does, and return what it returned here."""
        found: list[T] = []
        self.together(what, lambda: found.append(work()))
        return found[0]

    def check_same(self, what: str, of: str, work: Callable[[], object]) -> None:
        """Raise InvalidInputError unless `work` returns the same on every rank."""
        if len(set(self.together(what, work))) > 1:
            raise InvalidInputError(f"ranks disagree on {of}: every rank gives the same")

    @abstractmethod
    def lead(self, what: str, work: Callable[[], T]) -> T:
        """Do something on the leaders; each rank gets what its own leader returned."""

    @abstractmethod
    def gather(self, what: str, value: T) -> list[T]:
        """Return the value of every rank."""


class Alone(Coordinator):
    """One rank: what it is asked to do with all ranks it does."""

    def agree(self, what: str, values: Mapping[str, object], *, after_fault: bool = False) -> None:
        """Do nothing."""

    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Do it."""
        return [work()]

    def each(self, what: str, work: Callable[[], T]) -> T:
        """Do it."""
        return work()

    def lead(self, what: str, work: Callable[[], T]) -> T:
        """Do it."""
        return work()

    def gather(self, what: str, value: T) -> list[T]:
        """Return the value."""
        return [value]


ALONE = Alone()
