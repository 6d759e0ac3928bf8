"""Ids that are recognized: they distinguish a batch that was announced from others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Known:
    """Flat ids that are recognized: on a host by their values, on a device by where they are.

    On a device, a comparison of values would wait. Their memory is kept, so that no other
    ids get it, and torch counts the writes to it.
    """

    def __init__(self, *ids: Tensor) -> None:
        """Remember ids, which may be in several tensors."""
        parts = _parts(ids)
        self._ids = [each.clone() if on_host(each) else each.detach() for each in parts]
        self._what = list(map(_what, parts))

    def is_as(self, *ids: Tensor) -> bool:
        """Tell whether ids are these, and not known to be written since."""
        parts = _parts(ids)
        return self._what == list(map(_what, parts)) and all(map(_is_equal, self._ids, parts))


def on_host(ids: Tensor) -> bool:
    """Tell whether ids are on the host, where they can be compared."""
    there: bool = ids.is_cpu
    return there


def _parts(ids: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that hold ids; a nested one has no memory of its own."""
    parts: list[Tensor] = []
    for each in ids:
        if each.layout == torch.jagged:
            lengths = each.lengths()
            parts += [each.values(), each.offsets()]
            parts += [] if lengths is None else [lengths]
        else:
            parts.append(each)
    return parts


def _what(ids: Tensor) -> object:
    """Return the type of ids and how many there are; on a device, where and how often written, too.

    They are flat, in whatever shape they come. Return an object that equals no other for tensors
    of a device whose writes torch does not count.
    """
    if on_host(ids):
        return ids.dtype, ids.numel()
    if ids.is_nested:
        return object()
    try:
        writes = ids._version
    except RuntimeError:  # within `torch.inference_mode`
        return object()
    layout = None if ids.is_contiguous() else (ids.shape, ids.stride())
    return ids.dtype, ids.numel(), ids.device, ids.data_ptr(), writes, layout


def _is_equal(own: Tensor, ids: Tensor) -> bool:
    """Tell whether ids on a host are equal; those on a device are recognized by where they are."""
    if not on_host(own):
        return True
    same: bool = torch.equal(ids.reshape(-1), own.reshape(-1))
    return same
