"""Common code of trainer integrations: commit before a state is taken, and keep its version."""

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
        """Unregister: states are taken without a commit from now on."""
        self._handle.remove()


def keep_checkpoint(store: Store, path: Any) -> None:
    """Keep the version to which a checkpoint points, as long as the checkpoint exists.

    The path of the checkpoint is the name of the version.
    """
    store.keep(store.version, os.path.abspath(path))


def release_removed(store: Store) -> None:
    """Release the versions of removed checkpoints."""
    for each in store.versions():
        for name in each.names:
            if os.path.isabs(name) and not os.path.lexists(name):
                store.release(name)
