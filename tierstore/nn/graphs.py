"""How collections look features up within a graph of torch.compile or torch.export.

Features are joined by operators that a graph knows, and each layer looks its own up by one of
`compiling`, which the graph does not look into.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tierstore._table.joint import Features
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.nn import compiling
from tierstore.nn.compiling import Asked
from tierstore.nn.jagged import joined_weights

Layers: TypeAlias = Sequence[tuple[Any, Features]]
"""Each layer with the features that it looks up."""


class Given(NamedTuple):
    """The ids of one feature.

    Attributes:
        ids: `(n,)`.
        starts: where each bag begins among them, `(bags,)`; None for rows.
        weights: a factor for each id, or None.
    """

    ids: Tensor
    starts: Tensor | None = None
    weights: Tensor | None = None


def look_up(
    layers: Layers, given: Mapping[str, Given], padding: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the rows of each feature, `(n, dim)`; `padding` names the ids that have none."""
    found: dict[str, Tensor] = {}
    for layer, features in layers:
        names = features.names
        ids, lengths = _joined(given, names)
        asked = Asked(features, lengths, [padding.get(name, -1) for name in names])
        rows = compiling.look_up(ids, layer, asked)
        found.update(zip(names, rows.split(lengths), strict=True))
    return {name: found[name] for name in given}


def pool(
    layers: Layers,
    given: Mapping[str, Given],
    padding: Mapping[str, int],
    modes: Mapping[str, str],
) -> dict[str, Tensor]:
    """Return the pooled row of each bag, by feature, `(batch, dim)`, layer by layer."""
    found: dict[str, Tensor] = {}
    if not layers:
        raise InvalidInputError("a call needs the bags of at least one feature")
    dtype = layers[0][0].anchor.dtype
    for layer, _ in layers:
        dtype = torch.promote_types(dtype, layer.anchor.dtype)
    for layer, features in layers:
        names = features.names
        ids, lengths = _joined(given, names)
        pads = [padding.get(name, -1) for name in names]
        asked = Asked(features, lengths, pads, tuple([modes[name] for name in names]))
        own = [given[name] for name in names]
        weights = joined_weights([each.ids for each in own], [each.weights for each in own])
        offsets = _offsets(given, names, lengths)
        columns = compiling.look_up(ids, layer, asked, offsets, weights, dtype)
        found.update(zip(names, columns.split(layer.embedding_dim, 1), strict=True))
    return found


def _joined(given: Mapping[str, Given], names: Sequence[str]) -> tuple[Tensor, list[int]]:
    """Return the ids of features as one tensor, int64, and how many each has."""
    every = [given[name].ids for name in names]
    for name, ids in zip(names, every, strict=True):
        if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
            raise InvalidTypeError(
                f"row ids are whole numbers; those of feature {name!r} are {ids.dtype}"
            )
    whole = every[0] if len(every) == 1 else torch.cat(every)
    return whole.to(torch.int64).contiguous(), [ids.shape[0] for ids in every]


def _offsets(given: Mapping[str, Given], names: Sequence[str], lengths: Sequence[int]) -> Tensor:
    """Return where bags begin among the ids of features, and where the last one ends."""
    begins = [0, *itertools.accumulate(lengths)]
    starts = [given[name].starts for name in names]
    moved = [
        each.to(torch.int64) + begin
        for each, begin in zip(starts, begins, strict=False)
        if each is not None
    ]
    return torch.cat([*moved, moved[0].new_full((1,), begins[-1])])
