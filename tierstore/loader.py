"""Reads a data loader some batches ahead and prefetches the rows of these batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

from tierstore._random import Apart
from tierstore.errors import InvalidInputError, InvalidTypeError

__all__ = ["Lookahead", "lookahead"]

Batch = TypeVar("Batch")


class Lookahead(Generic[Batch]):
    """The batches of a loader, unchanged and in order, as returned by `lookahead`.

    While it produces a batch, the loader draws from its own copies of the global generators of
    torch, NumPy and Python; each iteration seeds them with a number from torch. Loader and model
    therefore do not affect each other's random numbers, and results are the same for any depth.

    `state_dict()` contains the position of the last batch that was yielded and the loader's
    generators. Make it part of a `Checkpoint` or of the state that a framework saves. The iteration
    after `load_state_dict` continues with the next batch. A loader with `state_dict` and
    `load_state_dict` provides its own position; any other loader draws the preceding batches again.

    Attributes:
        epoch: number of completed iterations.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        tables: Mapping[Any, Callable[[Batch], Any] | Hashable],
        depth: int,
    ) -> None:
        """Wrap a loader; each iteration starts it anew."""
        self.epoch: int = 0
        self._loader: Any = loader
        self._tables = [(table, _chooser(ids)) for table, ids in tables.items()]
        self._depth = depth
        self._is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._position: dict[str, Any] = {"given": 0}
        self._resumes = False

    def __iter__(self) -> Iterator[Batch]:
        """Yield each batch after drawing `depth` more and prefetching their rows."""
        waiting: deque[tuple[Batch, dict[str, Any]]] = deque()
        window = max(1, 2 * self._depth)
        for batch, position in self._drawn():
            for table, ids in self._tables:
                table.prefetch(ids(batch), window=window)
            waiting.append((batch, position))
            if len(waiting) > self._depth:
                yield self._given(*waiting.popleft())
        while waiting:
            yield self._given(*waiting.popleft())
        self.epoch += 1
        self._position = {"given": 0}
        if self._is_stateful:
            self._position["loader"] = self._loader.state_dict()

    def _given(self, batch: Batch, position: dict[str, Any]) -> Batch:
        self._position = position
        return batch

    def _drawn(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Draw the batches of this iteration; yield each with the position after it."""
        begin: dict[str, Any] = self._position if self._resumes else {"given": 0}
        self._resumes = False
        given, apart = begin["given"], Apart(begin.get("random"))
        start = apart.state
        if self._is_stateful and "loader" in begin:
            self._loader.load_state_dict(begin["loader"])
        with apart:
            batches = iter(self._loader)
            if not self._is_stateful:
                for _ in islice(batches, given):
                    pass
        end: Any = object()
        while True:
            with apart:
                batch = next(batches, end)
            if batch is end:
                return
            given += 1
            if self._is_stateful:
                position = {"random": apart.state, "loader": self._loader.state_dict()}
            else:
                position = {"random": start}
            yield batch, {"given": given, **position}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the last yielded batch, as tensors and numbers."""
        return {"epoch": self.epoch, **self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue after the saved position."""
        self.epoch = state["epoch"]
        self._position = {key: value for key, value in state.items() if key != "epoch"}
        self._resumes = True

    def __len__(self) -> int:
        """Return the number of batches, if the loader knows it."""
        return len(self._loader)


def lookahead(
    loader: Iterable[Batch],
    tables: Mapping[Any, Callable[[Batch], Any] | Hashable],
    *,
    depth: int = 4,
) -> Lookahead[Batch]:
    """Yield the batches of a loader, and prefetch the rows of the next `depth` batches.

    Results are the same for any depth: if a step changes a row after it was prefetched, its batch
    still sees the changed row. A DataLoader with workers is iterated in this process, as usual.

    Args:
        loader: a DataLoader or any iterable of batches.
        tables: for each layer or table, where a batch has its ids: a function of the batch, or the
            key or index of an item.
        depth: number of batches to read ahead; 0 prefetches each batch just before it is yielded.

    >>> for batch in lookahead(loader, {emb: "item", users: lambda batch: batch["user"]}, depth=4):
    ...     step(batch)
    """
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise InvalidTypeError(f"depth must be a number of batches, not {depth!r}")
    if depth < 0:
        raise InvalidInputError(f"depth cannot be negative: {depth}")
    if not isinstance(tables, Mapping):
        raise InvalidTypeError(
            "give the ids of each layer or table, such as {emb: 'item'} or {emb: lambda batch: "
            f"batch}}, not {type(tables).__name__}"
        )
    for table in tables:
        if not hasattr(table, "prefetch"):
            raise InvalidTypeError(f"a {type(table).__name__} is neither a layer nor a table")
    return Lookahead(loader, tables, depth)


def _chooser(ids: Any) -> Callable[[Any], Any]:
    return ids if callable(ids) else lambda batch: batch[ids]
