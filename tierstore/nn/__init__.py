"""Embedding layers whose rows live in a store: drop-in for `torch.nn.Embedding` and `EmbeddingBag`.

    emb = tierstore.nn.TieredEmbedding(store["item"])
    opt = tierstore.optim.TieredOptimizer(torch.optim.Adam, [emb], lr=1e-3)

A forward pass leases the distinct rows of its batch. After a backward pass the parameter of the
layer is these rows and their gradient, until an optimizer of `tierstore.optim` takes its step.
"""

from __future__ import annotations

from tierstore.errors import needs

with needs("torch", "torch", "this needs PyTorch"):
    from tierstore.nn.bag import TieredEmbeddingBag
    from tierstore.nn.bags import FeatureBags, TieredEmbeddingBagCollection
    from tierstore.nn.collection import TieredEmbeddingCollection
    from tierstore.nn.data_parallel import leave_rows_alone
    from tierstore.nn.embedding import TieredEmbedding
    from tierstore.nn.frozen import FrozenEmbedding
    from tierstore.nn.rows import RowsParameter

__all__ = [
    "FeatureBags",
    "FrozenEmbedding",
    "RowsParameter",
    "TieredEmbedding",
    "TieredEmbeddingBag",
    "TieredEmbeddingBagCollection",
    "TieredEmbeddingCollection",
]

leave_rows_alone()
