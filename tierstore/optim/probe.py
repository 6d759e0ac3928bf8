"""What an optimizer keeps of a row, found by running it on a few made-up rows.

An optimizer can train a table if its state consists of numbers and of values for each row, and if
what it does to a row depends on that row's weight, gradient and state alone. Then it may be given
the rows of a batch as if they were a whole parameter.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierstore.errors import InvalidInputError

__all__ = ["RowState", "StatePlan", "as_gradient", "changes_unused", "probe", "ruinous_gradient"]

_REFUSED = {
    "adafactor": "it factors the second moment over all rows of a table",
    "lamb": "it scales a step by the norms of a whole table",
    "lars": "it scales a step by the norms of a whole table",
    "lbfgs": "it fits the curvature of the whole table and runs the model several times a step",
    "muon": "it orthogonalizes the update of a table as a whole",
    "shampoo": "it preconditions the table as a whole",
    "soap": "it preconditions the table as a whole",
}
_SOME = [1, 3]
_RUINED_AFTER = 3
"""Steps after which a division by zero has come, also where the first one has a larger divisor."""


@dataclass(frozen=True)
class RowState:
    """A state that has values for each row.

    Attributes:
        shape: of one row's values; `()` where a row has a single number.
        dtype: of the values, as the optimizer makes them.
        initial: the value that all of them start from.
        late: the optimizer makes it in its first step only, from the gradient.
        signed: whether values may be negative.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: float
    late: bool
    signed: bool

    @property
    def dim(self) -> int:
        """Values of a row."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class StatePlan:
    """The state of an optimizer for a parameter of rows: by row, and what the rows share.

    Attributes:
        rows: states that have values for each row.
        shared: what the others start from.
        counts: those of them that count the steps.
    """

    rows: Mapping[str, RowState]
    shared: Mapping[str, Any]
    counts: frozenset[str]


class _Watched(dict[str, Any]):
    """The state of a parameter, remembering what each entry was at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.detach().clone() if isinstance(value, Tensor) else value
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **entries: Any) -> None:
        for key, value in dict(*others, **entries).items():
            self[key] = value


class _Trial:
    """An optimizer with one parameter to try it on."""

    def __init__(
        self, optimizer_class: Any, options: Mapping[str, Any], weights: Tensor, name: str
    ) -> None:
        self.parameter = torch.nn.Parameter(weights.clone())
        self.optimizer = optimizer_class([self.parameter], **options)
        self.name = name
        self.state = _Watched()
        self.state.update(self.optimizer.state.get(self.parameter, {}))
        self.optimizer.state[self.parameter] = self.state

    def step(self, gradient: Tensor) -> None:
        self.parameter.grad = as_gradient(self.optimizer, gradient)
        try:
            self.optimizer.step()
        except TypeError as error:
            if "closure" not in str(error):
                raise
            raise _refusal(self.name, "its step runs the model again") from None

    def has_rows(self, value: Any) -> bool:
        """Tell whether a state has values for each row."""
        return isinstance(value, Tensor) and value.shape[:1] == self.parameter.shape[:1]

    def of_rows(self) -> dict[str, Tensor]:
        """Return copies of the weights and of what is kept of each row."""
        kept = {key: value for key, value in self.state.items() if self.has_rows(value)}
        return {key: value.detach().clone() for key, value in {**kept, "": self.parameter}.items()}

    def only(self, rows: Sequence[int], options: Mapping[str, Any]) -> _Trial:
        """Return a trial that goes on from here with some of the rows."""
        index = list(rows)
        made = _Trial(type(self.optimizer), options, self.parameter.detach()[index], self.name)
        ours, theirs = self.optimizer.param_groups[0], made.optimizer.param_groups[0]
        theirs.update({key: value for key, value in ours.items() if key != "params"})
        made.state.clear()
        for key, value in self.state.items():
            if isinstance(value, Tensor):
                value = (value[index] if self.has_rows(value) else value).clone()
            made.state[key] = value
        return made


def as_gradient(optimizer: torch.optim.Optimizer, gradient: Tensor) -> Tensor:
    """Return a gradient of distinct rows as the optimizer takes it: sparse for SparseAdam."""
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return gradient
    rows = torch.arange(len(gradient), device=gradient.device)[None]
    return torch.sparse_coo_tensor(
        rows, gradient, gradient.shape, is_coalesced=True, check_invariants=False
    )


def probe(
    optimizer_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    *,
    dim: int,
    dtype: torch.dtype,
    device: str,
) -> StatePlan:
    """Return what an optimizer keeps of rows of `dim` elements, or say why it cannot train them.

    Raises InvalidInputError, naming the optimizer, if its state or update is not row by row.
    """
    name = optimizer_class.__name__
    for base in optimizer_class.__mro__:
        for word, reason in _REFUSED.items():
            if word in base.__name__.lower():
                raise _refusal(name, reason)
    draw = _drawing(dim, dtype, device, seed=0)
    trials = [_Trial(optimizer_class, options, draw(), name) for _ in range(2)]
    weights = trials[0].parameter.detach().clone()
    for trial in trials:
        trial.step(draw())
    rows, shared, counts = {}, {}, set()
    trials[1].step(draw())
    for key, value in trials[0].state.items():
        first = trials[0].state.first[key]
        if trials[0].has_rows(value):
            again = trials[1].state.first[key]
            signed = any(bool((trial.state[key] < 0).any()) for trial in trials)
            rows[key] = _row_state(name, key, first, again, weights, signed=signed)
        elif _is_number(value):
            shared[key] = first
            if _counts(first, [value, trials[1].state[key]]):
                counts.add(key)
        else:
            raise _refusal(name, f"its state {key!r} is {_kind(value)}, not values for each row")
    _check_rows(optimizer_class, options, dim, dtype, device)
    return StatePlan(rows, shared, frozenset(counts))


def ruinous_gradient(
    optimizer_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    *,
    dim: int,
    dtype: torch.dtype,
    device: str,
) -> float | None:
    """Return the largest gradient that an optimizer makes infinite or NaN rows of; None if none.

    It is tried on the powers of two of `dtype` up to 1, and on 0: where the square of a gradient
    and `eps` are both 0 in that type, a step divides by zero.
    """
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    powers = [2.0**-power for power in range(round(-math.log2(tiny)) + 1)]
    gradients = torch.tensor([*powers, 0.0]).to(device, dtype)[:, None].expand(-1, dim)
    trial = _Trial(optimizer_class, options, torch.zeros_like(gradients), optimizer_class.__name__)
    for _ in range(_RUINED_AFTER):
        trial.step(gradients.clone())
    ruined = ~trial.parameter.detach().isfinite().all(dim=1)
    return float(gradients[ruined].max()) if bool(ruined.any()) else None


def changes_unused(
    optimizer_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    *,
    dim: int,
    device: str,
) -> str | None:
    """Return when an optimizer of torch changes rows, or their state, that have no gradient.

    That is "always", as by weight decay, or "later", once they had one, as by momentum. None is
    never, as for SparseAdam, which is given the rows of a batch alone. `group` are options that
    replace others.
    """
    if issubclass(optimizer_class, torch.optim.SparseAdam):
        return None
    if "lr" in inspect.signature(optimizer_class).parameters:
        options = {**options, "lr": 0.1}
    # A small decay would round to none in float32, which others may have kernels for alone.
    is_torchs = optimizer_class.__module__.startswith("torch.optim.")
    draw = _drawing(dim, torch.float64 if is_torchs else torch.float32, device, seed=2)
    for steps, when in ((0, "always"), (2, "later")):
        trial = _Trial(optimizer_class, options, draw(), optimizer_class.__name__)
        own = {key: value for key, value in group.items() if key not in ("params", "lr")}
        trial.optimizer.param_groups[0].update(own)
        for _ in range(steps):
            trial.step(draw())
        before = trial.of_rows()
        trial.step(torch.zeros_like(trial.parameter))
        after = trial.of_rows()
        if any(not torch.equal(value, after[key]) for key, value in before.items()):
            return when
    return None


def _row_state(
    name: str, key: str, first: Tensor, again: Tensor, weights: Tensor, *, signed: bool
) -> RowState:
    shape, dtype = tuple(first.shape[1:]), first.dtype
    if not dtype.is_floating_point:
        raise _refusal(name, f"its state {key!r} is of {dtype}, and fields are of floats")
    initial = float(first.reshape(-1)[0])
    if bool((first == initial).all()) and bool((again == initial).all()):
        return RowState(shape, dtype, initial, late=False, signed=signed)
    if first.shape == weights.shape and torch.equal(first.to(weights), weights):
        raise _refusal(name, f"its state {key!r} starts as a copy of the weights")
    return RowState(shape, dtype, 0.0, late=True, signed=signed)


def _check_rows(
    optimizer_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    dim: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Raise InvalidInputError unless some rows alone step as they do among others.

    In float32 at least and with a large learning rate, so that a difference shows.
    """
    precise = torch.promote_types(dtype, torch.float32)
    if "lr" in inspect.signature(optimizer_class).parameters:
        options = {**options, "lr": 0.1}
    draw = _drawing(dim, precise, device, seed=1)
    every = _Trial(optimizer_class, options, draw(), optimizer_class.__name__)
    every.step(draw())
    some, gradient = every.only(_SOME, options), draw()
    some.step(gradient[_SOME])
    every.step(gradient)
    expected = every.only(_SOME, options)
    pairs = [(some.parameter, expected.parameter)]
    pairs += [(some.state.get(key), value) for key, value in expected.state.items()]
    for found, value in pairs:
        if isinstance(value, Tensor):
            same = isinstance(found, Tensor) and torch.allclose(found, value, rtol=1e-5, atol=1e-7)
        else:
            same = found == value
        if not same:
            raise _refusal(
                optimizer_class.__name__, "what it does to a row depends on the other rows too"
            )


def _drawing(dim: int, dtype: torch.dtype, device: str, seed: int) -> Callable[[], Tensor]:
    """Return a function that draws a few random rows; their number is never `dim`."""
    generator = torch.Generator().manual_seed(seed)
    rows = 5 if dim != 5 else 6
    return lambda: torch.randn(rows, dim, generator=generator).to(device, dtype)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(value.numel() == 1)
    return value is None or isinstance(value, bool | int | float | str)


def _counts(first: Any, after: Sequence[Any]) -> bool:
    """Tell whether a number is one more after each step."""
    if first is None or isinstance(first, bool | str):
        return False
    return [float(value) for value in after] == [float(first) + 1, float(first) + 2]


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _refusal(name: str, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name} cannot train a table a few rows at a time: {reason}. Adam, AdamW, Adagrad, "
        "RMSprop, SGD and most others of torch.optim can"
    )
