"""Libraries that train, on two ranks: as plain embeddings in the same, saved and resumed."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import tierstore
from tests.distributed.ranks import run, values
from tests.integrations.conftest import DIM, ROWS, Clicks
from tierstore import distributed
from tierstore.optim import TieredOptimizer

EPOCHS, BATCH, CLIP, RATE = 3, 16, 0.05, 0.5
made = torch.Generator().manual_seed(2)
IDS = torch.randint(0, ROWS, (128, 2), generator=made)
LABELS = (IDS.sum(1) % 2).float()
Train = Callable[..., None]


def plain_of(model: Clicks) -> Clicks:
    """Return the same model with plain embeddings."""
    plain = Clicks.__new__(Clicks)
    torch.nn.Module.__init__(plain)
    with torch.no_grad():
        for name in ("user", "item"):
            rows = getattr(model, name)(torch.arange(ROWS)).clone()
            setattr(plain, name, torch.nn.Embedding.from_pretrained(rows, freeze=False))
    plain.head = copy.deepcopy(model.head)
    return plain


def content(model: Clicks) -> list[Tensor]:
    """Return the rows and the head, to be compared."""
    with torch.no_grad():
        rows = [each(torch.arange(ROWS)).clone() for each in (model.user, model.item)]
    return [*rows, model.head.weight.detach().clone(), model.head.bias.detach().clone()]


def lightning(model: Any, root: Path, store: Any, at: str | None = None) -> None:
    """Train with Lightning; with a store, save each epoch, and go on `at` one that was saved."""
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from tierstore.integrations.lightning import StoreCallback

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(*batch)["loss"]

        def configure_optimizers(self) -> Any:
            return optimizer_of(model, store)

    saved = ModelCheckpoint(root, filename="{epoch}", save_top_k=-1)
    pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[TorchElasticEnvironment()],
        logger=CSVLogger(root),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=store is not None,
        accumulate_grad_batches=2,
        gradient_clip_val=CLIP,
        callbacks=[] if store is None else [StoreCallback(store), saved],
    ).fit(
        Module(),
        DataLoader(TensorDataset(IDS, LABELS), BATCH),
        ckpt_path=at and root / "epoch=0.ckpt",
        weights_only=False,
    )


def transformers(model: Any, root: Path, store: Any, at: str | None = None) -> None:
    """Train with the Trainer of transformers; see `lightning`."""
    import transformers as hf

    from tierstore.integrations.transformers import StoreCallback

    args = hf.TrainingArguments(
        output_dir=root,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        learning_rate=RATE,
        save_strategy="no" if store is None else "epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        label_names=["labels"],
    )
    hf.Trainer(
        model,
        args,
        train_dataset=[
            {"ids": ids, "labels": label} for ids, label in zip(IDS, LABELS, strict=True)
        ],
        optimizers=(optimizer_of(model, store), None),
        callbacks=[] if store is None else [StoreCallback(store)],
    ).train(resume_from_checkpoint=at and str(root / "checkpoint-2"))


def accelerate(model: Any, root: Path, store: Any, at: str | None = None) -> None:
    """Train with Accelerate; see `lightning`."""
    from accelerate import Accelerator

    from tierstore.integrations.accelerate import register

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    whole, optimizer, loader = accelerator.prepare(
        model, optimizer_of(model, store), DataLoader(TensorDataset(IDS, LABELS), BATCH)
    )
    if store is not None:
        register(accelerator, store, whole)
    if at:
        accelerator.load_state(root / "0")
    for epoch in range(1 if at else 0, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(whole):
                accelerator.backward(whole(*batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(whole.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        if store is not None:
            accelerator.save_state(root / str(epoch))


def optimizer_of(model: Any, store: Any) -> Any:
    if store is None:
        return torch.optim.SGD(model.parameters(), lr=RATE)
    return TieredOptimizer(torch.optim.SGD, model, lr=RATE)


def trained(rank: int, path: Path, name: str) -> list[list[Tensor]]:
    """Return what training leads to: with a store, resumed after an epoch, and without one."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    train: Train = globals()[name]
    with distributed.open(path / "store", budget=tierstore.Budget(host_rows=30)) as store:
        torch.manual_seed(1)
        model = Clicks(store)
        plain, found = plain_of(model), []
        train(model, path / "saved", store)
        found.append(content(model))
        again = Clicks(store)  # with another head
        train(again, path / "saved", store, at="the first epoch")
        found.append(content(again))
        train(plain, path / "plain", None)
        return [*found, content(plain)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "transformers", "accelerate"])
def test_two_ranks_train_save_and_resume_as_with_plain_embeddings(
    tmp_path: Path, name: str
) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    init = tierstore.normal(std=0.5, seed=3)
    specs = {each: tierstore.TableSpec(ROWS, DIM, init=init) for each in ("user", "item")}
    distributed.create(tmp_path / "store", specs, partitions=4).close()
    one, other = values(run(2, trained, tmp_path, name))
    for ours, resumed, plain in (one, other):
        for at, each in enumerate(ours):
            torch.testing.assert_close(each, plain[at])
            assert torch.equal(each, resumed[at])
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert torch.equal(mine, theirs)
