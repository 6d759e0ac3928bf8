"""Accelerate: commits a store in `save_state`, and restores it in `load_state`."""

from __future__ import annotations

from typing import Any

import torch

from tierstore._store.store import Store
from tierstore.distributed import DistributedStore
from tierstore.errors import MissingExtraError
from tierstore.integrations.saving import CommitBeforeState, keep_checkpoint, release_removed

try:
    from accelerate import Accelerator
except ModuleNotFoundError as _error:
    raise MissingExtraError("this needs Accelerate: pip install accelerate") from _error

__all__ = ["register"]


def register(
    accelerator: Accelerator, store: Store | DistributedStore, *models: torch.nn.Module
) -> None:
    """Commit a store before the state of any of these models is taken, and keep the version.

    `accelerator.save_state(directory)` and `save_model` save pointers to a version of the store,
    which is kept as long as the directory exists. `load_state` works without changes: models and
    optimizers restore the store to their version. Every rank calls these.
    """
    for model in models:
        CommitBeforeState(store, accelerator.unwrap_model(model))

    def keep(models: Any, weights: Any, directory: str) -> None:
        release_removed(store)
        keep_checkpoint(store, directory)

    accelerator.register_save_state_pre_hook(keep)
