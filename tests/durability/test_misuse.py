"""Ids, values and specs that are wrong or odd: an error that says what, or the right rows.

Rows 1 to 18 of docs/faults.md; on a GPU they are in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.crash import scratch
from tests.every import every
from tierstore.budget import Budget
from tierstore.errors import (
    CapacityError,
    InvalidInputError,
    InvalidTypeError,
    RowIndexError,
    StoreFullError,
    TierStoreError,
)

ROWS, DIM = 20, 3
TRUTH = np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float32)
fault = pytest.mark.fault


@pytest.fixture(params=[0, 2, 1000], ids=lambda slots: f"{slots} slots")
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tierstore.Store]:
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.from_array(TRUTH))
    budget = Budget(host_rows=request.param)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=budget) as made:
        yield made
        made.rollback()


@pytest.fixture
def table(store: tierstore.Store) -> tierstore.Table:
    return store["t"]


def values(count: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def unchanged(table: tierstore.Table) -> None:
    assert inside.uncommitted(table).size == 0
    assert np.array_equal(table.read(np.arange(ROWS)), TRUTH)


@fault(1, 2, 3)
@pytest.mark.parametrize(
    "bad", [-1, ROWS, 2**63 - 1, -(2**63), np.uint64(2**63), np.uint64(2**64 - 1)]
)
def test_ids_outside_of_the_table(table: tierstore.Table, bad: Any) -> None:
    dtype = np.uint64 if isinstance(bad, np.uint64) else np.int64
    ids = np.array([3, bad, 5], dtype)
    for use in (lambda: table.read(ids), lambda: table.write(ids, values(3))):
        with pytest.raises(RowIndexError, match=rf"row id {bad} at position 1"):
            use()
    unchanged(table)


@fault(4, 5)
@every(
    ids=[[1.0], [float("nan")], np.array([1e30]), [True, False], np.ones(ROWS, bool), ["1"], [1j]]
)
def test_ids_that_are_no_whole_numbers(table: tierstore.Table, ids: Any) -> None:
    for use in (lambda: table.read(ids), lambda: table.write(ids, values(len(ids)))):
        with pytest.raises(InvalidTypeError):
            use()
    unchanged(table)


@fault(5)
def test_bytes_are_ids_and_never_a_mask(table: tierstore.Table) -> None:
    torch = pytest.importorskip("torch")
    mask = [1, 0, 1, 1]
    assert np.array_equal(table.read(np.array(mask, np.uint8)), TRUTH[mask])
    assert np.array_equal(table.read(torch.tensor(mask, dtype=torch.uint8)).numpy(), TRUTH[mask])


@fault(6)
def test_no_ids_at_all(table: tierstore.Table) -> None:
    for empty in (np.empty(0, np.int64), [], np.empty((2, 0), np.int32)):
        assert table.read(empty).shape == (*np.shape(empty), DIM)
        table.write(empty, np.empty((*np.shape(empty), DIM), np.float32))
    unchanged(table)


@fault(7, 8)
def test_ids_that_repeat(table: tierstore.Table) -> None:
    ids, new = np.array([4, 7, 4, 4, 7]), values(5)
    assert np.array_equal(table.read(ids), TRUTH[ids])
    table.write(ids, new)
    assert np.array_equal(table.read([4, 7]), new[[3, 4]])


def _views() -> dict[str, Any]:
    grid = np.arange(12).reshape(3, 4)
    return {
        "a number": 7,
        "a list": [3, 1],
        "nested": [[3, 1], [0, 2]],
        "2-D": grid,
        "0-D": np.array(5),
        "int32": grid.astype(np.int32),
        "big-endian": grid.astype(">i4"),
        "columns": grid[:, ::2],
        "backwards": np.arange(9)[::-1],
        "a broadcast": np.broadcast_to(np.array([2]), (5,)),
    }


@pytest.mark.variants(16)
@fault(9)
@pytest.mark.parametrize("name", _views())
def test_ids_of_every_shape_and_kind(table: tierstore.Table, name: str) -> None:
    ids = _views()[name]
    assert np.array_equal(table.read(ids), TRUTH[np.asarray(ids)])
    new = values(max(1, np.size(ids))).reshape(*np.shape(ids), DIM)
    table.write(ids, new)
    if np.unique(ids).size == np.size(ids):
        assert np.array_equal(table.read(ids), new)


@fault(10)
def test_batches_larger_than_any_tier(table: tierstore.Table) -> None:
    ids = np.random.default_rng(3).permutation(ROWS)
    new = values(ROWS)
    assert np.array_equal(table.read(ids), TRUTH[ids])
    table.write(ids, new)
    assert np.array_equal(table.read(ids), new)


@fault(11)
@pytest.mark.gpu
def test_ids_and_values_on_a_gpu(table: tierstore.Table) -> None:
    """The store is on the CPU: they are moved, and so are the rows that come back."""
    torch = pytest.importorskip("torch")
    ids, new = torch.tensor([3, 1], device="cuda"), torch.from_numpy(values(2)).cuda()
    table.write(ids, new)
    assert torch.equal(table.read(ids).cpu(), new.cpu())


@fault(12)
@every(
    wrong=[
        values(3).astype(np.float64), values(3).astype(complex), np.array([["a"] * DIM] * 3),
        values(3)[:1], values(3)[:, :1], values(3)[:, :2], values(4), values(3)[0], np.float32(1),
        [[1.0, 2.0], [3.0]], None,
    ],
)  # fmt: skip
def test_values_of_another_type_or_shape(table: tierstore.Table, wrong: Any) -> None:
    with pytest.raises((InvalidTypeError, InvalidInputError)):
        table.write([1, 2, 3], wrong)
    unchanged(table)


@fault(13)
def test_tensors_with_a_history_or_odd_strides(table: tierstore.Table) -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([2, 9, 4])
    kinds: list[Callable[[Any], Any]] = [
        lambda rows: rows.clone().requires_grad_(),
        lambda rows: rows.clone().requires_grad_() * 1,
        lambda rows: rows.T.contiguous().T,
        lambda rows: rows[:1].expand(3, DIM),
        lambda rows: torch._neg_view(-rows),
    ]
    for number, kind in enumerate(kinds):
        given = kind(torch.from_numpy(values(3, number)))
        table.write(ids, given)
        found = table.read(ids)
        assert not found.requires_grad
        assert torch.equal(found, given.detach())


@fault(14)
def test_numbers_that_are_not_finite_keep_their_bits(table: tierstore.Table) -> None:
    bits = np.array([0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x80000000, 1], np.uint32)
    table.write([1, 2], bits.view(np.float32).reshape(2, DIM))
    assert np.array_equal(table.read([1, 2]).view(np.uint32).ravel(), bits)


@fault(15)
def test_results_are_the_caller_s_own(table: tierstore.Table) -> None:
    for _ in range(2):
        table.read([1, 2])[:] = 7
        table[[1, 2]][:] = 7
    given = values(2)
    table.write([3, 4], given)
    kept = given.copy()
    given[:] = 7
    assert np.array_equal(table.read([3, 4]), kept)
    assert np.array_equal(table.read([1, 2]), TRUTH[[1, 2]])


@fault(16)
def test_state_and_weight_belong_to_one_version(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import tierstore.nn
    import tierstore.optim

    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=5))
    with tierstore.create(tmp_path / "s", {"t": spec}) as store:
        layer = tierstore.nn.TieredEmbedding(store["t"])
        optimizer = tierstore.optim.TieredOptimizer(torch.optim.Adam, [layer], lr=0.1)
        versions = {}
        for _ in range(2):
            layer(torch.tensor([1, 5, 5])).sum().backward()
            optimizer.step()
            versions[store.commit()] = store["t"].read(np.arange(ROWS), list(store["t"].fields))
        layer(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        store.rollback()
        for version, fields in versions.items():
            with tierstore.open(store.path, version=version) as reader:
                found = reader["t"].read(np.arange(ROWS), list(fields))
                assert all(np.array_equal(found[name], fields[name]) for name in fields)


@fault(17)
@pytest.mark.parametrize(
    "spec",
    [
        {"dtype": "object"}, {"dtype": "str"}, {"dtype": "complex64"}, {"dtype": "bool"},
        {"dtype": [("a", "<f4")]}, {"dtype": ">f4"}, {"rows": 0}, {"rows": -5}, {"rows": 10**18},
        {"rows": "1e6"}, {"rows": 1e6}, {"rows": True}, {"dim": 0}, {"dim": -1}, {"dim": 2**40},
        {"dim": 1.5},
    ],
    ids=repr,
)  # fmt: skip
def test_tables_that_cannot_be(tmp_path: Path, spec: dict[str, Any]) -> None:
    with pytest.raises(TierStoreError):
        tierstore.create(
            tmp_path / "s", {"t": tierstore.TableSpec(**{"rows": 5, "dim": 2, **spec})}
        )
    assert list(tmp_path.iterdir()) == []


@fault(18)
@pytest.mark.slow
def test_a_table_larger_than_the_disk() -> None:
    """In memory, whose file system refuses at once what it could never hold."""
    with scratch() as root:
        if not str(root).startswith("/dev/shm"):
            pytest.skip("no file system in memory")
        with pytest.raises(StoreFullError, match="no space"):
            tierstore.create(root / "s", {"t": tierstore.TableSpec(10**9, 768)})
        assert list(root.iterdir()) == []


@fault(10)
def test_a_budget_too_small_for_the_maps(tmp_path: Path) -> None:
    tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(5000, DIM)}).close()
    with pytest.raises(CapacityError, match="bytes"):
        tierstore.open(tmp_path / "s", budget=Budget(host=100))
