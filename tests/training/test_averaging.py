"""Averages of a whole model, as torch.optim.swa_utils makes them: by the ways that errors name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import swa_utils

from tests.training.conftest import DIM, ROWS, Place
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

SWA: dict[str, Any] = {
    "mean": dict,
    "ema": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "swa": lambda: {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "one by one": lambda: {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "buffers": lambda: {"use_buffers": True},
    "own": lambda: {"avg_fn": lambda mine, theirs, count: mine + (theirs - mine) / (count + 1)},
}


@pytest.mark.variants(7)
@pytest.mark.parametrize("when", ["first", "between", "after", "again"])
@pytest.mark.parametrize("options", SWA.values(), ids=SWA)
def test_averaging_a_model_names_the_ways_before_anything_is_averaged(
    place: Place, weights: Tensor, options: Any, when: str
) -> None:
    """As torch's page on averages trains: whenever the model is averaged, also after a load."""
    head = torch.nn.Linear(DIM, 1).to(place.torch)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = torch.nn.Sequential(TieredEmbedding(place.table(weights)), head)
        average = swa_utils.AveragedModel(model, **options())
    (said,) = [str(each.message) for each in seen]
    opt = TieredOptimizer(torch.optim.SGD, model, lr=0.1)
    schedule = swa_utils.SWALR(opt, swa_lr=0.05)
    if when == "again":
        average.n_averaged.fill_(3)
    before = head.weight.clone()
    with pytest.raises(InvalidInputError) as raised:
        for _ in range(3):
            if when == "first":
                average.update_parameters(model)
            model(torch.tensor([1, 2]).to(place.torch)).sum().backward()
            if when == "between":
                average.update_parameters(model)
            opt.step()
            schedule.step()
            average.update_parameters(model)
    for text in (said, str(raised.value)):
        assert "emb.averaged()" in text and "ema=" in text and "store.save(path)" in text
        assert "table 'item'" in text
    assert torch.equal(average.module[1].weight, before)


def test_averages_as_a_page_has_them_are_those_of_torch(place: Place, weights: Tensor) -> None:
    """Rows by `ema=`, the rest by `AveragedModel`: as one over a model of plain tensors."""
    random, decay = torch.Generator().manual_seed(4), 0.9
    found = []
    for make in (TieredEmbedding, torch.nn.Embedding.from_pretrained):
        torch.manual_seed(1)
        head = torch.nn.Linear(DIM, 1).to(place.torch)
        random.manual_seed(4)
        average = swa_utils.get_ema_multi_avg_fn(decay)
        if make is TieredEmbedding:
            emb: Any = make(place.table(weights))
            model = torch.nn.Sequential(emb, head)
            opt: Any = TieredOptimizer(torch.optim.Adagrad, model, lr=0.1, ema=decay)
            smooth = swa_utils.AveragedModel(head, multi_avg_fn=average)
        else:
            emb = make(weights.clone(), freeze=False).to(place.torch)
            model = torch.nn.Sequential(emb, head)
            opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
            smooth = swa_utils.AveragedModel(model, multi_avg_fn=average)
        for _ in range(5):
            ids = torch.randint(0, ROWS, (6,), generator=random).to(place.torch)
            opt.zero_grad()
            model(ids).square().sum().backward()
            opt.step()
            smooth.update_parameters(head if make is TieredEmbedding else model)
        every = torch.arange(ROWS).to(place.torch)
        averaged = smooth(emb.averaged()(every)) if make is TieredEmbedding else smooth(every)
        found.append(averaged.detach())
        assert not torch.allclose(averaged, model(every))
    torch.testing.assert_close(*found)
