"""Lightning: checkpoints bring rows back, with automatic optimization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.integrations.conftest import Setting

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
