"""Lightning: commits a store with each checkpoint, and restores it with the checkpoint."""

from __future__ import annotations

import os
from typing import Any

from tierstore._random import every_state, set_every_state
from tierstore._store.store import Store
from tierstore.distributed import DistributedStore
from tierstore.errors import MissingExtraError
from tierstore.integrations.saving import CommitBeforeState, commit_changes, keep_checkpoint

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy
except ModuleNotFoundError as _error:
    raise MissingExtraError("this needs Lightning: pip install lightning") from _error

__all__ = ["StoreCallback"]


class StoreCallback(Callback):  # type: ignore[misc]
    """Commits a store with each checkpoint, and keeps the version as long as the checkpoint.

    A checkpoint that is loaded (`ckpt_path`, the learning rate finder) brings rows, their state,
    the head and the generators of torch, NumPy and Python back together. One that `ModelCheckpoint`
    removes releases its version. A loader that is read through `tierstore.lookahead` continues
    after the last batch that was trained on.

        trainer = lightning.Trainer(callbacks=[StoreCallback(store)])
    """

    def __init__(self, store: Store | DistributedStore, *, log: bool = True) -> None:
        """Manage a store; `log` sends the hit rate of each table's tiers to the loggers."""
        self._store = store
        self._log = log
        self._commit: CommitBeforeState | None = None
        self._keeping: _Keeping | None = None
        self._random: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators of random numbers."""
        return every_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states that the generators get when training continues."""
        self._random = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the generators as they were in the checkpoint, after all that drew from them."""
        if self._random is not None:
            set_every_state(self._random)
            self._random = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start managing the store."""
        self._end()
        self._commit = CommitBeforeState(self._store, pl_module, lambda: trainer.global_step)
        self._keeping = _Keeping(self._store, trainer.strategy)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Commit the results of the run."""
        if stage == "fit":
            commit_changes(self._store, trainer.global_step)
        self._end()

    def _end(self) -> None:
        if self._commit is not None:
            self._commit.remove()
            self._commit = None
        if self._keeping is not None:
            self._keeping.end()
            self._keeping = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Log the hit rates, as often as the trainer logs."""
        step = trainer.global_step
        if self._log and trainer.loggers and step % trainer.log_every_n_steps == 0:
            rates = _hit_rates(self._store)
            for logger in trainer.loggers:
                logger.log_metrics(rates, step=step)


class _Keeping:
    """Keeps the versions to which checkpoints of a strategy point, on every rank that saves them.

    Its plugin for checkpoints is called on the first rank alone.
    """

    def __init__(self, store: Store | DistributedStore, strategy: Strategy) -> None:
        self._store = store
        self._strategy = strategy
        self._save, self._remove = strategy.save_checkpoint, strategy.remove_checkpoint
        strategy.save_checkpoint, strategy.remove_checkpoint = self._keep, self._release

    def end(self) -> None:
        del self._strategy.save_checkpoint, self._strategy.remove_checkpoint

    def _keep(self, checkpoint: dict[str, Any], path: Any, **options: Any) -> None:
        keep_checkpoint(self._store, path)
        self._save(checkpoint, path, **options)

    def _release(self, path: Any) -> None:
        self._remove(path)
        name = os.path.abspath(path)
        if any(name in each.names for each in self._store.versions()):
            self._store.release(name)


def _hit_rates(store: Store | DistributedStore) -> dict[str, float]:
    """Return the hit rate of each tier of this rank except the last, by table and tier."""
    rates = {}
    for name, table in store.items():
        own = getattr(table, "shard", table)
        for tier, stats in list(own.stats().items())[:-1]:
            if stats.requested:
                rates[f"tierstore/{name}/{tier}/hit_rate"] = stats.hits / stats.requested
    return rates
