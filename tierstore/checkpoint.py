"""Committing a training run as a whole: tables, model, optimizers, random numbers."""

from __future__ import annotations

from typing import Any

from tierstore._random import every_state, python_state, set_every_state, set_python_state
from tierstore._store.store import Store
from tierstore.errors import InvalidInputError, InvalidTypeError

__all__ = ["Checkpoint"]

_RANDOM = "random"
_EXTRA = "extra"


class Checkpoint:
    """Binds what a training run consists of to its store, so that a commit holds all of it.

    A run that was killed continues from its last commit as if nothing had happened: rows, state of
    their optimizer, model, and the generators of torch, NumPy and Python are those of that step. A
    plain `store.commit()` afterwards keeps step and state.

    >>> run = Checkpoint(store, model=model, dense=dense_optimizer, tiered=opt, schedule=schedule)
    >>> for step in range(run.resume(), steps):
    ...     train(step)
    ...     if (step + 1) % 1000 == 0:
    ...         run.commit(step + 1)
    """

    def __init__(self, store: Store, /, **parts: Any) -> None:
        """Bind parts, each under the name its state is committed by.

        A part is whatever has `state_dict` and `load_state_dict`, a `lookahead` too, or is a
        generator: of torch, NumPy or Python, or anything with `get_state` and `set_state`. The
        names "random" and "extra" are taken. Give the TieredOptimizer too: its learning rates are
        part of the run.
        """
        for name, part in parts.items():
            if name in (_RANDOM, _EXTRA):
                raise InvalidInputError(f"{name!r} is a name of the checkpoint's own")
            if not any(all(hasattr(part, each) for each in pair) for pair in _PROTOCOLS):
                raise InvalidTypeError(
                    f"{name} has no state_dict and is no generator of random numbers: {part!r}"
                )
        self._store = store
        self._parts = parts
        self.extra: dict[str, Any] = {}
        """What was committed beside the parts; filled by `resume`."""

    def commit(self, step: int, *, keep: str | None = None, **extra: Any) -> int:
        """Commit the store at a step, with the state of every part and values of your own.

        `extra` are texts, numbers, arrays, tensors, lists and dicts of them. `keep` is a name to
        keep the version by; see `Store.commit`. Returns the version; raises what `Store.commit`
        raises. Nothing is pickled.
        """
        payload: dict[str, object] = {name: _state_of(part) for name, part in self._parts.items()}
        payload[_RANDOM] = every_state()
        payload[_EXTRA] = extra
        version = self._store.commit(step=step, payload=payload, keep=keep)
        self.extra = extra
        return version

    def resume(self) -> int:
        """Give every part the state of the last commit; return its step, 0 where there is none.

        Raises InvalidInputError if that version lacks the state of a part: it was committed without
        this checkpoint. `store.restore(version)` goes back to one that has it.
        """
        saved, step = self._store.payload, self._store.step
        if _RANDOM not in saved and step is None and not self._with_state():
            return 0
        missing = [name for name in self._parts if name not in saved]
        if missing or _RANDOM not in saved:
            has = f"it has {', '.join(saved)}" if saved else "it has none at all"
            older = ", ".join(map(str, self._with_state())) or "none"
            raise InvalidInputError(
                f"version {self._store.version} of step {step} has no state of "
                f"{', '.join(missing) or 'a checkpoint'}; {has}. Versions that have it: {older}; "
                "store.restore(version) goes back to one"
            )
        for name, part in self._parts.items():
            _set_state(part, saved[name].state_dict())
        self.extra = saved[_EXTRA].state_dict()
        set_every_state(saved[_RANDOM].state_dict())
        return step or 0

    def _with_state(self) -> list[int]:
        """Return the versions that were committed by a checkpoint of such parts."""
        wanted = {_RANDOM, *self._parts}
        return [each.version for each in self._store.versions() if wanted <= set(each.payload)]


_PROTOCOLS = (
    ("state_dict", "load_state_dict"),
    ("get_state", "set_state"),
    ("getstate", "setstate"),
    ("bit_generator",),
)
"""What a part has: that of a module, of a torch.Generator, of random.Random, of NumPy's."""


def _state_of(part: Any) -> object:
    """Return the state of a generator; a part with `state_dict` is asked by the commit."""
    if hasattr(part, "state_dict"):
        return part
    if hasattr(part, "get_state"):
        return {"state": part.get_state()}
    return python_state(part) if hasattr(part, "getstate") else dict(part.bit_generator.state)


def _set_state(part: Any, state: Any) -> None:
    if hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    elif hasattr(part, "set_state"):
        part.set_state(state["state"])
    elif hasattr(part, "setstate"):
        set_python_state(state, part)
    else:
        part.bit_generator.state = state
