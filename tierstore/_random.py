"""Random number generators of torch, NumPy and Python, the global ones and those of loaders."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

State = dict[str, Any]
"""States by the name of their library, of tensors, lists and numbers: torch.load takes them."""


def _python_state(generator: random.Random | Any = random) -> State:
    """Return the state of a generator of Python's `random` module."""
    version, numbers, gauss = generator.getstate()
    return {"version": version, "numbers": list(numbers), "gauss": gauss}


def _set_python_state(state: Mapping[str, Any], generator: random.Random | Any = random) -> None:
    """Give a generator of Python's `random` a state."""
    numbers = tuple(map(int, state["numbers"]))
    generator.setstate((state["version"], numbers, state["gauss"]))


def get_state() -> State:
    """Return the states of Python, NumPy and, where it is imported, torch on the CPU."""
    name, keys, *rest = np.random.get_state()
    state: State = {"python": _python_state(), "numpy": [name, np.asarray(keys).tolist(), *rest]}
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = torch.get_rng_state()
    return state


def set_state(state: Mapping[str, Any]) -> None:
    """Set the generators that are in a state."""
    if "python" in state:
        _set_python_state(state["python"])
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


_PROTOCOLS = (("get_state", "set_state"), ("getstate", "setstate"), ("bit_generator",))
"""What a torch.Generator and a RandomState, a random.Random, and a NumPy Generator have."""


def is_generator(candidate: object) -> bool:
    """Tell whether an object is a generator, or has the methods of one."""
    return any(all(hasattr(candidate, name) for name in names) for names in _PROTOCOLS)


def generator_state(generator: Any) -> State:
    """Return the state of a generator of torch, NumPy or Python, or of one like these."""
    if hasattr(generator, "get_state"):
        return {"state": _plain(generator.get_state())}
    if hasattr(generator, "getstate"):
        return _python_state(generator)
    return {name: _plain(value) for name, value in generator.bit_generator.state.items()}


def set_generator_state(generator: Any, state: Mapping[str, Any]) -> None:
    """Give a generator the state that `generator_state` returned."""
    if isinstance(generator, np.random.RandomState):
        generator.set_state(tuple(state["state"]))
    elif hasattr(generator, "set_state"):
        generator.set_state(state["state"])
    elif hasattr(generator, "setstate"):
        _set_python_state(state, generator)
    else:
        generator.bit_generator.state = state


def _plain(state: Any) -> Any:
    """Return a state of NumPy with lists in place of arrays, which `torch.load` refuses."""
    if isinstance(state, Mapping):
        return {name: _plain(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return [_plain(value) for value in state]
    return state.tolist() if isinstance(state, np.ndarray) else state


_PARTS = ("sampler", "batch_sampler", "dataset", "loader", "dataloader")
"""Attributes of a loader whose generators decide its batches too, as those of a DataLoader."""


def generators_of(loader: object) -> dict[str, Any]:
    """Return the generators that a loader draws its batches from, by path, each once.

    They are attributes of the loader itself, or of its sampler, batch sampler or data set, such as
    "generator" or "batch_sampler.sampler.generator"; the global ones are not among them.
    """
    generators: dict[str, Any] = {}
    seen = _globals()

    def search(part: object, path: str) -> None:
        own = getattr(part, "__dict__", {})
        for name, value in own.items():
            if isinstance(value, _generators()) and id(value) not in seen:
                seen.add(id(value))
                generators[path + name] = value
        for name in _PARTS:
            if name in own and id(own[name]) not in seen:
                seen.add(id(own[name]))
                search(own[name], f"{path}{name}.")

    search(loader, "")
    return generators


def _generators() -> tuple[type, ...]:
    """Return the classes of generators, torch's where it is imported."""
    torch = sys.modules.get("torch")
    own = (random.Random, np.random.Generator, np.random.RandomState)
    return own if torch is None else (*own, torch.Generator)


def _globals() -> set[int]:
    """Return the identities of the global generators, whose states `get_state` returns."""
    shared: list[Any] = [random._inst, np.random.mtrand._rand]
    if (torch := sys.modules.get("torch")) is not None:
        shared.append(torch.default_generator)
    return {id(each) for each in shared}


class OwnGenerators:
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
