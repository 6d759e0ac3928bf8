"""Lightning: checkpoints bring rows back, with automatic optimization."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import tierstore
from tests.integrations.conftest import ROWS, Setting

lightning = pytest.importorskip("lightning", reason="Lightning is not installed")

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

from tierstore.integrations.lightning import StoreCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
]


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


def test_the_best_checkpoint_validates_as_it_did(setting: Setting, tmp_path: Path) -> None:
    module, (train, val) = Module(setting), loaders(setting)
    ran = trainer(tmp_path, StoreCallback(setting.store), gradient_clip_val=0.5)
    losses = {}

    class Record(lightning.Callback):
        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            losses[trainer.current_epoch] = trainer.callback_metrics["val_loss"].item()

    ran.callbacks.insert(0, Record())
    ran.fit(module, train, val)
    saves = ran.checkpoint_callback
    best = {path: value.item() for path, value in saves.best_k_models.items()}
    assert len(best) == 2
    named = {name for each in setting.store.versions() for name in each.names}
    assert named == {*map(str, best), str(tmp_path / "checkpoints" / "last.ckpt")}
    for path, value in best.items():
        found = ran.validate(module, val, ckpt_path=path, verbose=False)
        assert found[0]["val_loss"] == value
    again = ran.validate(module, val, ckpt_path="best", verbose=False)[0]["val_loss"]
    assert again == min(losses.values())


def test_a_run_goes_on_from_its_last_checkpoint(setting: Setting, tmp_path: Path) -> None:
    other = Setting(tmp_path / "other")
    whole = trainer(tmp_path / "whole", StoreCallback(other.store), max_epochs=6)
    whole.fit(Module(other), *loaders(other))
    cut = trainer(tmp_path / "cut", StoreCallback(setting.store), max_epochs=3)
    cut.fit(Module(setting), *loaders(setting))
    setting.train(5)  # what came after the checkpoint goes
    setting.store.close() if not setting.store.uncommitted_rows() else setting.store.rollback()
    setting.store.close()
    again = Setting(tmp_path / "store")
    resumed = trainer(tmp_path / "cut", StoreCallback(again.store), max_epochs=6)
    resumed.fit(Module(again), *loaders(again), ckpt_path=tmp_path / "cut/checkpoints/last.ckpt")
    assert resumed.global_step == whole.global_step == 48
    assert again.store["item"].scalars["step"] == 48
    assert again.loss() == other.loss()
    for made in (again, other):
        made.store.close()


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


@pytest.mark.slow
def test_a_run_killed_within_an_epoch_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = read_ahead(tmp_path / "whole")
    assert list(whole["losses"]) == list(range(32))
    spawn = multiprocessing.get_context("spawn")
    victim = spawn.Process(target=read_ahead, args=(tmp_path / "cut",), kwargs={"kill": 14})
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    resumed = read_ahead(tmp_path / "cut", resume=True)
    assert resumed["losses"] == {step: whole["losses"][step] for step in range(12, 32)}
    assert whole["rows"].keys() == resumed["rows"].keys() >= {"user.weight", "item.exp_avg"}
    for name, rows in whole["rows"].items():
        assert np.array_equal(rows, resumed["rows"][name]), name
    for name, value in whole["head"].items():
        assert torch.equal(value, resumed["head"][name])


def test_the_learning_rate_finder_leaves_no_traces(setting: Setting, tmp_path: Path) -> None:
    module, (train, val) = Module(setting), loaders(setting)
    setting.train(3)
    loss, step = setting.loss(), setting.store["item"].scalars["step"]
    ran = trainer(tmp_path, StoreCallback(setting.store))
    Tuner(ran).lr_find(module, train, val, num_training=10, update_attr=False)
    assert setting.loss() == loss
    assert setting.store["item"].scalars["step"] == step


def test_hit_rates_come_to_the_logger(setting: Setting, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs")
    ran = trainer(tmp_path, StoreCallback(setting.store), max_epochs=1, logger=logger)
    ran.fit(Module(setting), *loaders(setting))
    (log,) = (tmp_path / "logs").rglob("metrics.csv")
    assert "tierstore/item/host/hit_rate" in log.read_text().splitlines()[0]


def test_without_the_callback_saving_says_what_to_do(setting: Setting, tmp_path: Path) -> None:
    ran = lightning.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
    )
    with pytest.raises(Exception, match=r"call store\.commit\(\) before"):
        ran.fit(Module(setting), loaders(setting)[0])


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
def test_options_of_the_trainer(setting: Setting, tmp_path: Path, options: Any) -> None:
    before = setting.loss()
    ran = trainer(tmp_path, StoreCallback(setting.store), gradient_clip_val=1.0, **options)
    ran.fit(Module(setting), *loaders(setting))
    assert setting.loss() < before
    assert setting.store.uncommitted_rows() == 0
    assert setting.store["user"].scalars["step"] == ran.global_step
    assert torch.isfinite(torch.tensor(setting.loss()))
