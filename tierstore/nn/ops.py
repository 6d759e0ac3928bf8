"""The lookup as an autograd function, and as operators that torch.compile takes into its graphs.

The function costs the host less; the operators are what a graph is made of. An operator takes
tensors and numbers, so a module goes by a number, and the batch that a lookup leaves for its
backward pass by a ticket: a tensor of one number whose memory owns the batch. When autograd lets go
of the ticket, used or not, the batch ends. The tables below only help to find them and keep nothing
alive.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tierstore.errors import ClosedError
from tierstore.guard import interrupts_deferred
from tierstore.nn.batch import Batch

__all__ = ["Lookup", "deposit", "lookup", "read", "register"]


class Module(Protocol):
    """What the operators ask of a module."""

    def lease_rows(self, ids: Tensor) -> Batch:
        """Lease the rows of ids whose gradient may come."""

    def rows_of(self, batch: Batch) -> Tensor:
        """Return the row of each id of a batch."""

    def read_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids that take no part in training."""

    def take_gradient(self, batch: Batch, gradient: Tensor) -> None:
        """Take the gradient of each id's row."""


class Lookup(torch.autograd.Function):
    """Look up rows outside graphs; the batch lives as long as autograd's own graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, module: Module) -> Tensor:
        """Return the row of each id, `ids.shape + (dim,)`, as `lookup` does."""
        with interrupts_deferred():  # once for all that follows
            ctx.batch, ctx.module = module.lease_rows(ids), module
            rows = module.rows_of(ctx.batch).to(anchor)
        ctx.save_for_backward(anchor)
        return rows.reshape(*ids.shape, anchor.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Give the module the gradient of the rows; the anchor's own is empty."""
        (anchor,) = ctx.saved_tensors
        ctx.module.take_gradient(ctx.batch, gradient.reshape(-1, anchor.shape[1]))
        return torch.empty_like(anchor), None, None


_numbers = itertools.count(1)
_modules: weakref.WeakValueDictionary[int, Module] = weakref.WeakValueDictionary()
_batches: weakref.WeakValueDictionary[int, Batch] = weakref.WeakValueDictionary()


def register(module: Module) -> int:
    """Give a module a number for the operators, valid as long as the module lives."""
    number = next(_numbers)
    _modules[number] = module
    return number


class _Owner(np.ndarray[Any, Any]):
    """Memory of a ticket, which owns the batch."""

    batch: Batch


def _ticket(batch: Batch) -> Tensor:
    number = next(_numbers)
    memory = np.array(number, np.int64).view(_Owner)
    memory.batch = batch
    _batches[number] = batch
    return torch.from_numpy(memory)


@torch.library.custom_op("tierstore::lookup", mutates_args=())
def lookup(ids: Tensor, anchor: Tensor, module: int) -> tuple[Tensor, Tensor]:
    """Return the row of each id, `ids.shape + (dim,)`, and the ticket of the batch.

    Rows come as the anchor is: of its type, on its device, with its `dim`.
    """
    found = _modules[module]
    batch = found.lease_rows(ids)
    rows = found.rows_of(batch).to(anchor)
    return rows.reshape(*ids.shape, anchor.shape[1]), _ticket(batch)


@torch.library.custom_op("tierstore::deposit", mutates_args=())
def deposit(gradient: Tensor, ticket: Tensor, anchor: Tensor, module: int) -> Tensor:
    """Give a module the gradient of a lookup's rows; return the anchor's own, which is empty."""
    batch = _batches.get(int(ticket))
    if batch is None:
        raise ClosedError("the batch of this lookup has ended; run the forward pass again")
    _modules[module].take_gradient(batch, gradient.reshape(-1, anchor.shape[1]))
    return torch.empty_like(anchor)


@torch.library.custom_op("tierstore::read", mutates_args=())
def read(ids: Tensor, anchor: Tensor, module: int) -> Tensor:
    """Return the row of each id, `ids.shape + (dim,)`, outside training."""
    return _modules[module].read_rows(ids).to(anchor)


@lookup.register_fake
def _(ids: Tensor, anchor: Tensor, module: int) -> tuple[Tensor, Tensor]:
    return anchor.new_empty((*ids.shape, anchor.shape[1])), torch.empty((), dtype=torch.int64)


@deposit.register_fake
def _(gradient: Tensor, ticket: Tensor, anchor: Tensor, module: int) -> Tensor:
    return torch.empty_like(anchor)


@read.register_fake
def _(ids: Tensor, anchor: Tensor, module: int) -> Tensor:
    return anchor.new_empty((*ids.shape, anchor.shape[1]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, anchor, ctx.module = inputs
    ctx.save_for_backward(output[1], anchor)


def _backward(ctx: Any, gradient: Tensor, _: None) -> tuple[None, Tensor, None]:
    ticket, anchor = ctx.saved_tensors
    return None, deposit(gradient, ticket, anchor, ctx.module), None


lookup.register_autograd(_backward, setup_context=_remember)
