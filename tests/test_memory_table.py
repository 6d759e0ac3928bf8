"""A table in memory alone, against a NumPy array; its tiers are those of a store."""

from __future__ import annotations

import pickle
import shutil
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.gpu.emulator import EmulatedDevice
from tierstore import Budget, Field, TableSpec
from tierstore._memory_table import BottomTier, MemoryTable
from tierstore.errors import ClosedError, InvalidInputError, InvalidTypeError, RowIndexError

ROWS = 9000
FIELDS = {
    "weight": Field(5, "float32", tierstore.normal(seed=3)),
    "state": Field(2, "float16", tierstore.uniform(-1, 1, seed=4)),
}
SPEC = TableSpec(rows=ROWS, fields=FIELDS)
BUDGETS = [None, Budget(host_rows=100, gpu_rows=ROWS), Budget(host_rows=ROWS, gpu_rows=70)]


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> Any:
    if request.param == "cpu":
        return "cpu"
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    return EmulatedDevice()


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_scratch_table_is_a_table(device: Any, budget: Budget | None) -> None:
    rng = np.random.default_rng(0)
    with MemoryTable(SPEC, budget=budget, device=device) as scratch:
        table = scratch.table
        now = {name: table.read(np.arange(ROWS), name) for name in FIELDS}
        for _ in range(10):
            ids = rng.integers(0, ROWS, 60)
            rows = rng.normal(size=(60, 5)).astype(np.float32)
            table.write(ids, rows)
            now["weight"][ids] = rows
            with table.lease(ids) as lease:
                lease.write("state", lease.read("state") / 2)
            now["state"][np.unique(ids)] /= 2
            seen = rng.integers(0, ROWS, (4, 9))
            for name, expected in now.items():
                np.testing.assert_array_equal(table.read(seen, name), expected[seen])
        for name, expected in now.items():
            np.testing.assert_array_equal(np.concatenate(list(table.scan(name))), expected)
        assert table._backing.information(()).disk_bytes == 0


def test_first_values_are_those_of_a_store(tmp_path: Any) -> None:
    with (
        MemoryTable(SPEC.bound("t")) as scratch,
        tierstore.create(tmp_path / "s.tier", {"t": SPEC}) as store,
    ):
        ids = np.random.default_rng(1).integers(0, ROWS, 300)
        for name in FIELDS:
            np.testing.assert_array_equal(scratch.table.read(ids, name), store["t"].read(ids, name))


def test_rows_without_a_place_are_kept_below() -> None:
    rng = np.random.default_rng(2)
    with MemoryTable(SPEC, budget=Budget(host_rows=10)) as scratch:
        rows = rng.normal(size=(ROWS, 5)).astype(np.float32)
        order = rng.permutation(ROWS)
        scratch.table.write(order, rows)
        np.testing.assert_array_equal(scratch.table.read(order), rows)


def test_zeros_take_no_memory_below() -> None:
    spec = TableSpec(rows=1000, dim=8)
    origin = BottomTier(spec)
    out = np.ones((3, spec.layout.record_bytes), np.uint8)
    origin.read(np.array([5, 999, 5]), out)
    assert not out.any()
    with MemoryTable(spec) as scratch:
        scratch.table.write([7], np.ones((1, 8), np.float32))
        assert scratch.table.stats()["disk"].written == 0


def test_progress_and_refusals() -> None:
    seen: list[tuple[int, int]] = []
    with MemoryTable(SPEC, progress=lambda done, total: seen.append((done, total))) as scratch:
        assert seen[-1] == (ROWS, ROWS)
        with pytest.raises(RowIndexError, match="9000"):
            scratch.table.read([0, ROWS])
        for refused in (lambda: scratch.table.store,):
            with pytest.raises(InvalidInputError, match="in memory alone"):
                refused()
    scratch.close()
    with pytest.raises(ClosedError):
        scratch.table.read([0])


def test_layer_and_optimizer_train_a_table_in_memory() -> None:
    torch = pytest.importorskip("torch")
    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    fields = {"weight": Field(4, init=tierstore.normal(seed=5)), "sum": Field(4)}
    with MemoryTable(TableSpec(30, fields=fields)) as memory:
        layer = TieredEmbedding(memory.table)
        peer = torch.nn.Embedding.from_pretrained(
            torch.from_numpy(memory.table.read(np.arange(30)).copy()), freeze=False
        )
        optimizers = [
            TieredOptimizer(torch.optim.Adagrad, [layer], lr=0.1),
            torch.optim.Adagrad(peer.parameters(), lr=0.1),
        ]
        for seed in range(3):
            ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 30, 12))
            for each, optimizer in zip([layer, peer], optimizers, strict=True):
                each(ids).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found = memory.table.read(np.arange(30))
    assert np.array_equal(found, peer.weight.detach().numpy())


def test_a_table_in_memory_is_not_pickled():
    with MemoryTable(SPEC) as scratch, pytest.raises(InvalidTypeError, match="in memory alone"):
        pickle.dumps(scratch.table)
