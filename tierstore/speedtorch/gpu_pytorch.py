"""The family over torch tensors on the GPU."""

from __future__ import annotations

from tierstore.speedtorch.held import Held, legacy
from tierstore.speedtorch.torch_rows import TorchCounts, TorchModel, TorchOptimizer

__all__ = [
    "GPUPytorchCOM",
    "GPUPytorchModelFactory",
    "GPUPytorchOptimizerFactory",
    "_GPUPytorchCommon",
]


class _GPUPytorchCommon(Held):
    """What the classes of this family share: the whole table is on the GPU."""

    _pinned = False
    pytorchGPUVar = legacy("getTorchVar", "table.write")


class GPUPytorchModelFactory(_GPUPytorchCommon, TorchModel):
    """All rows of an embedding on the GPU, those of a batch in a module; see `ModelFactory`."""


class GPUPytorchOptimizerFactory(_GPUPytorchCommon, TorchOptimizer):
    """The state of all rows on the GPU, a batch's in an optimizer; see `OptimizerFactory`."""


class GPUPytorchCOM(_GPUPytorchCommon, TorchCounts):
    """Counts of pairs of classes on the GPU; see `COM`."""
