"""The Trainer of transformers: commits a store with each checkpoint."""

from __future__ import annotations

import os
from typing import Any

from tierstore._store.store import Store
from tierstore.errors import MissingExtraError
from tierstore.integrations.saving import CommitBeforeState, keep_checkpoint, release_removed

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as _error:
    raise MissingExtraError("this needs transformers: pip install transformers") from _error

__all__ = ["StoreCallback"]


class StoreCallback(TrainerCallback):  # type: ignore[misc]
    """Commits a store with each checkpoint, and keeps the version as long as the checkpoint.

    `load_best_model_at_end` and `resume_from_checkpoint` then restore the rows with the rest.

        opt = TieredOptimizer(torch.optim.AdamW, model, lr=0.01)
        Trainer(model, args, optimizers=(opt, None), callbacks=[StoreCallback(store)], ...)
    """

    def __init__(self, store: Store) -> None:
        """Manage a store."""
        self._store = store
        self._commit: CommitBeforeState | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Make states of the model refer to committed rows."""
        if self._commit is None:
            self._commit = CommitBeforeState(self._store, more["model"], lambda: state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Keep the version of the saved checkpoint; release those of removed checkpoints."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        keep_checkpoint(self._store, os.path.join(args.output_dir, name))
        release_removed(self._store)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Commit the results of the run."""
        if self._store.uncommitted_rows():
            self._store.commit(step=state.global_step)
