"""Where the rows of a factory are: on the GPU, in host memory, or in a store on disk."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierstore.budget import Budget
from tierstore.errors import CapacityError, ExistsError
from tierstore.scratch import Scratch
from tierstore.spec import TableSpec
from tierstore.store import Store, create
from tierstore.store import open as open_store
from tierstore.table import Table
from tierstore.transfer import Device

__all__ = ["Where", "table_of"]

TABLE = "rows"

_GPU_CACHE = 256 << 20
_DISK_CACHE = 512 << 20
_STAGING = 64 << 20


@dataclass(frozen=True)
class Where:
    """Where a table is to be.

    Attributes:
        device: "cpu", "cuda", "cuda:1", a device, or None for the GPU if there is one.
        pinned: in host memory, with a cache of rows on the GPU; else on the GPU as a whole.
        path: of a store on disk; None for memory alone.
        budget: memory for the tiers; None for the defaults below.
    """

    device: str | Device | None = None
    pinned: bool = False
    path: Path | None = None
    budget: Budget | None = None

    def near(self, parameter: Tensor | None) -> Where:
        """Return this place with its device decided: the parameter's GPU, or torch's current one.

        Without CuPy, or a torch that finds a GPU, it is the CPU.
        """
        device = self.device
        if device is None or device == "cuda":
            if not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None:
                device = "cpu"
            elif parameter is not None and parameter.is_cuda:
                device = str(parameter.device)
            else:
                device = f"cuda:{torch.cuda.current_device()}"
        return dataclasses.replace(self, device=device)

    @property
    def torch_device(self) -> torch.device:
        """The device that rows come to, once it is decided."""
        name = self.device if isinstance(self.device, str) else self._given.torch_name
        return torch.device(name)

    @property
    def _given(self) -> Any:
        return self.device

    @property
    def resident(self) -> bool:
        """Whether the table is on the GPU as a whole."""
        return self.device != "cpu" and not self.pinned and self.path is None

    def budget_for(self, spec: TableSpec) -> Budget:
        """Return the memory that tiers get: what was given, or the defaults.

        A cache on the GPU has 256 MiB of rows, a store on disk 512 MiB in host memory before it. A
        table in memory has all its rows on the host, or all on the GPU.
        """
        rows, width = spec.rows, spec.layout.record_bytes

        def within(nbytes: int) -> int:
            return max(1, min(rows, nbytes // width))

        if self.path is not None:
            default = Budget(host_rows=within(_DISK_CACHE), gpu_rows=within(_GPU_CACHE))
            return self.budget or default
        if self.resident:
            return self.budget or Budget(host_rows=within(_STAGING), gpu_rows=rows)
        if self.budget is None:
            return Budget(host_rows=rows, gpu_rows=within(_GPU_CACHE))
        if self.budget.host is None and self.budget.host_rows is None:
            return dataclasses.replace(self.budget, host_rows=rows)
        return self.budget

    def make(self, spec: TableSpec) -> Scratch | Store:
        """Make a table by the laws of its fields; raises ExistsError for a store that is there."""
        try:
            if self.path is None:
                return Scratch(spec, budget=self.budget_for(spec), device=self._given)
            if self.path.exists():
                raise ExistsError(
                    f"{self.path} exists; reopen() goes on with it, another diskname starts anew"
                )
            tables = {TABLE: spec}
            return create(self.path, tables, budget=self.budget_for(spec), device=self._given)
        except CapacityError as error:
            error.add_note(
                "CPUPinn=True keeps a table in host memory, the classes ending in MM on disk"
            )
            raise

    def open(self) -> Store:
        """Open the store that an earlier run has left."""
        if self.path is None:
            raise RuntimeError("a table in memory cannot be opened")
        with open_store(self.path, budget=Budget(host=0)) as store:
            budget = self.budget_for(store[TABLE].spec)
        return open_store(self.path, "r+", budget=budget, device=self._given)


def table_of(owner: Scratch | Store) -> Table:
    """Return the table of what `Where.make` or `Where.open` returned."""
    return owner.table if isinstance(owner, Scratch) else owner[TABLE]
