"""Stores in partitions, which the ranks of torch.distributed write together.

    torch.distributed.init_process_group()
    store = tierstore.distributed.open("emb.tier", "r+", device="cuda")
    emb = tierstore.nn.TieredEmbedding(store["item"])

Rows are in partitions, each an ordinary store, and each rank has some of them. Reading needs none
of this: `tierstore.open` takes such a store as one. A process that writes all of them by itself
needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierstore.distributed.opening import create, open, save
from tierstore.distributed.store import DistributedStore
from tierstore.errors import needs

if TYPE_CHECKING:
    from tierstore.distributed.keyed import DistributedKeyedTable
    from tierstore.distributed.table import DistributedTable

__all__ = [
    "DistributedKeyedTable",
    "DistributedStore",
    "DistributedTable",
    "create",
    "open",
    "save",
]


def __getattr__(name: str) -> Any:
    """Import the tables of several ranks on first use: they need torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("torch", "torch", "tables of several ranks need PyTorch"):
        from tierstore.distributed import keyed, table

    return getattr(keyed if name == "DistributedKeyedTable" else table, name)
