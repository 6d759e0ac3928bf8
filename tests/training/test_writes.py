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


def test_a_gradient_of_other_rows_that_fits_is_told(place: Place, weights: Tensor) -> None:
    """Gradients that were kept from another batch, as where those of several tasks are combined.

    It is said where they may be in what is set, which cannot be seen.
    """
    same, other = ([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [4, 5, 6])
    for batches, how, said, differs in (
        (same, "sum", False, False),
        (other, "sum", True, True),
        (other, "first", True, True),
        (other, "own", True, False),
        (other, "in place", False, False),
    ):
        twins = Twins(place, weights)
        with told(TierStoreWarning, int(said)):
            for _ in range(2):
                set_kept(twins, batches, how)
                twins.step()
        if not differs:
            twins.check()


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
            parameter.grad = {"sum": first + last, "first": first, "own": last * 2}[how]


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
