"""What an operator does to the parameter of a layer: what it does to torch's, or our error.

The operators are those that torch has: every method of a tensor, every function of `torch.nn.init`,
of `torch.nn.utils`, and those over lists of tensors, with arguments that fit some of them.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor

from tests.training.conftest import DIM, ROWS, Place, rows_of
from tierstore.errors import InvalidInputError
from tierstore.nn import RowsParameter, TieredEmbedding
from tierstore.nn.values import NoRows
from tierstore.optim import TieredOptimizer

EVERY = torch.arange(ROWS)
ONES, FIRST = torch.ones(ROWS, DIM), torch.tensor([0])
ARGUMENTS: list[tuple[Any, ...]] = [
    (),
    (0,),
    (1.0,),
    (ONES,),
    (0, 1),
    (ONES > 0, 1.0),
    (0, 0),
    (torch.float64,),
    (0, FIRST, ONES[:1]),
    (0, FIRST),
    (ONES > 0,),
    (ONES > 0, ONES),
    (ONES, ONES),
    (ONES.T,),
    (0.0, 1.0),
    ((DIM, ROWS),),
    (DIM, ROWS),
    (1, 0, 1),
    (2,),
]
SHAPE_ONLY = {"isreal", "new", "new_empty", "new_ones", "new_tensor", "new_zeros"}
"""Methods that return a tensor of a shape or type, whatever the values."""
UNLIKE = {
    "__setstate__": "takes what is pickled",
    "_make_subclass": "makes classes",
    "_make_wrapper_subclass": "makes classes",
    "as_subclass": "makes classes",
    "backward": "of a scalar",
    "share_memory_": "rows lie in the store",
    "numel": "of the whole table",
    "nelement": "of the whole table",
    "detach_": "freezes the layer",
    "register_hook": "adds a hook",
    "register_post_accumulate_grad_hook": "adds a hook",
    "requires_grad_": "freezes the layer",
}
RESHAPING = {"resize", "resize_as", "set", "t", "transpose", "squeeze", "unsqueeze", "as_strided"}
RESHAPING |= {"swapaxes", "swapdims"}
"""In place, they would give the parameter other rows or columns."""
RANDOM = ("bernoulli", "multinomial", "_like", "normal", "uniform", "random", "cauchy", "geometric")
RANDOM += ("exponential", "new", "empty", "dropout", "pinverse", "_use_count", "_ptr", "_version")


@pytest.fixture
def emb(place: Place, weights: Tensor) -> Iterator[TieredEmbedding]:
    layer = TieredEmbedding(place.table(weights))
    yield layer
    layer.table.store.rollback()
    assert torch.equal(rows_of(layer.table), weights)


def methods() -> list[str]:
    return sorted(set(dir(torch.Tensor)) - set(dir(object)) - {"__torch_dispatch__"})


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the class of what it raises."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except Exception as error:
            return type(error)


def alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, equal_nan=True)


@pytest.mark.variants(0, 1)
def test_no_method_takes_the_rows_at_rest_for_an_empty_matrix(emb: TieredEmbedding) -> None:
    """After a step and a forward pass, and frozen: a query of a shape, or an error."""
    ids = EVERY.to(emb.rows.device)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=0.0)
    emb(ids).sum().backward()
    opt.step()
    kept = emb(ids)
    found = {"refused": 0, "free": 0}
    for of in (emb.rows, emb.rows.data, emb.requires_grad_(False).rows.detach()):
        assert of.shape == (0, DIM)
        for name in methods():
            attribute = outcome(lambda of=of, name=name: getattr(of, name))
            results = [attribute]
            if callable(attribute) and not inspect.isclass(attribute):
                for given in ARGUMENTS:
                    if InvalidInputError in results:
                        break
                    results.append(outcome(lambda a=attribute, given=given: a(*given)))
            if InvalidInputError in results:
                found["refused"] += 1
                continue
            found["free"] += 1
            tensors = [each for each in results if isinstance(each, Tensor) and each is not of]
            same = all(type(each) in (type(of), NoRows) for each in tensors)
            assert same or name in SHAPE_ONLY, name
    assert found["refused"] > 1600, found
    del kept


@pytest.mark.nightly
@pytest.mark.slow
def test_every_method_sees_the_rows_between_backward_and_step(
    weights: Tensor, tmp_path: Any
) -> None:
    """Where every row has a gradient, what a method returns and writes is what torch's does."""
    place = Place(tmp_path)
    emb, compared, unlike = TieredEmbedding(place.table(weights)), 0, list[str]()
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=0.0)
    for name in methods():
        if name in UNLIKE or name.startswith("_") or any(each in name for each in RANDOM):
            continue
        for given in ARGUMENTS[:6]:
            emb(EVERY).sum().backward()
            rows = emb.rows
            before = rows.detach().clone()
            plain = torch.nn.Parameter(before.clone())
            plain.grad = rows.grad.clone()
            mine, theirs = (
                outcome(lambda of=of, given=given, name=name: getattr(of, name)(*given))
                for of in (rows, plain)
            )
            if mine is InvalidInputError:
                assert name.removesuffix("_") in RESHAPING, name
                assert torch.equal(rows.detach(), before)
                opt.zero_grad()
                continue
            if isinstance(theirs, Tensor) and theirs.layout is torch.strided:
                compared += 1
                if not isinstance(mine, Tensor) or not alike(mine.detach(), theirs.detach()):
                    unlike.append(f"{name}{given}: {mine}")
            if plain.shape == rows.shape and not alike(rows.detach(), plain.detach()):
                unlike.append(f"{name}{given} writes {rows}")
            opt.zero_grad()
            emb.table.store.rollback()
    assert not unlike
    assert compared > 200
    place.close()


def test_initializers_and_utilities_of_torch_do_it_or_say_how(
    emb: TieredEmbedding, place: Place
) -> None:
    init, utils = torch.nn.init, torch.nn.utils
    rows = emb.rows
    calls: dict[str, Callable[[], Any]] = {
        "normal": lambda: init.normal_(rows),
        "uniform": lambda: init.uniform_(rows.data),
        "zeros": lambda: init.zeros_(rows),
        "constant": lambda: init.constant_(rows, 1.0),
        "eye": lambda: init.eye_(rows),
        "sparse": lambda: init.sparse_(rows, 0.1),
        "xavier": lambda: init.xavier_uniform_(rows),
        "trunc": lambda: init.trunc_normal_(rows),
        "vector": lambda: utils.parameters_to_vector([rows]),
        "parametrized": lambda: utils.parametrizations.weight_norm(emb, "rows"),
        "pruned": lambda: utils.prune.l1_unstructured(emb, "rows", 0.5),
        "clamped": lambda: rows.data.clamp_(-1, 1),
        "penalty": lambda: (rows**2).sum(),
        "foreach": lambda: torch._foreach_norm([torch.ones(2), rows]),
        "assigned": lambda: setattr(rows, "data", torch.ones(3, DIM)),
        "pickled": lambda: pickle.dumps(rows.data),
        "copied": lambda: copy.deepcopy(rows),
        "array": lambda: rows.detach().numpy(),
        "array_of": lambda: np.asarray(rows.data),
        "list": lambda: rows.tolist(),
        "dlpack": lambda: torch.from_dlpack(rows.data),
        "average": lambda: torch.zeros(3, DIM).lerp_(rows.data, 0.5),
    }
    for name, call in calls.items():
        with pytest.raises(
            InvalidInputError, match=r"emb\(ids\).*emb\(torch\.arange.*write"
        ) as found:
            call()
        assert "'item'" in str(found.value), name
    with pytest.warns(UserWarning, match="no-op"):  # torch's own word
        init.kaiming_uniform_(rows)
    assert rows.numel() == rows.data.numel() == ROWS * DIM
    assert torch.zeros_like(rows).shape == rows.shape == (0, DIM)
    assert "no rows" in repr(rows)
    assert "no rows" in repr(list(emb.parameters()))
    rows.data = rows.data  # as a loop over all parameters may do
    # No method that layers and optimizers call hides one of a tensor that does something else.
    hidden = {name for name in vars(RowsParameter) if hasattr(torch.nn.Parameter, name)}
    assert {name for name in hidden if not name.startswith("__")} == {
        *("data", "detach", "grad", "nelement", "numel", "register_hook"),
        *("register_post_accumulate_grad_hook", "requires_grad", "requires_grad_"),
    }


def test_a_penalty_on_the_parameter_raises_when_its_gradient_comes(
    place: Place, weights: Tensor
) -> None:
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=0.1)
    ids = torch.tensor([1, 2]).to(place.torch)
    emb(ids).sum().backward()
    assert emb.rows.norm() > 0
    with pytest.raises(InvalidInputError, match=r"a gradient of what was computed from"):
        emb.rows.square().sum().backward()
    opt.zero_grad()
    (emb(ids).sum() + emb(ids).square().sum()).backward()
    opt.step()
    expected = weights[1:3] - 0.1 * (1 + 2 * weights[1:3])
    torch.testing.assert_close(rows_of(emb.table)[1:3], expected)


def test_a_copy_is_not_averaged_over_the_same_rows_in_silence(
    place: Place, weights: Tensor
) -> None:
    head = torch.nn.Linear(DIM, 1).to(place.torch)
    model = torch.nn.Sequential(TieredEmbedding(place.table(weights)), head)
    average, of_head = (torch.optim.swa_utils.AveragedModel(each) for each in (model, head))
    target = copy.deepcopy(model)
    opt = TieredOptimizer(torch.optim.SGD, model, lr=0.1)
    model(torch.tensor([1, 2]).to(place.torch)).sum().backward()
    opt.step()
    with pytest.raises(InvalidInputError, match="copy_ needs the values of table 'item'"):
        average.update_parameters(model)
    with pytest.raises(InvalidInputError, match="needs the values of table 'item'"):
        for mine, theirs in zip(target.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
    of_head.update_parameters(head)
    assert torch.equal(of_head.module.weight, head.weight)


def test_a_compiled_use_of_the_parameter_is_that_of_an_eager_one(
    weights: Tensor, tmp_path: Any
) -> None:
    torch.compiler.reset()
    place = Place(tmp_path)
    emb = TieredEmbedding(place.table(weights))
    with pytest.raises(Exception, match="needs the values of table 'item'"):
        torch.compile(lambda: emb.rows.square().sum(), backend="eager")()
    place.close()
