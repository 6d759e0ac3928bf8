"""The tiers of a table as one: changes go down them together, and memory is given back together."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore._table.gpu import on_device
from tierstore._tiers.base import Tier
from tierstore._tiers.epoch import OPENED_ANEW, REFRESHED, ROLLED_BACK, Epoch
from tierstore._tiers.gpu import GpuTier
from tierstore._tiers.host import HostTier
from tierstore.stats import Occupancy, TierInformation, TierStats

__all__ = ["LowestTier", "Tiers"]


class Changed(Protocol):
    """Records that no version has yet."""

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Their rows."""


class LowestTier(Tier, Protocol):
    """The lowest tier of a table: the disk, or what stands in for it."""

    queue_bytes: int

    @property
    def live(self) -> Changed | None:
        """What was handed down since the last commit."""

    def discard(self) -> npt.NDArray[np.int64]:
        """Drop what was handed down since the last commit; return its rows."""


class Tiers:
    """The tiers of a table: its disk tier, a host cache or none, a GPU cache or none.

    Attributes:
        host: the host tier, or None.
        gpu: the GPU tier, or None; there is none without a host tier.
        below: the nearest tier that is not on a GPU.
        epoch: what leases on the host live in; another one after each `discard`.
    """

    def __init__(
        self, table: str, disk: LowestTier, host: HostTier | None = None, gpu: GpuTier | None = None
    ) -> None:
        """Take over the tiers above the disk; `table` is for messages."""
        self.host = host
        self.gpu = gpu
        self.below: Tier = disk if host is None else host
        self.epoch: Epoch = Epoch()
        self._table = table
        self._disk = disk

    def flush_gpu(self) -> None:
        """Have the tiers below the GPU know every record that changed there; waits for it."""
        if self.gpu is not None:
            with on_device(self.gpu, self._table):
                self.gpu.flush()

    def flush(self) -> None:
        """Hand every changed record down to the disk tier."""
        self.flush_gpu()
        self.below.flush()

    def uncommitted(self) -> npt.NDArray[np.int64]:
        """Return the rows that were written since the last commit, ascending."""
        self.flush_gpu()
        nothing = np.empty(0, np.int64)
        handed_down = nothing if self._disk.live is None else self._disk.live.ids
        return np.union1d(handed_down, nothing if self.host is None else self.host.dirty())

    def discard(self) -> None:
        """Drop what was not committed, and end every lease."""
        self.epoch.end(ROLLED_BACK)
        if self.gpu is not None:
            with on_device(self.gpu, self._table):
                self.gpu.discard()
        gone = self._disk.discard()
        if self.host is not None:
            self.host.discard(gone)
        self.epoch = Epoch()

    def forget(self, rows: npt.NDArray[np.int64]) -> None:
        """Drop `rows`, for a reader: the disk tier has others now. Ends every lease."""
        self.epoch.end(REFRESHED)
        if self.host is not None:
            self.host.discard(rows)
        self.epoch = Epoch()

    def stats(self) -> dict[str, TierStats]:
        """Return copies of the counters of each tier, the nearest first."""
        with on_device(self.gpu, self._table):
            found = {
                **({} if self.gpu is None else {"gpu": self.gpu.stats}),
                **({} if self.host is None else {"host": self.host.stats}),
                "disk": self._disk.stats,
            }
            return {name: dataclasses.replace(stats) for name, stats in found.items()}

    def occupancy(self) -> dict[str, Occupancy]:
        """Return how full the host tier is, under "host"; empty where there is none."""
        return {} if self.host is None else {"host": self.host.occupancy()}

    def information(self) -> tuple[TierInformation, ...]:
        """Return what each tier above the disk takes, the nearest first."""
        found = []
        if self.gpu is not None:
            name = self.gpu.device.torch_name
            found.append(TierInformation("gpu", self.gpu.nbytes, self.gpu.slots, name))
        if self.host is not None:
            host = self.host
            found.append(TierInformation("host", host.nbytes, host.slots, host.arena.kind))
        return tuple(found)

    def close(self, reason: str = OPENED_ANEW) -> None:
        """End every lease and give the memory back, even where the GPU has failed."""
        self.epoch.end(reason)
        if self.gpu is not None:
            self.gpu.epoch.end(reason)
            with contextlib.suppress(Exception), self.gpu.device.current():
                self.gpu.close()
        if self.host is not None:
            with contextlib.suppress(Exception):
                self.host.close()
