"""The Trainer of transformers: it saves, loads the best, and resumes."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tierstore
from tests.integrations.conftest import Setting
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

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


def language_models() -> dict[str, Any]:
    """Return small models whose output layer is tied to their input embedding, by name."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    gpt = transformers.GPT2Config(
        vocab_size=40,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=1,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    bert = transformers.BertConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=8,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    torch.manual_seed(0)
    return {
        "gpt2": transformers.GPT2LMHeadModel(gpt),
        "bert": transformers.BertForMaskedLM(bert),
        "untied": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**{**gpt.to_dict(), "tie_word_embeddings": False})
        ),
    }


def test_a_tied_model_trains_as_with_its_own_embedding(tmp_path: Path) -> None:
    for name, plain in language_models().items():
        from tierstore.integrations.transformers import StoreCallback, set_embedding

        model = copy.deepcopy(plain)
        with tierstore.create(None, {}) as store:
            weight = model.get_input_embeddings()
            set_embedding(
                model, TieredEmbedding.from_pretrained(weight, store, "word", freeze=False)
            )
            model.tie_weights()
            losses = []
            for each, kind in ((plain, None), (model, TieredOptimizer)):
                optimizer: Any = (
                    torch.optim.SGD(each.parameters(), lr=0.5)
                    if kind is None
                    else kind(torch.optim.SGD, each, lr=0.5)
                )
                random = torch.Generator().manual_seed(1)
                losses.append([])
                for _ in range(4):
                    ids = torch.randint(40, (4, 6), generator=random)
                    loss = each(input_ids=ids, labels=ids).loss
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses[-1].append(loss.item())
            assert losses[1] == pytest.approx(losses[0], rel=1e-5), name
            with pytest.raises(AttributeError, match=r"store\.grow"):
                model.resize_token_embeddings(50)
            with pytest.raises(InvalidInputError, match="reset_parameters"):
                for part in model.modules():
                    if hasattr(part, "reset_parameters"):
                        part.reset_parameters()
            callback, args = StoreCallback(store), SimpleNamespace(world_size=1)
            callback.on_train_begin(args, None, None, model=model)
            if name != "untied":
                plain.set_input_embeddings(TieredEmbedding(store["word"]))
                with pytest.raises(InvalidInputError, match="set_embedding"):
                    callback.on_train_begin(args, None, None, model=plain)
                for whole in (plain, torch.nn.Sequential(plain)):
                    with pytest.raises(InvalidInputError, match="set_embedding"):
                        TieredOptimizer(torch.optim.SGD, whole, lr=0.5)
            store.rollback()
