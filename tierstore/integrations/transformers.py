"""transformers: a layer over a table in its models, and a Trainer that commits the store."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from tierstore._store.store import Store
from tierstore.distributed import DistributedStore
from tierstore.errors import MissingExtraError
from tierstore.integrations.saving import (
    CommitBeforeState,
    commit_changes,
    keep_checkpoint,
    release_removed,
)
from tierstore.nn import TieredEmbedding
from tierstore.nn.tied import check_tied

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as _error:
    raise MissingExtraError("this needs transformers: pip install transformers") from _error

__all__ = ["StoreCallback", "set_embedding"]


def set_embedding(model: Any, emb: TieredEmbedding) -> None:
    """Put a layer over a table in the place of a model's input embedding, tied where that is.

    An output layer that has the same weight looks up all rows from then on, in each forward pass;
    `model.set_input_embeddings` alone would leave it the old weight. `tie_weights()` has nothing
    to do for it any more.

        emb = TieredEmbedding.from_pretrained(
            model.get_input_embeddings(), store, "word", freeze=False
        )
        set_embedding(model, emb)
    """
    before, head = model.get_input_embeddings(), model.get_output_embeddings()
    every = model.named_modules(remove_duplicate=False)
    names = {f"{name}.weight" for name, each in every if each is before}
    is_tied = head is not None and head.weight is before.weight
    model.set_input_embeddings(emb)
    if is_tied:
        model.set_output_embeddings(_TiedHead(emb, head.bias))
    for prefix, part in model.named_modules():
        if keys := getattr(part, "_tied_weights_keys", None):
            part._tied_weights_keys = {
                key: of for key, of in keys.items() if f"{prefix}.{of}".lstrip(".") not in names
            }
    tied = getattr(model, "all_tied_weights_keys", {})
    model.all_tied_weights_keys = {key: of for key, of in tied.items() if of not in names}


class _TiedHead(torch.nn.Module):  # type: ignore[misc]
    """An output layer over all rows of a layer, that of padding among them, as of a weight."""

    def __init__(self, emb: TieredEmbedding, bias: Tensor | None) -> None:
        super().__init__()
        self.words = TieredEmbedding(emb.table, emb.field)
        self.bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        rows = self.words(torch.arange(self.words.num_embeddings, device=hidden.device))
        return torch.nn.functional.linear(hidden, rows.to(hidden.dtype), self.bias)


class StoreCallback(TrainerCallback):  # type: ignore[misc]
    """Commits a store with each checkpoint, and keeps the version as long as the checkpoint.

    `load_best_model_at_end` and `resume_from_checkpoint` then restore the rows with the rest.

        opt = TieredOptimizer(torch.optim.AdamW, model, lr=0.01)
        Trainer(model, args, optimizers=(opt, None), callbacks=[StoreCallback(store)], ...)
    """

    def __init__(self, store: Store | DistributedStore) -> None:
        """Manage a store, one that ranks share if there are several."""
        self._store = store
        self._commit: CommitBeforeState | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Make states of the model refer to committed rows."""
        check_tied(more["model"])
        if self._commit is None and args.world_size == 1:
            self._commit = CommitBeforeState(self._store, more["model"], lambda: state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Commit on every rank before the first one alone takes the state."""
        if control.should_save:
            commit_changes(self._store, state.global_step)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Commit where the trainer is to find out only now whether it saves."""
        if args.save_strategy == "best":
            commit_changes(self._store, state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Keep the version of the saved checkpoint; release those of removed checkpoints."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        keep_checkpoint(self._store, os.path.join(args.output_dir, name))
        release_removed(self._store)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Commit the results of the run."""
        commit_changes(self._store, state.global_step)
