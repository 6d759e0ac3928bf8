"""Adam on the records of many rows, as one program of torch's operators.

torch runs a program without the interpreter's lock. Threads that call one operator after another
hand that lock to each other at every call: four take twice the time of one, sixteen even more.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Program", "compiled"]

_PART_BYTES = 512 << 10
"""Bytes of records changed at a time, which stay in a processor's own cache meanwhile."""

# Operators have their full names: other libraries replace functions of torch.
_SOURCE = """
def adam(
    records: Tensor, slots: Tensor, gradient: Tensor, block: Tensor, fields: Tensor, spare: Tensor,
    places: List[int], maximize: bool, decouples: bool, decay: float, rate: float, first: float,
    keep: float, second: float, deviation: float, eps: float, shrink: float
) -> int:
    dim, at = spare.size(1), 0
    while at < slots.size(0):
        stop = min(at + block.size(0), slots.size(0))
        here, items, change = slots[at:stop], block[:stop - at], gradient[at:stop]
        torch.ops.aten.index_select(records, 0, here, out=items)
        values = fields[:stop - at]
        weight = values.narrow(1, places[0], dim)
        mean = values.narrow(1, places[1], dim)
        square = values.narrow(1, places[2], dim)
        if maximize:
            change = -change
        if decouples:
            weight.mul_(shrink)
        if decay != 0.0:
            change = change.add(weight, alpha=decay)
        mean.lerp_(change, first)
        root = spare[:stop - at]
        torch.ops.aten.mul(square, keep, out=root)
        root.addcmul_(change, change, value=second)
        square.copy_(root)
        root.sqrt_()
        root.div_(deviation).add_(eps)
        weight.addcdiv_(mean, root, value=rate)
        records.index_copy_(0, here, items)
        at = stop
    return at
"""
_WORDS = {16: np.complex128, 8: np.float64, 4: np.float32}
"""By width: what records are copied as, the widest in the least time."""


@functools.cache
def compiled() -> Any:
    """Return the program for `Program`, which torch reads in 4 ms; None if it cannot."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TorchScript's age
            return torch.jit.CompilationUnit(_SOURCE).adam
    except (AttributeError, RuntimeError):
        return None


class Program:
    """Adam on three fields of one type in the bytes `lo:hi` of a record.

    Its result is that of the operators one by one, to the bit.
    """

    def __init__(
        self,
        adam: Callable[..., None],
        lo: int,
        hi: int,
        places: list[int],
        dim: int,
        storage: np.dtype[Any],
    ) -> None:
        """Take where the weight and both states are in those bytes, counted in elements."""
        self._adam = adam
        self._span = lo, hi
        self._places = places
        self._dim = dim
        self._storage = storage
        self._own = threading.local()

    def run(
        self,
        records: npt.NDArray[np.uint8],
        slots: npt.NDArray[np.integer[Any]],
        gradient: Tensor,
        numbers: tuple[Any, ...],
    ) -> None:
        """Change the records in `slots` `(n,)`, distinct, of all `(slots, record_bytes)`.

        `gradient` is `(n, dim)`; `numbers` are what the program takes, in its order.
        """
        lo, hi = self._span
        width = math.gcd(lo, hi, records.shape[1], 16)
        word = np.dtype(_WORDS[width])
        window = records.view(word)[:, lo // width : hi // width]
        block, spare = self._room()
        self._adam(
            torch.from_numpy(window),
            torch.from_numpy(np.ascontiguousarray(slots, np.int64)),
            gradient,
            torch.from_numpy(block.view(word)),
            torch.from_numpy(block.view(self._storage)),
            torch.from_numpy(spare),  # each time: a tensor of inference mode is of no other use
            self._places,
            *numbers,
        )

    def _room(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
        """Return memory for some records, and for one field of them, that a thread keeps."""
        if not hasattr(self._own, "room"):
            lo, hi = self._span
            rows = max(1, _PART_BYTES // (hi - lo))
            spare = np.empty((rows, self._dim), self._storage)
            self._own.room = np.empty((rows, hi - lo), np.uint8), spare
        room: tuple[npt.NDArray[np.uint8], npt.NDArray[Any]] = self._own.room
        return room
