"""The family over torch tensors in pinned host memory."""

from __future__ import annotations

from tierstore.speedtorch.held import Held, legacy
from tierstore.speedtorch.torch_rows import TorchCounts, TorchModel, TorchOptimizer

__all__ = [
    "CPUPytorchCOM",
    "CPUPytorchModelFactory",
    "CPUPytorchOptimizerFactory",
    "_CPUPytorchCommon",
]


class _CPUPytorchCommon(Held):
    """What the classes of this family share: tables in host memory, with a cache on the GPU."""

    _pinned = True
    pytorchCPUVar = legacy("getTorchVar", "table.write")


class CPUPytorchModelFactory(_CPUPytorchCommon, TorchModel):
    """All rows of an embedding in host memory, a batch's in a module; see `ModelFactory`."""


class CPUPytorchOptimizerFactory(_CPUPytorchCommon, TorchOptimizer):
    """The state of all rows in host memory, a batch's in an optimizer; see `OptimizerFactory`."""


class CPUPytorchCOM(_CPUPytorchCommon, TorchCounts):
    """Counts of pairs of classes in host memory; see `COM`."""
