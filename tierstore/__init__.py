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
    from tierstore.ahead import lookahead as lookahead
    from tierstore.budget import Budget as Budget
    from tierstore.checkpoint import Checkpoint as Checkpoint
    from tierstore.errors import TierStoreError as TierStoreError
    from tierstore.laws import constant as constant
    from tierstore.laws import from_array as from_array
    from tierstore.laws import from_file as from_file
    from tierstore.laws import normal as normal
    from tierstore.laws import uniform as uniform
    from tierstore.laws import xavier_uniform as xavier_uniform
    from tierstore.laws import zeros as zeros
    from tierstore.spec import Field as Field
    from tierstore.spec import TableSpec as TableSpec
    from tierstore.store import Store as Store
    from tierstore.store import create as create
    from tierstore.store import open as open
    from tierstore.store import repair as repair
    from tierstore.store import verify as verify
    from tierstore.table import Table as Table

__version__ = "0.1.0"

_HOMES = {
    "Budget": "budget",
    "Checkpoint": "checkpoint",
    "Field": "spec",
    "Store": "store",
    "Table": "table",
    "TableSpec": "spec",
    "TierStoreError": "errors",
    "constant": "laws",
    "create": "store",
    "from_array": "laws",
    "from_file": "laws",
    "lookahead": "ahead",
    "normal": "laws",
    "open": "store",
    "repair": "store",
    "uniform": "laws",
    "verify": "store",
    "xavier_uniform": "laws",
    "zeros": "laws",
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
