"""torch.distributed.checkpoint: model, optimizer and the trained store as one Stateful."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from tierstore._store.store import Store

__all__ = ["StoreState"]


class StoreState(Stateful):  # type: ignore[misc]
    """A model and optimizers whose states point to a version of a store.

    Taking the state commits uncommitted rows. That commit is confirmed when the next state is taken
    or loaded, so the versions to which earlier checkpoints point are kept until then; see
    `Store.commit`. `store.keep(store.version, name)` keeps one for longer.

        state = StoreState(store, model, opt)
        dcp.save({"run": state}, checkpoint_id=path)
        dcp.load({"run": state}, checkpoint_id=path)
    """

    def __init__(
        self, store: Store, model: torch.nn.Module, *optimizers: torch.optim.Optimizer
    ) -> None:
        """Combine a store, a model and optimizers."""
        self._store = store
        self._model = model
        self._optimizers = optimizers
        self._unconfirmed: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Commit the store, and return the states of model and optimizers.

        DCP also takes the state before it loads: the previous version is kept regardless of `keep`.
        """
        if self._store.uncommitted_rows():
            self._unconfirmed = self._store.commit(confirm=False)
        model, optimizers = get_state_dict(self._model, self._optimizers)
        return {"model": model, "optimizers": optimizers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the store, model and optimizers to the version of a state."""
        set_state_dict(
            self._model,
            self._optimizers,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizers"],
        )
        self.confirm()

    def confirm(self) -> None:
        """Confirm the last saved checkpoint, so that older versions may be removed."""
        if self._unconfirmed is not None:
            self._unconfirmed = None
            self._store.confirm(self._store.version)
