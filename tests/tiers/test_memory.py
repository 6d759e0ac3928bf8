import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import tierstore
from tierstore._tiers import memory
from tierstore.errors import CapacityError, InvalidInputError


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 5 << 20])
def test_arenas_are_zeroed_memory_of_the_size_asked_for(nbytes):
    arena = memory.allocate(nbytes)
    assert (arena.kind, arena.device_pointer) == ("pageable", None)
    assert arena.array.dtype == np.uint8
    assert arena.array.size == nbytes
    assert not arena.array.any()
    arena.array[:] = 7
    assert (arena.array == 7).all()
    arena.close()
    arena.close()
    assert arena.array.size == 0


def test_pages_are_taken_when_they_are_touched():
    arena = memory.allocate(4 << 30)
    arena.array[3 << 30] = 5
    assert arena.array[3 << 30] == 5
    arena.close()


def private_bytes():
    """Anonymous memory of the process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def test_closing_gives_pages_back_while_a_view_is_left():
    arena = memory.allocate(64 << 20)
    view = arena.array[5:]
    view[:] = 7
    before = private_bytes()
    arena.close()
    assert before - private_bytes() > 60 << 20
    assert not view.any()


def test_a_closed_store_holds_no_memory_of_its_tiers(tmp_path):
    """Though its tables are still referred to, and in cycles."""
    spec = tierstore.TableSpec(500_000, 16)
    tierstore.create(tmp_path / "s", {"t": spec}).close()
    store = tierstore.open(tmp_path / "s", budget=tierstore.Budget(host="40MiB"))
    table = store["t"]
    table.warm(np.arange(500_000))
    before = private_bytes()
    store.close()
    assert before - private_bytes() > 30 << 20
    assert table.name == "t"


def test_more_than_there_can_be_is_refused():
    with pytest.raises(CapacityError, match="cannot reserve"):
        memory.allocate(1 << 62)


def test_kinds_have_names():
    with pytest.raises(InvalidInputError, match="pageable, pinned, managed"):
        memory.allocate(10, "fast")


def test_what_is_available_is_less_than_there_is():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_bytes() <= total


@pytest.mark.parametrize("error", ["driver", "interrupt"])
def test_managed_memory_that_cannot_be_mapped_is_given_back(monkeypatch, error):
    class DriverError(RuntimeError):
        pass

    raised = DriverError("no such device") if error == "driver" else KeyboardInterrupt()
    freed = []

    def refuse(*_):
        raise raised

    runtime = SimpleNamespace(
        CUDARuntimeError=DriverError,
        cudaMemAdviseSetAccessedBy=5,
        memGetInfo=lambda: (1 << 30, 1 << 30),
        mallocManaged=lambda nbytes, flags: 4096,
        getDevice=lambda: 0,
        memAdvise=refuse,
        free=freed.append,
    )
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    before = memory.ManagedArena.reserved
    with pytest.raises(CapacityError if error == "driver" else KeyboardInterrupt):
        memory.allocate(1 << 20, "managed")
    assert freed == [4096]
    assert memory.ManagedArena.reserved == before
