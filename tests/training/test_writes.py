"""What is written between a backward pass and its step, and is of some rows alone.

It is what torch's would be, or it is said how it differs: the parameter has the rows of a batch.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.conftest import DIM, ROWS, Place, rows_of
from tests.training.test_parameter import SGD, Twins
from tierstore.errors import InvalidInputError, LazyUpdatesWarning, TierStoreWarning
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

Change = Callable[[Tensor, Tensor], Tensor]
RESTING: dict[str, Change] = {
    "along the gradient": lambda rows, gradient: rows + 0.3 * gradient,
    "against it": lambda rows, gradient: rows - 0.1 * gradient / gradient.norm(),
    "by its sign": lambda rows, gradient: rows + 0.2 * gradient.sign(),
    "by the size of a row": lambda rows, gradient: rows + gradient * rows.square(),
    "not at all": lambda rows, _: rows.clone(),
    "there and back": lambda rows, gradient: rows + gradient,
}
"""Changes that are none for a row without a gradient."""
MOVING: dict[str, Change] = {
    "decay": lambda rows, _: rows * 0.9,
    "a clamp": lambda rows, _: rows.clamp(-0.2, 0.2),
    "unit length": lambda rows, _: torch.nn.functional.normalize(rows),
    "a constant": lambda rows, _: rows + 3.0,
    "decay and a step": lambda rows, gradient: rows * 0.99 - 0.01 * gradient,
}
SOME, EVERY = [3, 1, 7, 7, 20], list(range(ROWS))


@contextmanager
def told(category: type[Warning], times: int) -> Iterator[None]:
    """Expect so many warnings of a category."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    seen = [str(each.message) for each in found if each.category is category]
    assert len(seen) == times, seen


def writes(twins: Twins, way: str, batch: list[int]) -> None:
    """Take a step of either model, with a change before it."""

    def write(model: Any, value: Tensor | None = None) -> Tensor:
        parameter = next(model.parameters())
        before = parameter.detach().clone()
        change = {**RESTING, **MOVING}[way]
        parameter.data = change(before, parameter.grad) if value is None else value
        return before

    twins.backward(batch)
    before = [write(model) for model in twins.models]
    if way == "there and back":
        twins.both(lambda _, optimizer: optimizer.zero_grad())
        twins.backward(batch)
        for model, value in zip(twins.models, before, strict=True):
            write(model, value)
    twins.step()


@pytest.mark.variants(6)
@pytest.mark.parametrize("batch", [SOME, EVERY], ids=["some", "every"])
@pytest.mark.parametrize("way", [*RESTING, *MOVING])
def test_a_change_that_torch_would_make_to_every_row_is_told_once(
    place: Place, weights: Tensor, way: str, batch: list[int]
) -> None:
    """Where nothing is said the rows are those of torch."""
    twins = Twins(place, weights, lr=0.02)
    differs = way in MOVING and batch is SOME
    with told(LazyUpdatesWarning, int(differs)):
        for _ in range(3):
            writes(twins, way, batch)
    if not differs:
        twins.check()


KEPT: dict[str, Callable[[dict[str, Tensor], Tensor], None]] = {
    "an average of rows": lambda kept, p: average(kept, p.detach()),
    "an average of data": lambda kept, p: average(kept, p.data),
    "an average of the parameter": lambda kept, p: average(kept, p),
    "an average of several": lambda kept, p: torch._foreach_lerp_(
        [kept.setdefault("mean", p.detach().clone())], [p.detach()], 0.1
    ),
    "an average from zero": lambda kept, p: average(
        {"mean": kept.setdefault("mean", torch.zeros_like(p.data))}, p.data
    ),
    "squares from zero": lambda kept, p: kept.setdefault("mean", torch.zeros_like(p)).add_(
        p.grad.square()
    ),
    "a flat gradient": lambda kept, p: p.grad.mul_(
        kept.setdefault("mean", p.grad.flatten()).dot(p.grad.view(-1)).sign() * 0.5
    ),
    "a distance": lambda kept, p: p.grad.add_(
        torch.sub(p.detach(), kept.setdefault("mean", p.detach().clone()))
    ),
    "momentum that is set": lambda kept, p: setattr(p, "grad", momentum(kept, p).clone()),
    "momentum in place": lambda kept, p: p.grad.copy_(momentum(kept, p)),
    "momentum into the rows": lambda kept, p: p.data.sub_(momentum(kept, p), alpha=0.1),
    "rows as they were": lambda kept, p: setattr(
        p, "data", kept.setdefault("mean", p.data.clone()).clone()
    ),
    "a gradient as it was": lambda kept, p: setattr(
        p, "grad", kept.setdefault("mean", p.grad.clone()).clone()
    ),
}
"""What is kept between steps by the place of a row, as loops for weights of torch do."""


def average(kept: dict[str, Tensor], rows: Tensor) -> None:
    if "mean" not in kept:
        kept["mean"] = rows.clone()
    kept["mean"].mul_(0.9).add_(rows, alpha=0.1)


def momentum(kept: dict[str, Tensor], parameter: Tensor) -> Tensor:
    last = kept.get("mean")
    kept["mean"] = parameter.grad.clone() if last is None else 0.9 * last + parameter.grad
    return kept["mean"]


@pytest.mark.filterwarnings("ignore:values written:tierstore.errors.LazyUpdatesWarning")
@pytest.mark.parametrize("way", KEPT)
def test_what_is_kept_of_one_batch_does_not_meet_another(
    tmp_path: Any, weights: Tensor, way: str
) -> None:
    """Batches of the same rows are as in torch; of others, as many, nothing is mixed."""
    place, kept = Place(tmp_path), list[dict[str, Tensor]]([{}, {}])
    twins = Twins(place, weights, lr=0.1)
    for ids in ([3, 1, 7], [3, 1, 7]):
        twins.backward(ids)
        with torch.no_grad():
            for each, model in zip(kept, twins.models, strict=True):
                KEPT[way](each, next(iter(model.parameters())))
        twins.step()
        twins.check()
    twins.backward([4, 1, 9])
    before = rows_of(twins.table)
    with torch.no_grad(), pytest.raises(InvalidInputError, match="3 rows of one batch of table"):
        KEPT[way](kept[0], twins.emb.rows)
    twins.optimizers[0].zero_grad()
    twins.emb(torch.tensor([1]))
    assert torch.equal(rows_of(twins.table), before)
    place.close()


def test_what_goes_by_ids_or_joins_batches_is_free(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)
    every = torch.zeros_like(weights).to(place.torch)
    seen = []
    for ids in ([3, 1, 7], [4, 1, 9]):
        twins.backward(ids)
        rows = twins.emb.rows
        every[rows.ids] = every[rows.ids].lerp(rows.detach(), 0.5) + rows.grad
        seen.append(rows.detach()[rows.ids.argsort()])
        twins.step()
    assert type(seen[0]) is Tensor
    assert torch.equal((seen[0] - seen[1]).cpu(), torch.stack(seen).diff(dim=0)[0].neg().cpu())
    twins.backward([1, 2])
    kept = twins.emb.rows.detach()
    assert torch.cat([kept, twins.emb.rows.grad]).shape == (4, DIM)
    assert type(pickle.loads(pickle.dumps(kept))) is Tensor
    copied = copy.deepcopy(kept)
    twins.step()
    twins.backward([2, 5])
    assert torch.cat([copied, twins.emb.rows.detach()]).shape == (4, DIM)
    with pytest.raises(InvalidInputError, match=r"kept\[emb.rows.ids\]"):
        copied += twins.emb.rows.detach()


def test_a_gradient_of_other_rows_that_fits_is_told(place: Place, weights: Tensor) -> None:
    """Gradients that were kept from another batch, as where those of several tasks are combined.

    They raise; what came by a list, or on a GPU, is told where it may be of other rows.
    """
    same, other = ([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [4, 5, 6])
    for batches, how, said in (
        (same, "sum", ""),
        (other, "sum", "raises"),
        (other, "first", "raises"),
        (other, "own", ""),
        (other, "by a list", "warns"),
        (other, "in place", ""),
    ):
        twins = Twins(place, weights)
        if place.torch != "cpu" and batches is other and how != "in place":
            said = "warns"  # gradients there are torch's own tensors, which know no batch
        with told(TierStoreWarning, int(said == "warns")):
            for _ in range(2):
                if said == "raises":
                    with pytest.raises(InvalidInputError, match="3 rows of one batch"):
                        set_kept(twins, batches, how)
                    twins.optimizers[0].zero_grad()
                    continue
                set_kept(twins, batches, how)
                twins.step()
        if not said:
            twins.check()


SET: dict[str, Change] = {
    "sum": lambda first, last: first + last,
    "first": lambda first, _: first,
    "own": lambda _, last: last * 2,
    "by a list": lambda first, _: torch.tensor(first.tolist()).to(first.device),
}


def set_kept(twins: Twins, batches: tuple[list[int], ...], how: str) -> None:
    """Set the gradients of either model to what is made of those of some batches."""
    kept: list[list[Tensor]] = [[], []]
    for ids in batches:
        twins.both(lambda _, optimizer: optimizer.zero_grad())
        twins.backward(ids)
        for mine, model in zip(kept, twins.models, strict=True):
            mine.append(next(model.parameters()).grad.clone())
    for (first, last), model in zip(kept, twins.models, strict=True):
        parameter = next(model.parameters())
        if how == "in place":
            parameter.grad.mul_(0.5)
            parameter.grad = parameter.grad
        else:
            way = SET[how]
            parameter.grad = way(first, last)


def test_a_gradient_is_detached_and_cleared_as_old_loops_do(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)
    for ids in ([1, 2, 2], [2, 5]):
        twins.backward(ids, 100.0)
        for model in twins.models:
            for parameter in model.parameters():
                parameter.grad.detach_()
                parameter.grad.zero_()
        twins.backward(ids)
        twins.step()
        twins.check()


@pytest.mark.parametrize("trained", [False, True], ids=["at rest", "after backward"])
@pytest.mark.parametrize("save", ["torch.save", "pickle", "copy"])
def test_a_parameter_is_not_saved_without_its_rows(
    weights: Tensor, tmp_path: Any, save: str, trained: bool
) -> None:
    place = Place(tmp_path)
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(SGD, [emb], lr=0.1)
    if trained:
        emb(torch.tensor([1, 2])).sum().backward()
    named = dict(emb.named_parameters())
    with pytest.raises(InvalidInputError, match=r"'item' would be saved without rows.*state_dict"):
        if save == "torch.save":
            torch.save(named, io.BytesIO())
        elif save == "pickle":
            pickle.dumps(named)
        else:
            copy.copy(emb.rows)
    del opt
    place.close()


@pytest.mark.parametrize("enabled", [True, False])
def test_what_has_rows_in_place_of_the_parameter_is_refused(
    place: Place, weights: Tensor, enabled: bool
) -> None:
    emb = TieredEmbedding(place.table(weights))
    ids = torch.tensor([1, 2]).to(place.torch)
    other = {"rows": torch.zeros(ROWS, DIM).to(place.torch)}
    with torch.set_grad_enabled(enabled):
        with pytest.raises(InvalidInputError, match="replaced the parameter of the layer over"):
            torch.func.functional_call(emb, other, (ids,))
        assert torch.equal(emb(ids).cpu(), weights[1:3])
    frozen = {"rows": emb.rows.detach()}
    assert torch.equal(torch.func.functional_call(emb, frozen, (ids,)).cpu(), weights[1:3])
    emb.rows = torch.nn.Parameter(other["rows"])
    with torch.no_grad(), pytest.raises(InvalidInputError, match="replaced the parameter"):
        emb(ids)


def test_rows_of_a_state_are_told_that_they_are_not_loaded(weights: Tensor, tmp_path: Any) -> None:
    place = Place(tmp_path)
    emb = TieredEmbedding(place.table(weights))
    state = {**emb.state_dict(), "rows": weights + 1}
    with pytest.warns(TierStoreWarning, match="rows has values of rows and is not loaded"):
        emb.load_state_dict(state)
    assert torch.equal(rows_of(emb.table), weights)
    place.close()
