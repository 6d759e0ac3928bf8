"""TieredOptimizer: which optimizers it takes, and what else works with it."""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import tierstore
from tests.training import strangers
from tests.training.conftest import DIM, ROWS, Place, randomly, rows_of
from tierstore.errors import InvalidInputError, InvalidTypeError, ReadOnlyError
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer
from tierstore.optim.trained import TrainedField

FIRST = torch.arange(10)


def pair(place: Place, weights: Tensor, optimizer: Any, **options: Any) -> Any:
    """Return layer, optimizer and table, tiered; the same, plain, over rows 0..9 alone."""
    table = place.table(weights)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(optimizer, [emb], **options)
    plain = torch.nn.Embedding.from_pretrained(weights[:10].clone(), freeze=False).to(place.torch)
    return emb, opt, table, plain, optimizer(plain.parameters(), **options)


def backward(*layers: Any, times: float = 1.0) -> None:
    """Give every layer's rows 0..9 the same gradient, some of them several times."""
    ids = torch.cat([FIRST, torch.tensor([3, 3, 9])])
    factors = torch.randn(13, layers[0].embedding_dim) * times
    for layer in layers:
        rows = layer(ids.to(layer.rows.device if hasattr(layer, "rows") else layer.weight.device))
        (rows * factors.to(rows)).sum().backward()


def check(table: Any, plain: Any, weights: Tensor) -> None:
    found = rows_of(table)
    torch.testing.assert_close(found[:10], plain.weight.detach().cpu())
    assert torch.equal(found[10:], weights[10:])


REFUSED = [
    ("LBFGS", torch.optim.LBFGS, "runs the model several times"),
    ("Adafactor", getattr(torch.optim, "Adafactor", None), "factors the second moment"),
    ("Muon", getattr(torch.optim, "Muon", None), "orthogonalizes"),
    ("FusedLAMB", strangers.FusedLAMB, "norms of a whole table"),
    ("Trusting", strangers.Trusting, "depends on the other rows"),
    ("Noisy", strangers.Noisy, "depends on the other rows"),
    ("Anchored", strangers.Anchored, "'start' starts as a copy of the weights"),
    ("Listing", strangers.Listing, "'all' is a list"),
    ("ByColumn", strangers.ByColumn, r"'columns' is of shape \(6,\)"),
    ("Counting", strangers.Counting, "'seen' is of torch.int64"),
    ("Searching", strangers.Searching, "runs the model again"),
]


@pytest.mark.parametrize(
    ("name", "optimizer", "reason"), REFUSED, ids=[name for name, *_ in REFUSED]
)
def test_optimizers_that_cannot_train_rows_are_refused_by_name(
    weights: Tensor, tmp_path: Path, name: str, optimizer: Any, reason: str
) -> None:
    if optimizer is None:
        pytest.skip(f"this torch has no {name}")
    place = Place(tmp_path)
    table = place.table(weights)
    with pytest.raises(InvalidInputError, match=f"{name} cannot train.*{reason}"):
        TieredOptimizer(optimizer, [TieredEmbedding(table)])
    assert list(table.fields) == ["weight"]
    place.close()


@pytest.mark.variants(2)
@pytest.mark.parametrize("optimizer", [strangers.Lion, strangers.RowWiseAdagrad, strangers.Halves])
def test_other_optimizers_that_go_row_by_row_are_taken(
    place: Place, weights: Tensor, optimizer: Any
) -> None:
    emb, opt, table, plain, plain_opt = pair(place, weights, optimizer, lr=0.1)
    for _ in range(4):
        backward(emb, plain)
        for each in (opt, plain_opt):
            each.step()
            each.zero_grad()
    check(table, plain, weights)
    (state,) = plain_opt.state.values()
    for key, value in state.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(rows_of(table, key)[:10], value.cpu().reshape(10, -1))
    assert table.scalars["step"] == 4


def test_state_fields_start_from_what_the_optimizer_starts_from(
    place: Place, weights: Tensor
) -> None:
    table = place.table(weights)
    TieredOptimizer(torch.optim.Rprop, [TieredEmbedding(table)], lr=0.25)
    assert torch.equal(rows_of(table, "step_size"), torch.full((ROWS, DIM), 0.25))
    other = place.table(weights)
    TieredOptimizer(strangers.RowWiseAdagrad, [TieredEmbedding(other)])
    assert torch.equal(rows_of(other, "sum"), torch.full((ROWS, 1), 0.5))


@pytest.mark.variants(1)
def test_a_state_field_may_be_narrower_than_the_state(place: Place, weights: Tensor) -> None:
    fields = {
        "weight": tierstore.Field(DIM, init=tierstore.normal(seed=1)),
        "exp_avg": tierstore.Field(DIM, "bfloat16"),
    }
    table = place.store({"item": tierstore.TableSpec(ROWS, fields=fields)})["item"]
    before = rows_of(table)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
    plain = torch.nn.Embedding.from_pretrained(before[:10].clone(), freeze=False)
    plain_opt = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(3):
        backward(emb, plain)
        for each in (opt, plain_opt):
            each.step()
            each.zero_grad()
        state = plain_opt.state[plain.weight]
        state["exp_avg"] = state["exp_avg"].bfloat16().float()
    check(table, plain, before)
    assert rows_of(table, "exp_avg").dtype == torch.bfloat16
    assert rows_of(table, "exp_avg_sq").dtype == torch.float32


@pytest.mark.fault(16)
def test_a_field_of_another_width_is_refused(place: Place) -> None:
    weight = tierstore.Field(DIM, init=tierstore.normal(seed=5))
    fields = {"weight": weight, "exp_avg": tierstore.Field(2)}
    table = place.store({"item": tierstore.TableSpec(ROWS, fields=fields)})["item"]
    with pytest.raises(InvalidInputError, match=r"exp_avg.*2 elements.*6"):
        TieredOptimizer(torch.optim.Adam, [TieredEmbedding(table)])


def test_fields_are_added_once(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    store = place.opened[0]
    done: list[tuple[int, int]] = []
    emb = TieredEmbedding(table)
    TieredOptimizer(torch.optim.Adam, [emb], progress=lambda *counts: done.append(counts))
    version = store.version
    assert done[-1] == (ROWS, ROWS)
    TieredOptimizer(torch.optim.AdamW, [emb])
    assert store.version == version
    table.write(FIRST, weights[:10])
    with pytest.raises(
        InvalidInputError,
        match=r"^the optimizer has to add fields 'square_avg', 'acc_delta', where it keeps the "
        r"state of each row: 10 rows are not committed, of table 'item'; call store\.commit\(\) or "
        r"store\.rollback\(\) before you add fields to table 'item'$",
    ):
        TieredOptimizer(torch.optim.Adadelta, [emb])


def test_a_store_that_is_open_for_reading_cannot_be_trained(
    weights: Tensor, tmp_path: Path
) -> None:
    place = Place(tmp_path)
    place.table(weights)
    place.close()
    with tierstore.open(place.opened[0].path) as store:
        emb = TieredEmbedding(store["item"])
        assert torch.equal(emb(FIRST).detach(), weights[:10])
        for kind in (torch.optim.Adam, torch.optim.SGD):  # the latter adds no fields
            with pytest.raises(ReadOnlyError, match="opened for reading"):
                TieredOptimizer(kind, [emb])
        dense = torch.nn.Linear(DIM, 1)
        emb.requires_grad_(False)
        TieredOptimizer(torch.optim.SGD, torch.nn.Sequential(emb, dense))


def test_groups_have_options_of_their_own(place: Place, weights: Tensor) -> None:
    one, two = place.table(weights), place.table(weights)
    layers = [TieredEmbedding(one), TieredEmbedding(two)]
    groups = [{"params": [layers[0]]}, {"params": [layers[1]], "lr": 0.5}]
    opt = TieredOptimizer(torch.optim.SGD, groups, lr=0.1)
    backward(*layers)
    opt.step()
    torch.testing.assert_close((weights - rows_of(one)) * 5, weights - rows_of(two))
    with pytest.raises(InvalidInputError, match="two groups"):
        opt.add_param_group({"params": [layers[0]]})


def test_a_group_added_later_is_trained(place: Place, weights: Tensor) -> None:
    one, two = TieredEmbedding(place.table(weights)), TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(torch.optim.Adam, [one], lr=0.1)
    opt.add_param_group({"params": [two], "lr": 0.2})
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.2]
    backward(one, two)
    opt.step()
    assert not torch.equal(rows_of(two.table)[:10], weights[:10])


def test_what_it_does_not_take(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    with pytest.raises(InvalidTypeError, match="not 'item'"):
        TieredOptimizer(torch.optim.Adam, ["item"])
    with pytest.raises(InvalidInputError, match="needs layers"):
        TieredOptimizer(torch.optim.Adam, [])
    with pytest.raises(InvalidInputError, match="needs layers"):
        TieredOptimizer(torch.optim.Adam, [copy.deepcopy(emb).requires_grad_(False)])
    with pytest.raises(InvalidTypeError, match=r"a class such as torch\.optim\.Adam"):
        TieredOptimizer("adam", [emb])
    with pytest.raises(InvalidTypeError, match=r"a class such as torch\.optim\.Adam"):
        TieredOptimizer(torch.optim.Adam(torch.nn.Linear(2, 2).parameters()), [emb])
    with pytest.raises(TypeError, match="beta"):
        TieredOptimizer(torch.optim.Adam, [emb], beta=3)


def test_step_counts_the_steps_in_which_a_table_had_a_gradient(
    place: Place, weights: Tensor
) -> None:
    one, two = TieredEmbedding(place.table(weights)), TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(torch.optim.Adam, [one, two], lr=0.1)
    for layers in ([one], [one, two], [one]):
        backward(*layers)
        opt.step()
    opt.step()
    one(place.ids(0)).sum().backward()
    opt.step()
    assert (one.table.scalars["step"], two.table.scalars["step"]) == (3, 1)


def test_the_parameter_is_the_rows_from_backward_to_step(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=0.1)
    (parameter,) = opt.parameters()
    assert parameter is emb.rows
    assert parameter.shape == (0, DIM)
    assert parameter.grad is None
    backward(emb)
    assert parameter.grad.shape == parameter.shape == (10, DIM)
    assert parameter.ids.sort()[0].tolist() == list(range(10))
    assert torch.equal(parameter.data.cpu(), weights[parameter.ids.cpu()])
    assert opt.param_groups[0]["params"] == [parameter]
    opt.step()
    assert parameter.shape == (0, DIM)
    assert parameter.grad is None


def test_zero_grad_drops_what_has_come(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
    backward(emb)
    next(opt.parameters())
    backward(emb)
    opt.zero_grad()
    opt.step()
    assert torch.equal(rows_of(emb.table), weights)
    assert "step" not in emb.table.scalars


def test_clipping(place: Place, weights: Tensor) -> None:
    emb, opt, table, plain, plain_opt = pair(place, weights, torch.optim.Adam, lr=0.1)
    for _ in range(3):
        backward(emb, plain, times=10)
        norm = torch.nn.utils.clip_grad_norm_(opt.parameters(), 1.0)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
        backward(emb, plain)
        for each in (opt, plain_opt):
            each.step()
            each.zero_grad()
    check(table, plain, weights)


def test_a_gradient_that_is_taken_away_leaves_its_rows_alone(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=0.1)
    backward(emb)
    for parameter in opt.parameters():
        parameter.grad = None
    opt.step()
    assert torch.equal(rows_of(emb.table), weights)


def test_a_gradient_that_is_scaled(place: Place, weights: Tensor) -> None:
    device = place.torch.split(":")[0]
    emb, opt, table, plain, plain_opt = pair(place, weights, torch.optim.Adam, lr=0.1)
    scalers = [torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2) for _ in range(2)]
    for number in range(5):
        torch.manual_seed(number)
        factors = torch.randn(10, DIM)
        if number == 2:
            factors[0, 0] = torch.inf
        for layer, each, scaler in zip((emb, plain), (opt, plain_opt), scalers, strict=True):
            rows = layer(FIRST.to(place.torch))
            scaler.scale((rows * factors.to(rows)).sum()).backward()
            scaler.unscale_(each)
            scaler.step(each)
            scaler.update()
            each.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert table.scalars["step"] == 4
    check(table, plain, weights)


SCHEDULES = {
    "lambda": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch),
    "one cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=6),
    "warm": lambda opt: torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=3),
}


@pytest.mark.variants(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_schedules(place: Place, weights: Tensor, name: str) -> None:
    emb, opt, table, plain, plain_opt = pair(place, weights, torch.optim.Adam, lr=0.1)
    schedules = [SCHEDULES[name](each) for each in (opt, plain_opt)]
    for _ in range(4):
        backward(emb, plain)
        for each, schedule in zip((opt, plain_opt), schedules, strict=True):
            each.step()
            each.zero_grad()
            schedule.step()
    assert opt.param_groups[0]["lr"] == plain_opt.param_groups[0]["lr"]
    check(table, plain, weights)


def test_a_plateau_lowers_the_rate(place: Place, weights: Tensor) -> None:
    opt = TieredOptimizer(torch.optim.SGD, [TieredEmbedding(place.table(weights))], lr=0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    for _ in range(3):
        schedule.step(1.0)
    assert opt.param_groups[0]["lr"] < 0.5


def test_a_closure_and_hooks_are_called(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0)
    called: list[str] = []
    opt.register_step_pre_hook(lambda *_: called.append("before"))
    opt.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> Tensor:
        loss = emb(FIRST.to(place.torch)).sum()
        loss.backward()
        return loss

    torch.testing.assert_close(opt.step(closure).detach().cpu(), weights[:10].sum())
    torch.testing.assert_close(rows_of(emb.table)[:10], weights[:10] - 1)
    assert called == ["before", "after"]


# torch 2.11 warns so of any profile on a machine with a GPU.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_a_profiler_and_hooks_of_all_optimizers_see_every_step(
    place: Place, weights: Tensor
) -> None:
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0)
    seen: list[object] = []
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda optimizer, *_: seen.append(optimizer))
        opt.step()
        handle.remove()
    opt.step()
    assert seen == [opt, opt]
    with torch.profiler.profile() as profile:
        opt.step()
    names = [event.name for event in profile.events()]
    assert "Optimizer.step#TieredOptimizer.step" in names


def test_gradients_are_off_in_a_step_and_as_they_were_behind_it(
    place: Place, weights: Tensor
) -> None:
    emb = TieredEmbedding(place.table(weights))
    on: list[bool] = []

    def project(rows: Tensor) -> Tensor:
        on.append(torch.is_grad_enabled())
        return rows

    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0, project=project)
    emb(FIRST.to(place.torch)).sum().backward()
    opt.step()
    assert on == [False]
    assert torch.is_grad_enabled()


def test_state_dict_has_the_options_and_names_what_is_trained(
    place: Place, weights: Tensor
) -> None:
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
    opt.param_groups[0]["lr"] = 0.05
    state = opt.state_dict()
    assert state["state"].keys() == {0}
    assert state["state"][0].keys() == {"pointer"}
    assert state["param_groups"][0]["params"] == [0]
    other = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.05
    two = TieredOptimizer(torch.optim.Adam, [emb, TieredEmbedding(place.table(weights))])
    with pytest.raises(InvalidInputError, match="no pointer to rows"):
        two.load_state_dict(state)


def test_rollback_takes_back_rows_state_and_step(place: Place, weights: Tensor) -> None:
    emb, opt, table, plain, plain_opt = pair(place, weights, torch.optim.Adam, lr=0.1)
    store = place.opened[0]

    def step(*trained: Any) -> None:
        backward(*[layer for layer, _ in trained])
        for _, each in trained:
            each.step()
            each.zero_grad()

    step((emb, opt), (plain, plain_opt))
    store.commit(step=1)
    assert table.scalars["step"] == 1
    step((emb, opt))
    store.rollback()
    assert table.scalars["step"] == 1
    step((emb, opt), (plain, plain_opt))
    check(table, plain, weights)


def test_state_goes_on_in_a_store_that_is_opened_again(weights: Tensor, tmp_path: Path) -> None:
    place = Place(tmp_path)
    emb, opt, _, plain, plain_opt = pair(
        place, weights, torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5
    )
    store = place.opened[0]
    for _ in range(4):
        backward(emb, plain)
        for each in (opt, plain_opt):
            each.step()
            each.zero_grad()
        store.commit()
        store.close()
        store = tierstore.open(store.path, "r+", budget=tierstore.Budget(host_rows=3))
        emb = TieredEmbedding(store["item"])
        opt = TieredOptimizer(torch.optim.SGD, [emb], lr=0.1, momentum=0.9, dampening=0.5)
    check(store["item"], plain, weights)
    store.close()


def test_an_interrupt_waits_for_the_end_of_a_step(weights: Tensor, tmp_path: Path) -> None:
    place = Place(tmp_path)

    def interrupted(inner: torch.optim.Optimizer) -> None:
        inner.step()
        signal.raise_signal(signal.SIGINT)

    emb, opt, table, plain, plain_opt = pair(place, weights, torch.optim.SGD, lr=0.1)
    opt._inner_step = interrupted
    backward(emb, plain)
    plain_opt.step()
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    check(table, plain, weights)
    place.close()


def test_an_error_in_the_middle_of_a_step_says_how_to_go_back(
    weights: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    emb, opt, *_ = pair(place, weights, torch.optim.Adam, lr=0.1)
    backward(emb)

    def fail(*_: Any) -> None:
        raise tierstore.errors.StoreFullError("no space left")

    monkeypatch.setattr("tierstore._tiers.host.HostTier.write_held", fail)
    with pytest.raises(tierstore.errors.StoreFullError) as caught:
        opt.step()
    assert any("rollback" in note for note in caught.value.__notes__)
    monkeypatch.undo()
    place.close()


def test_an_error_before_anything_is_written_asks_for_no_rollback(
    place: Place, weights: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    emb, opt, table, plain, plain_opt = pair(place, weights, torch.optim.Adam, lr=0.1)
    backward(emb, plain)

    def fail(*_: Any) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patched, pytest.raises(MemoryError) as caught:
        patched.setattr("tierstore.nn.RowsParameter.gradient_for", fail)
        opt.step()
    assert not hasattr(caught.value, "__notes__")
    assert torch.is_grad_enabled()
    for each in (opt, plain_opt):
        each.step()
    check(table, plain, weights)


def test_rows_that_cannot_be_loaded_leave_nothing_in_the_optimizer(
    place: Place, weights: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [place.table(weights), place.table(weights)]
    layers = [TieredEmbedding(table) for table in tables]
    opt = TieredOptimizer(torch.optim.NAdam, layers, lr=0.1)
    backward(*layers)
    load = TrainedField.load

    def fails_for_the_second(field: TrainedField, *given: Any) -> Any:
        if field.rows is layers[1].rows:
            raise MemoryError("no more")
        return load(field, *given)

    with monkeypatch.context() as patched, pytest.raises(MemoryError) as caught:
        patched.setattr(TrainedField, "load", fails_for_the_second)
        opt.step()
    assert any("rollback" in note for note in caught.value.__notes__)
    assert opt.state_dict()["state"].keys() == {0, 1}
    opt.step()
    assert [table.scalars["step"] for table in tables] == [1, 1]
    assert torch.equal(rows_of(tables[0]), rows_of(tables[1]))


@pytest.mark.variants(1)
@pytest.mark.parametrize("flags", [{"foreach": True}, {"fused": True}])
def test_ways_of_updating_agree(place: Place, weights: Tensor, flags: Any) -> None:
    tables = [place.table(weights), place.table(weights)]
    layers = [TieredEmbedding(table) for table in tables]
    opts = [
        TieredOptimizer(torch.optim.AdamW, [layers[0]], lr=0.1, foreach=False),
        TieredOptimizer(torch.optim.AdamW, [layers[1]], lr=0.1, **flags),
    ]
    for _ in range(4):
        backward(*layers)
        for opt in opts:
            opt.step()
    torch.testing.assert_close(rows_of(tables[0]), rows_of(tables[1]), rtol=1e-5, atol=1e-6)
    assert randomly(1, like=weights).isfinite()
