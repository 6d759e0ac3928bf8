"""Steps on the records of many rows, each optimizer's as one program of torch's operators.

torch runs a program without the interpreter's lock. Threads that call one operator after another
pass that lock to each other at every call: four take twice the time of one, sixteen even more.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore.optim.row_wise import COLUMNS

__all__ = ["Program", "compiled"]

_PART_BYTES = 1 << 20
"""Bytes of records changed at a time, which stay in a processor's own cache meanwhile."""
_LONG_BYTES = 256
"""Bytes of a field from which on copying each apart pays off: operators on values without gaps take
less time, and fewer of them are needed."""

_NUMBERS = {
    "adam": "maximize: bool, decouples: bool, decay: float, rate: float, first: float, "
    "keep: float, second: float, deviation: float, eps: float, shrink: float",
    "row_wise": "maximize: bool, decay: float, rate: float, eps: float",
}
"""What each optimizer's step takes."""
_MEMORY = {"adam": ["least[:stop - at]"], "row_wise": []}
"""The memory that it takes besides, as it is called in the loop."""
# Operators have their full names: other libraries replace functions of torch. `fields` are those of
# some records, the weights first, `change` is the gradient, `root` memory of its shape, and `least`
# the epsilon of Adam for each of its numbers: to divide and add at once takes one pass less.
_UPDATES = f"""
def adam(
    fields: List[Tensor], change: Tensor, root: Tensor, least: Tensor, {_NUMBERS["adam"]}
):
    weight, mean, square = fields[0], fields[1], fields[2]
    if maximize:
        change = -change
    if decouples:
        weight.mul_(shrink)
    if decay != 0.0:
        change = change.add(weight, alpha=decay)
    mean.lerp_(change, first)
    if square.is_contiguous():
        square.mul_(keep)
        square.addcmul_(change, change, value=second)
        torch.ops.aten.sqrt(square, out=root)
    else:
        torch.ops.aten.mul(square, keep, out=root)
        root.addcmul_(change, change, value=second)
        square.copy_(root)
        root.sqrt_()
    divisor = torch.full([1], deviation, dtype=root.dtype).expand_as(root)
    torch.ops.aten.addcdiv(least, root, divisor, value=1.0, out=root)
    weight.addcdiv_(mean, root, value=rate)

def row_wise(fields: List[Tensor], change: Tensor, root: Tensor, {_NUMBERS["row_wise"]}):
    weight, total = fields[0], fields[1]
    dim = weight.size(1)
    if maximize:
        change = -change
    if decay != 0.0:
        change = change.add(weight, alpha=decay)
    torch.ops.aten.mul(change, change, out=root)
    rest = {COLUMNS - 1} - (dim - 1) % {COLUMNS}
    squares = torch.ops.aten.constant_pad_nd(root, [0, rest]) if rest > 0 else root
    sums = squares.narrow(1, 0, {COLUMNS})
    for part in range(1, squares.size(1) // {COLUMNS}):
        sums = sums + squares.narrow(1, part * {COLUMNS}, {COLUMNS})
    while sums.size(1) > 1:
        half = sums.size(1) // 2
        sums = sums.narrow(1, 0, half) + sums.narrow(1, half, half)
    total.add_(sums * (1.0 / float(dim)))
    torch.ops.aten.mul(change, rate, out=root)
    weight.addcdiv_(root, total.sqrt().add_(eps))
"""
_LOOP = """
def many_{name}(
    records: List[Tensor], slots: Tensor, gradient: Tensor, blocks: List[Tensor],
    values: List[Tensor], spare: Tensor, least: Tensor, {numbers}
):
    at = 0
    while at < slots.size(0):
        stop = min(at + spare.size(0), slots.size(0))
        here = slots[at:stop]
        for source, block in zip(records, blocks):
            torch.ops.aten.index_select(source, 0, here, out=block[:stop - at])
        fields: List[Tensor] = []
        for each in values:
            fields.append(each[:stop - at])
        {name}(fields, gradient[at:stop], spare[:stop - at], {given})
        for source, block in zip(records, blocks):
            source.index_copy_(0, here, block[:stop - at])
        at = stop
"""
_WORDS = {16: np.complex128, 8: np.float64, 4: np.float32}
"""By width: what records are copied as, the widest in the least time."""


@functools.cache
def compiled() -> Any:
    """Return the programs by name, which torch reads in 10 ms; None if it cannot.

    `adam` and `row_wise` change the fields of some records; `many_adam` and `many_row_wise`, for
    `Program`, the records themselves.
    """
    loops = [
        _LOOP.format(
            name=name,
            numbers=numbers,
            given=", ".join(
                [*_MEMORY[name], *(each.split(":")[0].strip() for each in numbers.split(","))]
            ),
        )
        for name, numbers in _NUMBERS.items()
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TorchScript's age
            return torch.jit.CompilationUnit("".join([_UPDATES, *loops]))
    except (AttributeError, RuntimeError):
        return None


class Program:
    """A step on a weight and its states, of one type, in the bytes `lo:hi` of a record.

    Its result is that of the operators one by one, to the bit.
    """

    def __init__(
        self,
        step: Callable[..., object],
        lo: int,
        hi: int,
        places: list[int],
        dims: list[int],
        storage: np.dtype[Any],
    ) -> None:
        """Take a compiled one, and where its fields are in those bytes, counted in elements."""
        self._step = step
        self._storage = storage
        self._dim = dims[0]
        size = storage.itemsize
        self._spans = [(lo, hi)]
        self._fields = [
            (0, slice(place, place + dim)) for place, dim in zip(places, dims, strict=True)
        ]
        if min(dims) * size >= _LONG_BYTES:  # each field apart
            starts = [lo + place * size for place in places]
            self._spans = [(at, at + dim * size) for at, dim in zip(starts, dims, strict=True)]
            self._fields = [(number, slice(dim)) for number, dim in enumerate(dims)]
        self._rows = max(1, _PART_BYTES // (hi - lo))
        self._own = threading.local()

    def run(
        self,
        records: npt.NDArray[np.uint8],
        slots: npt.NDArray[np.integer[Any]],
        gradient: Tensor,
        numbers: Any,
    ) -> None:
        """Change the records in `slots` `(n,)`, distinct, of all `(slots, record_bytes)`.

        `gradient` is `(n, dim)`; `numbers` are what the program takes, a tuple in its order, whose
        epsilon is its `eps`.
        """
        width = math.gcd(*itertools.chain(*self._spans), records.shape[1], 16)
        word = np.dtype(_WORDS[width])
        words = records.view(word)
        blocks, spare, least = self._room(numbers.eps)
        self._step(
            [torch.from_numpy(words[:, lo // width : hi // width]) for lo, hi in self._spans],
            torch.from_numpy(np.ascontiguousarray(slots, np.int64)),
            gradient,
            [torch.from_numpy(block.view(word)) for block in blocks],
            [
                torch.from_numpy(blocks[number].view(self._storage)[:, part])
                for number, part in self._fields
            ],
            torch.from_numpy(spare),  # made each time: one of inference mode has no other use
            torch.from_numpy(least),
            *numbers,
        )

    def _room(
        self, eps: float
    ) -> tuple[list[npt.NDArray[np.uint8]], npt.NDArray[Any], npt.NDArray[Any]]:
        """Return memory that a thread keeps.

        For the spans of some records; for one field of them; and of the shape of that field, filled
        with `eps`.
        """
        own = self._own
        if not hasattr(own, "blocks"):
            own.spare = np.empty((self._rows, self._dim), self._storage)
            own.least, own.eps = np.empty_like(own.spare), None
            own.blocks = [np.empty((self._rows, hi - lo), np.uint8) for lo, hi in self._spans]
        if own.eps != eps:
            own.least.fill(eps)
            own.eps = eps
        return own.blocks, own.spare, own.least
