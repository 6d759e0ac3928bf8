"""Ids that are recognized: they distinguish a batch that was announced from others."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Known", "on_host"]


class Known:
    """Flat ids that are recognized: on a host by their values, on a device by where they are.

    On a device, a comparison of values would wait. Their memory is kept, so that no other
    ids get it, and torch counts the writes to it.
    """

    def __init__(self, *ids: Tensor) -> None:
        """Remember ids, which may be in several tensors."""
        self._ids = [each.clone() if on_host(each) else each.detach() for each in ids]
        self._where = [_where(each) for each in ids]

    def is_as(self, *ids: Tensor) -> bool:
        """Tell whether ids are these, and not known to be written since."""
        if len(ids) != len(self._ids):
            return False
        return all(map(self._is_same, self._ids, self._where, ids))

    @staticmethod
    def _is_same(own: Tensor, where: object, ids: Tensor) -> bool:
        if ids.device != own.device or ids.dtype != own.dtype or ids.numel() != own.numel():
            return False
        if on_host(ids):
            same: bool = torch.equal(ids.reshape(-1), own.reshape(-1))
            return same
        return where == _where(ids)


def on_host(ids: Tensor) -> bool:
    """Tell whether ids are on the host, where they can be compared."""
    kind: str = ids.device.type
    return kind == "cpu"


def _where(ids: Tensor) -> object:
    """Return where ids are in memory, in whatever shape, and how often that was written.

    For tensors whose writes torch does not count, return an object that equals no other.
    """
    if ids.is_inference():
        return object()
    layout = None if ids.is_contiguous() else (ids.shape, ids.stride())
    return ids.data_ptr(), ids._version, layout
