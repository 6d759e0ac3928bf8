"""A torch optimizer over the rows of tables."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tierstore._door import interrupts_deferred
from tierstore._table.table import Table
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.nn import TieredEmbedding
from tierstore.nn.autograd import Abandoned, Gradient, merged
from tierstore.optim.in_place import InPlace
from tierstore.optim.probe import as_gradient, probe
from tierstore.optim.state import State, StoredState

__all__ = ["Compact", "TieredOptimizer", "TrainedField"]


class TrainedField:
    """A field of a table under training.

    Attributes:
        table: the table.
        field: the name of the field.
        state: where the optimizer's state for it lies.
        in_place: takes steps without copying rows, where it can; None where that is not wanted.
        gradients: what backward passes left since the last `gather`, in their order.
        compact: the rows that got a gradient, between a backward pass and a step.
    """

    def __init__(
        self, table: Table, field: str, state: StoredState, in_place: InPlace | None
    ) -> None:
        """Start without a gradient."""
        self.table = table
        self.field = field
        self.state = state
        self.in_place = in_place
        self.gradients: list[Gradient] = []
        self.compact: Compact | None = None
        self._abandoned = Abandoned()

    @property
    def name(self) -> str:
        """What the trained rows are called, `table.field`."""
        return f"{self.table.name}.{self.field}"

    def gather(self) -> bool:
        """Merge the gradients that have come into `compact`; return whether it is another one."""
        if not self.gradients and (self.compact is None or self.compact.usable):
            return False
        before = None if self.compact is None else self.compact.gradient
        parts = [*(() if before is None else (before,)), *self.gradients]
        self.gradients.clear()
        whole = parts[0]
        if len(parts) > 1 or not whole.batch.usable:
            whole = merged(self.table, parts, self._abandoned)
            for part in parts:
                part.batch.release()
        self.compact = Compact(self, whole)
        return True

    def clear(self) -> None:
        """Drop the gradients and release their rows."""
        for gradient in self.gradients:
            gradient.batch.release()
        self.gradients.clear()
        if self.compact is not None:
            self.compact.release()
        self.compact = None
        self._abandoned.release()


class Compact:
    """Distinct rows with their gradient, as a parameter of their own for generic optimizers."""

    def __init__(self, of: TrainedField, gradient: Gradient) -> None:
        """Take the gradient of a batch; nothing is read yet."""
        self._of = of
        self._gradient = gradient
        self._parameter: torch.nn.Parameter | None = None

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The rows, `(distinct rows, dim)`, with their gradient; on a GPU this may wait once."""
        if self._parameter is None:
            self._gradient.trim()
            rows = self._gradient.batch.lease.read(self._of.field)
            self._parameter = self._made(self._of.state.computed(rows))
        return self._parameter

    def _made(self, rows: Tensor) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(rows)
        parameter.grad = self._gradient.values.to(rows.dtype)
        return parameter

    @property
    def gradient(self) -> Gradient | None:
        """The gradient as clipping and the like have left it, None if it was taken away."""
        if self._parameter is None:
            return self._gradient
        grad = self._parameter.grad
        return None if grad is None else replace(self._gradient, values=grad)

    @property
    def usable(self) -> bool:
        """Whether its rows can be read and written, or it has no gradient for them."""
        return self.gradient is None or self._gradient.batch.usable

    def step(self, options: Mapping[str, Any]) -> bool:
        """Take a step of the optimizer in the slots, if that can be done; see `InPlace.step`."""
        gradient, in_place = self.gradient, self._of.in_place
        if gradient is None or in_place is None:
            return False
        return in_place.step(gradient.batch.lease, gradient.values, gradient.trained, options)

    def load(self) -> State:
        """Let the parameter be what its rows are now; return the optimizer's state for them."""
        self._gradient.trim()
        rows, state = self._of.state.load(self._gradient.batch.lease)
        if self._parameter is None:
            self._parameter = self._made(rows)
        else:
            self._parameter.data = rows
        return state

    def store(self, state: State) -> None:
        """Write the parameter and its state over the rows, but for those not to be trained."""
        lease, weights = self._gradient.batch.lease, self.parameter.detach()
        self._of.state.store(lease, weights, state, self._gradient.trained)

    def release(self) -> None:
        """Let the rows go."""
        self._gradient.batch.release()


class TieredOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose parameters are rows of tables, and whose state lies in their records.

    From a backward pass to `step()` or `zero_grad()` the rows that got a gradient stand in
    `param_groups` as one parameter a table, `(distinct rows, dim)`: gradient clipping, GradScaler
    and learning rate schedulers work as with any optimizer. `step()` updates exactly these rows; a
    table without a gradient is left alone, and `step` among its scalars counts the others.

    Fields for the state are added to the tables when the optimizer is made, which streams them anew
    once and is a commit. State follows its rows through tiers, commits, copies and exports; options
    such as `lr` are in `state_dict()`.

    `store.rollback()` takes rows and state back, not a gradient that has come and was not applied:
    as with a torch model whose `load_state_dict` is called between backward and step, the step
    updates the rows as they are then. `zero_grad()` drops the gradient.

    >>> opt = TieredOptimizer(torch.optim.Adam, [emb], lr=1e-3)
    >>> loss.backward()
    >>> opt.step()
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        embeddings: Iterable[TieredEmbedding] | Iterable[dict[str, Any]],
        *,
        progress: Callable[[int, int], None] | None = None,
        in_place: bool = True,
        stochastic_rounding: bool = False,
        **options: Any,
    ) -> None:
        """Put an optimizer over embeddings.

        Args:
            optimizer_class: a class of `torch.optim`, or another whose update a probe finds to be
                row by row.
            embeddings: layers, or dicts `{"params": [layers], "lr": …}` with options of their own.
                Layers over the same field of the same table are trained as one.
            progress: called with rows done and in all while fields are added.
            in_place: on a GPU, update rows where they lie, with a kernel of tierstore, where there
                is one: for SGD, Adagrad, RowWiseAdagrad, Adam, AdamW and RMSprop, float32,
                bfloat16 and float16, unless options ask for `foreach=False` or `capturable`. The
                results are those of torch's `foreach=True`; False has torch compute them.
            stochastic_rounding: for weights in bfloat16: train them in float32 and round at random,
                so that steps too small for bfloat16 add up. What a row rounds to depends on the
                row and the count of steps alone: results stay the same for any budget.
            options: what the class takes besides parameters: lr, betas, foreach, fused, …

        Raises InvalidInputError for a class that cannot train rows, naming the reason, where fields
        must be added to a table with uncommitted rows, and for stochastic rounding of weights that
        are not bfloat16.
        """
        groups = _grouped(embeddings)
        self._class = optimizer_class
        self._options = options
        self._progress = progress
        self._in_place = in_place
        self._at_random = stochastic_rounding
        self._fields: list[list[TrainedField]] = []
        self._inner = optimizer_class([_stand_in(groups[0])], **options)
        self._inner.param_groups.clear()
        super().__init__([{"params": []}], self._inner.defaults)
        for group in groups:
            self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more layers: `{"params": [layers], "lr": …}`. Adds fields to their tables."""
        layers = list(param_group["params"])
        if not layers:
            return
        own = {key: value for key, value in param_group.items() if key != "params"}
        self._inner.add_param_group({**own, "params": [_stand_in(param_group)]})
        self._inner.state.clear()
        self._inner.param_groups[-1]["params"] = []
        self._fields.append(self._trained(layers, {**self._options, **own}))

    def _trained(
        self, layers: Iterable[TieredEmbedding], options: Mapping[str, Any]
    ) -> list[TrainedField]:
        """Prepare what layers train, and have them hand over their gradients."""
        fields: dict[tuple[int, str], TrainedField] = {}
        others = {(id(field.table), field.field) for field in self._every()}
        for layer in layers:
            key = id(layer.table), layer.field
            if key in others:
                raise InvalidInputError(
                    f"field {layer.field!r} of table {layer.table.name!r} is in two groups"
                )
            if key not in fields:
                fields[key] = self._prepared(layer, options)
            layer._gradients = fields[key].gradients
        return list(fields.values())

    def _prepared(self, layer: TieredEmbedding, options: Mapping[str, Any]) -> TrainedField:
        """Find the state that rows of a layer need, and give their table its fields."""
        table = layer.table
        element = table.spec.layout.field(layer.field).element
        if self._at_random and not element.stochastic:
            raise InvalidInputError(
                f"stochastic rounding is for bfloat16; field {layer.field!r} of table "
                f"{table.name!r} is {element.name}"
            )
        dtype = torch.float32 if self._at_random else element.torch_dtype()
        dim, device = layer.embedding_dim, table.device
        plan = probe(self._class, options, dim=dim, dtype=dtype, device=device)
        state = StoredState(table, layer.field, plan, at_random=self._at_random)
        missing = state.missing_fields()
        if missing:
            table.store.add_fields(table.name, missing, progress=self._progress)
        in_place = InPlace(self._class, table, layer.field, state) if self._in_place else None
        return TrainedField(table, layer.field, state, in_place)

    def _every(self) -> Iterator[TrainedField]:
        return itertools.chain.from_iterable(self._fields)

    # -- the rows as parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of options, each with its parameters that have a gradient now as `"params"`."""
        for field in self._every():
            field.gather()
        return self._listed(
            [field.compact for field in fields if field.compact is not None]
            for fields in self._fields
        )

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Ignore the list that the base class starts with: the groups are the torch optimizer's."""

    def _listed(self, compacts: Iterable[list[Compact]]) -> list[dict[str, Any]]:
        """Let the groups of the torch optimizer have these parameters."""
        groups: list[dict[str, Any]] = self._inner.param_groups
        for group, listed in zip(groups, compacts, strict=False):
            group["params"] = [compact.parameter for compact in listed]
        return groups

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the rows that have a gradient, one parameter a table: for `clip_grad_norm_`."""
        for group in self.param_groups:
            yield from group["params"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that have come; no memory is kept to be set to zero."""
        for field in self._every():
            field.clear()
        for group in self._inner.param_groups:
            group["params"] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows that got a gradient, and give the gradient up.

        `closure`, if given, runs the model and the backward pass before, and its result is
        returned. After an error while rows are written, `store.rollback()` is the way back.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with interrupts_deferred():
            for field in self._every():
                field.gather()
            self._update()
            self.zero_grad()
        return loss

    def _update(self) -> None:
        """Update the rows, in their slots where that can be done."""
        try:
            self._update_copies(
                [
                    [
                        field.compact
                        for field in fields
                        if field.compact is not None
                        and field.compact.gradient is not None
                        and not field.compact.step(group)
                    ]
                    for group, fields in zip(self._inner.param_groups, self._fields, strict=True)
                ]
            )
        except Exception as error:
            error.add_note("this step may be written in part; store.rollback() drops it")
            raise

    def _update_copies(self, compacts: list[list[Compact]]) -> None:
        """Run the torch optimizer on copies of rows, and write them back."""
        every = [compact for listed in compacts for compact in listed]
        if not every:
            return
        state = self._inner.state
        for compact in every:
            loaded = compact.load()
            parameter = compact.parameter
            state[parameter] = loaded
            parameter.grad = as_gradient(self._inner, parameter.grad)
        try:
            self._listed(compacts)
            self._inner.step()
            for compact in every:
                compact.store(state[compact.parameter])
        finally:
            state.clear()

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """Return each group's options and the names of what it trains; state is with the rows."""
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [field.name for field in fields],
            }
            for group, fields in zip(self._inner.param_groups, self._fields, strict=True)
        ]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the options of each group; raises InvalidInputError for other tables' groups."""
        ours, theirs = self.state_dict()["param_groups"], state_dict["param_groups"]
        if [group["params"] for group in ours] != [list(group["params"]) for group in theirs]:
            raise InvalidInputError(
                f"this state is of an optimizer over {[group['params'] for group in theirs]}, "
                f"this one is over {[group['params'] for group in ours]}"
            )
        for group, saved in zip(self._inner.param_groups, theirs, strict=True):
            options = {key: value for key, value in saved.items() if key != "params"}
            group.update(copy.deepcopy(options))


def _grouped(
    embeddings: Iterable[TieredEmbedding] | Iterable[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return groups, each with a list of layers."""
    if isinstance(embeddings, torch.nn.Module):
        raise InvalidTypeError("give the layers as a list: TieredOptimizer(Adam, [emb])")
    given: list[Any] = list(embeddings)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    for group in groups:
        if not isinstance(group, dict) or not group.get("params"):
            raise InvalidInputError(
                "an optimizer needs embeddings, or dicts whose 'params' is a list of embeddings"
            )
        for layer in group["params"]:
            if not isinstance(layer, TieredEmbedding):
                raise InvalidTypeError(
                    f"a {type(layer).__name__} is not a tierstore.nn layer; parameters that are "
                    "not rows of a table go into an optimizer of their own"
                )
    return groups


def _stand_in(group: Mapping[str, Any]) -> torch.nn.Parameter:
    """Return a parameter for an optimizer that cannot be made without one."""
    return torch.nn.Parameter(group["params"][0]._anchor.detach().new_zeros(1, 1))
