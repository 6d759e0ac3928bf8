"""Norms and clipping of rows that ranks share, beside plain DistributedDataParallel."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

import tierstore
from tests.distributed.ranks import run, values
from tierstore import distributed
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbedding, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

ROWS, DIM = 40, 8
SPECS = {
    name: tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=0.5, seed=seed))
    for seed, name in enumerate(("item", "user"))
}


class Model(torch.nn.Module):
    """Two tables under a dense part, as layers, as a collection, or as plain embeddings."""

    def __init__(self, store: Any, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "collection":
            self.both: Any = TieredEmbeddingCollection(store, ["item", "user"])
        else:
            make: Any = TieredEmbedding if kind == "layers" else torch.nn.Embedding
            shapes: Any = [[store[name]] if kind == "layers" else [ROWS, DIM] for name in SPECS]
            self.item, self.user = (make(*each) for each in shapes)
        self.top = torch.nn.Linear(DIM, 1)

    def rows(self, ids: Tensor, users: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "collection":
            found = self.both({"item": ids, "user": users})
            return found["item"], found["user"]
        return self.item(ids), self.user(users)

    def forward(self, ids: Tensor, users: Tensor) -> Tensor:
        left, right = self.rows(ids, users)
        return torch.tanh(self.top(left * right))


def batch(rank: int, step: int, device: str) -> tuple[Tensor, Tensor]:
    """Return ids; the second rank has none in one of the steps, and few rows in another."""
    random = torch.Generator().manual_seed(10 * step + rank)
    size = {1: rank * 5, 2: 1}.get(step, 9 + rank)
    ids, users = torch.randint(ROWS, (2, size), generator=random).to(device)
    return ids, users


def trained(
    rank: int, path: Path, kind: str, device: str = "cpu"
) -> list[tuple[list[float], list[Tensor]]]:
    """Train rows of a store and plain ones, clipped; return the norms and the values of each."""
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    budget = tierstore.Budget(host_rows=30, gpu_rows=0 if device == "cpu" else 20)
    with distributed.open(path, device=device, budget=budget) as store:
        ours, plain = Model(store, kind).to(device), Model(store, "plain").to(device)
        everything = torch.arange(ROWS, device=device)
        with torch.no_grad():
            for weight, rows in zip(
                (plain.item.weight, plain.user.weight),
                ours.rows(everything, everything),
                strict=True,
            ):
                weight.copy_(rows)
        plain.top.load_state_dict(ours.top.state_dict())
        found = []
        for model, make in ((ours, TieredOptimizer), (plain, None)):
            whole = torch.nn.parallel.DistributedDataParallel(model)
            parameters = list(model.parameters())
            optimizer: Any = torch.optim.SGD(parameters, lr=0.3)
            if make is not None:
                optimizer = make(torch.optim.SGD, model, lr=0.3)
            scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
            norms = []
            for step in range(6):
                for part in range(1 + (step == 3)):
                    loss = whole(*batch(rank, step + 10 * part, device)).square().sum()
                    loss = loss / 0 if step == 4 and rank == 1 else loss
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norms.append(float(clip_grad_norm_(parameters, 0.05)))
                if step == 0 and rank == 0:  # alone
                    grads = [each.grad for each in parameters if each.grad is not None]
                    assert float(get_total_norm(grads)) == pytest.approx(0.05, rel=1e-4)
                    assert float(torch.stack([g.norm() for g in grads]).norm()) < 0.0501
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if make is not None:
                assert_refused(whole, parameters, batch(rank, 9, device))
                optimizer.zero_grad()
            with torch.no_grad():
                rows = [each.detach().clone() for each in model.rows(everything, everything)]
            dense = [each.detach() for each in model.top.parameters()]
            found.append((norms, [each.cpu() for each in (*rows, *dense)]))
        store.commit(1)
        return found


NORMS = """
g.norm() | g.norm(p="fro") | g.norm(2) | g.norm(dim=(0, 1)) | torch.norm(g) | torch.linalg.norm(g)
torch.linalg.vector_norm(g) | torch.linalg.matrix_norm(g) | torch.linalg.norm(g.flatten(), 2)
g.view(-1).norm() | g.flatten().norm() | g.reshape(-1).norm() | g.ravel().norm() | g.t().norm()
g.T.contiguous().norm() | g[:].norm() | g[None].norm() | g.unsqueeze(0).squeeze(0).norm()
g.detach().norm() | g.data.norm() | g.clone().norm() | g.detach().clone().flatten().norm()
g.float().norm() | g.double().norm() | g.cpu().norm() | g.to(torch.float64).view(-1).norm()
copy.deepcopy(g).norm() | (g * 3).norm() | (g / 3).norm() | (2 * g).norm()
(-g).norm() | g.abs().norm() | g.mul(torch.tensor(3.0).to(g)).norm() | g.norm(dim=1).norm()
g.pow(2).sum().sqrt() | g.square().sum() | (g * g).sum() | (g**2).sum(1).sum()
(g * 2).pow(2).sum() | torch._foreach_mul([g], 3)[0].norm() | torch._foreach_norm([g])[0]
torch.dot(g.view(-1), g.view(-1)) | g.view(-1) @ g.view(-1) | torch.einsum("ij,ij->", g, g)
torch.inner(g.flatten(), g.flatten()) | torch._foreach_norm([g.view(-1)])[0]
get_total_norm([g.clone()]) | get_total_norm([g.view(-1) / 2])
"""
"""What gives a norm, or its square, of all ranks' rows."""
REFUSED = """
(torch.tensor(3.0).to(g) / g).norm() | g.square().mul_(2).sum() | (g * g * 2).sum()
g.norm(1) | g.norm(float("inf")) | g.norm(0.5) | g.norm(0) | g.view(-1).norm(3) | torch.norm(g, 1)
torch.linalg.vector_norm(g, 1) | torch.linalg.norm(g, 1) | torch.linalg.norm(g, 2)
torch.linalg.norm(g, float("inf")) | torch.linalg.norm(g, -float("inf")) | g.norm(p="nuc")
torch.linalg.matrix_norm(g, "nuc") | torch.linalg.svdvals(g).max() | torch.linalg.cond(g)
torch.dist(g, 0 * g) | g.norm(dim=0).norm() | g.T.norm(dim=1).norm() | g.norm(dim=1).norm(1)
g.square().norm() | g.square().sum(0).sum() | (g + 1).norm() | (g - 2 * g).norm() | g.sign().norm()
g.clamp(-1e-9, 1e-9).norm() | (1 / g).norm() | torch.where(g > 0, g, 0.0).norm()
torch.cat([g.view(-1), torch.ones(2).to(g)]).norm() | torch.stack([g, g]).norm()
parameters_to_vector([g, torch.ones(2).to(g)]).norm() | get_total_norm([g], 1.0)
get_total_norm([g], float("inf")) | get_total_norm([g], 0.5, foreach=False)
get_total_norm([g.flatten()], 1.0) | torch._foreach_norm([g], 1)[0]
torch._foreach_norm(torch._foreach_add([g], 1.0))[0]
"""
"""What would be of one rank's rows, and raises; first what needs a gradient without parts."""


def derived(rank: int, path: Path, device: str = "cpu") -> list[tuple[str, float, float | str]]:
    """Take norms of the gradient of plain training, and of that of rows; return those that differ.

    The first rank takes them alone.
    """
    torch.manual_seed(0)
    with distributed.open(path) as store:
        ours, plain = Model(store, "layers"), Model(store, "plain")
        everything, found = torch.arange(ROWS), list[Any]()
        with torch.no_grad():
            plain.item.weight.copy_(ours.item(everything))
            plain.user.weight.copy_(ours.user(everything))
        plain.top.load_state_dict(ours.top.state_dict())
        optimizer = TieredOptimizer(torch.optim.SGD, ours, lr=0.1)
        for model in (ours, plain):
            whole = torch.nn.parallel.DistributedDataParallel(model)
            whole(*batch(rank, 0, "cpu")).square().sum().backward()
        names = {"torch": torch, "copy": copy, "get_total_norm": get_total_norm}
        names["parameters_to_vector"] = torch.nn.utils.parameters_to_vector
        for listed, is_known in ((REFUSED, False), (NORMS, True)) if rank == 0 else ():
            for each in listed.replace("\n", " | ").strip(" |").split(" | "):
                dense = {**names, "g": plain.item.weight.grad}
                expected = float(eval(each, dense))
                try:
                    got: Any = float(eval(each, {**names, "g": ours.item.rows.grad}))
                except InvalidInputError as error:
                    got = str(error)
                    if not is_known and "p.grad.plain" in got and "table 'item'" in got:
                        continue
                if not (is_known and got == pytest.approx(expected, rel=1e-4)):
                    found.append((each, expected, got))
        grad = ours.item.rows.grad
        halves = grad.clone().mul_(0.5)
        assert float(halves.norm()) == pytest.approx(float(grad.norm()) / 2)
        flat = grad.view(-1)
        flat.mul_(2)  # and so the gradient, whose memory it shares
        assert float(halves.norm()) == pytest.approx(float(grad.norm()) / 4)
        ours.item.rows.grad = grad * 3
        again = ours.item.rows.grad
        assert float(again.norm()) == pytest.approx(float(grad.norm()) * 3)
        again[:1].zero_()
        for changed in (again, again.view(-1), again.clone(), again * 2):
            with pytest.raises(InvalidInputError, match="something other than a factor"):
                changed.norm()
        optimizer.zero_grad()
        store.rollback()
    return found


def test_norms_of_what_is_made_of_a_gradient_are_of_all_ranks_or_raise(tmp_path: Path) -> None:
    distributed.create(tmp_path / "store", SPECS, partitions=4).close()
    assert values(run(2, derived, tmp_path / "store")) == [[], []]


def assert_refused(whole: Any, parameters: list[Any], given: tuple[Tensor, Tensor]) -> None:
    """Check that a norm that is not known raises, and does not wait for another rank."""
    for change in (
        lambda grad: grad.clamp_(-1e-9, 1e-9),
        lambda grad: grad[:3].zero_(),
        lambda grad: grad.data.add_(1.0),
        lambda grad: torch._foreach_add_([grad], 1.0),
    ):
        whole.zero_grad()
        whole(*given).square().sum().backward()
        grad = next(each.grad for each in parameters if each.grad.shape[1:] == (DIM,))
        with pytest.raises(InvalidInputError, match="norm_type=2"):
            clip_grad_norm_(parameters, 1.0, norm_type=float("inf"))
        assert grad.norm(dim=1).shape == grad.shape[:1]  # of each row
        assert grad.norm() > grad.plain.norm() > 0
        change(grad)
        with pytest.raises(InvalidInputError, match="since"):
            clip_grad_norm_(parameters, 1.0)


@pytest.mark.parametrize("kind", ["layers", pytest.param("collection", marks=pytest.mark.slow)])
def test_clipping_is_that_of_plain_training(tmp_path: Path, kind: str) -> None:
    distributed.create(tmp_path / "store", SPECS, partitions=4).close()
    assert_alike(values(run(2, trained, tmp_path / "store", kind)))


def assert_alike(ranks: list[Any]) -> None:
    """Check that ranks got what plain training gets, and each what the other got."""
    for (norms, ours), (expected, plain) in ranks:
        torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0, equal_nan=True)
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert [str(each) for each in ranks[0][0][0]] == [str(each) for each in ranks[1][0][0]]
    for mine, theirs in zip(ranks[0][0][1], ranks[1][0][1], strict=True):
        assert torch.equal(mine, theirs)  # the replicas have not drifted apart
