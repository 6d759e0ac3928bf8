"""Training steps on tables whose state of Adam, or all of whose rows, are narrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpu import DIM

from tierstore import Budget, Field, TableSpec
from tierstore._memory_table import MemoryTable

BLOCK = 1 << 20
STATE = ("exp_avg", "exp_avg_sq")
WAYS: Mapping[str, tuple[str, str]] = {
    "state in bfloat16": ("float32", "bfloat16"),
    "state in float8": ("float32", "float8"),
    "rows and state in bfloat16": ("bfloat16", "bfloat16"),
}
"""Types of the rows and of their state, by their names in the table of figures."""


def fields_of(rows: str, state: str) -> dict[str, Field]:
    """Return fields as `TieredOptimizer` makes them with this `state_dtype`."""
    from tierstore.optim.float8 import SIGNED, SIZES

    if state == "float8":
        kinds = {
            name: form.field(DIM, 0) for name, form in zip(STATE, (SIGNED, SIZES), strict=True)
        }
    else:
        kinds = {name: Field(DIM, state) for name in STATE}
    return {"weight": Field(DIM, rows), **kinds}


class NarrowTable:
    """The public layer and optimizer over a table in host memory, a tenth of it on the GPU."""

    def __init__(self, way: str, rows: int, device: Any, place: str = "cuda") -> None:
        """Fill the table from where torch's tensors for the device are."""
        import torch

        from tierstore.nn import TieredEmbedding
        from tierstore.optim import TieredOptimizer

        weights, state = WAYS[way]
        self._dtype = getattr(torch, weights)
        budget = Budget(host_rows=rows, gpu_rows=rows // 10)
        spec = TableSpec(rows, fields=fields_of(weights, state))
        self.record_bytes = spec.layout.record_bytes
        self._scratch = MemoryTable(spec, budget=budget, device=device)
        self.table = self._scratch.table
        for start in range(0, rows, BLOCK):
            ids = torch.arange(start, min(start + BLOCK, rows), device=place)
            drawn = torch.randn(len(ids), DIM, device=place, dtype=self._dtype)
            self.table.write(ids, drawn)
        self._layer = TieredEmbedding(self.table)
        self._optimizer = TieredOptimizer(
            torch.optim.Adam,
            [self._layer],
            lr=1e-3,
            state_dtype=state,  # type: ignore[arg-type]
            stochastic_rounding=weights == "bfloat16",
        )

    def step(self, gradient: Any) -> Callable[[Any], None]:
        """Return a step on ids whose rows get this gradient, in the type that a model would."""
        gradient = gradient.to(self._dtype)

        def run(ids: Any) -> None:
            self._layer(ids).backward(gradient)
            self._optimizer.step()

        return run

    def moved(self) -> int:
        """Return the bytes that crossed the link so far, both ways."""
        stats = self.table.stats()["gpu"]
        return int(stats.bytes_promoted + stats.bytes_written_back)

    def close(self) -> None:
        """Give the memory back."""
        self._scratch.close()
