"""The global random number generators of torch, NumPy and Python."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

__all__ = [
    "Apart",
    "every_state",
    "get_state",
    "python_state",
    "set_every_state",
    "set_python_state",
    "set_state",
]

State = dict[str, Any]
"""States by the name of their library, of tensors, lists and numbers: torch.load takes them."""


def python_state(generator: random.Random | Any = random) -> State:
    """Return the state of a generator of Python's `random` module."""
    version, numbers, gauss = generator.getstate()
    return {"version": version, "numbers": list(numbers), "gauss": gauss}


def set_python_state(state: Mapping[str, Any], generator: random.Random | Any = random) -> None:
    """Give a generator of Python's `random` a state."""
    numbers = tuple(map(int, state["numbers"]))
    generator.setstate((state["version"], numbers, state["gauss"]))


def get_state() -> State:
    """Return the states of Python, NumPy and, where it is imported, torch on the CPU."""
    name, keys, *rest = np.random.get_state()
    state: State = {"python": python_state(), "numpy": [name, np.asarray(keys).tolist(), *rest]}
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = torch.get_rng_state()
    return state


def set_state(state: Mapping[str, Any]) -> None:
    """Set the generators that are in a state."""
    if "python" in state:
        set_python_state(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))
    if "torch" in state and (torch := sys.modules.get("torch")) is not None:
        torch.set_rng_state(state["torch"].cpu())


def every_state() -> State:
    """Return the states of a training run: those of `get_state`, and of torch on every GPU."""
    state = get_state()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_every_state(state: Mapping[str, Any]) -> None:
    """Set the generators that a state of a training run has."""
    set_state(state)
    torch = sys.modules.get("torch")
    if "cuda" in state and torch is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])


class Apart:
    """A private state of the global generators that is active within the body.

    Each entry continues from the end of the last. Draws inside and outside the body do not affect
    each other.
    """

    def __init__(self, state: State | None = None) -> None:
        """Start from a state, or seed from a number drawn from the outer generators."""
        self._outside: State = {}
        if state is None:
            seed = _draw()
            self._outside = get_state()
            _seed(seed)
            state = get_state()
            set_state(self._outside)
        self.state = state

    def __enter__(self) -> Self:
        """Activate this state of the global generators."""
        self._outside = get_state()
        set_state(self.state)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous state."""
        self.state = get_state()
        set_state(self._outside)


def _draw() -> int:
    """Draw a number from the generator that seeds a training run."""
    if (torch := sys.modules.get("torch")) is not None:
        return int(torch.randint(2**32, ()))
    return int(np.random.randint(2**32, dtype=np.uint32))


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.random.default_generator.manual_seed(seed)
