"""What the state of a layer holds in place of rows: a pointer to a field of a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore._store.pointed import Claim, StatePointer
from tierstore._store.pointer import from_bytes, to_bytes
from tierstore._table.home import StoreOfTable
from tierstore.errors import InvalidInputError

_WAYS = {
    "optimizer": ": make it as it was; or leave it out, as in Checkpoint(store, model=model)"
    ".resume(), and make another after that, with reset=True"
}
"""What to do where something else is compared."""


def to_tensor(store: StoreOfTable, **what: str) -> Tensor:
    """Return a pointer to a store as it is committed, as a uint8 tensor.

    `what` is compared when it is loaded: `table` and `field`, and more. The version is kept while
    the tensor or a copy of it lives. Raises InvalidInputError where rows are not committed.
    """
    pointer = store.state_dict()
    data = np.frombuffer(to_bytes({**pointer, **what}), np.uint8).copy()
    tensor = torch.from_numpy(data)
    if not isinstance(pointer, StatePointer):  # in the payload of the version itself
        return tensor
    return _claiming(tensor, pointer.claim)


class PointerTensor(Tensor):
    """The bytes of a pointer, and the claim of its version, which copies of them share.

    It is saved as the plain tensor that it is otherwise.
    """

    claim: Claim

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Give results that are all bytes of a pointer its claim; others are plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            source = args[0] if args else None
            if (
                type(result) is Tensor
                and isinstance(source, PointerTensor)
                and (result.dtype, result.shape) == (source.dtype, source.shape)
            ):
                return _claiming(result, source.claim)
            return result

    def __copy__(self) -> Tensor:
        """Return another tensor of the same bytes."""
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy, once for each `memo`."""
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        self.claim.was_saved()
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _claiming(data: Tensor, claim: Claim) -> Tensor:
    """Return bytes as those of a pointer with a claim."""
    claiming = data.as_subclass(PointerTensor)
    claiming.claim = claim
    return claiming


def restore(store: StoreOfTable, state: Any, **what: str) -> None:
    """Bring a store to the version that a pointer names.

    Raises InvalidInputError for a pointer to something else than `what`, to another store, or to a
    version that is not kept.
    """
    store.load_state_dict(checked(state, **what))


def checked(state: Any, **what: str) -> Mapping[str, Any]:
    """Return the contents of a pointer, for `Store.load_state_dict`.

    Raises InvalidInputError for a pointer to something else than `what`.
    """
    if isinstance(state, Tensor):
        data = state.detach().cpu().to(torch.uint8)
        if not torch.equal(data.to(state.dtype), state.detach().cpu()):
            raise InvalidInputError(
                "not a pointer to a store: this state was computed from those of layers over "
                "tables, whose rows lie in the store. Averages over steps are ema= of the "
                "TieredOptimizer and emb.averaged(); to combine two versions, read both, "
                "tierstore.open(path, version=...)[name].read(ids), and write the result with "
                "emb.table.write(ids, rows)"
            )
        state = from_bytes(data.numpy().tobytes())
    if not isinstance(state, Mapping):
        raise InvalidInputError(f"not the state of a layer over a table: {state!r}")
    if "table" in what:
        found, wanted = ((of.get("table"), of.get("field")) for of in (state, what))
        if found != wanted:
            raise InvalidInputError(
                f"this state is of field {found[1]!r} of table {found[0]!r}, the layer is over "
                f"field {wanted[1]!r} of table {wanted[0]!r}: load it into a layer over that"
            )
    for key, value in what.items():
        if state.get(key) != value:
            raise InvalidInputError(
                f"this state is of the {key} {state.get(key)}, and not of {value}, to which it is "
                f"loaded{_WAYS.get(key, '')}"
            )
    return state
