"""What goes with rows: averages, projections, pretrained weights, and the optimizer's state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.training.conftest import DIM, ROWS, Place, rows_of
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbedding, TieredEmbeddingBag
from tierstore.optim import RowWiseAdagrad, TieredOptimizer

SGD, ADAM, ADAGRAD = torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad


def train(place: Place, pairs: list[tuple[Any, Any]], ids: Tensor) -> None:
    """Take the same step with several layers and optimizers."""
    factors = torch.randn(*ids.shape, DIM).to(place.torch)
    for layer, optimizer in pairs:
        rows = layer(ids.to(place.torch))
        (rows.float().square() * factors).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_layer(weights: Tensor, place: Place) -> torch.nn.Embedding:
    return torch.nn.Embedding.from_pretrained(weights.clone(), freeze=False).to(place.torch)


# -- averages


@pytest.mark.variants(1, 6)
@pytest.mark.parametrize("way", ["in place", "copies", "projected"])
def test_the_average_is_that_of_torch_over_all_rows(
    place: Place, weights: Tensor, way: str
) -> None:
    table = place.table(weights)
    emb, plain = TieredEmbedding(table), plain_layer(weights, place)
    project: Any = (lambda rows: rows) if way == "projected" else None
    opt = TieredOptimizer(
        ADAGRAD, [emb], lr=0.1, ema=0.7, in_place=way == "in place", project=project
    )
    plain_opt = ADAGRAD(plain.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(
        plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7)
    )
    everything = torch.arange(ROWS).to(place.torch)
    for _ in range(6):
        train(place, [(emb, opt), (plain, plain_opt)], place.ids(5))
        average.update_parameters(plain)
        found = emb.averaged()(everything)
        torch.testing.assert_close(found, average(everything), rtol=1e-5, atol=1e-6)
        assert not found.requires_grad
    torch.testing.assert_close(rows_of(table), plain.weight.detach().cpu())
    assert not torch.equal(found, plain(everything))


def test_averages_are_kept_by_commits_and_read_by_readers(weights: Tensor, tmp_path: Any) -> None:
    place = Place(tmp_path)
    table = place.table(weights)
    emb = TieredEmbeddingBag(table, mode="sum", padding_idx=0)
    opt = TieredOptimizer(ADAM, [emb], lr=0.1, ema=0.9)
    for _ in range(3):
        emb(place.ids(3, 4)).square().sum().backward()
        opt.step()
    ids = place.ids(4, 3)
    expected = emb.averaged()(ids)
    store = place.opened[0]
    store.commit()
    emb(place.ids(3, 4)).square().sum().backward()
    opt.step()
    store.rollback()
    assert torch.equal(emb.averaged()(ids), expected)
    with tierstore.open(store.path) as reader:
        layer = TieredEmbeddingBag(reader["item"], mode="sum", padding_idx=0).averaged()
        assert torch.equal(layer(ids), expected)
        assert torch.equal(copy.deepcopy(layer)(ids), expected)
    place.close()


@pytest.mark.variants(1)
def test_averages_of_half_types_are_in_float32(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights.bfloat16()))
    opt = TieredOptimizer(SGD, [emb], lr=0.1, ema=0.5)
    for _ in range(2):
        train(place, [(emb, opt)], place.ids(5))
    assert rows_of(emb.table, "ema").dtype == torch.float32
    assert emb.averaged()(place.ids(3)).dtype == torch.bfloat16


def test_what_averages_do_not_take(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    with pytest.raises(InvalidInputError, match=r"ema=0\.999"):
        emb.averaged()
    with pytest.raises(InvalidInputError, match="between 0 and 1"):
        TieredOptimizer(SGD, [emb], lr=0.1, ema=1.0)
    opt = TieredOptimizer(SGD, [emb], lr=0.1, ema=0.5)
    train(place, [(emb, opt)], place.ids(5))
    with pytest.raises(InvalidInputError, match=r"decay of 0\.5, not 0\.9"):
        TieredOptimizer(SGD, [emb], lr=0.1, ema=0.9)
    with pytest.raises(InvalidInputError, match="averages are not trained"):
        emb.averaged().requires_grad_(True)(place.ids(3))
    store = place.opened[0]
    store.commit()
    store.drop_fields("item", ["ema", "ema_step"])
    with pytest.raises(InvalidInputError, match=r"ema=0\.999"):
        emb.averaged()
    opt = TieredOptimizer(SGD, [emb], lr=0.1, ema=0.9)
    train(place, [(emb, opt)], place.ids(5))
    everything = torch.arange(ROWS).to(place.torch)
    assert torch.equal(emb.averaged()(everything), emb(everything))


# -- projections


@pytest.mark.parametrize("by_layer", [True, False])
def test_rows_of_a_step_are_projected(place: Place, weights: Tensor, by_layer: bool) -> None:
    table = place.table(weights)
    emb, plain = TieredEmbedding(table, padding_idx=3), plain_layer(weights, place)

    def unit(rows: Tensor) -> Tensor:
        return torch.nn.functional.normalize(rows)

    opt = TieredOptimizer(ADAGRAD, [emb], lr=0.1, project={emb: unit} if by_layer else unit)
    plain_opt = ADAGRAD(plain.parameters(), lr=0.1)
    for ids in ([1, 2, 2, 3], [2, 5]):
        train(place, [(emb, opt), (plain, plain_opt)], torch.tensor(ids))
        with torch.no_grad():
            plain.weight[ids] = unit(plain.weight[ids])
            plain.weight[3] = weights[3].to(place.torch)
    torch.testing.assert_close(rows_of(table), plain.weight.detach().cpu())


def test_a_projection_keeps_the_shape(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    for wrong in (lambda rows: rows[:1], lambda rows: None):
        opt = TieredOptimizer(SGD, [emb], lr=0.1, project=wrong)
        emb(torch.tensor([1, 2]).to(place.torch)).sum().backward()
        with pytest.raises(InvalidInputError, match="takes and returns the rows of a step"):
            opt.step()
        place.opened[0].rollback()
    assert torch.equal(rows_of(emb.table), weights)


# -- weights and states from torch


@pytest.mark.variants(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("freeze", [True, False])
def test_a_layer_of_pretrained_weights(
    place: Place, weights: Tensor, dtype: torch.dtype, freeze: bool
) -> None:
    store = place.store({"other": tierstore.TableSpec(3, 4)})
    plain = torch.nn.Embedding.from_pretrained(weights.to(dtype))
    for name, given in {"layer": plain, "weight": plain.weight}.items():
        emb = TieredEmbedding.from_pretrained(given, store, name, freeze=freeze, padding_idx=2)
        assert torch.equal(rows_of(store[name]), weights.to(dtype))
        assert emb.rows.requires_grad is not freeze
        assert emb.padding_idx == 2
    bag = TieredEmbeddingBag.from_pretrained(weights, store, "bag", mode="max")
    assert (bag.mode, bag.rows.requires_grad) == ("max", False)


@pytest.mark.variants(1, 5)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (ADAM, {"lr": 0.1}),
        (ADAM, {"lr": 0.1, "amsgrad": True}),
        (SGD, {"lr": 0.1, "momentum": 0.9}),
        (ADAGRAD, {"lr": 0.1}),
        (RowWiseAdagrad, {"lr": 0.1}),
    ],
)
def test_the_state_of_a_torch_optimizer_goes_on(
    place: Place, weights: Tensor, optimizer: Any, options: Any
) -> None:
    plain = plain_layer(weights, place)
    plain_opt = optimizer(plain.parameters(), **options)
    everything = torch.arange(ROWS)
    for _ in range(3):
        train(place, [(plain, plain_opt)], everything)
    table = place.table(plain.weight.detach().cpu())
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(optimizer, [emb], **options)
    opt.load_rows_state(emb, plain_opt.state_dict()["state"][0])
    place.opened[0].commit()
    for _ in range(2):
        train(place, [(emb, opt), (plain, plain_opt)], everything)
    torch.testing.assert_close(rows_of(table), plain.weight.detach().cpu())


def test_states_that_do_not_fit_are_refused(place: Place, weights: Tensor) -> None:
    plain = plain_layer(weights, place)
    plain_opt = ADAM(plain.parameters())
    train(place, [(plain, plain_opt)], torch.arange(ROWS))
    state = plain_opt.state_dict()["state"][0]
    emb, other = TieredEmbedding(place.table(weights)), TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(ADAM, [emb])
    with pytest.raises(InvalidInputError, match="does not train"):
        opt.load_rows_state(other, state)
    with pytest.raises(InvalidInputError, match="this state has step; the optimizer keeps"):
        opt.load_rows_state(emb, {"step": 3})
    narrow = {**state, "exp_avg": torch.zeros(ROWS, 2)}
    with pytest.raises(InvalidInputError, match=rf"exp_avg is \({ROWS}, 2\)"):
        opt.load_rows_state(emb, narrow)
    assert not rows_of(emb.table, "exp_avg_sq").any()
    assert place.opened[0].uncommitted_rows() == 0


@pytest.mark.variants(1, 4)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (ADAM, {"lr": 0.1}),
        (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
        (ADAGRAD, {"lr": 0.1, "initial_accumulator_value": 0.25}),
    ],
)
def test_reset_state_starts_anew(
    place: Place, weights: Tensor, optimizer: Any, options: Any
) -> None:
    table = place.table(weights)
    model = torch.nn.Sequential(TieredEmbedding(table), torch.nn.Linear(DIM, DIM)).to(place.torch)
    opt = TieredOptimizer(optimizer, model, **options)
    for _ in range(3):
        train(place, [(model, opt)], torch.arange(ROWS))
    opt.reset_state()
    assert "step" not in table.scalars
    plain = torch.nn.Sequential(plain_layer(rows_of(table), place), copy.deepcopy(model[1]))
    plain_opt = optimizer(plain.parameters(), **options)
    for _ in range(2):
        train(place, [(model, opt), (plain, plain_opt)], torch.arange(ROWS))
    torch.testing.assert_close(rows_of(table), plain[0].weight.detach().cpu())
    torch.testing.assert_close(model[1].weight, plain[1].weight)
    assert table.scalars["step"] == 2


def test_fields_of_another_optimizer_can_be_dropped(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    emb = TieredEmbedding(table)
    TieredOptimizer(ADAM, [emb])
    record = table.spec.layout.record_bytes
    table.store.drop_fields("item", ["exp_avg", "exp_avg_sq"])
    assert list(table.fields) == ["weight"]
    assert table.spec.layout.record_bytes < record
    opt = TieredOptimizer(ADAGRAD, [emb])
    emb(torch.tensor([1, 2]).to(place.torch)).sum().backward()
    opt.step()
    assert list(table.fields) == ["weight", "sum"]
