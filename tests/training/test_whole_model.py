"""One TieredOptimizer over rows and ordinary parameters, as trainers of other libraries want."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.pairs import pairs
from tests.training.conftest import DIM, PLACES, ROWS, Place, rows_of
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbedding, TieredEmbeddingBag
from tierstore.optim import RowWiseAdagrad, TieredOptimizer


class Model(torch.nn.Module):
    """Users by items, with a dense head."""

    def __init__(self, users: Any, items: Any) -> None:
        super().__init__()
        self.users, self.items = users, items
        self.head = torch.nn.Sequential(torch.nn.Linear(DIM, 4), torch.nn.Linear(4, 1))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.users(ids) * self.items(ids)).square().mean()
        return found


def models(place: Place) -> tuple[Model, Model]:
    """Return a model over a store, and a plain one of the same values."""
    init = {name: tierstore.normal(seed=seed) for seed, name in enumerate(("user", "item"))}
    specs = {name: tierstore.TableSpec(ROWS, DIM, init=law) for name, law in init.items()}
    store = place.store(specs)
    tiered = Model(*(TieredEmbedding(store[name]) for name in specs))
    plain = Model(
        *(torch.nn.Embedding.from_pretrained(rows_of(store[name]), freeze=False) for name in specs)
    )
    plain.head.load_state_dict(tiered.head.state_dict())
    return tiered.to(place.torch), plain.to(place.torch)


def check(tiered: Model, plain: Model) -> None:
    for ours, theirs in ((tiered.users, plain.users), (tiered.items, plain.items)):
        torch.testing.assert_close(rows_of(ours.table), theirs.weight.detach().cpu())
    for ours, theirs in zip(tiered.head.parameters(), plain.head.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


FORMS: dict[str, Any] = {
    "model": lambda model: model,
    "parameters": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
    "modules": lambda model: [model.users, model.items, model.head],
    "groups": lambda model: [
        {"params": [model.users, model.head[0]]},
        {"params": model.items},
        {"params": model.head[1].parameters()},
    ],
}
EVERY = list(range(ROWS))


OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.25}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


@pytest.mark.variants(3, 5)
@pairs(place=PLACES, form=list(FORMS), variant=list(OPTIMIZERS))
@pytest.mark.slow("emulated")
def test_one_optimizer_trains_the_whole_model(place: Place, form: str, variant: str) -> None:
    optimizer, options = OPTIMIZERS[variant]
    tiered, plain = models(place)
    opt = TieredOptimizer(optimizer, FORMS[form](tiered), **options)
    plain_opt = optimizer(plain.parameters(), **options)
    for _ in range(3):
        ids = torch.tensor(EVERY)[torch.randperm(ROWS)].to(place.torch)  # dense Adam moves all
        for model, each in ((tiered, opt), (plain, plain_opt)):
            each.zero_grad()
            model(ids).backward()
            each.step()
    check(tiered, plain)


@pytest.mark.variants(1)
def test_the_loop_of_a_trainer(place: Place) -> None:
    """Closure, accumulation, clipping by the model, schedule, groups: as Lightning and HF do."""
    tiered, plain = models(place)
    decayed = {"weight_decay": 0.1}
    opts: list[Any] = [
        TieredOptimizer(
            torch.optim.Adagrad,
            [{"params": [m.users, m.items]}, {"params": m.head, **decayed}],
            lr=0.1,
        )
        if m is tiered
        else torch.optim.Adagrad(
            [
                {"params": [m.users.weight, m.items.weight]},
                {"params": m.head.parameters(), **decayed},
            ],
            lr=0.1,
        )
        for m in (tiered, plain)
    ]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=9, cycle_momentum=False)
        for opt in opts
    ]
    for _ in range(3):
        batches = [place.ids(7), place.ids(7)]
        for model, opt, schedule in zip((tiered, plain), opts, schedules, strict=True):

            def closure(model: Any = model, opt: Any = opt, batches: Any = batches) -> Tensor:
                opt.zero_grad()
                for ids in batches:
                    loss = model(ids) / len(batches)
                    loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                return loss.detach()

            assert opt.step(closure).ndim == 0
            schedule.step()
        check(tiered, plain)
    assert [group["lr"] for group in opts[0].param_groups] == [
        group["lr"] for group in opts[1].param_groups
    ]


@pytest.mark.variants(1)
def test_a_scaler_skips_rows_and_parameters_alike(place: Place) -> None:
    device = place.torch.split(":")[0]
    tiered, plain = models(place)
    opts: list[Any] = [
        TieredOptimizer(torch.optim.Adagrad, tiered, lr=0.1),
        torch.optim.Adagrad(plain.parameters(), lr=0.1),
    ]
    scalers = [torch.amp.GradScaler(device, init_scale=8.0) for _ in opts]
    for number in range(4):
        ids = place.ids(7)
        for model, opt, scaler in zip((tiered, plain), opts, scalers, strict=True):
            scaler.scale(model(ids) * (torch.inf if number == 1 else 1.0)).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert tiered.users.table.scalars["step"] == 3
    check(tiered, plain)


def test_the_state_has_the_layout_of_torch(place: Place) -> None:
    tiered, plain = models(place)
    opts: list[Any] = [
        TieredOptimizer(torch.optim.AdamW, tiered, lr=0.1),
        torch.optim.AdamW(plain.parameters(), lr=0.1),
    ]
    ids = place.ids(9)
    for model, opt in zip((tiered, plain), opts, strict=True):
        model(ids).backward()
        opt.step()
    place.opened[0].commit()
    ours, theirs = (opt.state_dict() for opt in opts)
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    assert [ours["state"][number].keys() for number in (0, 1)] == [{"pointer"}] * 2
    for number in ours["state"].keys() - {0, 1}:  # rows keep their own
        for key, value in ours["state"][number].items():
            torch.testing.assert_close(value, theirs["state"][number][key])
    saved = io.BytesIO()
    torch.save(ours, saved)
    saved.seek(0)
    opts[0].param_groups[0]["lr"] = 7.0
    opts[0].load_state_dict(torch.load(saved, weights_only=True))
    assert opts[0].param_groups[0]["lr"] == 0.1
    for model, opt in zip((tiered, plain), opts, strict=True):
        opt.zero_grad()
        model(ids).backward()
        opt.step()
    for ours, theirs in zip(tiered.head.parameters(), plain.head.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_checkpoint_holds_rows_head_and_optimizer(weights: Tensor, tmp_path: Path) -> None:
    place = Place(tmp_path)
    tiered, plain = models(place)
    store = place.opened[0]
    opt = TieredOptimizer(torch.optim.Adagrad, tiered, lr=0.1)
    plain_opt = torch.optim.Adagrad(plain.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, ids: Tensor) -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = [place.ids(6) for _ in range(4)]
    for ids in batches:
        step(plain, plain_opt, ids)
    for ids in batches[:2]:
        step(tiered, opt, ids)
    tierstore.Checkpoint(store, model=tiered, opt=opt).commit(2)
    store.close()
    with tierstore.open(store.path, "r+") as again:
        resumed = Model(*(TieredEmbedding(again[name]) for name in ("user", "item")))
        opt = TieredOptimizer(torch.optim.Adagrad, resumed, lr=9.0)
        assert tierstore.Checkpoint(again, model=resumed, opt=opt).resume() == 2
        for ids in batches[2:]:
            step(resumed, opt, ids)
        check(resumed, plain)
        again.commit()


def test_parameters_come_and_go(place: Place) -> None:
    tiered, plain = models(place)
    tiered.items.requires_grad_(False)
    plain.items.requires_grad_(False)
    opt = TieredOptimizer(torch.optim.Adam, tiered, lr=0.1)
    assert "exp_avg" not in tiered.items.table.fields
    assert "exp_avg" in tiered.users.table.fields
    tiered.items.requires_grad_(True)
    with pytest.raises(InvalidInputError, match="table 'item' has nowhere to go"):
        tiered(place.ids(3)).backward()
    opt.zero_grad()
    more = torch.nn.Linear(2, 2)
    opt.add_param_group({"params": [tiered.items, more], "lr": 0.5})
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.5]
    with pytest.raises(InvalidInputError, match="in two groups"):
        opt.add_param_group({"params": tiered.items})
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": more})
    tiered(place.ids(3)).backward()
    opt.step()
    assert tiered.items.table.scalars["step"] == 1


def test_a_step_without_a_gradient_of_rows_trains_the_rest(place: Place) -> None:
    tiered, _ = models(place)
    opt = TieredOptimizer(torch.optim.SGD, tiered, lr=0.1)
    before = copy.deepcopy(tiered.head.state_dict())
    tiered.head(torch.ones(1, DIM).to(place.torch)).sum().backward()
    opt.step()
    assert not torch.equal(before["0.weight"], tiered.head[0].weight)
    assert "step" not in tiered.users.table.scalars
    assert place.opened[0].uncommitted_rows() == 0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_the_state_of_rows_is_not_dropped_by_halves(tmp_path: Path, kind: Any) -> None:
    """What programs do to `state` to start anew reaches the parameters of torch alone."""
    place = Place(tmp_path)
    tiered, _ = models(place)
    opt = TieredOptimizer(kind, tiered, lr=0.1)
    every = torch.arange(ROWS)
    rows, weight = tiered.items.rows, tiered.head[0].weight
    name = "exp_avg_sq" if kind is torch.optim.Adam else "sum"

    def train() -> None:
        opt.zero_grad()
        (tiered.items(every).sum() + tiered.head(torch.ones(1, DIM)).sum()).backward()
        opt.step()

    train()
    kept = {name: value.clone() for name, value in opt.state[weight].items()}
    for attempt in (
        lambda: opt.state.clear(),
        lambda: opt.state.pop(rows, None),
        lambda: opt.state.__delitem__(rows),
        lambda: opt.state.__setitem__(rows, {}),
        lambda: setattr(opt, "state", defaultdict(dict)),
    ):
        with pytest.raises(InvalidInputError, match=r"reset_state\(\)"):
            attempt()
    with pytest.raises(InvalidInputError, match=rf"emb\.table\.read\(ids, '{name}'\)"):
        opt.state[rows][name].zero_()
    assert opt.state[rows].get(name) is None
    opt.state[rows]["of a program"] = 1
    assert opt.state[rows]["of a program"] == 1
    assert all(torch.equal(opt.state[weight][name], value) for name, value in kept.items())
    opt.state = opt.state
    assert opt.state.pop(weight) is not None
    opt.reset_state()
    train()
    assert tiered.items.table.scalars["step"] == 1
    place.opened[0].commit()
    saved = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(saved)
    with pytest.raises(InvalidInputError, match="reset_state"):
        opt.state.clear()
    place.close()


@pytest.mark.variants(1)
def test_bags_and_biases_in_one_model(place: Place) -> None:
    fields = {
        "weight": tierstore.Field(DIM, init=tierstore.normal(seed=1)),
        "bias": tierstore.Field(1, init=tierstore.normal(seed=2)),
    }
    table = place.store({"item": tierstore.TableSpec(ROWS, fields=fields)})["item"]
    model = torch.nn.ModuleList(
        [
            TieredEmbeddingBag(table, mode="sum"),
            TieredEmbedding(table, "bias"),
            torch.nn.Linear(DIM, 1),
        ]
    ).to(place.torch)
    plain = torch.nn.ModuleList(
        [
            torch.nn.EmbeddingBag.from_pretrained(rows_of(table), freeze=False, mode="sum"),
            torch.nn.Embedding.from_pretrained(rows_of(table, "bias"), freeze=False),
            copy.deepcopy(model[2]),
        ]
    ).to(place.torch)
    opts: list[Any] = [
        TieredOptimizer(torch.optim.Adagrad, model, lr=0.1),
        torch.optim.Adagrad(plain.parameters(), lr=0.1),
    ]
    for _ in range(3):
        ids = place.ids(4, 3)
        for (bag, bias, head), opt in zip((model, plain), opts, strict=True):
            opt.zero_grad()
            (head(bag(ids))[:, 0] + bias(ids)[..., 0].sum(1)).square().sum().backward()
            opt.step()
    torch.testing.assert_close(rows_of(table), plain[0].weight.detach().cpu())
    torch.testing.assert_close(rows_of(table, "bias"), plain[1].weight.detach().cpu())
    torch.testing.assert_close(model[2].weight, plain[2].weight)


@pytest.mark.parametrize("options", [{}, {"lr_decay": 0.1, "weight_decay": 0.01, "maximize": True}])
def test_row_wise_adagrad_trains_biases_as_adagrad(options: dict[str, Any]) -> None:
    """A bias has no rows: each element has a sum of its own. Matrices have one a row."""
    table = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal())
    with tierstore.create(None, {"t": table}) as store:
        emb = TieredEmbedding(store["t"])
        head = torch.nn.Sequential(torch.nn.Linear(DIM, 3), torch.nn.LayerNorm(3))
        twin = copy.deepcopy(head)
        scalar = torch.nn.Parameter(torch.rand(()))
        scalars = [scalar, torch.nn.Parameter(scalar.detach().clone())]
        ours = TieredOptimizer(RowWiseAdagrad, [emb, head, scalars[0]], lr=0.1, **options)
        flat = [each for each in twin.parameters() if each.ndim != 2] + [scalars[1]]
        theirs = [
            torch.optim.Adagrad(flat, lr=0.1, **options),
            RowWiseAdagrad([twin[0].weight], lr=0.1, **options),
        ]
        for _ in range(4):
            rows = emb(torch.randint(ROWS, (7,)))
            for layer, factor in ((head, scalars[0]), (twin, scalars[1])):
                (layer(rows) * factor).sin().sum().backward(retain_graph=True)
            for optimizer in (ours, *theirs):
                optimizer.step()
                optimizer.zero_grad()
        for one, other in zip(
            [*head.parameters(), scalars[0]], [*twin.parameters(), scalars[1]], strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_layer_that_is_thawed_later_says_how_it_is_trained(tmp_path: Path) -> None:
    table = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal())
    with tierstore.create(tmp_path / "a.tier", {"t": table, "u": table}) as store:
        first, late = (TieredEmbedding(store[name]) for name in "tu")
        late.requires_grad_(False)
        opt = TieredOptimizer(torch.optim.SGD, [first, late], lr=0.1)
        late.requires_grad_(True)
        before = rows_of(store["u"])
        with pytest.raises(InvalidInputError, match=r"add_param_group\({'params': \[layer\]}\)"):
            late(torch.tensor([1])).sum().backward()
        opt.add_param_group({"params": [late]})
        late(torch.tensor([1])).sum().backward()
        opt.step()
        assert torch.equal(rows_of(store["u"])[1], before[1] - 0.1)
        store.rollback()
