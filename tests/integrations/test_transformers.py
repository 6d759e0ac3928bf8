"""The Trainer of transformers: it saves, loads the best, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.conftest import Setting

pytestmark = pytest.mark.filterwarnings("ignore")


def trainer(setting: Setting, root: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    from tierstore.integrations.transformers import StoreCallback

    args = transformers.TrainingArguments(
        output_dir=root,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=256,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        label_names=["labels"],
        **{"num_train_epochs": 4, **options},
    )
    examples = [
        {"ids": ids, "labels": label}
        for ids, label in zip(setting.ids, setting.labels, strict=True)
    ]
    return transformers.Trainer(
        setting.model,
        args,
        train_dataset=examples,
        eval_dataset=examples,
        optimizers=(setting.opt, None),
        callbacks=[StoreCallback(setting.store)],
    )


def test_the_best_model_is_loaded_at_the_end(setting: Setting, tmp_path: Path) -> None:
    setting.opt.param_groups[0]["lr"] = 2.0  # too much: the last is not the best
    ran = trainer(setting, tmp_path / "out", load_best_model_at_end=True)
    ran.train()
    losses = [each["eval_loss"] for each in ran.state.log_history if "eval_loss" in each]
    assert ran.evaluate()["eval_loss"] == min(losses)
    names = {name for each in setting.store.versions() for name in each.names}
    kept = {str(path) for path in (tmp_path / "out").glob("checkpoint-*")}
    assert kept <= names
    assert len(names) <= 3


def test_it_trains_clips_and_resumes(setting: Setting, tmp_path: Path) -> None:
    other = Setting(tmp_path / "other")
    trainer(other, tmp_path / "whole", num_train_epochs=4, lr_scheduler_type="constant").train()
    first = trainer(setting, tmp_path / "cut", num_train_epochs=2, lr_scheduler_type="constant")
    first.train()
    setting.store.close()
    again = Setting(tmp_path / "store")
    ran = trainer(again, tmp_path / "cut", num_train_epochs=4, lr_scheduler_type="constant")
    ran.train(resume_from_checkpoint=True)
    assert again.store["item"].scalars["step"] == ran.state.global_step == 32
    assert again.loss() == other.loss()
    assert torch.isfinite(torch.tensor(again.loss()))
    for made in (again, other):
        made.store.close()
