"""A parameter store for embedding tables larger than the GPU and larger than RAM.

Rows live on disk, hot rows in host and GPU memory; changed rows are written back, and what a
commit returned for survives a crash.

    import tierstore

    spec = tierstore.TableSpec(rows=1_000_000, dim=64)
    with tierstore.create("emb.tier", {"item": spec}) as store:
        item = store["item"]
        item.write([3, 5], rows)
        store.commit(step=1)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore import nn as nn
    from tierstore import optim as optim
    from tierstore._store.opening import create as create
    from tierstore._store.opening import open as open
    from tierstore._store.repair import repair as repair
    from tierstore._store.store import Store as Store
    from tierstore._store.verify import verify as verify
    from tierstore._table.table import Table as Table
    from tierstore.budget import Budget as Budget
    from tierstore.checkpoint import Checkpoint as Checkpoint
    from tierstore.errors import TierStoreError as TierStoreError
    from tierstore.initializers import constant as constant
    from tierstore.initializers import from_array as from_array
    from tierstore.initializers import from_file as from_file
    from tierstore.initializers import normal as normal
    from tierstore.initializers import uniform as uniform
    from tierstore.initializers import xavier_uniform as xavier_uniform
    from tierstore.initializers import zeros as zeros
    from tierstore.loader import lookahead as lookahead
    from tierstore.spec import Field as Field
    from tierstore.spec import TableSpec as TableSpec

__version__ = "0.1.0"

_HOMES = {
    "Budget": "budget",
    "Checkpoint": "checkpoint",
    "Field": "spec",
    "Store": "_store.store",
    "Table": "_table.table",
    "TableSpec": "spec",
    "TierStoreError": "errors",
    "constant": "initializers",
    "create": "_store.opening",
    "from_array": "initializers",
    "from_file": "initializers",
    "lookahead": "loader",
    "normal": "initializers",
    "open": "_store.opening",
    "repair": "_store.repair",
    "uniform": "initializers",
    "verify": "_store.verify",
    "xavier_uniform": "initializers",
    "zeros": "initializers",
}

_MODULES = frozenset({"nn", "optim"})

__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import tierstore` costs nothing."""
    if name in _MODULES:
        return importlib.import_module(f"tierstore.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tierstore.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__, "__version__"]
