"""Reads a data loader some batches ahead and prefetches the rows of these batches."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

from tierstore._random import (
    OwnGenerators,
    State,
    generator_state,
    generators_of,
    set_generator_state,
)
from tierstore.errors import (
    InvalidInputError,
    InvalidTypeError,
    TierStoreWarning,
    counted,
    warn,
)

__all__ = ["Lookahead", "is_read_ahead", "lookahead"]

Batch = TypeVar("Batch")


class Lookahead(Generic[Batch]):
    """The batches of a loader, unchanged and in order, as returned by `lookahead`.

    While it produces a batch, the loader draws from its own copies of the global generators of
    torch, NumPy and Python; each iteration seeds them with a number from torch. Loader and model
    therefore do not affect each other's random numbers, and results are the same for any depth.

    `state_dict()` contains the position of the last batch that was yielded and the loader's
    generators: its copies of the global ones, and those that it, its sampler, batch sampler or
    data set has as attributes, as of the start of the iteration. Make it part of a `Checkpoint` or
    of the state that a framework saves. The iteration after `load_state_dict` sets these generators
    and continues with the next batch. A loader with `state_dict` and `load_state_dict` provides its
    own position and generators; any other loader draws the preceding batches again. Workers that
    stay from one iteration to the next draw what no state has, of which a warning tells.

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
        _lookaheads.add(self)

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
        self._position = {"given": 0, **self._state_of_loader()}

    def _given(self, batch: Batch, position: dict[str, Any]) -> Batch:
        self._position = position
        return batch

    def _drawn(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Draw the batches of this iteration; yield each with the position after it."""
        begin: dict[str, Any] = self._position if self._resumes else {"given": 0}
        given, apart = begin["given"], OwnGenerators(begin.get("random"))
        if self._resumes:
            self._begin_workers(begin, apart.state)
        self._resumes = False
        self._set_state_of_loader(begin)
        start = {"random": apart.state, **self._state_of_loader()}
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
                position = {"random": apart.state, **self._state_of_loader()}
            else:
                position = start
            yield batch, {"given": given, **position}

    def _begin_workers(self, position: Mapping[str, Any], random: State) -> None:
        """Have workers that stay from one iteration to the next, or none yet, as it was then.

        A DataLoader draws a seed for workers where it starts them, and not where they stay. Warns
        of what they have drawn by then, which no state tells.
        """
        if not getattr(self._loader, "persistent_workers", False):
            return
        if not position.get("stays", self.epoch > 0):
            self._loader._iterator = None
            return
        if not self._stays():
            with OwnGenerators(random):
                iter(self._loader)
        warn(
            f"this run goes on after {counted(self.epoch, 'epoch')} with persistent_workers=True: "
            "workers that stay keep generators of their own, whose state is not saved. Batches "
            "come in the same order, but what the data set or collate_fn draws in workers is not "
            "what it would have been; with persistent_workers=False it is",
            TierStoreWarning,
        )

    def _stays(self) -> bool:
        """Whether the loader has workers of an earlier iteration, which go on in the next."""
        is_persistent = getattr(self._loader, "persistent_workers", False)
        return is_persistent and getattr(self._loader, "_iterator", None) is not None

    def _state_of_loader(self) -> State:
        """Return where the loader is: by its own word, or by the generators that it draws from."""
        if self._is_stateful:
            return {"loader": self._loader.state_dict()}
        generators = generators_of(self._loader)
        states = {path: generator_state(own) for path, own in generators.items()}
        return {"generators": states, "stays": self._stays()}

    def _set_state_of_loader(self, position: Mapping[str, Any]) -> None:
        """Bring the loader to where it was at the start of an iteration, or at its own position.

        Raises InvalidInputError if it draws from other generators than it did.
        """
        if self._is_stateful:
            if "loader" in position:
                self._loader.load_state_dict(position["loader"])
            return
        states = position.get("generators")
        if states is None:
            return
        generators = generators_of(self._loader)
        if generators.keys() != states.keys():
            raise InvalidInputError(
                f"this loader draws from the generators {_names(generators)}, and the one whose "
                f"position was saved from {_names(states)}: make it as it was made then"
            )
        for path, state in states.items():
            set_generator_state(generators[path], state)

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


_lookaheads: weakref.WeakSet[Lookahead[Any]] = weakref.WeakSet()


def is_read_ahead(loader: object) -> bool:
    """Tell whether a lookahead that is still in use reads a loader."""
    return any(ahead._loader is loader for ahead in _lookaheads)


def _names(generators: Mapping[str, Any]) -> str:
    return ", ".join(generators) or "of the library alone"


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
