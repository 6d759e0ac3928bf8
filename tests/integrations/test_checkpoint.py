"""torch.distributed.checkpoint: one Stateful for store, model and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.integrations.conftest import Setting

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def dcp() -> ModuleType:
    """Imported where it is used: it takes nearly as long as the rest of torch."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


@pytest.fixture
def state() -> Callable[..., Any]:
    from tierstore.integrations.checkpoint import StoreState

    return StoreState


def test_a_checkpoint_brings_rows_head_and_optimizer_back(
    setting: Setting, tmp_path: Path, dcp: ModuleType, state: Callable[..., Any]
) -> None:
    run = state(setting.store, setting.model, setting.opt)
    setting.train(3)
    dcp.save({"run": run}, checkpoint_id=tmp_path / "first")
    setting.store.keep(setting.store.version, "first")
    loss, step = setting.loss(), setting.store["item"].scalars["step"]
    found = []
    for number in range(3):
        setting.train(2)
        dcp.save({"run": run}, checkpoint_id=tmp_path / str(number))
        found.append(setting.loss())
        run.confirm()
    setting.train(2)
    dcp.load({"run": run}, checkpoint_id=tmp_path / "2")
    assert setting.loss() == found[2]
    setting.train(2)
    dcp.load({"run": run}, checkpoint_id=tmp_path / "first")
    assert setting.loss() == loss
    assert setting.store["item"].scalars["step"] == step
    assert len(setting.store.versions()) <= 4


def test_versions_stay_until_a_checkpoint_is_confirmed(
    setting: Setting, tmp_path: Path, dcp: ModuleType, state: Callable[..., Any]
) -> None:
    run = state(setting.store, setting.model, setting.opt)
    for number in range(5):
        setting.train(1)
        dcp.save({"run": run}, checkpoint_id=tmp_path / str(number))
    losses = setting.loss()
    dcp.load({"run": run}, checkpoint_id=tmp_path / "0")
    assert setting.loss() != losses
