"""TieredEmbedding beside torch.nn.Embedding."""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests import inside
from tests.training.conftest import DIM, ROWS, Place, randomly, rows_of, same
from tierstore.errors import (
    InvalidInputError,
    InvalidTypeError,
    RowIndexError,
    TierStoreWarning,
    UnknownNameError,
)
from tierstore.nn import FrozenEmbedding, TieredEmbedding
from tierstore.optim import TieredOptimizer


class Pair:
    """A tiered layer and a plain one with the same rows, each with an optimizer."""

    def __init__(
        self, place: Place, weights: Tensor, optimizer: Any = None, **options: Any
    ) -> None:
        padding = options.pop("padding_idx", None)
        self.place = place
        self.table = place.table(weights)
        self.tiered = TieredEmbedding(self.table, padding_idx=padding)
        self.plain = torch.nn.Embedding(*weights.shape, padding_idx=padding).to(place.torch)
        self.plain.weight.data.copy_(weights)
        optimizer = optimizer or torch.optim.SGD
        options = options or {"lr": 0.5}
        self.opt = TieredOptimizer(optimizer, [self.tiered], **options)
        self.plain_opt = optimizer(self.plain.parameters(), **options)

    def backward(self, ids: Tensor) -> None:
        rows, plain = self.tiered(ids), self.plain(ids)
        assert same(rows, plain, self.place)
        factors = randomly(*rows.shape, like=rows)
        (rows * factors).sum().backward()
        (plain * factors).sum().backward()

    def step(self) -> None:
        for optimizer in (self.opt, self.plain_opt):
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        torch.testing.assert_close(rows_of(self.table), self.plain.weight.detach().cpu())


@pytest.mark.variants(5)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 1, 3), (0,), (2, 0)])
def test_rows_come_in_the_shape_of_the_ids(place: Place, weights: Tensor, shape: Any) -> None:
    emb = TieredEmbedding(place.table(weights))
    ids = place.ids(*shape)
    rows = emb(ids)
    assert rows.requires_grad
    assert torch.equal(rows.cpu(), weights[ids.cpu()])
    with torch.no_grad():
        assert torch.equal(emb(ids).cpu(), weights[ids.cpu()])


@pytest.mark.variants(5)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_ids_of_any_integer_type(place: Place, weights: Tensor, dtype: torch.dtype) -> None:
    pair = Pair(place, weights)
    ids = place.ids(9)
    factors = randomly(9, DIM, like=pair.plain.weight)
    (pair.tiered(ids.to(dtype)) * factors).sum().backward()
    (pair.plain(ids) * factors).sum().backward()
    pair.step()
    pair.check()


def test_gradients_of_repeated_ids_add_up(place: Place, weights: Tensor) -> None:
    pair = Pair(place, weights)
    for _ in range(3):
        pair.backward(place.ids(5, 30, rows=10))
        pair.step()
    pair.check()


def test_gradients_of_several_backward_passes_add_up(place: Place, weights: Tensor) -> None:
    pair = Pair(place, weights)
    for _ in range(2):
        for count in (4, 11, 1, 7):
            pair.backward(place.ids(count))
        pair.step()
    pair.check()


def test_a_graph_that_is_run_backward_twice(place: Place, weights: Tensor) -> None:
    pair = Pair(place, weights)
    ids = place.ids(9)
    for layer in (pair.tiered, pair.plain):
        loss = layer(ids).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    pair.step()
    pair.check()
    for layer, optimizer in ((pair.tiered, pair.opt), (pair.plain, pair.plain_opt)):
        loss = layer(ids).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pair.check()


def test_a_step_between_forward_and_backward_is_not_lost(place: Place, weights: Tensor) -> None:
    pair = Pair(place, weights)
    ids = torch.randperm(ROWS)[:25].to(place.torch)
    more = torch.cat([ids, place.ids(12)])
    late = [(layer(ids) * 2).sum() for layer in (pair.tiered, pair.plain)]
    pair.backward(more)
    pair.step()
    for loss in late:
        loss.backward()
    pair.step()
    pair.check()


def test_layers_that_share_a_table_are_trained_as_one(place: Place, weights: Tensor) -> None:
    pair = Pair(place, weights, torch.optim.SGD, lr=0.5)
    other = TieredEmbedding(pair.table)
    opt = TieredOptimizer(torch.optim.SGD, [pair.tiered, other], lr=0.5)
    one, two = place.ids(9), place.ids(9)
    (pair.tiered(one) * other(two)).sum().backward()
    (pair.plain(one) * pair.plain(two)).sum().backward()
    opt.step()
    pair.plain_opt.step()
    pair.check()


def test_several_tables_in_one_model(place: Place) -> None:
    specs = {
        name: tierstore.TableSpec(rows, DIM, init=tierstore.normal(seed=rows))
        for name, rows in {"user": 30, "item": 20}.items()
    }
    store = place.store(specs)
    layers = {name: TieredEmbedding(store[name]) for name in specs}
    plain = {
        name: torch.nn.Embedding.from_pretrained(rows_of(store[name]), freeze=False).to(place.torch)
        for name in specs
    }
    opt = TieredOptimizer(torch.optim.SGD, layers.values(), lr=0.1)
    plain_opt = torch.optim.SGD([layer.weight for layer in plain.values()], lr=0.1)
    for _ in range(3):
        users, items = place.ids(8, rows=30), place.ids(8, rows=20)
        for both, optimizer in ((layers, opt), (plain, plain_opt)):
            (both["user"](users) * both["item"](items)).sum().square().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name in specs:
        torch.testing.assert_close(rows_of(store[name]), plain[name].weight.detach().cpu())


@pytest.mark.variants(1)
@pytest.mark.parametrize("padding", [3, -2])
def test_the_padding_row_is_never_trained(place: Place, weights: Tensor, padding: int) -> None:
    options = {"lr": 0.5, "weight_decay": 0.1, "padding_idx": padding}
    pair = Pair(place, weights, torch.optim.AdamW, **options)
    for _ in range(2):
        ids = torch.cat([torch.arange(ROWS), torch.full((5,), padding % ROWS)]).to(place.torch)
        pair.backward(ids)
        pair.backward(place.ids(7))
        pair.step()
        pair.plain.weight.data[padding] = weights[padding].to(place.torch)
    found, plain = rows_of(pair.table), pair.plain.weight.detach().cpu()
    assert torch.equal(found[padding], weights[padding])
    assert not rows_of(pair.table, "exp_avg")[padding].any()
    others = torch.arange(ROWS) != padding % ROWS
    torch.testing.assert_close(found[others], plain[others])


def test_the_padding_of_one_layer_is_trained_by_another(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    padded, other = TieredEmbedding(table, padding_idx=0), TieredEmbedding(table)
    opt = TieredOptimizer(torch.optim.SGD, [padded, other], lr=1.0)
    ids = torch.tensor([0, 1]).to(place.torch)
    (padded(ids).sum() + 2 * other(ids).sum()).backward()
    opt.step()
    found = rows_of(table)
    torch.testing.assert_close(found[0], weights[0] - 2)
    torch.testing.assert_close(found[1], weights[1] - 3)


def test_reading_marks_nothing(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(torch.optim.Adam, [emb], lr=1.0)
    version = place.opened[0].version
    emb.eval()
    with torch.no_grad():
        assert not emb(place.ids(9)).requires_grad
    with torch.inference_mode():
        emb(place.ids(9))
    emb.train().requires_grad_(False)
    assert not emb(place.ids(9)).requires_grad
    emb.requires_grad_(True)
    emb(place.ids(9)).sum()
    opt.step()
    assert place.opened[0].uncommitted_rows() == 0
    assert place.opened[0].version == version
    assert torch.equal(rows_of(table), weights)


def test_rows_are_held_until_their_step_or_as_long_as_a_backward_pass_may_come(
    weights: Tensor, tmp_path: Path
) -> None:
    place = Place(tmp_path)
    table = place.table(weights, host_rows=20)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=0.1)
    leases = inside.pins(table)
    kept = emb(torch.arange(5))
    for _ in range(10):
        emb(place.ids(9))
    emb.rows.abandoned.release()
    assert leases.sum() == 5
    kept.sum().backward()
    del kept
    emb.rows.abandoned.release()
    assert leases.sum() == 5
    opt.step()
    assert leases.sum() == 0
    place.close()


def test_rows_follow_the_module(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0)
    emb.to(torch.float64)
    rows = emb(torch.tensor([3, 3, 5]).to(place.torch))
    assert rows.dtype == torch.float64
    rows.sum().backward()
    opt.step()
    found = rows_of(table)
    torch.testing.assert_close(found[[3, 5, 6]], weights[[3, 5, 6]] - torch.tensor([[2], [1], [0]]))


@pytest.mark.variants(1, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_of_other_types(place: Place, weights: Tensor, dtype: torch.dtype) -> None:
    pair = Pair(place, weights.to(dtype))
    pair.plain.to(dtype).weight.data.copy_(weights.to(dtype))
    pair.backward(place.ids(9))
    pair.step()
    torch.testing.assert_close(rows_of(pair.table), pair.plain.weight.detach().cpu())


@pytest.mark.fault(62)
def test_autocast_leaves_rows_and_their_gradient_as_they_are(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    emb, linear = TieredEmbedding(table), torch.nn.Linear(DIM, 3).to(place.torch)
    plain = torch.nn.Embedding.from_pretrained(weights, freeze=False).to(place.torch)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0)
    ids = place.ids(9)
    for layer in (emb, plain):
        with torch.autocast(place.torch.split(":")[0], torch.bfloat16):
            rows = layer(ids)
            loss = linear(rows).float().square().sum()
        assert rows.dtype == torch.float32
        loss.backward()
    opt.step()
    torch.testing.assert_close(rows_of(table), (plain.weight - plain.weight.grad).detach().cpu())


@pytest.mark.variants(1)
def test_another_field_than_the_first(place: Place) -> None:
    fields = {
        "weight": tierstore.Field(DIM, init=tierstore.normal(seed=1)),
        "bias": tierstore.Field(1, init=tierstore.normal(seed=2)),
    }
    table = place.store({"item": tierstore.TableSpec(ROWS, fields=fields)})["item"]
    before = {name: rows_of(table, name) for name in fields}
    weight, bias = TieredEmbedding(table), TieredEmbedding(table, "bias")
    opt = TieredOptimizer(torch.optim.Adam, [weight, bias], lr=0.1)
    plain = {
        name: torch.nn.Embedding.from_pretrained(rows, freeze=False)
        for name, rows in before.items()
    }
    plain_opt = torch.optim.Adam([layer.weight for layer in plain.values()], lr=0.1)
    everything = torch.arange(ROWS)
    for _ in range(3):
        ids = everything.to(place.torch)
        (weight(ids).sum(-1) * bias(ids)[:, 0]).square().sum().backward()
        (
            plain["weight"](everything).sum(-1) * plain["bias"](everything)[:, 0]
        ).square().sum().backward()
        for optimizer in (opt, plain_opt):
            optimizer.step()
            optimizer.zero_grad()
    for name, layer in plain.items():
        torch.testing.assert_close(rows_of(table, name), layer.weight.detach())
    assert {"exp_avg", "bias_exp_avg", "exp_avg_sq", "bias_exp_avg_sq"} < set(table.fields)
    assert table.scalars["step"] == table.scalars["bias_step"] == 3


def test_bad_ids(weights: Tensor, tmp_path: Path) -> None:
    place = Place(tmp_path)
    emb = TieredEmbedding(place.table(weights))
    with pytest.raises(RowIndexError, match=f"{ROWS}"):
        emb(torch.tensor([1, ROWS]))
    with pytest.raises(InvalidTypeError):
        emb(torch.tensor([1.0]))
    place.close()


def test_what_it_does_not_take(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    with pytest.raises(InvalidInputError, match="max_norm"):
        TieredEmbedding(table, max_norm=1.0)
    with pytest.raises(InvalidInputError, match="scale_grad_by_freq"):
        TieredEmbedding(table, scale_grad_by_freq=True)
    with pytest.raises(InvalidInputError, match="padding_idx"):
        TieredEmbedding(table, padding_idx=ROWS)
    with pytest.raises(UnknownNameError, match="bias"):
        TieredEmbedding(table, "bias")
    with pytest.raises(InvalidTypeError, match="store\\['item'\\]"):
        TieredEmbedding(place.opened[0])
    TieredEmbedding(table, sparse=True, norm_type=1.0)


def test_there_is_no_weight(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    with pytest.raises(AttributeError, match=r"table\.read"):
        _ = emb.weight
    with pytest.raises(AttributeError, match="other"):
        _ = emb.other
    assert not hasattr(emb, "weight")
    assert (emb.num_embeddings, emb.embedding_dim) == (ROWS, DIM)
    assert repr(emb) == f"TieredEmbedding('item', {ROWS}, {DIM})"


def test_a_gradient_without_an_optimizer_says_so(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    with pytest.raises(InvalidInputError, match="TieredOptimizer"):
        emb(place.ids(3)).sum().backward()


def test_state_dict_is_a_pointer(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    model = torch.nn.Sequential(emb, torch.nn.Linear(DIM, 2))
    state = model.state_dict()
    assert set(state) == {"0._extra_state", "0.rows", "1.weight", "1.bias"}
    assert state["0.rows"].shape == (0, DIM)
    store = place.opened[0]
    pointer = store.state_dict()
    assert (pointer["path"], pointer["uuid"], pointer["version"]) == (
        str(store.path),
        store.uuid,
        store.version,
    )
    assert state["0._extra_state"].dtype == torch.uint8
    found = json.loads(state["0._extra_state"].numpy().tobytes())
    assert found == {**pointer, "table": "item", "field": "weight"}
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    assert not model.load_state_dict(torch.load(saved, weights_only=True)).missing_keys
    assert store.uncommitted_rows() == 0


def test_the_weight_of_a_plain_embedding_is_told_where_to_go(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    with pytest.warns(TierStoreWarning, match=r"from_pretrained\(weight, store, name\)") as caught:
        with pytest.raises(RuntimeError, match="Unexpected key"):
            emb.load_state_dict({"weight": weights})
        emb.load_state_dict({"weight": weights}, strict=False)
    assert {each.filename for each in caught} == {__file__}


def test_a_pointer_to_another_store_is_refused(
    place: Place, weights: Tensor, tmp_path: Path
) -> None:
    emb = TieredEmbedding(place.table(weights))
    other = TieredEmbedding(place.table(weights))
    with pytest.raises(InvalidInputError, match="belongs to the store"):
        emb.load_state_dict(other.state_dict())
    with pytest.raises(InvalidInputError, match="not a pointer"):
        place.opened[0].load_state_dict({})
    place.opened[0].save(tmp_path / "copy.tier")
    with tierstore.open(tmp_path / "copy.tier") as copied:
        copied.load_state_dict(place.opened[0].state_dict())


def test_a_copy_shares_the_table(place: Place, weights: Tensor) -> None:
    pair = Pair(place, weights)
    other = copy.deepcopy(torch.nn.Sequential(pair.tiered))
    pair.backward(place.ids(9))
    pair.step()
    with torch.no_grad():
        everything = torch.arange(ROWS).to(place.torch)
        assert torch.equal(other(everything), pair.tiered(everything))
    with pytest.raises(InvalidInputError, match="TieredOptimizer"):
        other(place.ids(3)).sum().backward()


def test_pickling_says_what_to_do(weights: Tensor, tmp_path: Path) -> None:
    place = Place(tmp_path)
    table = place.table(weights)
    with pytest.raises(InvalidTypeError, match=r"save its state_dict\(\).* FrozenEmbedding"):
        pickle.dumps(TieredEmbedding(table))
    with pytest.raises(InvalidTypeError, match="open it for reading"):
        pickle.dumps(FrozenEmbedding(table))
    place.close()


def test_a_frozen_layer_over_a_reader_is_pickled(weights: Tensor, tmp_path: Path) -> None:
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(*weights.shape)}) as store:
        store["t"].write(torch.arange(len(weights)), weights)
        store.commit()
    with tierstore.open(tmp_path / "s") as reader:
        data = pickle.dumps(FrozenEmbedding(reader["t"]))
    layer = pickle.loads(data)
    with layer.table.store:
        assert torch.equal(layer(torch.arange(len(weights))), weights)
