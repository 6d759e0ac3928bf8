"""Stores in partitions, which the ranks of torch.distributed write together.

    torch.distributed.init_process_group()
    store = tierstore.distributed.open("emb.tier", "r+", device="cuda")
    emb = tierstore.nn.TieredEmbedding(store["item"])

Rows are in partitions, each an ordinary store, and each rank has some of them. Reading needs none
of this: `tierstore.open` takes such a store as one.
"""

from __future__ import annotations

from tierstore.errors import needs

with needs("torch", "torch", "this needs PyTorch"):
    from tierstore.distributed.keyed import DistributedKeyedTable
    from tierstore.distributed.opening import create, open, save
    from tierstore.distributed.store import DistributedStore
    from tierstore.distributed.table import DistributedTable

__all__ = [
    "DistributedKeyedTable",
    "DistributedStore",
    "DistributedTable",
    "create",
    "open",
    "save",
]
