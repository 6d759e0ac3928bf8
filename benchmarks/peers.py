"""Other ways to keep a table larger than the GPU, for the GPU benchmarks, where installed."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def have(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


_defined: list[Any] = []


def define_missing_operators() -> list[str]:
    """Define the operators that a trimmed FBGEMM lacks; return their names.

    TorchRec registers fakes for all of them when it is imported, and calls those that were left out
    in no step of the benchmarks: called, they raise.
    """
    import fbgemm_gpu
    import torch

    place = Path(str(fbgemm_gpu.__file__)).parent
    texts = [path.read_text(errors="replace") for path in place.rglob("*.py")]
    named = sorted({name for text in texts for name in re.findall(r"fbgemm::(\w+)", text)})
    missing = [name for name in named if not hasattr(torch.ops.fbgemm, name)]
    if missing:
        library = torch.library.Library("fbgemm", "FRAGMENT")
        for name in missing:
            library.define(f"{name}(Tensor a) -> Tensor")
        _defined.append(library)  # the definitions end with it
    return missing


def _fbgemm(
    rows: Sequence[int], dim: int, load_factor: float | None, optimizer: str, pooling: str
) -> Any:
    """Make FBGEMM's operator over tables, in managed memory under a cache or in device memory."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        CacheAlgorithm,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    where = EmbeddingLocation.DEVICE if load_factor is None else EmbeddingLocation.MANAGED_CACHING
    made = SplitTableBatchedEmbeddingBagsCodegen(
        [(each, dim, where, ComputeDevice.CUDA) for each in rows],
        optimizer=getattr(EmbOptimType, optimizer),
        learning_rate=1e-3,
        cache_algorithm=CacheAlgorithm.LRU,
        cache_load_factor=load_factor or 0.0,
        pooling_mode=getattr(PoolingMode, pooling),
    )
    made.init_embedding_weights_uniform(-1, 1)
    return made


class FbgemmTables:
    """FBGEMM's table-batched embedding, which updates rows in its backward pass."""

    def __init__(
        self,
        rows: Sequence[int],
        dim: int,
        load_factor: float | None,
        optimizer: str,
        *,
        pooled: bool = False,
    ) -> None:
        """Make tables of a dim; `pooled` bags are summed, else each id has a row of its own."""
        self._tables = _fbgemm(rows, dim, load_factor, optimizer, "SUM" if pooled else "NONE")

    def rows(self, values: Any, offsets: Any) -> Any:
        """Look up the bags of all tables, one table after another; their gradient trains them."""
        return self._tables(values, offsets)


class Fbgemm:
    """FBGEMM's table in managed memory under its 32-way LRU cache, or wholly in device memory."""

    def __init__(
        self, rows: int, dim: int, load_factor: float | None, optimizer: str = "EXACT_SGD"
    ) -> None:
        self._table = _fbgemm([rows], dim, load_factor, optimizer, "NONE")
        self._offsets: dict[int, Any] = {}

    def _rows(self, ids: Any) -> Any:
        import torch

        n = ids.numel()
        if n not in self._offsets:
            self._offsets[n] = torch.arange(n + 1, device="cuda")
        return self._table(ids, self._offsets[n])

    def read(self, ids: Any) -> Any:
        import torch

        with torch.no_grad():
            return self._rows(ids)

    def step(self, gradient: Any, model: Any = None) -> Any:
        """Return a training step on ids whose rows get this gradient; `model` runs in between."""

        def run(ids: Any) -> None:
            rows = self._rows(ids)
            if model is not None:
                model()
            rows.backward(gradient)

        return run


class TorchCache:
    """An LFU cache of rows written with torch's own operations, as ColossalAI's CachedEmbedding is.

    Every batch waits for the device several times, and looks through all slots for victims.
    """

    def __init__(self, weight: Any, slots: int) -> None:
        import torch

        rows, dim = weight.shape
        self._weight = weight
        self._cache = torch.empty(slots, dim, device="cuda")
        self._row_in = torch.full((slots,), -1, dtype=torch.int64, device="cuda")
        self._slot_of = torch.full((rows,), -1, dtype=torch.int64, device="cuda")
        self._uses = torch.zeros(rows, dtype=torch.int64, device="cuda")

    def read(self, ids: Any) -> Any:
        import torch

        distinct, counts = torch.unique(ids, return_counts=True)
        self._uses[distinct] += counts
        missing = distinct[self._slot_of[distinct] < 0]
        if missing.numel():
            self._admit(distinct, missing)
        return torch.nn.functional.embedding(self._slot_of[ids], self._cache)

    def _admit(self, distinct: Any, missing: Any) -> None:
        import torch

        uses = torch.where(self._row_in < 0, -1, self._uses[self._row_in.clamp(min=0)])
        uses[self._slot_of[distinct[self._slot_of[distinct] >= 0]]] = torch.iinfo(torch.int64).max
        slots = torch.topk(uses, missing.numel(), largest=False).indices
        old = self._row_in[slots]
        old = old[old >= 0]
        self._weight[old.cpu()] = self._cache[self._slot_of[old]].cpu()
        self._slot_of[old] = -1
        rows = self._weight.index_select(0, missing.cpu()).pin_memory()
        self._cache.index_copy_(0, slots, rows.to("cuda", non_blocking=True))
        self._row_in[slots] = missing
        self._slot_of[missing] = slots


def speedtorch(table: Any) -> Any:
    """SpeedTorch's DataGadget over a copy of a table in its kind of pinned memory."""
    import cupy
    import SpeedTorch

    gadget = SpeedTorch.DataGadget("", CPUPinn=True)
    cupy.cuda.set_allocator(SpeedTorch.CUPYLive.my_pinned_allocator)
    try:
        gadget.CUPYcorpus = cupy.empty(table.shape, "float32")
    finally:
        # SpeedTorch itself leaves CuPy without a memory pool; with one it is faster.
        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    gadget.CUPYcorpus[:] = cupy.asarray(table)
    return gadget
