"""The tables of Criteo's Kaggle data, and batches of ids with their skew."""

from __future__ import annotations

from typing import Any

from gpu import power_law

SKEW = 1.05
"""The k-th most frequent value of a category has a share of k^-SKEW."""
_CARDINALITIES = """1460 583 10131227 2202608 305 24 12517 633 3 93145 5683 8351593 3194 27 14992
5461306 10 5652 2173 4 7046547 18 15 286181 105 142572"""
ROWS = sum(map(int, _CARDINALITIES.split()))


def sizes(rows: int = ROWS, tables: int = 26) -> dict[str, int]:
    """Return tables with Criteo's cardinalities, again from the first beyond 26.

    They are cut in one proportion so that 26 of them have `rows` rows in all, or a few more.
    """
    every = [max(3, int(each) * rows // ROWS) for each in _CARDINALITIES.split()]
    return {f"C{number + 1}": every[number % len(every)] for number in range(tables)}


def draw(tables: dict[str, int], ids: int, count: int, device: str) -> list[Any]:
    """Draw batches of ids `(tables, ids)` on a device, whose rows follow the skew."""
    import torch

    drawn = [
        power_law(rows, ids, SKEW, count, seed=number, device=device)
        for number, rows in enumerate(tables.values())
    ]
    return [torch.stack(batch) for batch in zip(*drawn, strict=True)]
