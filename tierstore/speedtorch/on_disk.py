"""The family whose names end in MM: rows in a store on disk, as much of them in memory as allowed.

The store is a directory, `diskname`. The init methods make it and refuse one that is there;
`reopen()` goes on with it. Changes are committed by `commit()`, when the object is closed, and at
the end of the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tierstore.budget import Budget
from tierstore.errors import InvalidInputError
from tierstore.speedtorch.array import ArrayRows
from tierstore.speedtorch.counts import CountRows
from tierstore.speedtorch.held import Held, legacy
from tierstore.speedtorch.ids import flat_ids
from tierstore.speedtorch.model import ModelRows
from tierstore.speedtorch.state import OptimizerRows
from tierstore.speedtorch.where import Where, table_of
from tierstore.store import Store
from tierstore.transfer import Device

__all__ = ["COMMM", "DataGadgetMM", "ModelFactoryMM", "OptimizerFactoryMM", "_CommonMM"]


class _CommonMM(Held):
    """What the classes of this family share: the store, and what to do with it."""

    CPUPinn: bool
    CUPYmemmap = legacy("getCupyVar", "table.write")

    @property
    def diskname(self) -> str:
        """Path of the store."""
        return str(self._where.path)

    @property
    def store(self) -> Store:
        """The store, for `save`, `verify`, `info` and everything else that one can do."""
        self.table  # raises if there is none yet  # noqa: B018
        return self._owner  # type: ignore[return-value]

    def reopen(self) -> None:
        """Go on with the store that is at `diskname`, as its last commit left it.

        Raises NotAStoreError, and InvalidInputError if its rows are not those of this object.
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
        diskname: the store to be.
        CPUPinn: ignored: what is in memory, and where, `budget` says either way.
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
        duplicates: str = "sum",
        budget: Budget | None = None,
        device: str | Device | None = None,
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
        diskname: the store to be; by default the variable's name and the optimizer's, such as
            "u_embeddingsAdagrad".
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
        device: str | Device | None = None,
    ) -> None:
        name = diskname or variable_name + type(given_optimizer).__name__
        where = Where(device, path=Path(name), budget=budget)
        super().__init__(
            given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, where
        )
        self.CPUPinn = CPUPinn

    def reopen(self) -> None:
        """Go on with the store that is at `diskname`; an optimizer without state has none."""
        if self.optVarList:
            super().reopen()


class DataGadgetMM(_CommonMM, ArrayRows):
    """An array on disk that hands parts of itself to the GPU and takes them back; see `ArrayRows`.

    The file or array that it starts from is copied, and left as it is.

    Args:
        fileName: a `.npy` file, or an array: NumPy, CuPy, torch, a memory map, zarr.
        CPUPinn, budget, device: as for `ModelFactoryMM`.
        diskname: the store to be; by default the file's name with `.tier` behind it.
    """

    _first_calls = "gadgetInit(), or reopen()"

    def __init__(
        self,
        fileName: Any,
        CPUPinn: bool = False,
        *,
        diskname: str | None = None,
        budget: Budget | None = None,
        device: str | Device | None = None,
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
        """Return `array[indexes]`, as `DataGadget` does; two arrays of ids are taken as one."""
        if retrievedNegIndexes is not None:
            retrievedPosIndexes = flat_ids(retrievedPosIndexes, retrievedNegIndexes)
        return super().getData(retrievedPosIndexes)


class COMMM(_CommonMM, CountRows):
    """Counts of pairs of classes on disk, where only rows that were counted in take space.

    Args:
        total_classes, datatype: as for `COM`.
        diskname: the store to be.
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
        device: str | Device | None = None,
    ) -> None:
        super().__init__(total_classes, datatype, Where(device, path=Path(diskname), budget=budget))
        self.CPUPinn = CPUPinn
