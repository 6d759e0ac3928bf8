"""The parameter of a layer is what torch's own functions and anybody's loop take it for.

Each test does the same to `torch.nn.Embedding`, or says what is refused.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import tierstore
from tests.training.conftest import DIM, ROWS, Place, rows_of
from tierstore.errors import InvalidInputError, LazyUpdatesWarning
from tierstore.nn import RowsParameter, TieredEmbedding, TieredEmbeddingBag
from tierstore.optim import TieredOptimizer

SGD, ADAM = torch.optim.SGD, torch.optim.Adam


class Twins:
    """A model with a tiered layer and one with a plain layer, of the same values."""

    def __init__(self, place: Place, weights: Tensor, optimizer: Any = SGD, **options: Any) -> None:
        self.place = place
        self.table = place.table(weights)
        self.head = torch.nn.Linear(DIM, 2).to(place.torch)
        plain = torch.nn.Embedding.from_pretrained(weights.clone(), freeze=False).to(place.torch)
        self.emb, self.plain = TieredEmbedding(self.table), plain
        self.models = [
            torch.nn.Sequential(self.emb, self.head),
            torch.nn.Sequential(plain, copy.deepcopy(self.head)),
        ]
        options = options or {"lr": 0.5}
        tiered, dense = self.models
        self.optimizers = [
            TieredOptimizer(optimizer, tiered, **options),
            optimizer(dense.parameters(), **options),
        ]

    def both(self, do: Callable[[torch.nn.Module, Any], Any]) -> list[Any]:
        """Do the same to either model with its optimizer; return what it gives."""
        return [do(*each) for each in zip(self.models, self.optimizers, strict=True)]

    def backward(self, ids: list[int], scale: float = 1.0) -> None:
        given = torch.tensor(ids).to(self.place.torch)
        self.both(lambda model, _: (model(given).square().sum() * scale).backward())

    def step(self) -> None:
        self.both(lambda _, optimizer: optimizer.step())
        self.both(lambda _, optimizer: optimizer.zero_grad())

    def check(self) -> None:
        torch.testing.assert_close(rows_of(self.table), self.plain.weight.detach().cpu())
        torch.testing.assert_close(*(model[1].weight for model in self.models))


def test_clipping_by_the_parameters_of_the_model_clips_the_rows(
    place: Place, weights: Tensor
) -> None:
    twins = Twins(place, weights)
    for ids in ([1, 2, 2, 3], [3, 7], [9, 9, 9, 4]):
        twins.backward(ids, 1000.0)
        norms = twins.both(lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        torch.testing.assert_close(*norms)
        assert norms[0] > 100
        twins.step()
        twins.check()


def test_clipping_by_value_clips_the_rows(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)
    twins.backward([1, 2, 2, 3], 10.0)
    twins.both(lambda model, _: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1))
    twins.step()
    twins.check()


def test_clipping_between_accumulated_batches_is_kept(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)
    twins.backward([1, 2, 2, 3], 10.0)
    twins.both(lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    twins.backward([3, 4], 0.1)
    twins.step()
    twins.check()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("looked_at", [True, False])
def test_zero_grad_of_the_model_drops_the_gradient_of_the_rows(
    place: Place, weights: Tensor, set_to_none: bool, looked_at: bool
) -> None:
    twins = Twins(place, weights)
    twins.backward([5, 6], 1e6)
    if looked_at:
        assert twins.emb.rows.grad is not None
    twins.both(lambda model, _: model.zero_grad(set_to_none=set_to_none))
    twins.backward([1, 2])
    twins.step()
    twins.check()
    assert torch.equal(rows_of(twins.table)[5:7], weights[5:7])


def test_autograd_grad_with_respect_to_the_rows_is_refused_and_feeds_no_step(
    place: Place, weights: Tensor
) -> None:
    twins = Twins(place, weights)
    ids = torch.tensor([1, 2]).to(place.torch)
    for allowed in (False, True):
        loss = twins.models[0](ids).sum() * 100
        with pytest.raises(InvalidInputError, match=r"rows = emb\(ids\)"):
            torch.autograd.grad(loss, twins.models[0].parameters(), allow_unused=allowed)
    rows = twins.emb(ids)
    (gradient,) = torch.autograd.grad((rows * 3).sum(), rows)
    assert torch.equal(gradient, torch.full_like(gradient, 3))
    loss = twins.models[0](ids).sum() * 100
    torch.autograd.grad(loss, twins.head.parameters())
    assert twins.emb.rows.grad is None
    twins.backward([1, 2])
    twins.step()
    twins.check()


@pytest.mark.parametrize("wanted", ["all", "rows", "head"])
def test_a_backward_pass_for_some_parameters_only(
    place: Place, weights: Tensor, wanted: str
) -> None:
    twins = Twins(place, weights)
    ids = torch.tensor([1, 2, 2]).to(place.torch)

    def backward(model: Any, _: Any) -> None:
        which = {"all": model, "rows": model[0], "head": model[1]}[wanted]
        model(ids).square().sum().backward(inputs=list(which.parameters()))

    twins.both(backward)
    assert (twins.emb.rows.grad is None) == (wanted == "head")
    twins.step()
    twins.check()


def test_hooks_see_the_gradient_of_the_rows(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)
    seen: list[list[Tensor]] = [[], []]

    def watch(model: Any, number: int) -> None:
        parameter = next(model.parameters())
        parameter.register_hook(lambda gradient: gradient * 0.5)
        parameter.register_post_accumulate_grad_hook(
            lambda each: seen[number].append(each.grad.norm())
        )

    for number, model in enumerate(twins.models):
        watch(model, number)
    two = [torch.tensor(ids).to(place.torch) for ids in ([1, 2, 2], [2, 5])]
    twins.both(lambda model, _: sum(model(ids).square().sum() for ids in two).backward())
    twins.backward([5, 6])
    assert len(seen[0]) == len(seen[1]) == 2
    torch.testing.assert_close(*(torch.stack(norms) for norms in seen))
    twins.step()
    twins.check()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", ["by id", "decay", "after it was added"])
def test_a_hook_goes_by_the_rows_of_its_gradient(
    place: Place, weights: Tensor, kind: str, passes: int
) -> None:
    """Their ids and values: as a mask of ids, or a decay, has it for torch."""
    twins = Twins(place, weights, lr=0.05)
    rows, weight = twins.emb.rows, twins.plain.weight
    limit = 20

    def masked(parameter: Tensor, gradient: Tensor) -> Tensor:
        ids = rows.ids if parameter is rows else torch.arange(ROWS).to(place.torch)
        return torch.where((ids < limit)[:, None], 0.0, gradient)

    def mask(parameter: Tensor) -> None:
        parameter.grad.copy_(masked(parameter, parameter.grad))

    for parameter in (rows, weight):
        if kind == "by id":
            parameter.register_hook(partial(masked, parameter))
        elif kind == "decay":
            parameter.register_hook(
                lambda gradient, p=parameter: gradient + 0.1 * p.detach() * (gradient != 0)
            )
        else:
            parameter.register_post_accumulate_grad_hook(mask)
    for batches in (([30, 1, 2], [39, 5, 30]), ([2, 3, 3], [30, 31, 2])):
        for ids in batches[:passes]:
            twins.backward(ids)
        norms = twins.both(
            lambda model, _: torch.nn.utils.get_total_norm(
                [each.grad for each in model.parameters()]
            )
        )
        torch.testing.assert_close(*norms)
        twins.step()
        twins.check()


def test_an_optimizer_in_the_backward_pass(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)

    def step_of(optimizer: Any) -> Callable[[Any], None]:
        def step(_: Any) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step

    for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
        next(model.parameters()).register_post_accumulate_grad_hook(step_of(optimizer))
    for ids in ([1, 2, 2], [2, 5]):
        twins.backward(ids)
    torch.testing.assert_close(rows_of(twins.table), twins.plain.weight.detach().cpu())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations(place: Place, weights: Tensor, reentrant: bool) -> None:
    twins = Twins(place, weights)
    seen: list[list[Tensor]] = [[], []]
    for number, model in enumerate(twins.models):
        next(model.parameters()).register_hook(seen[number].append)
    one, two = (torch.tensor(ids).to(place.torch) for ids in ([1, 2, 2], [2, 5]))
    needed = torch.ones((), requires_grad=True).to(place.torch)

    def backward(model: Any, _: Any) -> None:
        def run(ids: Tensor, factor: Tensor) -> Tensor:
            found: Tensor = model(ids).square().sum() * factor
            return found

        inside = [
            torch.utils.checkpoint.checkpoint(run, ids, needed, use_reentrant=reentrant)
            for ids in (one, two)
        ]
        (sum(inside) + run(one, needed)).backward()

    twins.both(backward)
    assert seen[0]
    torch.testing.assert_close(*(sum(each.sum() for each in found) for found in seen))
    twins.step()
    twins.check()


def test_two_optimizers_use_the_same_gradient(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights, lr=1.0)
    others = [
        TieredOptimizer(SGD, [twins.emb], lr=0.1),
        SGD(twins.plain.parameters(), lr=0.1),
    ]
    for ids in ([1, 2, 2], [2, 5]):
        twins.backward(ids)
        for other in others:
            other.step()
        twins.step()
        twins.check()
    twins.backward([7, 8])  # the first warmed up, the other goes on alone
    for other in others:
        other.step()
        other.zero_grad()
    twins.backward([8, 9])
    for other in others:
        other.step()
        other.zero_grad()
    torch.testing.assert_close(rows_of(twins.table), twins.plain.weight.detach().cpu())


def test_a_gradient_that_one_optimizer_has_used_is_not_added_to_the_next(
    place: Place, weights: Tensor
) -> None:
    emb = TieredEmbedding(place.table(weights))
    opt, idle = (TieredOptimizer(SGD, [emb], lr=1.0) for _ in range(2))
    for _ in range(3):
        emb(torch.tensor([1, 2]).to(place.torch)).sum().backward()
        opt.step()
        opt.step()
    torch.testing.assert_close(rows_of(emb.table)[1:3], weights[1:3] - 3)
    assert idle.param_groups[0]["lr"] == 1.0


def test_a_torch_optimizer_over_the_rows_is_refused(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)
    model = twins.models[0]
    stranger = torch.optim.AdamW(model.parameters(), lr=0.1)
    twins.backward([1, 2])
    with pytest.raises(InvalidInputError, match="this AdamW has rows of table 'item'"):
        stranger.step()
    assert torch.equal(rows_of(twins.table), weights)
    twins.step()
    twins.check()
    stranger.step()  # no gradient is left
    beside = SGD([each for each in model.parameters() if type(each) is not RowsParameter], lr=0.1)
    twins.backward([1, 2])
    beside.step()


def test_what_that_refusal_prevents(weights: Tensor, tmp_path: Any) -> None:
    """Without it, moments of rows 1 and 2 would move rows 7 and 8, but that places do not mix."""
    place = Place(tmp_path)
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(SGD, [emb], lr=1.0)
    stranger = ADAM([emb.rows], lr=0.1)
    unhooked = torch.optim.Adam.step.__wrapped__  # type: ignore[attr-defined]
    emb(torch.tensor([1, 2])).sum().backward()
    unhooked(stranger)
    stranger.zero_grad()
    (emb(torch.tensor([7, 8])).sum() * 0.0).backward()
    with pytest.raises(InvalidInputError, match="2 rows of one batch of table 'item' and as many"):
        unhooked(stranger)
    stranger.zero_grad()
    emb(torch.tensor([7, 8]))
    assert torch.equal(rows_of(emb.table)[7:9], weights[7:9])
    assert opt.param_groups[0]["lr"] == 1.0
    place.close()


def test_a_gradient_of_no_rows_is_none(place: Place, weights: Tensor) -> None:
    """As torch.distributed.checkpoint gives it to every parameter, to make optimizers begin."""
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(ADAM, [emb], lr=0.1)
    emb.rows.grad = torch.zeros_like(emb.rows)
    assert emb.rows.grad is None
    opt.step()
    assert "step" not in emb.table.scalars


@pytest.mark.variants(1, 1)
@pytest.mark.slow("emulated")
def test_gradients_that_pile_up_hold_no_more_than_their_rows(weights: Tensor, place: Place) -> None:
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(SGD, [emb], lr=1.0)
    plain = torch.nn.Embedding.from_pretrained(weights.clone(), freeze=False).to(place.torch)
    for _ in range(150):
        ids = place.ids(5)
        factors = torch.randn(5, DIM).to(place.torch)
        for layer in (emb, plain):
            (layer(ids) * factors).sum().backward()
        assert len(emb.rows._waiting) < 64
    opt.step()
    assert plain.weight.grad is not None
    expected = weights - plain.weight.grad.cpu()
    torch.testing.assert_close(rows_of(emb.table), expected, rtol=1e-5, atol=1e-5)


def test_a_loop_that_never_steps_is_told(weights: Tensor, tmp_path: Any) -> None:
    place = Place(tmp_path)
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(SGD, [emb], lr=1.0)
    ids = torch.tensor([1, 2])
    with pytest.warns(UserWarning, match="1000 batches left a gradient of table 'item'"):
        for _ in range(1000):
            emb(ids).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(1001):
            opt.zero_grad()
            emb(ids).sum().backward()
        warnings.simplefilter("ignore", LazyUpdatesWarning)
        for _ in range(1001):
            emb(ids).sum().backward()
            with torch.no_grad():
                emb.rows.mul_(0.5)
            opt.zero_grad()  # which leaves the order of rows that were written
    place.close()


# -- values that are written into the parameter


@pytest.mark.variants(5)
@pytest.mark.parametrize("way", ["in place", "data in place", "data", "copy_"])
def test_what_is_written_between_backward_and_step_counts(
    place: Place, weights: Tensor, way: str
) -> None:
    twins = Twins(place, weights, ADAM, lr=0.1)

    def write(model: Any, _: Any) -> None:
        parameter = next(model.parameters())
        with torch.no_grad():
            if way == "in place":
                parameter.add_(10.0)
            elif way == "data in place":
                parameter.data.add_(10.0)
            elif way == "data":
                parameter.data = parameter.data + 10.0
            else:
                parameter.copy_(parameter + 10.0)

    everything = list(range(ROWS))
    twins.backward(everything)
    if way in ("in place", "copy_"):
        assert twins.emb.rows.grad is not None  # the rows are there once someone asks
    twins.both(write)
    twins.step()
    twins.check()


@pytest.mark.variants(1)
def test_rows_are_there_for_whatever_touches_them_first(place: Place, weights: Tensor) -> None:
    """Also for what is neither `grad` nor `data`: clamped, cloned or measured, they are no NaN."""
    ways: dict[str, Callable[[Any], Any]] = {
        "add": lambda p: p.add_(1.0),
        "clamp": lambda p: setattr(p, "data", torch.clamp(p, -0.5, 0.5)),
        "clone": lambda p: setattr(p, "data", p.clone() + 1),
        "view": lambda p: p.view(-1).mul_(2),
        "rows": lambda p: [row.mul_(2) for row in p],
        "foreach": lambda p: torch._foreach_mul_([p], 3.0),
        "array": lambda p: p.detach().cpu().numpy().sum(),
    }
    for write in ways.values():
        twins = Twins(place, weights)
        twins.backward(list(range(ROWS)))
        with torch.no_grad():
            twins.both(lambda model, _, write=write: write(next(model.parameters())))
            norms = twins.both(lambda model, _: torch.linalg.vector_norm(next(model.parameters())))
        torch.testing.assert_close(*norms)
        twins.step()
        twins.check()


def test_values_of_other_rows_are_refused(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(SGD, [emb], lr=1.0)
    emb(torch.tensor([1, 2]).to(place.torch)).sum().backward()
    with pytest.raises(InvalidInputError, match="these are 2 rows of table 'item'"):
        emb.rows.data = torch.zeros(3, DIM)
    for shape in ((3, DIM), (2, DIM + 1), (0, DIM), (ROWS, DIM)):
        with pytest.raises(InvalidInputError, match=r"order of rows\.ids, now \(2, 6\)"):
            emb.rows.grad = torch.zeros(shape).to(place.torch)
    opt.zero_grad()
    with pytest.raises(InvalidInputError, match=r"now \(0, 6\), not \(2, 6\)"):
        emb.rows.grad = torch.zeros(2, DIM).to(place.torch)
    emb.rows.grad = torch.zeros_like(emb.rows)
    assert torch.equal(rows_of(emb.table), weights)


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization as it is usually written."""

    def __init__(self, params: Any, base: Any, rho: float = 0.5, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        gradients = [
            p.grad.norm()
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        scale = self.param_groups[0]["rho"] / torch.stack(gradients).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["before"] = p.data.clone()
                    p.add_(p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["before"]
        self.base.step()
        self.zero_grad()


def test_sharpness_aware_minimization(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)
    tiered = Sharpness(twins.models[0].parameters(), partial(TieredOptimizer, SGD), lr=0.1)
    plain = Sharpness(twins.models[1].parameters(), SGD, lr=0.1)
    twins.optimizers = [tiered, plain]
    for ids in ([1, 2, 2, 9], [3, 2]):
        twins.backward(ids)
        twins.both(lambda _, optimizer: optimizer.climb())
        twins.backward(ids)
        twins.both(lambda _, optimizer: optimizer.descend())
        twins.check()


# -- where else the parameter goes


def test_the_names_of_parameters_are_names_in_the_state(place: Place, weights: Tensor) -> None:
    model = torch.nn.Sequential(TieredEmbedding(place.table(weights)), torch.nn.Linear(DIM, 2))
    model[1].to(place.torch)
    state = model.state_dict()
    assert {name for name, _ in model.named_parameters()} <= state.keys()
    opt = TieredOptimizer(SGD, model, lr=1.0)
    model(torch.tensor([1, 2]).to(model[0].rows.device)).sum().backward()
    assert model[0].rows.grad is not None
    saved = model.state_dict()
    assert saved["0.rows"].shape == (0, DIM)
    assert not any(model.load_state_dict(saved))
    opt.step()
    assert not torch.equal(rows_of(model[0].table)[1:3], weights[1:3])


def test_layers_over_a_field_share_the_parameter(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    emb, bag = TieredEmbedding(table), TieredEmbeddingBag(table, mode="sum")
    assert emb.rows is bag.rows
    model = torch.nn.ModuleList([emb, bag, emb])
    assert len(list(model.parameters())) == 1
    opt = TieredOptimizer(SGD, model, lr=1.0)
    plain = torch.nn.Embedding.from_pretrained(weights.clone(), freeze=False).to(place.torch)
    ids = place.ids(4, 3)
    (emb(ids).sum(1) * bag(ids)).sum().backward()
    (plain(ids).sum(1) * plain(ids).sum(1)).sum().backward()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, plain)]
    torch.testing.assert_close(*norms)
    opt.step()
    assert plain.weight.grad is not None
    torch.testing.assert_close(rows_of(table), weights - plain.weight.grad.cpu())
    bag.requires_grad_(False)
    assert not emb(ids).requires_grad


def test_a_copy_between_backward_and_step_has_no_gradient(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)
    twins.backward([1, 2])
    assert twins.emb.rows.grad is not None
    other = copy.deepcopy(twins.models[0])
    assert other[0].rows is not twins.emb.rows
    assert other[0].rows.shape == (0, DIM)
    assert copy.deepcopy(twins.emb.rows).shape == (2, DIM)
    twins.step()
    twins.check()
    other.requires_grad_(False)
    assert twins.emb(torch.tensor([1]).to(place.torch)).requires_grad


def test_what_a_copy_gets_is_its_own(place: Place, weights: Tensor) -> None:
    emb, calls = TieredEmbedding(place.table(weights)), list[torch.nn.Module]()
    emb.register_buffer("scale", torch.ones(1))
    emb.head = torch.nn.Linear(2, 2)
    emb.register_forward_hook(lambda layer, *_: calls.append(layer))
    other, ids = copy.deepcopy(emb), torch.tensor([1, 2]).to(place.torch)
    other.register_forward_hook(lambda layer, *_: calls.append(layer))
    other.scale.zero_()
    other.register_buffer("shift", torch.zeros(1))
    emb(ids)
    assert calls == [emb]
    other(ids)
    assert calls == [emb, other, other]
    assert dict(emb.named_buffers()) == {"scale": torch.ones(1)}
    assert not {*emb.head.parameters()} & {*other.head.parameters()}
    emb.compile(backend="eager")
    assert copy.deepcopy(emb)._compiled_call_impl is None  # it would call the first one


def test_layers_over_a_field_are_tied_in_a_copy_too(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    model = torch.nn.ModuleList([TieredEmbedding(table), TieredEmbedding(table)])
    other = copy.deepcopy(model)
    assert other[0].rows is other[1].rows is not model[0].rows
    with pytest.raises(InvalidInputError, match="a layer and a copy of it"):
        TieredOptimizer(SGD, [model, other], lr=1.0)
    opt = TieredOptimizer(SGD, other, lr=1.0)
    sum(layer(torch.tensor([1, 2]).to(place.torch)).sum() for layer in other).backward()
    opt.step()
    torch.testing.assert_close(rows_of(table)[1:3], weights[1:3] - 2)


def test_the_type_of_the_module_returns_after_a_step(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights)).to(torch.float64)
    opt = TieredOptimizer(SGD, [emb], lr=1.0)
    assert emb.rows.dtype == torch.float64
    emb(torch.tensor([1, 2]).to(place.torch)).sum().backward()
    assert emb.rows.grad is not None
    assert emb.rows.dtype == torch.float32
    emb.bfloat16()
    assert emb.rows.dtype == torch.float32
    opt.step()
    assert emb.rows.dtype == torch.bfloat16
    assert emb(torch.tensor([1]).to(place.torch)).dtype == torch.bfloat16
    torch.testing.assert_close(rows_of(emb.table)[1:3], weights[1:3] - 1)


def test_evaluation_between_backward_and_step_changes_nothing(
    place: Place, weights: Tensor
) -> None:
    twins = Twins(place, weights)
    twins.backward([1, 2])
    for model in twins.models:
        model.eval()
        with torch.no_grad():
            model(torch.tensor([2, 3]).to(place.torch))
        with torch.inference_mode():
            model(torch.tensor([2, 3]).to(place.torch))
        model.train()
    twins.models[0](torch.tensor([8]).to(place.torch)).detach()
    twins.step()
    twins.check()


def test_accumulating_in_a_compiled_model_compiles_it_once(weights: Tensor, tmp_path: Any) -> None:
    place = Place(tmp_path)
    torch.compiler.reset()
    twins = Twins(place, weights)
    model, counted = twins.models[0], 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal counted
        counted += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    twins.models[0] = torch.compile(model, fullgraph=True, backend=backend)  # type: ignore[call-overload]
    for ids in ([1, 2], [2, 3], [4, 5]):
        for more in (0, 1):
            twins.backward([each + more for each in ids])
        twins.both(lambda each, _: torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5))
        twins.step()
    assert counted == 1
    torch.testing.assert_close(rows_of(twins.table), twins.plain.weight.detach())
    (gradient,) = torch.autograd.grad(twins.models[0](torch.tensor([1, 2])).sum(), [model[1].bias])
    assert gradient.tolist() == [2, 2]
    assert twins.emb.rows.grad is None
    place.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_scaler_and_clipping_by_the_model(
    weights: Tensor, tmp_path: Any, dtype: torch.dtype
) -> None:
    place = Place(tmp_path)
    twins = Twins(place, weights, torch.optim.Adagrad, lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for ids in ([1, 2, 2], [2, 5], [1, 7]):
        given = torch.tensor(ids)
        for scaler, model, optimizer in zip(scalers, twins.models, twins.optimizers, strict=True):
            with torch.autocast("cpu", dtype):
                loss = model(given).float().square().sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        twins.check()
    place.close()


def test_a_table_that_grows_between_backward_and_step(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)
    twins.backward([1, 2, 2])
    twins.both(lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    with torch.no_grad():
        for model in twins.models:
            next(model.parameters()).mul_(1.0)
    twins.table.store.grow("item", ROWS + 3)
    twins.step()
    torch.testing.assert_close(rows_of(twins.table)[:ROWS], twins.plain.weight.detach().cpu())


def test_tables_that_share_no_rows_have_parameters_of_their_own(place: Place) -> None:
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=1))
    store = place.store({"a": spec, "b": spec})
    a, b = (TieredEmbedding(store[name]) for name in "ab")
    assert a.rows is not b.rows
    assert TieredEmbedding(store["a"]).rows is a.rows
