"""Where a table's work on a device goes, seen from the host: whose stream, and what comes back."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.gpu.emulator import EmulatedDevice
from tierstore import Budget, TableSpec
from tierstore._table.gpu import DeviceAccess
from tierstore._table.values import Columns

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")

ROWS = 100


class Watched(EmulatedDevice):
    """Notes into which stream every upload and launch goes, and counts downloads."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: set[int | None] = set()
        self.downloads = 0

    def upload(self, array: Any, stream: int | None = None) -> Any:
        self.streams.add(stream)
        return super().upload(array, stream)

    def download(self, array: Any) -> Any:
        self.downloads += 1
        return super().download(array)

    def _loaded(self, *given: Any, **how: bool) -> Any:
        kernel, blocks = super()._loaded(*given, **how)

        def launch(blocks: int, arguments: int, stream: int) -> None:
            self.streams.add(stream)
            kernel(blocks, arguments, stream)

        return launch, blocks


def through_lease(table: Any, ids: np.ndarray, rows: np.ndarray, *, columns: bool) -> None:
    """Write NumPy rows through a lease on torch ids, all distinct."""
    with table.lease(torch.from_numpy(ids)) as lease:
        compact = np.empty_like(rows)
        compact[lease.positions.numpy()] = rows
        if columns:
            lease.write_columns(Columns(table.spec.layout, ["weight"]), {"weight": compact})
        else:
            lease.write("weight", compact)


TORCHS, ANOTHER = 7, 3
WRITES: dict[str, Callable[[Any, np.ndarray, np.ndarray], None]] = {
    "torch rows": lambda table, ids, rows: table.write(ids, torch.from_numpy(rows)),
    "torch ids": lambda table, ids, rows: table.write(torch.from_numpy(ids), rows),
    "a lease": functools.partial(through_lease, columns=False),
    "columns": functools.partial(through_lease, columns=True),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_write_is_in_torchs_stream_if_ids_or_rows_are_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    device = Watched()
    monkeypatch.setattr(
        DeviceAccess, "stream", lambda self, kind: TORCHS if kind == "torch" else ANOTHER
    )
    spec = {"t": TableSpec(rows=ROWS, dim=4)}
    ids, rows = np.arange(7), np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)
    with tierstore.create(tmp_path / "s", spec, budget=Budget(gpu_rows=9), device=device) as store:
        device.streams.clear()
        WRITES[way](store["t"], ids, rows)
        assert device.streams == {TORCHS}
        np.testing.assert_array_equal(store["t"].read(ids), rows)
        store.rollback()


def test_tensors_for_numpy_ids_stay_on_the_device(tmp_path: Path) -> None:
    device = Watched()
    spec = {"t": TableSpec(rows=ROWS, dim=4, init=tierstore.normal(seed=1))}
    with tierstore.create(tmp_path / "s", spec, budget=Budget(gpu_rows=9), device=device) as store:
        table, ids = store["t"], np.array([[3, 99], [3, 0]])
        device.downloads = 0
        found = table.read(ids, as_tensor=True)
        assert device.downloads == 0
        rows = table.read(ids)
        assert device.downloads == 1
        np.testing.assert_array_equal(found.numpy(), rows)
