"""Lightning: checkpoints bring rows back, with automatic optimization."""

from __future__ import annotations

import importlib
import multiprocessing
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integrations.conftest import Setting

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def loops() -> Any:
    """Imported where it is used: each worker would import all of Lightning."""
    pytest.importorskip("lightning", reason="Lightning is not installed")
    return importlib.import_module("tests.integrations.lightning_loops")


def test_the_best_checkpoint_validates_as_it_did(
    setting: Setting, loops: Any, tmp_path: Path
) -> None:
    module, (train, val) = loops.Module(setting), loops.loaders(setting)
    ran = loops.trainer(tmp_path, loops.StoreCallback(setting.store), gradient_clip_val=0.5)
    losses = {}

    class Record(loops.lightning.Callback):
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


def test_a_run_goes_on_from_its_last_checkpoint(
    setting: Setting, loops: Any, tmp_path: Path
) -> None:
    other = Setting(tmp_path / "other")
    whole = loops.trainer(tmp_path / "whole", loops.StoreCallback(other.store), max_epochs=6)
    whole.fit(loops.Module(other), *loops.loaders(other))
    cut = loops.trainer(tmp_path / "cut", loops.StoreCallback(setting.store), max_epochs=3)
    cut.fit(loops.Module(setting), *loops.loaders(setting))
    setting.train(5)  # what came after the checkpoint goes
    setting.store.close() if not setting.store.uncommitted_rows() else setting.store.rollback()
    setting.store.close()
    again = Setting(tmp_path / "store")
    resumed = loops.trainer(tmp_path / "cut", loops.StoreCallback(again.store), max_epochs=6)
    resumed.fit(
        loops.Module(again), *loops.loaders(again), ckpt_path=tmp_path / "cut/checkpoints/last.ckpt"
    )
    assert resumed.global_step == whole.global_step == 48
    assert again.store["item"].scalars["step"] == 48
    assert again.loss() == other.loss()
    for made in (again, other):
        made.store.close()


@pytest.mark.slow
def test_a_run_killed_within_an_epoch_goes_on_to_the_bit(loops: Any, tmp_path: Path) -> None:
    whole = loops.read_ahead(tmp_path / "whole")
    assert list(whole["losses"]) == list(range(32))
    spawn = multiprocessing.get_context("spawn")
    victim = spawn.Process(target=loops.read_ahead, args=(tmp_path / "cut",), kwargs={"kill": 14})
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    resumed = loops.read_ahead(tmp_path / "cut", resume=True)
    assert resumed["losses"] == {step: whole["losses"][step] for step in range(12, 32)}
    assert whole["rows"].keys() == resumed["rows"].keys() >= {"user.weight", "item.exp_avg"}
    for name, rows in whole["rows"].items():
        assert np.array_equal(rows, resumed["rows"][name]), name
    for name, value in whole["head"].items():
        assert torch.equal(value, resumed["head"][name])


def test_the_learning_rate_finder_leaves_no_traces(
    setting: Setting, loops: Any, tmp_path: Path
) -> None:
    module, (train, val) = loops.Module(setting), loops.loaders(setting)
    setting.train(3)
    loss, step = setting.loss(), setting.store["item"].scalars["step"]
    ran = loops.trainer(tmp_path, loops.StoreCallback(setting.store))
    from lightning.pytorch.tuner import Tuner

    Tuner(ran).lr_find(module, train, val, num_training=10, update_attr=False)
    assert setting.loss() == loss
    assert setting.store["item"].scalars["step"] == step


def test_hit_rates_come_to_the_logger(setting: Setting, loops: Any, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path / "logs")
    ran = loops.trainer(tmp_path, loops.StoreCallback(setting.store), max_epochs=1, logger=logger)
    ran.fit(loops.Module(setting), *loops.loaders(setting))
    (log,) = (tmp_path / "logs").rglob("metrics.csv")
    assert "tierstore/item/host/hit_rate" in log.read_text().splitlines()[0]


def test_without_the_callback_saving_says_what_to_do(
    setting: Setting, loops: Any, tmp_path: Path
) -> None:
    ran = loops.lightning.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
    )
    with pytest.raises(Exception, match=r"call store\.commit\(\) before"):
        ran.fit(loops.Module(setting), loops.loaders(setting)[0])


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
def test_options_of_the_trainer(setting: Setting, loops: Any, tmp_path: Path, options: Any) -> None:
    before = setting.loss()
    ran = loops.trainer(
        tmp_path, loops.StoreCallback(setting.store), gradient_clip_val=1.0, **options
    )
    ran.fit(loops.Module(setting), *loops.loaders(setting))
    assert setting.loss() < before
    assert setting.store.uncommitted_rows() == 0
    assert setting.store["user"].scalars["step"] == ran.global_step
    assert torch.isfinite(torch.tensor(setting.loss()))
