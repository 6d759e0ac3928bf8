"""SpeedTorch's classes over the tiers: scripts written for it run with one line changed.

    import tierstore.speedtorch as SpeedTorch

    rows = SpeedTorch.ModelFactory(model.u_embeddings, 50_000, 128, CPUPinn=True)
    rows.uniformDistributionInit(-0.1, 0.1)
    for ids in batches:
        rows.beforeForwardPass(ids)  # the module's weight holds the rows of the batch
        ...                          # forward, backward, optimizer.step()
        rows.afterOptimizerStep(ids)

Every class has a `table`, which is one of the library's own. What differs from SpeedTorch, and what
to write in new code, is in docs/from-speedtorch.md.
"""

from __future__ import annotations

from tierstore import _torch  # noqa: F401  (first: it says what to install)
from tierstore.speedtorch.families import (
    COM,
    COMMM,
    CPUPytorchCOM,
    CPUPytorchModelFactory,
    CPUPytorchOptimizerFactory,
    DataGadget,
    DataGadgetMM,
    GPUPytorchCOM,
    GPUPytorchModelFactory,
    GPUPytorchOptimizerFactory,
    ModelFactory,
    ModelFactoryMM,
    OptimizerFactory,
    OptimizerFactoryMM,
    PMemory,
    PMemoryMM,
    PytorchCOM,
    PytorchModelFactory,
    PytorchOptimizerFactory,
    _Common,
    _CommonMM,
    _CPUPytorchCommon,
    _GPUPytorchCommon,
    _PytorchCommon,
    my_pinned_allocator,
    my_pinned_allocatorMM,
)

__all__ = [
    "COM",
    "COMMM",
    "CPUPytorchCOM",
    "CPUPytorchModelFactory",
    "CPUPytorchOptimizerFactory",
    "DataGadget",
    "DataGadgetMM",
    "GPUPytorchCOM",
    "GPUPytorchModelFactory",
    "GPUPytorchOptimizerFactory",
    "ModelFactory",
    "ModelFactoryMM",
    "OptimizerFactory",
    "OptimizerFactoryMM",
    "PMemory",
    "PMemoryMM",
    "PytorchCOM",
    "PytorchModelFactory",
    "PytorchOptimizerFactory",
    "_CPUPytorchCommon",
    "_Common",
    "_CommonMM",
    "_GPUPytorchCommon",
    "_PytorchCommon",
    "my_pinned_allocator",
    "my_pinned_allocatorMM",
]
