"""What a layer of torch is: its weight and options, or why a layer over a table cannot be it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from tierstore.errors import InvalidInputError, InvalidTypeError


def taken_over(
    given: object, kind: type[torch.nn.Module], layer: type[torch.nn.Module]
) -> tuple[Tensor, dict[str, Any]]:
    """Return the weight `(rows, dim)` of a layer of torch, and its options that `layer` takes.

    A weight alone has no options. Raises InvalidInputError for a layer that does what one of
    `kind` does not, or something of its own with its rows.
    """
    if isinstance(given, Tensor):
        return _matrix(given), {}
    if not isinstance(given, torch.nn.Embedding | torch.nn.EmbeddingBag):
        raise InvalidTypeError(
            f"{layer.__name__}.from_pretrained takes a weight, or an nn.{kind.__name__} that has "
            f"it, not {type(given).__name__}"
        )
    own = _own_ways(given, kind)
    if own is not None:
        raise InvalidInputError(
            f"this {type(given).__name__} {own}, which a {layer.__name__} would drop: give its "
            "weight alone, layer.weight, and do the rest around the new layer"
        )
    names = {*kind.__constants__} & {*inspect.signature(layer).parameters}
    return _matrix(given.weight), {name: getattr(given, name) for name in names}


def _own_ways(layer: torch.nn.Module, kind: type[torch.nn.Module]) -> str | None:
    """Return what a layer does with its rows that one of a kind of torch does not, or None."""
    if not isinstance(layer, kind):
        return "pools bags" if kind is torch.nn.Embedding else "does not pool"
    if hasattr(layer, "parametrizations"):
        return "has a parametrization of its weight"
    if type(layer).forward is not kind.forward:
        return "has a forward of its own"
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks)
    if any((*hooks, layer._backward_pre_hooks)):
        return "has hooks"
    return None


def _matrix(weight: Tensor) -> Tensor:
    if weight.ndim != 2:
        raise InvalidTypeError(
            f"a weight has the shape (rows, dim), not {tuple(weight.shape)}: {weight.ndim} "
            "dimensions are no rows"
        )
    return weight
