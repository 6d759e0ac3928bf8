"""What the integrations of trainers share: commit before a state is taken, keep what it names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from tierstore._store.store import Store

__all__ = ["CommitBeforeState", "keep_checkpoint", "release_removed"]


class CommitBeforeState:
    """Commits a store before the state of a module is taken, while this is registered."""

    def __init__(
        self, store: Store, module: torch.nn.Module, step: Callable[[], int | None] = lambda: None
    ) -> None:
        """Register it with a module; `step` returns the step to commit with."""
        self._store = store
        self._step = step
        self._handle: Any = module.register_state_dict_pre_hook(self._commit)

    def _commit(self, *_: Any) -> None:
        if self._store.uncommitted_rows():
            self._store.commit(step=self._step())

    def remove(self) -> None:
        """Let states be taken as they are from now on."""
        self._handle.remove()


def keep_checkpoint(store: Store, path: Any) -> None:
    """Keep the version of a store that a checkpoint points to, as long as the checkpoint is there.

    The path of the checkpoint is the name of the version.
    """
    store.keep(store.version, os.path.abspath(path))


def release_removed(store: Store) -> None:
    """Let the versions go whose checkpoints are not there any more."""
    for each in store.versions():
        for name in each.names:
            if os.path.isabs(name) and not os.path.lexists(name):
                store.release(name)
