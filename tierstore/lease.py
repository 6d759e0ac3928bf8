"""A lease: the distinct records of a batch, kept in place while something computes on them."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tierstore.errors import ClosedError

__all__ = ["Lease"]


class Lease:
    """The distinct rows of a batch, pinned in the nearest tier until the lease ends.

    Everything that computes on rows goes through a lease: `read` the fields it needs as compact
    arrays, `write` what changed. Rows that find no room in the tier are read and written in the
    tier below, with the same results.

    Attributes:
        rows: the distinct row ids, int64 `(u,)`, ascending.
        positions: for each id of the batch, in its shape, the index of its row among `rows`.
    """

    def __init__(
        self,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.intp],
        *,
        read: Callable[[npt.NDArray[np.int64], str], Any],
        write: Callable[[npt.NDArray[np.int64], Any, str], None],
        release: Callable[[], None],
    ) -> None:
        """Bind a table's reading, writing and unpinning to these rows."""
        self.rows = rows
        self.positions = positions
        self._read = read
        self._write = write
        self._release: Callable[[], None] | None = release

    def read(self, field: str) -> Any:
        """Return one field of the distinct rows, a fresh `(u, dim)` array of the ids' kind."""
        self._check()
        return self._read(self.rows, field)

    def write(self, field: str, values: Any) -> None:
        """Write `(u, dim)` values over one field of the distinct rows."""
        self._check()
        self._write(self.rows, values, field)

    def release(self) -> None:
        """End the lease; harmless when repeated."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def _check(self) -> None:
        if self._release is None:
            raise ClosedError("this lease has ended; take a new one with table.lease(ids)")

    def __enter__(self) -> Self:
        """Return the lease itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the lease."""
        self.release()
