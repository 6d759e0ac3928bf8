"""Gradients between their backward pass and their step: ids that change, and rollbacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests import inside
from tests.training.conftest import DIM, ROWS, Place, rows_of
from tierstore._tiers.base import Epoch
from tierstore._tiers.host import HostTier
from tierstore.errors import ClosedError
from tierstore.nn import TieredEmbedding, TieredEmbeddingBag
from tierstore.nn import autograd as nn_batch
from tierstore.optim import TieredOptimizer

MICRO = [[4, 2, 4], [7, 2, 9]]


def place_ids(place: Place, ids: list[int]) -> Tensor:
    return torch.tensor(ids).to(place.torch)


@pytest.mark.variants(10, 16)
@pytest.mark.parametrize("layer", [TieredEmbedding, TieredEmbeddingBag])
@pytest.mark.parametrize("padding", [None, 9])
@pytest.mark.parametrize("in_place", [True, False])
def test_ids_may_be_copied_into_one_buffer(
    place: Place, weights: Tensor, layer: Any, padding: int | None, in_place: bool
) -> None:
    table = place.table(weights)
    emb = layer(table, padding_idx=padding)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0, in_place=in_place)
    buffer = place_ids(place, [0, 0, 0])
    offsets = {} if layer is TieredEmbedding else {"offsets": place_ids(place, [0, 1, 2])}
    expected = weights.clone()
    for ids in MICRO:
        buffer.copy_(place_ids(place, ids))
        emb(buffer, **offsets).sum().backward()
        for row in ids:
            expected[row] -= float(row != padding)
    buffer.fill_(ROWS - 1)
    opt.step()
    torch.testing.assert_close(rows_of(table), expected)


def test_ids_may_change_between_the_passes(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0)
    buffer = place_ids(place, [4, 2, 4])
    loss = emb(buffer).sum()
    buffer.fill_(ROWS - 1)
    emb(buffer).sum().backward()
    loss.backward()
    opt.step()
    expected = weights.clone()
    expected[2] -= 1
    expected[4] -= 2
    expected[ROWS - 1] -= 3
    torch.testing.assert_close(rows_of(table), expected)


def test_what_a_row_rounds_to_is_decided_by_its_lease(place: Place, weights: Tensor) -> None:
    found = []
    for changes in (False, True):
        table = place.table(weights.bfloat16())
        emb = TieredEmbedding(table)
        opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1e-3, stochastic_rounding=True)
        buffer = place_ids(place, [4, 2, 4, 31])
        emb(buffer).sum().backward()
        if changes:
            buffer.fill_(0)
        opt.step()
        found.append(rows_of(table))
    assert torch.equal(*found)


def test_the_rows_of_a_lease_are_its_own(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    ids = place.ids(5, 4)
    given = ids.clone()
    with table.lease(given) as lease:
        given.fill_(0)
        lease.trim(wait=True)
        rows = torch.as_tensor(lease.rows)
        assert torch.equal(rows[torch.as_tensor(lease.positions).long()], ids)
        assert len(rows) == lease.bound == len(ids.unique())


@pytest.mark.variants(7)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("clipped", [True, False])
def test_a_rollback_drops_gradients_that_have_come(
    place: Place, weights: Tensor, in_place: bool, clipped: bool
) -> None:
    table = place.table(weights)
    store = place.opened[0]
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0, in_place=in_place)
    table.write(torch.arange(ROWS), torch.zeros(ROWS, DIM))
    emb(place_ids(place, [1, 2, 3, 3])).sum().backward()
    if clipped:
        torch.nn.utils.clip_grad_norm_(emb.parameters(), 1e9)
    store.rollback()
    table.read(torch.arange(10, 17))  # into slots that the lease had
    assert emb.rows.grad is None
    opt.step()
    assert torch.equal(rows_of(table), weights)
    emb(place_ids(place, [1, 2])).sum().backward()
    opt.step()
    torch.testing.assert_close(rows_of(table)[1:4], weights[1:4] - torch.tensor([[1], [1], [0]]))


def test_a_backward_pass_of_rows_that_were_rolled_back_is_refused(
    place: Place, weights: Tensor
) -> None:
    table = place.table(weights)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0)
    loss = emb(place_ids(place, [1, 2, 3, 3])).sum()
    place.opened[0].rollback()
    with pytest.raises(ClosedError, match="rolled back since this forward pass"):
        loss.backward()
    opt.step()
    assert torch.equal(rows_of(table), weights)


def test_a_step_in_a_closed_store_is_refused(place: Place, weights: Tensor) -> None:
    """Whether the backward pass came before or comes after; other parameters stay too."""
    table = place.table(weights)
    emb, dense = TieredEmbedding(table), torch.nn.Linear(DIM, 1).to(place.torch)
    opt = TieredOptimizer(torch.optim.SGD, [emb, dense], lr=1.0)
    before = dense.weight.detach().clone()
    dense(emb(place_ids(place, [1, 2, 3, 3]))).sum().backward()
    later = emb(place_ids(place, [4])).sum()
    place.opened[0].close()
    with pytest.raises(ClosedError, match="was closed; open it again"):
        later.backward()
    with pytest.raises(ClosedError, match="was closed; open it again"):
        opt.step()
    assert torch.equal(dense.weight, before)
    opt.zero_grad()
    with tierstore.open(place.opened[0].path) as store:
        assert torch.equal(store["item"].read(torch.arange(ROWS)), weights)


def test_a_step_that_failed_is_not_taken_twice_after_a_rollback(
    weights: Tensor, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=1))
    store = place.store({"a": spec, "b": spec})
    layers = [TieredEmbedding(store[name]) for name in "ab"]
    opt = TieredOptimizer(torch.optim.Adam, layers, lr=0.1)
    for layer in layers:
        layer(torch.arange(3)).sum().backward()
    updated, calls = HostTier.update_held, []

    def fail_later(*given: Any) -> None:
        calls.append(given)
        if len(calls) > 1:
            raise tierstore.errors.StoreFullError("no space left")
        updated(*given)

    with monkeypatch.context() as patch:
        patch.setattr(HostTier, "update_held", fail_later)
        with pytest.raises(tierstore.errors.StoreFullError):
            opt.step()
    store.rollback()
    opt.step()  # nothing is left to apply
    for layer in layers:
        layer(torch.arange(3)).sum().backward()
    opt.step()
    assert [store[name].scalars["step"] for name in "ab"] == [1, 1]
    place.close()


def test_zero_grad_after_a_rollback_drops_the_gradient(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(torch.optim.Adam, [emb], lr=1.0)
    emb(place.ids(9)).sum().backward()
    place.opened[0].rollback()
    opt.zero_grad()
    opt.step()
    assert torch.equal(rows_of(table), weights)


def test_without_epochs_the_gradient_goes_to_other_rows(
    weights: Tensor, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tests.gpu.emulator").library()
    from tests.gpu.emulator import EmulatedDevice

    place = Place(tmp_path, device=EmulatedDevice(), budget={"host_rows": ROWS, "gpu_rows": 5})
    table = place.table(weights)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0)
    emb(torch.arange(1, 4)).sum().backward()
    monkeypatch.setattr(Epoch, "end", lambda *_, **__: None)
    place.opened[0].rollback()
    table.read(torch.arange(10, 15))
    opt.step()
    table.read(torch.arange(20, 25))
    wrong = (rows_of(table) != weights).any(dim=1).nonzero().ravel().tolist()
    assert set(wrong) & set(range(10, 15))
    monkeypatch.undo()
    place.close()


# -- leases of batches that were dropped


def test_evaluation_releases_what_training_dropped(weights: Tensor, tmp_path: Any) -> None:
    place = Place(tmp_path)
    table = place.table(weights, host_rows=20)
    emb = TieredEmbedding(table)
    emb(torch.arange(9))
    assert inside.pins(table).sum() == 9
    with torch.no_grad():
        emb(torch.arange(3))
    assert not inside.pins(table).any()
    place.close()


def test_a_lease_whose_release_failed_is_released_by_a_later_call() -> None:
    class Lease:
        def __init__(self, *errors: BaseException) -> None:
            self.errors, self.released = list(errors), False

        def release(self) -> None:
            if self.errors:
                raise self.errors.pop()
            self.released = True

    leases: Any = [Lease(), Lease(KeyboardInterrupt()), Lease()]
    abandoned = nn_batch.Abandoned()
    for lease in leases:
        abandoned.add(lease)
    with pytest.raises(KeyboardInterrupt):
        abandoned.release()
    assert [lease.released for lease in leases] == [True, False, False]
    abandoned.release()
    assert all(lease.released for lease in leases)
