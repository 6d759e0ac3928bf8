"""Optimizers that make NaN of rows in float16 say so once, when they are made; others do not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tierstore import TableSpec, errors
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

ROWS = 64
RNG = np.random.default_rng(64)
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], str, bool]] = {
    "adam": (torch.optim.Adam, {}, "float16", True),
    "adamw": (torch.optim.AdamW, {}, "float16", True),
    "sparse adam": (torch.optim.SparseAdam, {}, "float16", True),
    "rmsprop": (torch.optim.RMSprop, {}, "float16", True),
    "adagrad": (torch.optim.Adagrad, {}, "float16", True),
    "adam, large eps": (torch.optim.Adam, {"eps": 1e-4}, "float16", False),
    "sgd": (torch.optim.SGD, {"lr": 0.1}, "float16", False),
    "adam, bfloat16": (torch.optim.Adam, {}, "bfloat16", False),
    "adam, float32": (torch.optim.Adam, {}, "float32", False),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("case", CASES)
def test_it_is_said_where_rows_are_ruined(tmp_path: Path, case: str) -> None:
    """Exactly where training with small gradients, of any size, leaves rows that are not finite."""
    kind, options, dtype, ruins = CASES[case]
    spec = TableSpec(ROWS, 4, dtype=dtype, init=tierstore.normal(seed=1))  # type: ignore[arg-type]
    with tierstore.create(tmp_path / "s.tier", {"t": spec, "u": spec}) as store:
        tables = [TieredEmbedding(store[name]) for name in "tu"]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer = TieredOptimizer(kind, tables, **options)
        found = [each for each in said if issubclass(each.category, errors.TierStoreWarning)]
        assert len(found) == ruins
        if ruins:
            assert found[0].category is errors.UnderflowWarning
            assert "table 't'" in str(found[0].message)
            assert "bfloat16 or float32" in str(found[0].message)
        scale = torch.tensor(2.0 ** -RNG.integers(0, 25, (ROWS, 1)))
        for _ in range(3):
            (tables[0](torch.arange(ROWS)).double() * scale).sum().backward()
            optimizer.step()
        rows = np.asarray(store["t"].read(range(ROWS)), np.float32)
        assert ruins == (not np.isfinite(rows).all())
        store.rollback()
