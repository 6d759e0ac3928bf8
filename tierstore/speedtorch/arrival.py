"""A tensor on its way to the host."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Arrival"]


class Arrival:
    """A copy of a tensor to host memory, begun and not waited for.

    The copy goes behind the work in the current stream, into pinned memory that torch keeps for the
    next one; the program goes on meanwhile.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Begin to copy; a tensor in host memory has arrived."""
        tensor = tensor.detach()
        self._event: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._copy = tensor
            return
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def done(self) -> bool:
        """Tell, without waiting, whether it is there."""
        return self._event is None or bool(self._event.query())

    def result(self) -> npt.NDArray[Any]:
        """Wait until it is there, and return it as a NumPy array."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._copy.numpy()
        return array
