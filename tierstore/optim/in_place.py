"""Steps of an optimizer on the records of a batch, where they are: which, and with what numbers.

They save copying weights and state out of the records and back, and a pass over them for every
operation. step.cu computes them on a GPU as torch does there for lists of tensors, and the core on
the host as torch does there for one tensor after another: the same formulas, of the same numbers,
rounded where torch rounds, to the bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierstore._table.joint import JointTable
from tierstore._table.table import Table
from tierstore.nn.zeros import Zeros
from tierstore.optim.on_device import DeviceStep
from tierstore.optim.on_host import OnHost
from tierstore.optim.rounding import Rounding
from tierstore.optim.row_wise import RowWiseAdagrad
from tierstore.spec import RecordLayout

__all__ = ["InPlace"]

Group = Mapping[str, Any]
"""The options of an optimizer."""


@dataclass(frozen=True)
class _Rule:
    """An optimizer that step.cu knows.

    Attributes:
        name: what step.cu calls it.
        states: the names of its states, in the kernel's order.
        flags: macros.
        numbers: what a step needs, from the options and the number of the step, counted from 1.
    """

    name: str
    states: Callable[[Group], tuple[str, ...]]
    flags: Callable[[Group], dict[str, bool]]
    numbers: Callable[[Group, float], tuple[float, ...]]


class InPlace:
    """The step for a field of a table, for as long as the options of the optimizer allow it."""

    def __init__(
        self,
        optimizer_class: type,
        table: Table | JointTable,
        field: str,
        states: Mapping[str, str],
        *,
        rounding: Rounding,
    ) -> None:
        """Compile nothing yet; `states` are the fields of the optimizer's states."""
        self._rule = _RULES.get(optimizer_class)
        self._table = table
        self._field = field
        self._states = states
        self._rounding = rounding
        self._found: dict[tuple[Any, ...], DeviceStep | OnHost | None] = {}
        self._layout: RecordLayout | None = None

    def step(
        self,
        lease: Any,
        gradient: Tensor,
        trained: Tensor | None,
        group: Group,
        step: int,
        ids: Callable[[], Tensor],
        *,
        ends: bool = False,
        zeros: Zeros | None = None,
    ) -> bool:
        """Update the distinct rows of a lease, of those `trained` if given.

        Args:
            lease: the lease.
            gradient: of its rows, `(bound, dim)`.
            trained: bool `(bound, 1)`.
            group: the options.
            step: the number of the step, counted from 1.
            ids: returns what decides how the rows round at random, int64 `(bound,)`.
            ends: whether the lease may end with the step; on the host it goes on.
            zeros: gets the gradient, once the step has cleared it; only where all rows are trained.

        Returns False, having done nothing, where this is left to torch's optimizer: for another
        class, for types that differ, and for options that require another way; on the host also for
        rows that are not in the host tier.
        """
        kind = OnHost if lease.device is None else DeviceStep
        if self._rule is None or not kind.takes(group):
            return False
        layout = self._table.spec.layout
        if layout is not self._layout:
            self._found.clear()
            self._layout = layout
        states, flags = self._rule.states(group), self._rule.flags(group)
        key = (kind, states, *flags.values())
        if key not in self._found:
            self._found[key] = None
            if set(states) == set(self._states):
                names = (self._field, *map(self._states.__getitem__, states))
                self._found[key] = kind.of(
                    self._rule.name, layout, names, flags, self._rounding, states
                )
        found = self._found[key]
        if found is None:
            return False
        numbers = self._rule.numbers(group, step)
        return found.step(lease, gradient, trained, numbers, step, ids, ends=ends, zeros=zeros)


def _sgd(group: Group, step: float) -> tuple[float, ...]:
    undamped = 1 - group["dampening"]
    return group["weight_decay"], -group["lr"], group["momentum"], undamped, float(step == 1)


def _decouples(group: Group, kind: type) -> bool:
    """Tell whether the decay is of the weights themselves; torch before 2.7 tells by the class."""
    return bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW))


def _adam(kind: type, group: Group, step: float) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    lr, decay = group["lr"], group["weight_decay"]
    return (
        0.0 if decay == 0 or _decouples(group, kind) else decay,
        -(lr / (1 - beta1**step)),
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        group["eps"],
        1 - lr * decay,
    )


def _adagrad(group: Group, step: float) -> tuple[float, ...]:
    rate = -group["lr"] / (1 + (step - 1) * group["lr_decay"])
    return group["weight_decay"], rate, group["eps"]


def _rmsprop(group: Group, step: float) -> tuple[float, ...]:
    alpha = group["alpha"]
    return (
        group["weight_decay"],
        -group["lr"],
        alpha,
        1 - alpha,
        group["eps"],
        group["momentum"],
    )


def _rmsprop_states(group: Group) -> tuple[str, ...]:
    centered = ("grad_avg",) if group["centered"] else ()
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    return ("square_avg", *centered, *momentum)


_SGD = _Rule(
    "SGD",
    lambda group: ("momentum_buffer",) if group["momentum"] != 0 else (),
    lambda group: {
        "MAXIMIZE": group["maximize"],
        "MOMENTUM": group["momentum"] != 0,
        "NESTEROV": group["nesterov"],
    },
    _sgd,
)


def _adam_rule(kind: type) -> _Rule:
    return _Rule(
        "ADAM",
        lambda group: (
            "exp_avg",
            "exp_avg_sq",
            *(("max_exp_avg_sq",) if group["amsgrad"] else ()),
        ),
        lambda group: {
            "MAXIMIZE": group["maximize"],
            "DECOUPLED": _decouples(group, kind),
            "AMSGRAD": group["amsgrad"],
        },
        functools.partial(_adam, kind),
    )


_ADAGRAD = _Rule(
    "ADAGRAD", lambda _: ("sum",), lambda group: {"MAXIMIZE": group["maximize"]}, _adagrad
)
_RMSPROP = _Rule(
    "RMSPROP",
    _rmsprop_states,
    lambda group: {
        "MAXIMIZE": group["maximize"],
        "CENTERED": group["centered"],
        "MOMENTUM": group["momentum"] > 0,
    },
    _rmsprop,
)
_RULES: dict[type, _Rule] = {
    torch.optim.SGD: _SGD,
    torch.optim.Adam: _adam_rule(torch.optim.Adam),
    torch.optim.AdamW: _adam_rule(torch.optim.AdamW),
    torch.optim.Adagrad: _ADAGRAD,
    torch.optim.RMSprop: _RMSPROP,
    RowWiseAdagrad: dataclasses.replace(_ADAGRAD, name="ROWWISE"),
}
