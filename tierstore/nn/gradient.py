"""Summing the gradients of a batch's ids by row."""

from __future__ import annotations

import ctypes
import functools
from importlib.resources import files

import torch
from torch import Tensor

from tierstore.table.access import Lease

__all__ = ["sum_by_row", "summed"]


def sum_by_row(values: Tensor, positions: Tensor, bound: int) -> Tensor:
    """Add row i of `values` `(n, dim)` to row `positions[i]` of `(bound, dim)`, unless negative.

    In the order of i, with the operator that `torch.nn.Embedding` sums its gradient with.
    """
    return torch.ops.aten.embedding_dense_backward(values, positions, bound, -1, False)


def summed(values: Tensor, lease: Lease, positions: Tensor) -> Tensor:
    """Do the same for the distinct rows of a lease, `(lease.bound, dim)`.

    On a GPU float32 is added as it comes, which is several times faster, in no particular order and
    leaving what is behind the distinct rows undefined; `torch.use_deterministic_algorithms(True)`
    brings the order back.
    """
    run = getattr(lease, "run", None)
    ordered = torch.are_deterministic_algorithms_enabled()
    if run is None or ordered or values.dtype != torch.float32:
        return sum_by_row(values, positions, lease.bound)
    values = values.contiguous()
    total = values.new_empty(lease.bound, values.shape[1])
    dim = values.shape[1]
    work = _Sum(values.data_ptr(), total.data_ptr(), dim)
    vector = 4 if (dim * 4 | values.data_ptr()) % 16 == 0 else 1
    load = functools.partial(lease.device.load, _source(), macros={"VECTOR": vector})  # type: ignore[attr-defined]
    run(load("clear"), work, lease.bound)
    run(load("sum"), work, len(values), positions=(positions.data_ptr(), len(values)))
    return total


class _Sum(ctypes.Structure):
    """`struct Sum`."""

    _fields_ = (("each", ctypes.c_uint64), ("total", ctypes.c_uint64), ("dim", ctypes.c_uint32))


@functools.cache
def _source() -> str:
    return files("tierstore.nn").joinpath("sum.cu").read_text()
