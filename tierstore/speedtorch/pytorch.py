"""The family over torch tensors on a device of choice."""

from __future__ import annotations

from typing import Any

import torch

from tierstore.budget import Budget
from tierstore.speedtorch.counts import CountRows
from tierstore.speedtorch.held import Held, legacy
from tierstore.speedtorch.model import ModelRows
from tierstore.speedtorch.state import OptimizerRows
from tierstore.speedtorch.where import Where
from tierstore.transfer import Device

__all__ = [
    "PytorchCOM",
    "PytorchModelFactory",
    "PytorchOptimizerFactory",
    "_PytorchCommon",
]


class _PytorchCommon(Held):
    """What the classes of this family share.

    `deviceType="cuda"` is a table on the GPU, "cpu" one in host memory; with `pinType=True` the GPU
    reads that, and keeps a cache of it.
    """

    pytorchGPUVar = legacy("getTorchVar", "table.write")


def _where(
    device_type: str, pinned: bool, budget: Budget | None, device: str | Device | None
) -> Where:
    on_host = torch.device(device_type).type == "cpu"
    if device is None and not (on_host and pinned):
        device = device_type
    return Where(device, pinned=on_host, budget=budget)


class PytorchModelFactory(_PytorchCommon, ModelRows):
    """All rows of an embedding in memory, those of a batch in a module; see `ModelRows`.

    Arguments are those of `ModelFactory`, with `deviceType` and `pinType` for `CPUPinn`.
    """

    def __init__(
        self,
        model_variable: torch.nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = torch.float,
        deviceType: str = "cuda",
        pinType: bool = False,
        *,
        duplicates: str = "sum",
        budget: Budget | None = None,
        device: str | Device | None = None,
    ) -> None:
        where = _where(deviceType, pinType, budget, device)
        super().__init__(
            model_variable, total_classes, embed_dimension, datatype, where, duplicates
        )


class PytorchOptimizerFactory(_PytorchCommon, OptimizerRows):
    """The state of all rows in memory, that of a batch in an optimizer; see `OptimizerRows`.

    Arguments are those of `OptimizerFactory`, with `deviceType` and `pinType` for `CPUPinn`.
    """

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: torch.nn.Module,
        variable_name: str,
        dtype: Any = torch.float,
        deviceType: str = "cuda",
        pinType: bool = False,
        *,
        budget: Budget | None = None,
        device: str | Device | None = None,
    ) -> None:
        where = _where(deviceType, pinType, budget, device)
        super().__init__(
            given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, where
        )


class PytorchCOM(_PytorchCommon, CountRows):
    """Counts of pairs of classes in memory; see `COM`; with `deviceType` and `pinType`."""

    def __init__(
        self,
        total_classes: int,
        datatype: Any = torch.int32,
        deviceType: str = "cuda",
        pinType: bool = False,
        *,
        budget: Budget | None = None,
        device: str | Device | None = None,
    ) -> None:
        super().__init__(total_classes, datatype, _where(deviceType, pinType, budget, device))
