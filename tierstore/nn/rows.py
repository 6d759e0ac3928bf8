"""The parameter of a layer: rows of a table and their gradient, from a backward pass to a step."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierstore._table.table import Table
from tierstore.errors import InvalidInputError
from tierstore.nn.autograd import Abandoned, Batch, Gradient, merged, placed

__all__ = ["RowsParameter"]

_grad: Any = torch.Tensor.grad
_data: Any = torch.Tensor.data
_requires_grad: Any = torch.Tensor.requires_grad
_Parameter: Any = torch.nn.Parameter

_WAITING = 64
"""Batches whose gradients are kept apart; then they are merged, so that no more rows are held."""
_FORGOTTEN = 1000
"""Backward passes without a step after which a warning asks for one."""


class RowsParameter(torch.nn.Parameter):
    """The rows of a table that got a gradient, `(distinct rows, dim)`, with that gradient.

    Empty, `(0, dim)`, but from a backward pass to the step that uses its gradient. It is the
    parameter of every layer over the field: `model.parameters()` has it once. Gradient clipping,
    `GradScaler`, `zero_grad` and hooks work on it as on any parameter; values that are written into
    it reach the table at the next forward pass or step. Rows come when `grad` or `data` is first
    asked for, which on a GPU waits once; until then every value is NaN and writing raises.

    Attributes:
        table: the table.
        field: the field of it.
        optimizers: those that train it; a gradient is there until each of them took a step.
        layers: those over the field.
        computed: the type that the rows are trained in.
    """

    def __new__(cls, table: Table, field: str, empty: Tensor) -> RowsParameter:
        """Start from `empty`, `(0, dim)`."""
        made: RowsParameter = _Parameter.__new__(cls, empty)
        return made

    def __init__(self, table: Table, field: str, empty: Tensor) -> None:
        """Start without a gradient."""
        self.table = table
        self.field = field
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.computed: torch.dtype = table.spec.layout.field(field).element.torch_dtype()
        self._stored = self.computed
        self._nan: Tensor | None = None
        self._waiting: list[Gradient] = []
        self._whole: Gradient | None = None
        self._order: Batch | None = None
        self._shown = self._exposed = self._kept = False
        self._noted = (0, 0)
        self._used_by: weakref.WeakSet[Any] = weakref.WeakSet()
        self._passes = 0
        self._hooked = (-1, 0)
        self._abandoned = Abandoned()
        self.rest(empty)

    # -- as torch sees it

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the rows, `(distinct rows, dim)`; None where there is none."""
        if self._waiting or self._whole is not None:
            self.show()
        found: Tensor | None = _grad.__get__(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            self.show()
            _grad.__set__(self, value)
        elif self._shown and (self._kept or self._is_written()):
            _grad.__set__(self, None)  # what wrote into the rows may write into them again
        else:
            self.give_up()

    @property
    def data(self) -> Tensor:
        """The rows; what is written into them counts as written into the parameter."""
        if self._waiting or self._whole is not None:
            self.show()
            self._exposed = self._shown
        found: Tensor = _data.__get__(self)
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        self.show()
        if self._shown and value.shape != self.shape:
            raise InvalidInputError(
                f"these are {len(self)} rows of table {self.table.name!r}, {tuple(self.shape)}; "
                f"values of shape {tuple(value.shape)} are of other rows"
            )
        _data.__set__(self, value)

    def detach(self) -> Tensor:
        """Return the rows, or none, without their history."""
        self.show()
        self._exposed = self._shown
        return super().detach()

    @property
    def requires_grad(self) -> bool:
        """Whether the layers over the field are trained."""
        found: bool = _requires_grad.__get__(self)
        return found

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        _requires_grad.__set__(self, value)
        for layer in self.layers:
            layer._trained = value

    def requires_grad_(self, requires_grad: bool = True) -> RowsParameter:
        """Freeze, or train, the layers over the field."""
        self.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Return an ordinary parameter of the values."""
        copy = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary parameter of the values."""
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    # -- what layers and optimizers call

    def rest(self, empty: Tensor) -> None:
        """Be `empty`, `(0, dim)`, while there is no gradient."""
        self._rest = empty.detach()
        if not self._waiting and self._whole is None:
            _data.__set__(self, self._rest)

    def add(self, gradient: Gradient) -> None:
        """Take the gradient of a batch, in the middle of a backward pass."""
        if self._used_by:
            self.give_up()
        if self._shown:
            self._hide()
        self._waiting.append(gradient)
        if len(self._waiting) == 1:
            self._cover(gradient)
        if self._backward_hooks or self._post_accumulate_grad_hooks:
            self._await_end_of_pass()
        elif len(self._waiting) == _WAITING:
            self.gather()
        self._passes += 1
        if self._passes == _FORGOTTEN:
            warnings.warn(
                f"{_FORGOTTEN} batches left a gradient of table {self.table.name!r} since the last "
                "step or zero_grad() of its TieredOptimizer",
                stacklevel=2,
            )

    def gather(self) -> Gradient | None:
        """Return the gradient of all batches as one, as clipping and the like have left it."""
        whole = self._whole
        if self._shown and whole is not None:
            if whole.batch.usable and not self._waiting:
                values = _grad.__get__(self)
                return None if values is None else replace(whole, values=values)
            self._hide()
        if self._waiting or (self._whole is not None and not self._whole.batch.usable):
            self._merge()
        return self._whole

    def gradient_for(self, optimizer: Any) -> Gradient | None:
        """Return the gradient that an optimizer has not used yet, once writes have settled."""
        self.settle()
        return None if optimizer in self._used_by else self.gather()

    def show(self) -> None:
        """Let data and gradient be those of all batches as one."""
        if self._shown and not self._waiting:
            if self._whole is not None and self._whole.batch.dropped:
                self.give_up()
            return
        gradient = self.gather()
        if gradient is None or self._shown:
            return
        gradient.trim()
        rows = gradient.batch.lease.read(self.field).to(self.computed)
        _data.__set__(self, rows)
        _grad.__set__(self, gradient.values.to(rows.dtype))
        self._shown = True
        self._note()

    def settle(self) -> None:
        """Write into the table what was written into the parameter."""
        if not self._shown or self._whole is None or not self._is_written():
            return
        batch, rows = self._whole.batch, _data.__get__(self).to(self._stored)
        if batch.usable:
            batch.lease.write(self.field, rows)
        elif not batch.dropped:
            self.table.write(batch.distinct, rows, self.field)
        self._note()
        self._kept = True

    def used(self, by: Any) -> None:
        """Note that an optimizer took its step; after the last one, drop the gradient."""
        self._used_by.add(by)
        if all(each in self._used_by for each in self.optimizers):
            self.give_up()
        elif self._shown:
            self._hide()

    def give_up(self) -> None:
        """Drop the gradient and let the rows go."""
        self.settle()
        for gradient in self._waiting:
            gradient.batch.release()
        self._waiting.clear()
        if self._whole is not None:
            self._whole.batch.release()
        if self._order is not None:
            self._order.release()
        self._whole = self._order = None
        self._shown = self._kept = False
        self._used_by.clear()
        self._passes = 0
        _grad.__set__(self, None)
        _data.__set__(self, self._rest)
        self._abandoned.release()

    # -- between batches

    def _note(self) -> None:
        """Note what the data are, to tell when something writes into them."""
        self._exposed = False
        self._noted = self.data_ptr(), self._version

    def _is_written(self) -> bool:
        return self._exposed or (self.data_ptr(), self._version) != self._noted

    def _cover(self, gradient: Gradient) -> None:
        """Stand for rows that are not there yet: reading gives NaN, writing raises."""
        if self._nan is None or self._nan.dtype != self.computed:
            self._nan = gradient.values.new_full((1, 1), torch.nan, dtype=self.computed)
        _data.__set__(self, self._nan.expand(gradient.batch.lease.bound, self._rest.shape[1]))

    def _hide(self) -> None:
        """Take the gradient back from where torch sees it; the rows may change then."""
        self.settle()
        whole, values = self._whole, _grad.__get__(self)
        if whole is None:
            return
        _grad.__set__(self, None)
        self._cover(whole)
        self._shown = False
        if values is not None and bool(values.any()):  # or zero_grad(set_to_none=False) was here
            self._whole = replace(whole, values=values)
            return
        self._whole = None
        if self._kept:
            self._order = whole.batch  # for values in the order of these rows may be written again
        else:
            whole.batch.release()

    def _merge(self) -> None:
        """Merge the gradients of all batches, but of those that a rollback dropped."""
        parts = [*(() if self._whole is None else (self._whole,)), *self._waiting]
        self._waiting.clear()
        parts = [part for part in parts if not part.batch.dropped]
        if not parts:
            self.give_up()
            return
        whole = None
        if self._order is not None:
            whole = placed(self._order, parts)
            if whole is None:
                self._order.release()
            self._order = None
        if whole is None and len(parts) == 1 and parts[0].batch.usable:
            self._whole = parts[0]
            return
        self._whole = merged(self.table, parts, self._abandoned) if whole is None else whole
        for part in parts:
            part.batch.release()

    def _await_end_of_pass(self) -> None:
        """Have hooks called once all gradients of this backward pass have come."""
        number = torch._C._current_graph_task_id()
        if self._hooked[0] != number:
            self._hooked = number, len(self._waiting) - 1
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._run_hooks)

    def _run_hooks(self) -> None:
        """Call hooks as torch does: some with the gradient that came, others with the whole."""
        first = self._hooked[1]
        arrived = self._waiting[first:]
        gradient = arrived[0]
        if len(arrived) > 1 or not gradient.batch.usable:
            gradient = merged(self.table, arrived, self._abandoned)
            for part in arrived:
                part.batch.release()
        gradient.trim()
        for hook in list((self._backward_hooks or {}).values()):
            found = hook(gradient.values)
            gradient = gradient if found is None else replace(gradient, values=found)
        self._waiting[first:] = [gradient]
        for hook in list((self._post_accumulate_grad_hooks or {}).values()):
            hook(self)


def _refuse_other_optimizers(optimizer: Any, *_: object) -> None:
    """Raise InvalidInputError before an optimizer that is not tierstore's updates rows.

    Its state would be that of other rows in the next step.
    """
    for group in optimizer.param_groups:
        for rows in group["params"]:
            if type(rows) is not RowsParameter:
                continue
            ours = (other for each in rows.optimizers for other in each.param_groups)
            if not any(other is group for other in ours) and rows.grad is not None:
                raise InvalidInputError(
                    f"this {type(optimizer).__name__} has rows of table {rows.table.name!r} among "
                    "its parameters, and would keep its state for other rows than those of the "
                    "next batch: make a tierstore.optim.TieredOptimizer of that class over the "
                    "whole model, or leave parameters that are tierstore.nn.RowsParameter out"
                )


register_optimizer_step_pre_hook(_refuse_other_optimizers)
