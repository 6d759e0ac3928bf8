"""torch.distributed.checkpoint: one Stateful for store, model and optimizer."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.integrations.conftest import Setting
from tierstore.integrations.checkpoint import StoreState

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def dcp() -> ModuleType:
    """Imported where it is used: it takes more time than the rest of torch."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def test_a_checkpoint_brings_rows_head_and_optimizer_back(
    setting: Setting, tmp_path: Path, dcp: ModuleType
) -> None:
    run = StoreState(setting.store, setting.model, setting.opt)
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
    setting: Setting, tmp_path: Path, dcp: ModuleType
) -> None:
    run = StoreState(setting.store, setting.model, setting.opt)
    for number in range(5):
        setting.train(1)
        dcp.save({"run": run}, checkpoint_id=tmp_path / str(number))
    losses = setting.loss()
    dcp.load({"run": run}, checkpoint_id=tmp_path / "0")
    assert setting.loss() != losses
