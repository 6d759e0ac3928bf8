"""Names of layers and tickets of what is pending, by which operators of torch refer to them."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore._table.joint import JointTable
from tierstore._table.table import Table, where_from
from tierstore.errors import ClosedError

BETWEEN = "\x1f"
"""Stands between the names of features, and between modes: operators take no lists of texts.

The separator of ASCII, since torch's compiler writes arguments into comments, which a line break
would end (torch 2.11, for a GPU).
"""
_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_pending: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(layer: Any, table: Table | JointTable, field: str) -> str:
    """Give a layer a name for the operators, valid as long as the layer lives.

    It begins with the store or files, tables and field, so that an exported program finds them
    elsewhere.
    """
    tables = table.tables if isinstance(table, JointTable) else (table,)
    places = " and ".join(dict.fromkeys(map(where_from, tables)))
    names = ",".join(each.name for each in tables)
    name = f"{BETWEEN.join((places, names, field))}#{next(_numbers)}"
    _layers[name] = layer
    return name


def named(name: str) -> Any:
    """Return the layer of this name, or another one over the same field."""
    same = _layers.get(name)
    if same is not None:
        return same
    where = name.rpartition("#")[0]
    for other, layer in list(_layers.items()):
        if other.rpartition("#")[0] == where:
            return layer
    places, table, field = where.split(BETWEEN)
    raise ClosedError(
        f"this program looks up field {field!r} of table {table!r} of {places}, and no layer over "
        "it is there: open that, make the same layer over it, and keep that while the program runs"
    )


class _Owner(np.ndarray[Any, Any]):
    """Memory of a ticket, which owns what is pending."""

    pending: Any


def ticket(pending: Any) -> Tensor:
    """Return a number in a tensor that owns what is pending."""
    number = next(_numbers)
    memory = np.array(number, np.int64).view(_Owner)
    memory.pending = pending
    _pending[number] = pending
    return torch.from_numpy(memory)


def of_ticket(ticket: Tensor) -> Any:
    """Return what is pending; raises ClosedError where nothing is any more."""
    pending = _pending.get(int(ticket))
    if pending is None:
        raise ClosedError("the batch of this lookup has ended; run the forward pass again")
    return pending
