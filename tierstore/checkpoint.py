"""Commits a training run as a whole: tables, model, optimizers, random number generators."""

from __future__ import annotations

from typing import Any

from tierstore._kinds import check_store
from tierstore._random import (
    every_state,
    generator_state,
    is_generator,
    set_every_state,
    set_generator_state,
)
from tierstore._store.store import Store
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.loader import is_read_ahead

__all__ = ["Checkpoint"]

_RANDOM = "random"
_EXTRA = "extra"


class Checkpoint:
    """Commits all state of a training run together with its store.

    A run that was killed continues from its last commit as if nothing had happened: the rows, their
    optimizer state, the model and the generators of torch, NumPy and Python are restored as of that
    step. A plain `store.commit()` afterwards keeps the step and the state.

    >>> run = Checkpoint(store, model=model, dense=dense_optimizer, tiered=opt, schedule=schedule)
    >>> for step in range(run.resume(), steps):
    ...     train(step)
    ...     if (step + 1) % 1000 == 0:
    ...         run.commit(step + 1)
    """

    def __init__(self, store: Store, /, **parts: Any) -> None:
        """Add the parts of the run, each under the name for its state in the commit.

        A part is an object with `state_dict` and `load_state_dict` (a `lookahead` too), or a random
        number generator: of torch, NumPy or Python, or any object with `get_state` and `set_state`.
        The names "random" and "extra" are reserved. Include the TieredOptimizer: its learning rates
        are part of the run.
        """
        check_store(store, "a checkpoint")
        for name, part in parts.items():
            if name in (_RANDOM, _EXTRA):
                raise InvalidInputError(f"{name!r} is reserved for the checkpoint itself")
            if not (_has_state(part) or is_generator(part)):
                raise InvalidTypeError(
                    f"{name} has no state_dict and is not a random number generator: {part!r}"
                )
        self._store = store
        self._parts = parts
        self._check_read_ahead()
        self.extra: dict[str, Any] = {}
        """The additional values of the last commit; filled in by `resume`."""

    def __repr__(self) -> str:
        """Name the store and the parts of the run."""
        return f"Checkpoint({self._store!r}, {', '.join(self._parts)})"

    def commit(self, step: int, *, keep: str | None = None, **extra: Any) -> int:
        """Commit the store at a step, with the state of every part and additional values.

        `extra` may contain strings, numbers, arrays, tensors, and lists and dicts of them. `keep`
        is a name under which the version is kept; see `Store.commit`. Returns the version, and
        raises what `Store.commit` raises. Nothing is pickled.
        """
        self._check_read_ahead()
        payload: dict[str, object] = {  # the commit itself calls `state_dict`
            name: part if _has_state(part) else generator_state(part)
            for name, part in self._parts.items()
        }
        payload[_RANDOM] = every_state()
        payload[_EXTRA] = extra
        version = self._store.commit(step=step, payload=payload, keep=keep)
        self.extra = extra
        return version

    def resume(self) -> int:
        """Load the state of the last commit into every part; return its step (0 if none).

        Raises InvalidInputError if that version lacks the state of a part because it was committed
        without this checkpoint. `store.restore(version)` goes back to a version that has it.
        """
        saved, step = self._store.payload, self._store.step
        if _RANDOM not in saved and step is None and not self._with_state():
            return 0
        missing = [name for name in self._parts if name not in saved]
        if missing or _RANDOM not in saved:
            has = f"it has {', '.join(saved)}" if saved else "it has none at all"
            older = ", ".join(map(str, self._with_state())) or "none"
            raise InvalidInputError(
                f"version {self._store.version} of step {step} lacks the state of "
                f"{', '.join(missing) or 'a checkpoint'}; {has}. Versions that have it: {older}; "
                "go back to one with store.restore(version)"
            )
        for name, part in self._parts.items():
            state = saved[name].state_dict()
            if _has_state(part):
                part.load_state_dict(state)
            else:
                set_generator_state(part, state)
        self.extra = saved[_EXTRA].state_dict()
        set_every_state(saved[_RANDOM].state_dict())
        return step or 0

    def _check_read_ahead(self) -> None:
        """Raise InvalidInputError for a loader whose position is that of batches read ahead."""
        for name, part in self._parts.items():
            if is_read_ahead(part):
                raise InvalidInputError(
                    f"{name} is a loader that a lookahead reads, and so is batches ahead of those "
                    "that are trained: leave it out, and give the lookahead, which has its position"
                )

    def _with_state(self) -> list[int]:
        """Return the versions committed by a checkpoint with these parts."""
        wanted = {_RANDOM, *self._parts}
        return [each.version for each in self._store.versions() if wanted <= set(each.payload)]


def _has_state(part: object) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
