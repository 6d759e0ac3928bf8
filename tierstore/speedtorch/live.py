"""The family over CuPy arrays: rows on the GPU, or in host memory that the GPU reads."""

from __future__ import annotations

from typing import Any

import torch

from tierstore.budget import Budget
from tierstore.speedtorch.array import ArrayRows
from tierstore.speedtorch.counts import CountRows
from tierstore.speedtorch.held import Held, legacy
from tierstore.speedtorch.model import ModelRows
from tierstore.speedtorch.state import OptimizerRows
from tierstore.speedtorch.where import Where
from tierstore.transfer import Device

__all__ = ["COM", "DataGadget", "ModelFactory", "OptimizerFactory", "_Common"]


class _Common(Held):
    """What the classes of this family share: `CPUPinn=True` is host memory, False the GPU."""

    CPUPinn: bool


class ModelFactory(_Common, ModelRows):
    """All rows of an embedding in memory, those of a batch in a module; see `ModelRows`.

    Args:
        model_variable: the module, such as a `torch.nn.Embedding`.
        total_classes: rows in all.
        embed_dimension: elements of a row.
        datatype: element type, as a name or a type of NumPy, CuPy or torch.
        CPUPinn: keep the rows in host memory, with a cache on the GPU; else on the GPU.
        duplicates: what becomes of rows that come more than once in a batch: "sum" gives each copy
            the sum of their gradients, "mean" the mean; "last" lets each take its own step and
            keeps the last, as SpeedTorch did.
        budget: memory for the tiers; by default the GPU cache has 256 MiB of rows.
        device: the GPU; by default that of the module, or torch's current one.
    """

    CUPYcorpus = legacy("getCupyVar", "table.write")

    def __init__(
        self,
        model_variable: torch.nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = "float32",
        CPUPinn: bool = False,
        *,
        duplicates: str = "sum",
        budget: Budget | None = None,
        device: str | Device | None = None,
    ) -> None:
        where = Where(device, pinned=CPUPinn, budget=budget)
        super().__init__(
            model_variable, total_classes, embed_dimension, datatype, where, duplicates
        )
        self.CPUPinn = CPUPinn


class OptimizerFactory(_Common, OptimizerRows):
    """The state of all rows in memory, that of a batch in an optimizer; see `OptimizerRows`.

    Args:
        given_optimizer: an optimizer that trains the variable, perhaps among others.
        total_classes: rows in all.
        embed_dimension: elements of a row.
        model: the module that has the variable.
        variable_name: its name in there, such as "u_embeddings".
        dtype: element type that the state is kept in.
        CPUPinn, budget, device: as for `ModelFactory`.
    """

    CUPYcorpi = legacy("getCupyVar", "table.write")

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: torch.nn.Module,
        variable_name: str,
        dtype: Any = "float32",
        CPUPinn: bool = False,
        *,
        budget: Budget | None = None,
        device: str | Device | None = None,
    ) -> None:
        where = Where(device, pinned=CPUPinn, budget=budget)
        super().__init__(
            given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, where
        )
        self.CPUPinn = CPUPinn


class DataGadget(_Common, ArrayRows):
    """An array that hands parts of itself to the GPU and takes them back; see `ArrayRows`.

    Args:
        fileName: a `.npy` file, or an array: NumPy, CuPy, torch, a memory map, zarr.
        CPUPinn, budget, device: as for `ModelFactory`.
    """

    _first_calls = "gadgetInit()"
    CUPYcorpus = legacy("getCupyVar", "insertData")

    def __init__(
        self,
        fileName: Any,
        CPUPinn: bool = False,
        *,
        budget: Budget | None = None,
        device: str | Device | None = None,
    ) -> None:
        super().__init__(Where(device, pinned=CPUPinn, budget=budget).near(None))
        self.fileName = fileName
        self.CPUPinn = CPUPinn

    def gadgetInit(self) -> None:
        """Load the array."""
        self._hold_source(self.fileName)


class COM(_Common, CountRows):
    """Counts of pairs of classes in memory; see `CountRows`.

    Args:
        total_classes: classes, rows and columns of the counts.
        datatype: element type of a count.
        CPUPinn, budget, device: as for `ModelFactory`.
    """

    CUPYCom = legacy("getCupyVar", "addCounts")

    def __init__(
        self,
        total_classes: int,
        datatype: Any = "uint32",
        CPUPinn: bool = False,
        *,
        budget: Budget | None = None,
        device: str | Device | None = None,
    ) -> None:
        super().__init__(total_classes, datatype, Where(device, pinned=CPUPinn, budget=budget))
        self.CPUPinn = CPUPinn
