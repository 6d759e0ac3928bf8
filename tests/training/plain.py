"""Training without tiers: the torch optimizer on the distinct rows of each batch, all in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INITIAL = {"step_size": "lr", "sum": "initial_accumulator_value"}
"""States that start from an option of the optimizer; all others start from zero."""


class Plain:
    """Weights and the state of each row as whole tensors."""

    def __init__(self, weights: Tensor, optimizer: Any, options: dict[str, Any]) -> None:
        self.weights = weights.clone()
        self.rows: dict[str, Tensor] = {}
        self.shared: dict[str, Any] = {}
        self._optimizer = optimizer
        self._options = options

    def step(self, ids: Tensor, gradients: Tensor) -> None:
        rows, positions = torch.unique(ids, return_inverse=True)
        parameter = torch.nn.Parameter(self.weights[rows])
        (torch.nn.functional.embedding(positions, parameter) * gradients).sum().backward()
        optimizer = self._optimizer([parameter], **self._options)
        if self.rows or self.shared:
            optimizer.state[parameter] = {
                **self.shared,
                **{key: values[rows] for key, values in self.rows.items()},
            }
        if self._optimizer is torch.optim.SparseAdam:
            parameter.grad = parameter.grad.to_sparse(1)
        optimizer.step()
        self.weights[rows] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                if key not in self.rows:
                    fill = self._options.get(INITIAL.get(key, ""), 0)
                    self.rows[key] = torch.full_like(self.weights, fill, dtype=value.dtype)
                self.rows[key][rows] = value
            else:
                self.shared[key] = value
