"""Committing a training run as a whole: tables, model, optimizers, random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from tierstore._store.store import Store
from tierstore.errors import InvalidInputError, InvalidTypeError, needs

__all__ = ["Checkpoint"]

_RANDOM = "random"
_EXTRA = "extra"


class Stateful(Protocol):
    """A model, optimizer, scheduler, scaler or sampler."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take the state."""


class Checkpoint:
    """Binds what a training run consists of to its store, so that a commit holds all of it.

    A run that was killed continues from its last commit as if nothing had happened: rows, state of
    their optimizer, model, and the generators of torch and NumPy are those of that step. A plain
    `store.commit()` afterwards keeps step and state.

    >>> run = Checkpoint(store, model=model, dense=dense_optimizer, tiered=opt, schedule=schedule)
    >>> for step in range(run.resume(), steps):
    ...     train(step)
    ...     if (step + 1) % 1000 == 0:
    ...         run.commit(step + 1)
    """

    def __init__(self, store: Store, /, **parts: Stateful) -> None:
        """Bind parts, each under the name its state is committed by.

        A part is whatever has `state_dict` and `load_state_dict`; the names "random" and "extra"
        are taken. Give the TieredOptimizer too: its learning rates are part of the run.
        """
        for name, part in parts.items():
            if name in (_RANDOM, _EXTRA):
                raise InvalidInputError(f"{name!r} is a name of the checkpoint's own")
            if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
                raise InvalidTypeError(f"{name} has no state_dict: {part!r}")
        self._store = store
        self._parts = parts
        self.extra: dict[str, Any] = {}
        """What was committed beside the parts; filled by `resume`."""

    def commit(self, step: int, **extra: Any) -> int:
        """Commit the store at a step, with the state of every part and values of your own.

        `extra` are texts, numbers, arrays, tensors, lists and dicts of them: the position of a data
        reader, for example. Returns the version; raises what `Store.commit` raises. Nothing is
        pickled.
        """
        payload: dict[str, object] = {name: part.state_dict() for name, part in self._parts.items()}
        payload[_RANDOM] = _random_state()
        payload[_EXTRA] = extra
        version = self._store.commit(step=step, payload=payload)
        self.extra = extra
        return version

    def resume(self) -> int:
        """Give every part the state of the last commit; return its step, 0 where there is none.

        Where that version was committed with a step and without a checkpoint, the parts stay as
        they are, and a warning says so. Raises InvalidInputError if it lacks the state of a part.
        """
        saved, step = self._store.payload, self._store.step
        if _RANDOM not in saved:
            if step is not None and self._parts:
                warnings.warn(
                    f"version {self._store.version} of step {step} was not committed by a "
                    f"checkpoint: {', '.join(self._parts)} stay as they are",
                    stacklevel=2,
                )
            return step or 0
        missing = [name for name in self._parts if name not in saved]
        if missing:
            raise InvalidInputError(
                f"version {self._store.version} has no state of {', '.join(missing)}; "
                f"it has {', '.join(saved)}"
            )
        for name, part in self._parts.items():
            part.load_state_dict(saved[name].state_dict())
        self.extra = saved[_EXTRA].state_dict()
        _set_random_state(saved[_RANDOM].state_dict())
        return step or 0


def _random_state() -> dict[str, Any]:
    """Return the state of the generators of torch, on the CPU and on every GPU, and of NumPy."""
    with needs("torch", "torch", "this needs PyTorch"):
        import torch

    state: dict[str, Any] = {"torch": torch.get_rng_state(), "numpy": np.random.get_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    with needs("torch", "torch", "this needs PyTorch"):
        import torch

    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
