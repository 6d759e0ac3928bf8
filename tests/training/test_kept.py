"""What programs keep of rows and gradients between steps: as with a weight of torch, or it raises.

The order of a batch is not that of another, so a function that takes rows of both in pairs must
raise, and no other function may: a false alarm breaks a program that is right.
"""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tests.training.conftest import DIM, Place
from tests.training.test_operator_database import database
from tests.training.test_parameter import Twins
from tierstore.errors import InvalidInputError
from tierstore.nn.placed import Order, PlacedRows

Kept = dict[str, Any]
SEQUENCES = {
    "the same": ([3, 1, 7], [3, 1, 7]),
    "in another order": ([3, 1, 7], [7, 3, 1]),
    "as many": ([3, 1, 7], [4, 1, 9]),
    "one each": ([3], [5]),
    "one and more": ([3], [4, 1, 9]),
    "more and one": ([4, 1, 9], [3]),
    "as many as columns": (list(range(DIM)), list(range(1, DIM + 1))),
    "fewer": ([4, 1, 9], [3, 5]),
}
"""Ids of batches that follow each other."""


def kept(held: Kept, value: Tensor, name: str = "kept") -> Tensor:
    """Return what was kept first, or this."""
    found: Tensor = held.setdefault(name, value)
    return found


def buffer(held: Kept, like: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a buffer of a shape, made once for each."""
    found: Tensor = held.setdefault(tuple(like.shape), make(like))
    return found


def running(held: Kept, value: Tensor) -> Tensor:
    """Return a running mean."""
    held["mean"] = 0.9 * held["mean"] + value if "mean" in held else value
    return held["mean"]  # type: ignore[no-any-return]


def into(target: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    write(target)
    return target


FREE: dict[str, Callable[[Kept, Any], Tensor]] = {
    "a buffer that is overwritten": lambda held, p: buffer(held, p.grad, torch.empty_like).copy_(
        p.grad
    ),
    "a slice that is overwritten": lambda held, p: into(
        buffer(held, p.grad, torch.empty_like), lambda each: each.__setitem__(slice(None), p.grad)
    ),
    "a result that is given": lambda held, p: torch.mul(
        p.grad, 2, out=buffer(held, p.grad, torch.empty_like)
    ),
    "a buffer that is zeroed": lambda held, p: (
        buffer(held, p.grad, torch.zeros_like).zero_().add_(p.grad)
    ),
    "zeros of a shape": lambda held, p: (
        buffer(held, p.grad, lambda each: torch.zeros(each.shape)).zero_().add_(p.grad)
    ),
    "zeros that stay": lambda held, p: buffer(held, p.grad, torch.zeros_like) + p.grad,
    "ones": lambda held, p: buffer(held, p.grad, torch.ones_like) * p.grad,
    "foreach": lambda held, p: into(
        buffer(held, p.grad, torch.empty_like), lambda each: torch._foreach_copy_([each], [p.grad])
    ),
    "data of a buffer": lambda held, p: into(
        kept(held, p.grad.clone()), lambda each: setattr(each, "data", p.grad.clone())
    ),
    "a mean of columns": lambda held, p: running(held, p.grad.sum(0)),
    "one that keeps a row": lambda held, p: running(held, p.grad.sum(0, keepdim=True)),
    "a norm": lambda held, p: p.grad / (1 + running(held, p.grad.norm())),
    "products of columns": lambda held, p: running(held, p.grad.T @ p.grad),
    "largest elements": lambda held, p: running(held, p.grad.abs().flatten().topk(2).values),
    "clipping": lambda _, p: nn.utils.clip_grad_norm_([p], 0.01),
    "norms of rows": lambda _, p: p.grad.div(p.grad.norm(dim=1, keepdim=True) + 1),
    "a mask": lambda _, p: into(p.grad, lambda each: each.__setitem__(each < 0, 0)),
    "a type": lambda _, p: p.grad.double().float(),
    "pickled": lambda _, p: pickle.loads(pickle.dumps(p.grad)),
    "saved": lambda _, p: saved(p.grad),
    "copied": lambda _, p: copy.deepcopy(p.grad),
    "an array": lambda _, p: torch.from_numpy(np.asarray(p.grad) * 2),
    "a function of torch.func": lambda _, p: torch.func.grad(lambda each: each.square().sum())(
        p.grad
    ),
    "a tangent": lambda _, p: torch.func.jvp(
        lambda each: each.square().sum(), (p.grad,), (p.grad,)
    )[1],
    "a tangent of a dual": lambda _, p: dual(p.grad),
    "a map": lambda _, p: torch.vmap(lambda each: each.square())(p.grad),
    "compiled": lambda held, p: held.setdefault(
        "call", torch.compile(lambda each: (each * 2).norm(), backend="eager")
    )(p.grad),
    "compiled as a whole": lambda held, p: held.setdefault(
        "call", torch.compile(lambda each: each * 2, backend="eager", fullgraph=True)
    )(p.grad.as_subclass(Tensor)),
}
"""Programs that never take rows of two batches in pairs; what they return is torch's."""

ALL_BY_ALL: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "products": lambda a, b: a @ b.T,
    "a layer": lambda a, b: F.linear(a, b),
    "an equation": lambda a, b: torch.einsum("nd,md->nm", a, b),
    "a tensor product": lambda a, b: torch.tensordot(a, b, dims=([1], [1])),
    "of Kronecker": lambda a, b: torch.kron(a, b),
    "distances": lambda a, b: torch.cdist(a, b),
    "differences": lambda a, b: a.unsqueeze(1) - b.unsqueeze(0) if len(a) + len(b) > 2 else 0,
    "an outer product": lambda a, b: torch.outer(a.flatten(), b.flatten()),
    "joined": lambda a, b: torch.cat([a, b]),
    "compared": lambda a, b: (torch.equal(a, b), torch.is_same_size(a, b)),
    "of its type": lambda a, b: (b.type_as(a), b.to(a)),
}
"""Functions of what was kept and what is now that go by no place."""

PAIRED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a sum": lambda a, b: a + b,
    "in place": lambda a, b: a.lerp_(b, 0.1),
    "foreach": lambda a, b: torch._foreach_add([a], [b]),
    "norms of rows": lambda a, b: a.norm(dim=1) + b.norm(dim=1),
    "norms that divide": lambda a, b: b / a.norm(dim=1, keepdim=True),
    "means of rows": lambda a, b: a.square().mean(-1) + b.square().mean(-1),
    "columns": lambda a, b: a[:, :3] + b[:, :3],
    "all of them": lambda a, b: a[:] + b[:],
    "parts": lambda a, b: a.chunk(2, 1)[0] + b.chunk(2, 1)[0],
    "transposed": lambda a, b: a.T + b.T,
    "with a dimension": lambda a, b: a.unsqueeze(0) + b.unsqueeze(0),
    "flat": lambda a, b: a.flatten() @ b.flatten(),
    "a dot": lambda a, b: torch.dot(a.flatten(), b.flatten()),
    "rows by rows": lambda a, b: a.T @ b,
    "an equation": lambda a, b: torch.einsum("nd,nd->n", a, b),
    "a tensor product": lambda a, b: torch.tensordot(a, b, dims=2),
    "similarity": lambda a, b: F.cosine_similarity(a, b),
    "stacked": lambda a, b: torch.stack([a, b]).mean(0),
    "side by side": lambda a, b: torch.cat([a, b], dim=1),
    "in columns": lambda a, b: torch.hstack([a, b]),
    "zeros of a shape": lambda a, b: torch.zeros(a.shape).add_(a).add_(b),
    "a given result": lambda a, b: torch.mul(a, 1, out=torch.empty(a.shape)) + b,
    "a mask": lambda a, b: b.masked_fill(a > 0, 0),
    "a mask of rows": lambda a, b: b[a.norm(dim=1) > 0],
    "the largest": lambda a, b: torch.maximum(a, b),
    "another type": lambda a, b: a.double() + b.double(),
    "sorted columns": lambda a, b: a.sort(dim=1).values + b.sort(dim=1).values,
    "broadcast": lambda a, b: torch.broadcast_tensors(a, b),
    "a parameter of its own": lambda a, b: nn.Parameter(a.clone()).data + b,
    "a deep copy": lambda a, b: copy.deepcopy(a) + b,
}
"""Functions of what was kept and what is now that go by the places of rows."""


def saved(value: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"value": value}, file)
    file.seek(0)
    found: Tensor = torch.load(file, weights_only=True)["value"]
    assert type(found) is Tensor
    return found


def dual(value: Tensor) -> Tensor:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        found = forward_ad.make_dual(value, value).square()
        tangent: Tensor = forward_ad.unpack_dual(found).tangent
    return tangent


def batches(tmp_path: Any, weights: Tensor, ids: Any) -> Iterator[tuple[Twins, list[Any]]]:
    """Yield the parameters of either model between the backward pass and the step of each batch."""
    tmp_path.mkdir(exist_ok=True)
    place = Place(tmp_path)
    twins = Twins(place, weights, lr=0.1)
    for each in ids:
        twins.backward(each)
        with torch.no_grad():
            yield twins, [twins.emb.rows, twins.plain.weight]
        twins.step()
    place.close()


@pytest.mark.parametrize("name", FREE)
def test_a_program_that_pairs_no_rows_of_two_batches_is_as_with_torch(
    tmp_path: Any, weights: Tensor, name: str
) -> None:
    for number, ids in enumerate(SEQUENCES.values()):
        held: list[Kept] = [{}, {}]
        for twins, both in batches(tmp_path / str(number), weights, ids):
            values = [FREE[name](*each) for each in zip(held, both, strict=True)]
            if values[1].shape == twins.plain.weight.shape:
                values[1] = values[1][twins.emb.rows.ids]
            torch.testing.assert_close(*(value.detach().as_subclass(Tensor) for value in values))


@pytest.mark.parametrize("of", ["rows", "gradients"])
def test_rows_of_two_batches_are_taken_all_by_all_but_not_in_pairs(
    tmp_path: Any, weights: Tensor, of: str
) -> None:
    for number, (sequence, ids) in enumerate(SEQUENCES.items()):
        first = None
        for _twins, (rows, _) in batches(tmp_path / str(number), weights, ids):
            now = rows.detach() if of == "rows" else rows.grad
            first = now.clone() if first is None else first
            for call in ALL_BY_ALL.values():
                call(first, now)
            with torch.no_grad():
                for name, call in PAIRED.items():
                    given = first.clone(), now.clone()
                    if torch.equal(torch.tensor(ids[0]).sort()[0], rows.ids.sort()[0]):
                        call(*given)
                        continue
                    with pytest.raises(InvalidInputError, match="of one batch of table") as error:
                        call(*given)
                    assert torch.equal(given[0], first), (name, sequence)
                    told = "as many" if len(first) == len(now) else str(max(map(len, given)))
                    assert f"{min(map(len, given))} rows of one" in str(error.value) or (
                        f"{max(map(len, given))} rows of one" in str(error.value)
                    ), told


def test_what_is_kept_is_a_parameter_of_another_module_as_torch_has_it(
    tmp_path: Any, weights: Tensor
) -> None:
    ((twins, (rows, _)),) = islice(batches(tmp_path, weights, [[3, 1, 7]]), 1)
    module = nn.Linear(DIM, 3, bias=False)
    module.weight = nn.Parameter(rows.detach().clone())
    assert repr(module.weight.detach()).startswith("tensor(")
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert list(each.parameters()) == [each.weight]
        assert each.weight.requires_grad and isinstance(each.weight, nn.Parameter)
        before = each.weight.detach().clone()
        optimizer = torch.optim.Adam(each.parameters())
        with torch.enable_grad():
            each(torch.ones(2, DIM)).sum().backward()
        optimizer.step()
        assert not torch.equal(each.weight.detach(), before)
        assert each.double().weight.grad.dtype == torch.float64
    twins.place.close()


def test_state_that_was_made_without_rows_says_so(tmp_path: Any, weights: Tensor) -> None:
    """A buffer like the parameter at rest is of no rows, into which torch adds one in silence."""
    place = Place(tmp_path)
    twins = Twins(place, weights, lr=0.1)
    momentum = torch.zeros_like(twins.emb.rows)
    for ids in ([5], [3, 1, 7]):
        twins.backward(ids)
        for add in (momentum.add_, momentum.copy_, momentum.add):
            with pytest.raises(InvalidInputError, match="while the parameter of table 'item'"):
                add(twins.emb.rows.grad)
        twins.step()
    place.close()


KNOWN = {
    *("bernoulli", "gradient", "geqrf", "multinomial", "normal", "svd", "tril", "triu"),
    *("linalg.svd", "resize_", "nn.functional.dropout", "nn.functional.dropout2d"),
    *("nn.functional.dropout3d", "nn.functional.alpha_dropout", "randint_like", "randn_like"),
    *("nn.functional.feature_alpha_dropout", "rand_like", "empty_like", "unique_consecutive"),
    *("cauchy", "exponential", "geometric", "log_normal", "uniform", "lu", "qr", "linalg.qr"),
    *("linalg.lu", "linalg.lu_factor", "linalg.lu_factor_ex", "flatten", "ravel"),
}
"""Functions whose result is taken to be of the rows, though they look at places, or draw."""


class Table:
    """Stands for a parameter."""

    live_order = None


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_what_functions_of_torch_make_is_known_by_its_rows() -> None:
    """Where rows in another order give the same in that order, and so in no other dimension."""
    parameter, order = Table(), torch.tensor([2, 0, 4, 1, 3])
    place = Order(torch.arange(5), weakref.ref(parameter))
    wrong, known = set(), 0
    for operator in database():
        if operator.name.startswith("fft.") or operator.name in KNOWN:
            continue
        for given, call in calls(operator):
            found = outcome(call, PlacedRows.of(given.clone(), place))
            plain, turned = outcome(call, given.clone()), outcome(call, given[order])
            if not len(found) == len(plain) == len(turned):
                continue
            for each, value, other in zip(found, plain, turned, strict=True):
                if type(each) is not PlacedRows:
                    continue
                assert torch.equal(each.as_subclass(Tensor).nan_to_num(), value.nan_to_num())
                moved = value.index_select(each.row_dim, order)
                if moved.shape == other.shape and moved.allclose(other, 1e-4, equal_nan=True):
                    known += 1
                else:
                    wrong.add(operator.name)
    assert not wrong
    assert known > 500


def calls(operator: Any) -> Iterator[tuple[Tensor, Callable[[Tensor], Any]]]:
    """Yield tensors of five rows with calls that take nothing else."""
    options: list[tuple[Any, Mapping[str, Any]]] = [((), {})]
    if operator.name.startswith("sparse"):
        return
    for each in islice(operator.sample_inputs("cpu", torch.float32), 20):
        others = tree_leaves((each.args, each.kwargs))
        if isinstance(each.input, Tensor) and not any(isinstance(o, Tensor) for o in others):
            options.append((each.args, each.kwargs))
    torch.manual_seed(0)
    for given in (torch.rand(5, 3), torch.rand(5)):
        for args, named in options[:5]:
            yield given, lambda x, args=args, named=named: operator(x, *args, **named)


def outcome(call: Callable[[Tensor], Any], given: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    try:
        found = tree_leaves(call(given))
    except Exception:  # not for tensors of this shape
        return []
    return [
        each
        for each in found
        if isinstance(each, Tensor) and each.layout == torch.strided and not each.is_complex()
    ]
