"""SpeedTorch's classes over the tiers: scripts written for it run with one line changed.

    import tierstore.speedtorch as SpeedTorch

    rows = SpeedTorch.ModelFactory(model.u_embeddings, 50_000, 128, CPUPinn=True)
    rows.uniformDistributionInit(-0.1, 0.1)
    for ids in batches:
        rows.beforeForwardPass(ids)  # the module's weight holds the rows of the batch
        ...                          # forward, backward, optimizer.step()
        rows.afterOptimizerStep(ids)

Every class has a `table`, a normal table of this library. docs/from-speedtorch.md describes the
differences from SpeedTorch, and the equivalents for new code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tierstore._store.store import Store
from tierstore._tiers.gpu.device import Device
from tierstore.budget import Budget
from tierstore.errors import InvalidInputError, needs
from tierstore.spec import DeviceName

with needs("torch", "torch", "this needs PyTorch"):
    import torch

    from tierstore.speedtorch.array import ArrayRows, CountRows
    from tierstore.speedtorch.base import TableRows, Where, flat_ids, legacy, table_of
    from tierstore.speedtorch.batches import Duplicates, ModelRows, OptimizerRows

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
    "PytorchCOM",
    "PytorchModelFactory",
    "PytorchOptimizerFactory",
]


class _Common(TableRows):
    """Base of the classes of this family: `CPUPinn=True` is host memory, False the GPU."""

    CPUPinn: bool


class ModelFactory(_Common, ModelRows):
    """All rows of an embedding in memory, those of a batch in a module; see `ModelRows`.

    Args:
        model_variable: the module, such as a `torch.nn.Embedding`.
        total_classes: rows in all.
        embed_dimension: elements of a row.
        datatype: element type, as a name or a NumPy, CuPy or torch type.
        CPUPinn: keep the rows in host memory with a cache on the GPU, instead of on the GPU.
        duplicates: how rows that occur more than once in a batch are trained: "sum" applies the sum
            of the gradients to each copy, "mean" their mean; "last" trains each copy separately and
            keeps the last one, like SpeedTorch.
        budget: memory for the tiers; by default the GPU cache has 256 MiB of rows.
        device: the GPU; by default that of the module, or torch's current one.
    """

    CUPYcorpus: Any = legacy("getCupyVar", "table.write")

    def __init__(
        self,
        model_variable: torch.nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = "float32",
        CPUPinn: bool = False,
        *,
        duplicates: Duplicates = "sum",
        budget: Budget | None = None,
        device: DeviceName | Device | None = None,
    ) -> None:
        where = Where(device, pinned=CPUPinn, budget=budget)
        super().__init__(
            model_variable, total_classes, embed_dimension, datatype, where, duplicates
        )
        self.CPUPinn = CPUPinn


class OptimizerFactory(_Common, OptimizerRows):
    """The state of all rows in memory, that of a batch in an optimizer; see `OptimizerRows`.

    Args:
        given_optimizer: an optimizer that trains the variable, and possibly others.
        total_classes: rows in all.
        embed_dimension: elements of a row.
        model: the module that has the variable.
        variable_name: its name in the module, such as "u_embeddings".
        dtype: element type of the stored state.
        CPUPinn, budget, device: as for `ModelFactory`.
    """

    CUPYcorpi: Any = legacy("getCupyVar", "table.write")

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
        device: DeviceName | Device | None = None,
    ) -> None:
        where = Where(device, pinned=CPUPinn, budget=budget)
        super().__init__(
            given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, where
        )
        self.CPUPinn = CPUPinn


class DataGadget(_Common, ArrayRows):
    """An array whose parts are copied to the GPU and back; see `ArrayRows`.

    Args:
        fileName: a `.npy` file, or an array: NumPy, CuPy, torch, a memory map, zarr.
        CPUPinn, budget, device: as for `ModelFactory`.
    """

    _first_calls = "gadgetInit()"
    CUPYcorpus: Any = legacy("getCupyVar", "insertData")

    def __init__(
        self,
        fileName: Any,
        CPUPinn: bool = False,
        *,
        budget: Budget | None = None,
        device: DeviceName | Device | None = None,
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

    CUPYCom: Any = legacy("getCupyVar", "addCounts")

    def __init__(
        self,
        total_classes: int,
        datatype: Any = "uint32",
        CPUPinn: bool = False,
        *,
        budget: Budget | None = None,
        device: DeviceName | Device | None = None,
    ) -> None:
        super().__init__(total_classes, datatype, Where(device, pinned=CPUPinn, budget=budget))
        self.CPUPinn = CPUPinn


class _CommonMM(TableRows):
    """Base of the classes of this family: the store, and what to do with it."""

    CPUPinn: bool
    CUPYmemmap: Any = legacy("getCupyVar", "table.write")

    @property
    def diskname(self) -> str:
        """Path of the store."""
        return str(self._where.path)

    @property
    def store(self) -> Store:
        """The store, for `save`, `verify`, `info` and all other operations."""
        self.table  # raises if there is none yet  # noqa: B018
        return self._owner  # type: ignore[return-value]

    def reopen(self) -> None:
        """Open the store at `diskname` in the state of its last commit.

        Raises NotAStoreError, and InvalidInputError if its rows do not match this object.
        """
        self.close()
        store = self._where.open()
        try:
            self._accept(table_of(store))
            self._take(store)
        except BaseException:
            store.close()
            raise

    def commit(self) -> int:
        """Make all changes durable; return the number of the version."""
        before = self._before_commit()
        if before is not None:
            before()
        return self.store.commit()

    def getCupyMM(self) -> Any:
        """Return a copy of all rows; see `getCupyVar`."""
        return self.getCupyVar()


class ModelFactoryMM(_CommonMM, ModelRows):
    """All rows of an embedding on disk, those of a batch in a module; see `ModelRows`.

    Args:
        model_variable, total_classes, embed_dimension, datatype: as for `ModelFactory`.
        diskname: path of the new store.
        CPUPinn: ignored; `budget` determines what is in which memory.
        duplicates, device: as for `ModelFactory`.
        budget: memory for the tiers; by default 512 MiB of rows on the host and 256 MiB on the GPU.
    """

    def __init__(
        self,
        model_variable: torch.nn.Module,
        total_classes: int,
        embed_dimension: int,
        diskname: str = "variable",
        datatype: Any = "float32",
        CPUPinn: bool = False,
        *,
        duplicates: Duplicates = "sum",
        budget: Budget | None = None,
        device: DeviceName | Device | None = None,
    ) -> None:
        where = Where(device, path=Path(diskname), budget=budget)
        super().__init__(
            model_variable, total_classes, embed_dimension, datatype, where, duplicates
        )
        self.CPUPinn = CPUPinn


class OptimizerFactoryMM(_CommonMM, OptimizerRows):
    """The state of all rows on disk, that of a batch in an optimizer; see `OptimizerRows`.

    Args:
        given_optimizer, total_classes, embed_dimension, model, variable_name, dtype: as for
            `OptimizerFactory`.
        CPUPinn, budget, device: as for `ModelFactoryMM`.
        diskname: path of the new store; by default the names of the variable and the optimizer,
            such as "u_embeddingsAdagrad".
    """

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
        diskname: str | None = None,
        budget: Budget | None = None,
        device: DeviceName | Device | None = None,
    ) -> None:
        name = diskname or variable_name + type(given_optimizer).__name__
        where = Where(device, path=Path(name), budget=budget)
        super().__init__(
            given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, where
        )
        self.CPUPinn = CPUPinn

    def reopen(self) -> None:
        """Open the store at `diskname`; an optimizer without state has none."""
        if self.optVarList:
            super().reopen()


class DataGadgetMM(_CommonMM, ArrayRows):
    """An array on disk whose parts are copied to the GPU and back; see `ArrayRows`.

    The original file or array is copied and does not change.

    Args:
        fileName: a `.npy` file, or an array: NumPy, CuPy, torch, a memory map, zarr.
        CPUPinn, budget, device: as for `ModelFactoryMM`.
        diskname: path of the new store; by default the file name with `.tier` appended.
    """

    _first_calls = "gadgetInit(), or reopen()"

    def __init__(
        self,
        fileName: Any,
        CPUPinn: bool = False,
        *,
        diskname: str | None = None,
        budget: Budget | None = None,
        device: DeviceName | Device | None = None,
    ) -> None:
        if diskname is None:
            if not isinstance(fileName, str | Path):
                raise InvalidInputError("an array has no name: give diskname= for its store")
            diskname = f"{fileName}.tier"
        super().__init__(Where(device, path=Path(diskname), budget=budget).near(None))
        self.fileName = fileName
        self.CPUPinn = CPUPinn

    def gadgetInit(self) -> None:
        """Copy the array into the store."""
        self._hold_source(self.fileName)

    def getData(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> torch.Tensor:
        """Return `array[indexes]` like `DataGadget`; two arrays of ids are concatenated."""
        if retrievedNegIndexes is not None:
            retrievedPosIndexes = flat_ids(retrievedPosIndexes, retrievedNegIndexes)
        return super().getData(retrievedPosIndexes)


class COMMM(_CommonMM, CountRows):
    """Counts of pairs of classes on disk, where only rows with counts take space.

    Args:
        total_classes, datatype: as for `COM`.
        diskname: path of the new store.
        CPUPinn, budget, device: as for `ModelFactoryMM`.
    """

    def __init__(
        self,
        total_classes: int,
        diskname: str = "COM",
        datatype: Any = "uint32",
        CPUPinn: bool = False,
        *,
        budget: Budget | None = None,
        device: DeviceName | Device | None = None,
    ) -> None:
        super().__init__(total_classes, datatype, Where(device, path=Path(diskname), budget=budget))
        self.CPUPinn = CPUPinn


class _Kind(TableRows):
    """A family of classes, with tables in host memory or on the GPU."""

    _pinned: bool


class TorchModel(_Kind, ModelRows):
    """A model factory whose family determines the location of its rows."""

    def __init__(
        self,
        model_variable: torch.nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = torch.float,
        *,
        duplicates: Duplicates = "sum",
        budget: Budget | None = None,
        device: DeviceName | Device | None = None,
    ) -> None:
        where = Where(device, pinned=self._pinned, budget=budget)
        super().__init__(
            model_variable, total_classes, embed_dimension, datatype, where, duplicates
        )


class TorchOptimizer(_Kind, OptimizerRows):
    """An optimizer factory whose family determines the location of its rows."""

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
        device: DeviceName | Device | None = None,
    ) -> None:
        where = Where(device, pinned=self._pinned, budget=budget)
        super().__init__(
            given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, where
        )


class TorchCounts(_Kind, CountRows):
    """Counts whose family determines their location."""

    def __init__(
        self,
        total_classes: int,
        datatype: Any = torch.int32,
        *,
        budget: Budget | None = None,
        device: DeviceName | Device | None = None,
    ) -> None:
        where = Where(device, pinned=self._pinned, budget=budget)
        super().__init__(total_classes, datatype, where)


class _PytorchCommon(TableRows):
    """Base of the classes of this family.

    `deviceType="cuda"` means a table on the GPU, "cpu" one in host memory. With `pinType=True` the
    GPU reads the host memory through a cache.
    """

    pytorchGPUVar: Any = legacy("getTorchVar", "table.write")


def _where(
    device_type: str, pinned: bool, budget: Budget | None, device: DeviceName | Device | None
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
        duplicates: Duplicates = "sum",
        budget: Budget | None = None,
        device: DeviceName | Device | None = None,
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
        device: DeviceName | Device | None = None,
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
        device: DeviceName | Device | None = None,
    ) -> None:
        super().__init__(total_classes, datatype, _where(deviceType, pinType, budget, device))


class _CPUPytorchCommon(TableRows):
    """Base of the classes of this family: tables in host memory, with a cache on the GPU."""

    _pinned = True
    pytorchCPUVar: Any = legacy("getTorchVar", "table.write")


class CPUPytorchModelFactory(_CPUPytorchCommon, TorchModel):
    """All rows of an embedding in host memory, a batch's in a module; see `ModelFactory`."""


class CPUPytorchOptimizerFactory(_CPUPytorchCommon, TorchOptimizer):
    """The state of all rows in host memory, a batch's in an optimizer; see `OptimizerFactory`."""


class CPUPytorchCOM(_CPUPytorchCommon, TorchCounts):
    """Counts of pairs of classes in host memory; see `COM`."""


class _GPUPytorchCommon(TableRows):
    """Base of the classes of this family: the whole table is on the GPU."""

    _pinned = False
    pytorchGPUVar: Any = legacy("getTorchVar", "table.write")


class GPUPytorchModelFactory(_GPUPytorchCommon, TorchModel):
    """All rows of an embedding on the GPU, those of a batch in a module; see `ModelFactory`."""


class GPUPytorchOptimizerFactory(_GPUPytorchCommon, TorchOptimizer):
    """The state of all rows on the GPU, a batch's in an optimizer; see `OptimizerFactory`."""


class GPUPytorchCOM(_GPUPytorchCommon, TorchCounts):
    """Counts of pairs of classes on the GPU; see `COM`."""
