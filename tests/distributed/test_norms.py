"""Norms and clipping of rows that ranks share, beside plain DistributedDataParallel."""

from __future__ import annotations

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
