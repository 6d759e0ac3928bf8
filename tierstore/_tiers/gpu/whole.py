"""Columns that a GPU holds for every row of a table, beside the cache of the rest."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from tierstore._tiers.base import Tier
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.split import Split

_LOAD_BYTES = 8 << 20


class WholeColumns:
    """Some bytes of every record, in device memory as long as the tiers live; never written.

    Attributes:
        split: the bytes held here, and the cached ones.
        rows: number of rows.
        pitch: bytes of a row.
        array: uint8 `(rows * pitch,)` on the device.
    """

    def __init__(self, device: Device, below: Tier, split: Split) -> None:
        """Load every row of `below`, whose records are those bytes; waits until they are there."""
        self.split = split
        self.rows: int = below.rows
        self.pitch: int = split.whole.nbytes
        self.array: Any = device.allocate(self.nbytes, "u1")
        step = max(1, _LOAD_BYTES // self.pitch)
        for start in range(0, self.rows, step):
            rows = np.arange(start, min(start + step, self.rows), dtype=np.int64)
            with contextlib.closing(below.stream(rows)) as stream:
                for part, records in stream:
                    begin = (start + part.start) * self.pitch
                    flat = np.ascontiguousarray(records).reshape(-1)
                    self.array[begin : begin + flat.size] = device.upload(flat)
        device.synchronize(device.current_stream())

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.rows * self.pitch

    def close(self) -> None:
        """Free the memory, once nothing refers to it."""
        self.array = None
