"""Loops of Lightning over the model of clicks; importing it imports Lightning, in seconds."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import tierstore
from tests.integrations.conftest import ROWS, Setting
from tierstore.integrations.lightning import StoreCallback


class Module(lightning.LightningModule):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.model = setting.model
        self.setting = [setting]  # no part of the module
        self.lr = 0.05

    def training_step(self, batch: Any, _: int) -> Any:
        return self.model(*batch)["loss"]

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.model(*batch)["loss"])

    def configure_optimizers(self) -> Any:
        return self.setting[0].opt


def trainer(root: Path, callback: StoreCallback, **options: Any) -> Any:
    saves = ModelCheckpoint(
        root / "checkpoints", filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=True
    )
    given = {"max_epochs": 5, "logger": False, **options}
    return lightning.Trainer(
        default_root_dir=root,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
        callbacks=[callback, saves],
        **given,
    )


def loaders(setting: Setting) -> tuple[Any, Any]:
    return DataLoader(setting.data, 32), DataLoader(setting.data, 256)


class Noisy(Module):
    """Training that draws from the global generators."""

    def training_step(self, batch: Any, number: int) -> Any:
        ids, labels = batch
        loss = self.model(ids, (labels + 0.1 * torch.rand(len(labels))).clamp(max=1))["loss"]
        self.losses[self.global_step] = loss.item()
        return loss


class Kill(lightning.Callback):
    """Kill the process after a step, whatever it has not saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def read_ahead(root: Path, *, kill: int | None = None, resume: bool = False) -> dict[str, Any]:
    """Train with lookahead, 8 shuffled batches an epoch; save every 3 steps. Return the end."""
    root.mkdir(exist_ok=True)
    setting = Setting(root / "store")
    module = Noisy(setting)
    module.losses = {}
    torch.manual_seed(99 if resume else 5)
    ahead = tierstore.lookahead(
        DataLoader(setting.data, 32, shuffle=True),
        {setting.model.user: lambda b: b[0][:, 0], setting.model.item: lambda b: b[0][:, 1]},
        depth=3,
    )
    saves = ModelCheckpoint(root / "saved", save_last=True, every_n_train_steps=3)
    callbacks = [StoreCallback(setting.store), saves]
    if kill is not None:
        callbacks.append(Kill(kill))
    ran = lightning.Trainer(
        default_root_dir=root,
        accelerator="cpu",
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        callbacks=callbacks,
    )
    ran.fit(module, ahead, ckpt_path=root / "saved/last.ckpt" if resume else None)
    with setting.store:
        rows = {
            f"{name}.{field}": np.array(table.read(np.arange(ROWS), field))
            for name, table in setting.store.items()
            for field in table.fields
        }
    return {"rows": rows, "losses": module.losses, "head": setting.model.head.state_dict()}
