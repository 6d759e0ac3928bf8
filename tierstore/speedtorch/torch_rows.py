"""What the families over torch tensors of one kind share: how their classes are made."""

from __future__ import annotations

from typing import Any

import torch

from tierstore.budget import Budget
from tierstore.speedtorch.counts import CountRows
from tierstore.speedtorch.held import Held
from tierstore.speedtorch.model import ModelRows
from tierstore.speedtorch.state import OptimizerRows
from tierstore.speedtorch.where import Where
from tierstore.transfer import Device

__all__ = ["TorchCounts", "TorchModel", "TorchOptimizer"]


class _Kind(Held):
    """A family: its tables are in host memory, or on the GPU."""

    _pinned: bool


class TorchModel(_Kind, ModelRows):
    """A model factory whose family says where its rows are."""

    def __init__(
        self,
        model_variable: torch.nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = torch.float,
        *,
        duplicates: str = "sum",
        budget: Budget | None = None,
        device: str | Device | None = None,
    ) -> None:
        where = Where(device, pinned=self._pinned, budget=budget)
        super().__init__(
            model_variable, total_classes, embed_dimension, datatype, where, duplicates
        )


class TorchOptimizer(_Kind, OptimizerRows):
    """An optimizer factory whose family says where its rows are."""

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: torch.nn.Module,
        variable_name: str,
        dtype: Any = torch.float,
        *,
        budget: Budget | None = None,
        device: str | Device | None = None,
    ) -> None:
        where = Where(device, pinned=self._pinned, budget=budget)
        super().__init__(
            given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, where
        )


class TorchCounts(_Kind, CountRows):
    """Counts whose family says where they are."""

    def __init__(
        self,
        total_classes: int,
        datatype: Any = torch.int32,
        *,
        budget: Budget | None = None,
        device: str | Device | None = None,
    ) -> None:
        where = Where(device, pinned=self._pinned, budget=budget)
        super().__init__(total_classes, datatype, where)
