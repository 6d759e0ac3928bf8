"""Common code of trainer integrations: commit before a state is taken, and keep its version.

Everything here is collective where several ranks share the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tierstore._store.store import Store
from tierstore.distributed import DistributedStore

__all__ = ["CommitBeforeState", "commit_changes", "keep_checkpoint", "release_removed"]

T = TypeVar("T")


def commit_changes(store: Store | DistributedStore, step: int | None = None) -> None:
    """Commit, if any rank wrote something since the last commit."""
    if any(_of_every_rank(store, store.uncommitted_rows())):
        store.commit(step=step)


def _of_every_rank(store: Store | DistributedStore, value: T) -> list[T]:
    """Return the value of each rank that shares the store."""
    if not isinstance(store, DistributedStore):
        return [value]
    return store._ranks.gather("save a checkpoint", value)


class CommitBeforeState:
    """Commits a store before the state of a module is taken, while this is registered."""

    def __init__(
        self,
        store: Store | DistributedStore,
        module: torch.nn.Module,
        step: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Register it with a module; `step` returns the step to commit with."""
        self._store = store
        self._step = step
        self._handle: Any = module.register_state_dict_pre_hook(self._commit)

    def _commit(self, *_: Any) -> None:
        commit_changes(self._store, self._step())

    def remove(self) -> None:
        """Unregister: states are taken without a commit from now on."""
        self._handle.remove()


def keep_checkpoint(store: Store | DistributedStore, path: Any) -> None:
    """Keep the version to which a checkpoint points, as long as the checkpoint exists.

    The path of the checkpoint is the name of the version.
    """
    store.keep(store.version, os.path.abspath(path))


def release_removed(store: Store | DistributedStore) -> None:
    """Release the versions of checkpoints that are removed, as the first rank sees it."""
    names = [name for each in store.versions() for name in each.names]
    gone = [name for name in names if os.path.isabs(name) and not os.path.lexists(name)]
    for name in _of_every_rank(store, gone)[0]:
        store.release(name)
