"""Adagrad with one sum for each row of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["RowWiseAdagrad", "update"]

COLUMNS = 32
"""Squares of a row that are summed side by side, at first."""


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad whose state is one number for each row: the mean square of the row's gradients.

    A row's elements share their learning rate, and its state takes 4 bytes where Adagrad's takes as
    much as the row. Rows are those of tables and of two-dimensional parameters, such as the weight
    of an `nn.Linear`; parameters of other shapes, such as biases, have none and are trained as by
    `torch.optim.Adagrad`. All arguments are those of that class.

    >>> opt = tierstore.optim.TieredOptimizer(RowWiseAdagrad, [emb], lr=0.05)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        """Start every row's sum from `initial_accumulator_value`."""
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                shape = parameter.shape[:1] if parameter.ndim == 2 else parameter.shape
                self.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "sum": parameter.new_full(shape, group["initial_accumulator_value"]),
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; return what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        rate = -group["lr"] / (1 + (state["step"].item() - 1) * group["lr_decay"])
        update(
            parameter,
            state["sum"],
            gradient,
            maximize=group["maximize"],
            decay=group["weight_decay"],
            rate=rate,
            eps=group["eps"],
        )


def update(
    weight: Tensor,
    total: Tensor,
    gradient: Tensor,
    *,
    maximize: bool,
    decay: float,
    rate: float,
    eps: float,
) -> None:
    """Take a step on weights `(rows, dim)` and their sums `(rows,)`; `rate` is below zero.

    Weights of another shape have a sum for each element.
    """
    if maximize:
        gradient = -gradient
    if decay != 0:
        gradient = gradient.add(weight, alpha=decay)
    if gradient.ndim != 2:
        total.addcmul_(gradient, gradient)
        weight.addcdiv_(gradient, total.sqrt().add_(eps), value=rate)
        return
    total += _mean_squares(gradient)
    deviation = total.sqrt().add_(eps)
    weight.addcdiv_(gradient * rate, deviation[:, None])


def _mean_squares(gradient: Tensor) -> Tensor:
    """Return the mean square of each row, summed in an order that a kernel can follow."""
    rows, dim = gradient.shape
    squares = gradient * gradient
    if dim % COLUMNS:
        squares = torch.nn.functional.pad(squares, (0, -dim % COLUMNS))
    parts = squares.reshape(rows, -1, COLUMNS).unbind(1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    while total.shape[1] > 1:
        left, right = total.chunk(2, 1)
        total = left + right
    return total[:, 0] * (1 / dim)
