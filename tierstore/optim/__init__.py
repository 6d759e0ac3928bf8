"""Optimizers for rows that live in a store: any torch optimizer, its state kept with each row.

    opt = tierstore.optim.TieredOptimizer(torch.optim.Adam, [emb], lr=1e-3)

A step reads the weight and state of the rows that got a gradient, runs the torch optimizer on them,
and writes them back; all other rows stay as they are. Results do not depend on where rows are.
"""

from __future__ import annotations

from tierstore.errors import needs

with needs("torch", "torch", "this needs PyTorch"):
    from tierstore.optim.optimizer import TieredOptimizer
    from tierstore.optim.row_wise import RowWiseAdagrad

__all__ = ["RowWiseAdagrad", "TieredOptimizer"]
