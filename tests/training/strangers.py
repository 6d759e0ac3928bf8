"""Optimizers that are not torch's: some can train rows, some cannot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Simple(torch.optim.Optimizer):
    """Calls `update(parameter, gradient, state, lr)` for each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group["lr"])

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class Lion(_Simple):
    """Sign of a running mean; counts its steps in a Python int."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
        state["step"] += 1
        mean = state["exp_avg"]
        p.sub_((0.9 * mean + 0.1 * g).sign(), alpha=lr)
        mean.lerp_(g, 0.01)


class RowWiseAdagrad(_Simple):
    """One sum of squares a row."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["sum"] = p.new_full((len(p),), 0.5)
        state["sum"] += g.square().mean(1)
        p.sub_(lr * g / state["sum"].sqrt()[:, None])


class Halves(_Simple):
    """State of another width than the rows, made in the constructor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(mean=p.new_zeros(len(p), 2, p.shape[1] // 2))

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state["mean"].lerp_(g.reshape(state["mean"].shape), 0.5)
        p.sub_(lr * state["mean"].reshape(p.shape))


class Trusting(_Simple):
    """Scales a step by norms of the whole parameter, under a name that does not tell."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        p.sub_(lr * g * p.norm() / g.norm())


class Noisy(_Simple):
    """Adds noise."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        p.sub_(lr * (g + torch.randn_like(g)))


class Anchored(_Simple):
    """Remembers where the weights started."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["start"] = p.clone()
        p.sub_(lr * (g + p - state["start"]))


class Listing(_Simple):
    """Keeps a list."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state.setdefault("all", []).append(1)
        p.sub_(lr * g)


class ByColumn(_Simple):
    """Keeps a value for each column."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state.setdefault("columns", torch.zeros(p.shape[1])).add_(g.square().sum(0))
        p.sub_(lr * g)


class Counting(_Simple):
    """Keeps whole numbers."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state.setdefault("seen", torch.zeros(p.shape, dtype=torch.int64)).add_(1)
        p.sub_(lr * g)


class Searching(_Simple):
    """Runs the model again in a step."""

    def step(self, closure: Any) -> None:
        closure()


class FusedLAMB(_Simple):
    """Refused by its name."""
