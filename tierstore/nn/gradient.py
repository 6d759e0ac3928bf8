"""Summing the gradients of a batch's ids by row."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tierstore.table.access import Lease
from tierstore.table.device_lease import DeviceLease
from tierstore.tier.gpu.source import on_records

__all__ = ["sum_by_row", "summed"]

_EXACT = (torch.float32, torch.float64)
"""Types that `index_add_` sums as that operator does on the CPU, in half the time."""


def sum_by_row(values: Tensor, positions: Tensor, bound: int) -> Tensor:
    """Add row i of `values` `(n, dim)` to row `positions[i]` of `(bound, dim)`, unless negative.

    In the order of i, so the result is that of the operator `torch.nn.Embedding` sums its gradient
    with, to the last bit.
    """
    if values.device.type == "cpu" and values.dtype in _EXACT:
        total = values.new_zeros(bound + 1, values.shape[1])  # the last is for negative positions
        return total.index_add_(0, positions.remainder(bound + 1), values)[:bound]
    return torch.ops.aten.embedding_dense_backward(values, positions, bound, -1, False)


def summed(values: Tensor, lease: Lease, positions: Tensor | None) -> Tensor:
    """Do the same for the distinct rows of a lease, `(lease.bound, dim)`.

    Where `positions` is None they are those of the lease's ids. On a GPU float32 is added as it
    comes, which is several times faster, in no particular order and leaving what is behind the
    distinct rows undefined; `torch.use_deterministic_algorithms(True)` brings the order back.
    """
    ordered = torch.are_deterministic_algorithms_enabled()
    if ordered or values.dtype != torch.float32 or not isinstance(lease, DeviceLease):
        if positions is None:
            positions = torch.as_tensor(lease.positions)
        return sum_by_row(values, positions.reshape(-1), lease.bound)
    values = values.contiguous()
    dim = values.shape[1]
    total = values.new_empty(lease.bound, dim)
    work = _Sum(values.data_ptr(), total.data_ptr(), dim)
    macros = {"VECTOR": 4 if (4 * dim | values.data_ptr()) % 16 == 0 else 1}
    source = on_records("tierstore.nn", "sum.cu")
    lease.run(lease.device.load(source, "clear", macros), work, lease.bound)
    add = lease.device.load(source, "sum", macros)
    given = None if positions is None else (positions.data_ptr(), len(values))
    lease.run(add, work, len(values), positions=given)
    return total


class _Sum(ctypes.Structure):
    """`struct Sum`."""

    _fields_ = (("each", ctypes.c_uint64), ("total", ctypes.c_uint64), ("dim", ctypes.c_uint32))
