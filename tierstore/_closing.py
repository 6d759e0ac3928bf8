"""A base for context managers, and calls that all run even if some fail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self


class Closing(ABC):
    """A context manager that calls `close`, which may be called repeatedly."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the object."""
        self.close()


def call_each(*calls: Callable[[], object]) -> None:
    """Call each in order, also after one that raises.

    Raises the last error. Its context is the one before, and so on to the error that is being
    handled, such as that of the body of a `with`: contextlib.ExitStack would drop that one.
    """
    if len(calls) == 1:
        calls[0]()
    elif calls:
        half = len(calls) // 2  # so that a thousand calls do not nest a thousand deep
        try:
            call_each(*calls[:half])
        finally:
            call_each(*calls[half:])
