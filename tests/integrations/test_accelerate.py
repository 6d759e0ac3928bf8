"""Accelerate: `save_state` and `load_state` with the rows of a store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.conftest import Setting
from tierstore.errors import InvalidInputError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def accelerator() -> Any:
    """Imported where it is used, since it takes seconds."""
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    return accelerate.Accelerator(cpu=True)


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_a_state_that_is_loaded_brings_rows_and_head_back(
    setting: Setting, tmp_path: Path, accelerator: Any, safe: bool
) -> None:
    from tierstore.integrations.accelerate import register

    setting.model, setting.opt = accelerator.prepare(setting.model, setting.opt)
    register(accelerator, setting.store, setting.model)
    setting.train(4)
    accelerator.save_state(tmp_path / "best", safe_serialization=safe)
    loss, step = setting.loss(), setting.store["item"].scalars["step"]
    for number in range(4):
        setting.train(2)
        accelerator.save_state(tmp_path / f"later{number}", safe_serialization=safe)
        if number:
            shutil.rmtree(tmp_path / f"later{number - 1}")
    setting.train(2)
    accelerator.load_state(tmp_path / "best")
    assert setting.loss() == loss
    assert setting.store["item"].scalars["step"] == step
    named = {name for each in setting.store.versions() for name in each.names}
    assert {Path(name).name for name in named} == {"best", "later2", "later3"}
    setting.train(3)
    assert setting.loss() != loss


def test_without_it_saving_says_what_to_do(
    setting: Setting, tmp_path: Path, accelerator: Any
) -> None:
    setting.model, setting.opt = accelerator.prepare(setting.model, setting.opt)
    setting.train(2)
    with pytest.raises(InvalidInputError, match=r"store\.commit\(\) before"):
        accelerator.save_state(tmp_path / "state")
    setting.store.commit()
    accelerator.save_state(tmp_path / "state")
