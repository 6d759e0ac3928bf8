"""Several uses of a store on a GPU that are entered once."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests import inside
from tests.gpu.emulator import EmulatedDevice
from tierstore.errors import ClosedError, ReadOnlyError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")


class Marked(EmulatedDevice):
    """Counts how often the store is entered, and markers of the order of streams."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.entered = self.marks = 0
        self.fails = False
        self.stream = 0

    def current_stream(self) -> int:
        return self.stream

    def enter(self) -> int:
        self.entered += 1
        return super().enter()

    def record(self, event: Any, stream: int) -> None:
        self.marks += 1
        if self.fails:
            raise RuntimeError("no marker")
        super().record(event, stream)


@pytest.fixture
def device() -> Marked:
    return Marked()


@pytest.fixture
def table(tmp_path: Path, device: Marked) -> Iterator[Any]:
    spec = tierstore.TableSpec(40, 3, init=tierstore.normal(seed=2))
    budget = tierstore.Budget(host_rows=40, gpu_rows=10)
    opened = tierstore.create(tmp_path / "s", {"t": spec}, budget=budget, device=device)
    yield opened["t"]
    if not inside.door(opened).closed:
        opened.rollback()
    opened.close()


IDS = torch.tensor([3, 9, 3, 30])


def test_one_entry_and_one_marker_for_several_uses(table: Any, device: Marked) -> None:
    expected = table.read(IDS)
    device.entered = device.marks = 0
    with inside.together(table):
        with table.lease(IDS) as lease:
            assert torch.equal(lease.expand("weight"), expected)
            lease.write("weight", lease.read("weight") + 1)
        with inside.together(table):  # within another, nothing
            found = table.read(IDS)
    assert device.entered == device.marks == 1
    assert torch.equal(found, expected + 1)
    table.read(IDS)
    assert device.entered == device.marks == 2


def test_work_in_another_stream_follows(table: Any, device: Marked) -> None:
    table.read(IDS)
    device.marks = 0
    launcher = inside.space(table).gpu.launcher
    with inside.together(table):
        table.read(IDS)
        assert device.marks == 0
        launcher.enter(5)
        assert device.marks == 1
        assert launcher.stream == 5
    table.read(IDS)
    assert launcher.stream == 0


def test_an_error_between_uses_leaves_the_store_open(table: Any) -> None:
    expected = table.read(IDS)
    with pytest.raises(ZeroDivisionError), inside.together(table):
        table.read(IDS)
        raise ZeroDivisionError
    assert torch.equal(table.read(IDS), expected)
    assert not inside.space(table).gpu.launcher.waits


def test_an_error_within_a_use_closes_the_store(table: Any, monkeypatch: Any) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(inside.space(table).gpu, "read", fail)
    with pytest.raises(Exception) as caught, inside.together(table):
        table.read(IDS)
    assert isinstance(caught.value, ZeroDivisionError | tierstore.errors.InternalError)
    with pytest.raises(ClosedError):
        table.read(IDS)
    with pytest.raises(ClosedError), inside.together(table):
        pass


def test_a_marker_that_fails_closes_the_store(table: Any, device: Marked) -> None:
    table.read(IDS)
    with pytest.raises(Exception, match="no marker"), inside.together(table):
        table.read(IDS)
        device.fails = True
    device.fails = False
    assert inside.door(table.store).closed
    with pytest.raises(ClosedError):
        table.read(IDS)


def test_a_reader_writes_in_none_of_them(tmp_path: Path, table: Any, device: Marked) -> None:
    path = table.store.path
    table.store.close()
    budget = tierstore.Budget(host_rows=40, gpu_rows=10)
    with tierstore.open(path, budget=budget, device=Marked()) as reader:
        other = reader["t"]
        before = other.read(IDS)
        with inside.together(other), other.lease(IDS) as lease, pytest.raises(ReadOnlyError):
            lease.write("weight", lease.read("weight") + 1)
        assert torch.equal(other.read(IDS), before)


def test_other_threads_wait_and_enter_by_themselves(table: Any, device: Marked) -> None:
    expected, found = table.read(IDS).numpy(), []
    device.entered = 0
    with inside.together(table):
        thread = threading.Thread(target=lambda: found.append(table.read(IDS.numpy())))
        thread.start()
        table.write(IDS[:1], np.full((1, 3), 7, np.float32))
        thread.join(0.05)
        assert not found
    thread.join()
    expected[[0, 2]] = 7
    assert np.array_equal(found[0], expected)
    assert device.entered == 2


def test_bad_ids_are_looked_for_once_where_every_use_does(tmp_path: Path) -> None:
    spec = tierstore.TableSpec(40, 3, init=tierstore.normal(seed=4))
    budget, device = tierstore.Budget(host_rows=40, gpu_rows=10), Marked()
    tierstore.create(tmp_path / "c", {"t": spec}).close()
    with tierstore.open(
        tmp_path / "c", "r+", budget=budget, device=device, check_ids="sync"
    ) as store:
        ids = IDS.clone()
        ids[2] = 40
        collection = tierstore.nn.TieredEmbeddingCollection(store, {"f": "t"}).requires_grad_(False)
        with pytest.raises(IndexError, match="40"):
            collection({"f": ids})
        store.rollback()
        assert store["t"].read(IDS[:2]).all()
