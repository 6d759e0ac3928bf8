"""Reads a loader some batches ahead, to prefetch the rows of batches to come."""

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
    """The batches of a loader, unchanged and in order; what `lookahead` returns.

    What the loader draws from the global generators of torch, NumPy and Python, while it makes a
    batch, comes from generators of its own, which each iteration starts from a number of torch's.
    So neither loader nor model sees how far ahead the other is, and results are the same for any
    depth.

    `state_dict()` is the position of the batch that was given out last, with the loader's
    generators: part of a `Checkpoint`, or of `state_dict`s that frameworks save. The iteration
    after `load_state_dict` goes on with the batch behind that one. A loader that has `state_dict`
    and `load_state_dict` is asked for its own position; another draws the batches before it again.

    Attributes:
        epoch: how many iterations have come to their end.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        tables: Mapping[Any, Callable[[Batch], Any] | Hashable],
        depth: int,
    ) -> None:
        """Refer to a loader, which is started anew by each iteration."""
        self.epoch: int = 0
        self._loader: Any = loader
        self._tables = [(table, _chooser(ids)) for table, ids in tables.items()]
        self._depth = depth
        self._is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._position: dict[str, Any] = {"given": 0}
        self._resumes = False

    def __iter__(self) -> Iterator[Batch]:
        """Yield each batch once `depth` more were drawn and their rows prefetched."""
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
        """Draw each batch, from where this iteration begins; yield it with the position behind."""
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
        """Return the position of the batch that was given out last, of tensors and numbers."""
        return {"epoch": self.epoch, **self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on behind a position."""
        self.epoch = state["epoch"]
        self._position = {key: value for key, value in state.items() if key != "epoch"}
        self._resumes = True

    def __len__(self) -> int:
        """Return the number of batches, of a loader that knows it."""
        return len(self._loader)


def lookahead(
    loader: Iterable[Batch],
    tables: Mapping[Any, Callable[[Batch], Any] | Hashable],
    *,
    depth: int = 4,
) -> Lookahead[Batch]:
    """Yield the batches of a loader, and prefetch the rows of the next `depth` batches.

    Results are the same for any depth; a row that a step changes after it was fetched is the
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
