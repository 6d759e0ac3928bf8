"""Reads a loader some batches ahead, to prefetch the rows of batches to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from tierstore.errors import InvalidInputError, InvalidTypeError

__all__ = ["Lookahead", "lookahead"]

Batch = TypeVar("Batch")


class Lookahead(Generic[Batch]):
    """The batches of a loader, unchanged and in order; what `lookahead` returns."""

    def __init__(
        self,
        loader: Iterable[Batch],
        tables: Mapping[Any, Callable[[Batch], Any] | Hashable],
        depth: int,
    ) -> None:
        """Refer to a loader, which is started anew by each iteration."""
        self._loader = loader
        self._tables = [(table, _chooser(ids)) for table, ids in tables.items()]
        self._depth = depth

    def __iter__(self) -> Iterator[Batch]:
        """Yield each batch once `depth` more were drawn and their rows prefetched."""
        waiting: deque[Batch] = deque()
        window = max(1, 2 * self._depth)
        for batch in self._loader:
            for table, ids in self._tables:
                table.prefetch(ids(batch), window=window)
            waiting.append(batch)
            if len(waiting) > self._depth:
                yield waiting.popleft()
        yield from waiting

    def __len__(self) -> int:
        """Return the number of batches, of a loader that knows it."""
        return len(self._loader)  # type: ignore[arg-type]


def lookahead(
    loader: Iterable[Batch],
    tables: Mapping[Any, Callable[[Batch], Any] | Hashable],
    *,
    depth: int = 4,
) -> Lookahead[Batch]:
    """Yield the batches of a loader, and prefetch the rows of the next `depth` batches.

    Results are the same with and without; a row that a step changes after it was fetched is the
    changed row when its batch comes. A DataLoader with workers is read in this process, as usual.

    Args:
        loader: a DataLoader or any iterable of batches.
        tables: from a layer or table to what its ids are in a batch: a function of the batch, or
            the key or index of the batch's item.
        depth: how many batches ahead; 0 prefetches each batch right before it is yielded.

    >>> for batch in lookahead(loader, {emb: "item", users: lambda batch: batch["user"]}, depth=4):
    ...     step(batch)
    """
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise InvalidTypeError(f"depth is a number of batches, not {depth!r}")
    if depth < 0:
        raise InvalidInputError(f"depth cannot be negative: {depth}")
    for table in tables:
        if not hasattr(table, "prefetch"):
            raise InvalidTypeError(f"a {type(table).__name__} is neither a layer nor a table")
    return Lookahead(loader, tables, depth)


def _chooser(ids: Any) -> Callable[[Any], Any]:
    return ids if callable(ids) else lambda batch: batch[ids]
