"""The parameter of a layer: rows of a table and their gradient, from a backward pass to a step."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tierstore._table.joint import JointTable
from tierstore._table.table import Table, unmoving
from tierstore._tiers.base import UNDONE
from tierstore.distributed.apart import sharing
from tierstore.distributed.ranks import Ranks
from tierstore.distributed.wire import Squares
from tierstore.errors import (
    ClosedError,
    InvalidInputError,
    LazyUpdatesWarning,
    TierStoreWarning,
    warn,
)
from tierstore.nn.apart import check_not_apart, in_group
from tierstore.nn.autograd import Abandoned, Batch, Gradient
from tierstore.nn.merging import merged, placed
from tierstore.nn.norms import ShardGradient
from tierstore.nn.placed import Order, PlacedRows, like, one_batch, plain
from tierstore.nn.values import FREE, NoRows, OfRows, refused
from tierstore.nn.zeros import Zeros

_grad: Any = torch.Tensor.grad
_data: Any = torch.Tensor.data
_requires_grad: Any = torch.Tensor.requires_grad
_Parameter: Any = torch.nn.Parameter
_engine: Any = torch.autograd.Variable._execution_engine
_is_tracing: Any = torch._C._is_tracing  # torch.jit.is_tracing takes ten times as long

_WAITING = 64
"""Batches whose gradients are kept apart; then they are merged, so that no more rows are held."""
_LOOKS = 4
"""Writes into rows that are looked at, whether torch's would have changed other rows too."""
_FORGOTTEN = 1000
"""Backward passes without a step after which a warning is issued."""


class State(Enum):
    """What a parameter of rows has; `RowsParameter._to` leads from one to another.

    ========  ======================================  =============  ==================
    state     held                                    torch sees     of it, `grad`
    ========  ======================================  =============  ==================
    REST      nothing                                 no rows        None
    PENDING   gradients of batches that came          their shape    None until it asks
    SHOWN     one gradient of all, and its rows       the rows       the gradient
    CLEARED   the same, after rows were written       the rows       None
    ========  ======================================  =============  ==================

    A gradient that comes leads to PENDING; from SHOWN it is what torch has by then, and from
    CLEARED nothing but the order of its rows. What torch sees leads from PENDING to SHOWN, and
    `zero_grad` to REST, or to CLEARED where rows were written. A step leads to REST once every
    optimizer took it, and before that to PENDING. What was written into the rows reaches the table
    with every change from SHOWN and CLEARED.
    """

    REST = auto()
    PENDING = auto()
    SHOWN = auto()
    CLEARED = auto()


_SEEN = State.SHOWN, State.CLEARED
"""States in which torch sees rows."""


class RowsParameter(OfRows, torch.nn.Parameter):
    """The rows of a table that got a gradient, `(distinct rows, dim)`, with that gradient.

    It is the parameter of every layer over the field: `model.parameters()` has it once. Gradient
    clipping, `GradScaler`, `zero_grad` and hooks work on it as on any parameter.

    =======================  =============  ============  ========  =========  ==========
    state                    `shape`        `grad`        `data`    operators  in place
    =======================  =============  ============  ========  =========  ==========
    at rest, after the step  `(0, dim)`     None          `NoRows`  raise      raise
    after a forward pass     `(0, dim)`     None          `NoRows`  raise      raise
    frozen                   `(0, dim)`     None          `NoRows`  raise      raise
    from backward to step    `(rows, dim)`  the gradient  the rows  see them   write them
    =======================  =============  ============  ========  =========  ==========

    `detach()` gives what `data` does. What is kept of it after the step, such as an average or a
    momentum by hand, is in the order of its batch: a function that would pair its rows with rows
    or gradients of another batch raises (`PlacedRows`; not of gradients on a GPU or a rank).
    `averaged()` with `ema=` of the optimizer averages, and what goes by `ids` is free.
    Layers over the same field share one parameter, in one state;
    so do copies of tied ones. On a rank it has the rows of its own shard that any rank's batch has,
    and the norm of their gradient is that of all ranks' rows. A compiled layer changes nothing of
    this: its graph refers to no parameter.

    What is written reaches the table at the next forward pass or step; values of other rows are
    refused. What raises is an InvalidInputError with the way to the values. An operator that needs
    a shape alone, such as `zeros_like`, works in every state, and so do `dtype`, `device`,
    `is_leaf`, `requires_grad` and hooks. Functions of torch that compare shapes before they call an
    operator, such as `cosine_similarity`, raise its own error, and `linalg.cond` and `matrix_rank`
    are those of no rows. `numel()` is the number of elements of the whole table, as
    of a weight of torch. A gradient of what was computed from the parameter raises: compute a
    penalty from what the layer returned. Rows are read when something first needs them, which on a
    GPU waits once for their number; until then `shape` may be longer.

    Attributes:
        table: the table, or the tables that a collection looks up as one.
        field: the field of it.
        optimizers: those that train it; a gradient is there until each of them took a step.
        layers: those over the field.
        abandoned: leases of lookups of it that were dropped.
        zeros: what a step left of the sums of its batch.
        widened: whether the rows are trained in float32 though the table's are narrower.
    """

    def __new__(cls, table: Table | JointTable, field: str, empty: Tensor) -> RowsParameter:
        """Start from `empty`, `(0, dim)`."""
        made: RowsParameter = _Parameter.__new__(cls, empty)
        return made

    def __init__(self, table: Table | JointTable, field: str, empty: Tensor) -> None:
        """Start without a gradient."""
        self.table: Any = table
        self.field = field
        self._is_joint = isinstance(table, JointTable)
        shared = sharing(table)
        self._ranks: Ranks | None = None if shared is None else shared.ranks
        self._squares: Squares | None = None
        """Those of the gradients of all ranks, as of the last backward pass."""
        self._of_shard: ShardGradient | None = None
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.widened = False
        self._content = empty.detach()
        """What the parameter has as its value, as a tensor of torch's own."""
        self._waiting: list[Gradient] = []
        self._whole: Gradient | None = None
        self._order: Batch | None = None
        self.live_order: Order | None = None
        """The order of the rows and the gradient that torch sees; None where it sees none."""
        self._state = State.REST
        self._exposed = self._kept = self._in_hook = False
        self._noted = (0, 0)
        self._used_by: set[Any] = set()
        self._passes = 0
        self._looks, self._unwritten = _LOOKS, cast(Tensor | None, None)
        """How many writes are still looked at, and what rows were before the first since a step."""
        self._told_of_order = False
        self._orders: deque[Tensor] = deque(maxlen=4)
        """The rows of each gradient that was shown since the last step, in its order."""
        self._lost = ""
        """Why a gradient had to be dropped of which the next step is to tell; see `_lose`."""
        self._pass = -1
        self._seen_by_hooks = 0
        self._hooks_before: dict[int, Callable[[Tensor], Tensor | None]] = OrderedDict()
        self._hooks_after: dict[int, Callable[[Tensor], None]] = OrderedDict()
        self.abandoned: Abandoned = Abandoned()
        self.zeros: Zeros = Zeros()
        self._parts: dict[int, TableRows] = {}
        self.rest(empty)
        _Parameter.register_hook(self, _refuse_other_gradients(self))

    # -- as torch sees it

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the rows, `(distinct rows, dim)`; None where there is none."""
        self.show()
        found: Tensor | None = _grad.__get__(self)
        if found is None and self._lost:
            return self._rest.new_zeros(1, self.shape[1])  # setting it to None is `zero_grad`
        if found is None or self._ranks is None:
            return found
        each = self._of_shard
        if each is None or each.plain is not found or each.squares is not self._squares:
            each = self._of_shard = ShardGradient.of(found, self.table, self._squares)
        return each

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            self.show()
            is_resting = self._state is State.REST
            if value.shape != self.shape and (len(value) or not is_resting):
                raise InvalidInputError(
                    f"a gradient of table {self.table.name!r} is of the rows of one batch, in the "
                    f"order of rows.ids, now {tuple(self.shape)}, not {tuple(value.shape)}: "
                    "gradients of several batches are added up by backward(), or by rows.ids"
                )
            if isinstance(value, PlacedRows):
                one_batch("grad__set__", self, value)
            if isinstance(value, ShardGradient):
                known = value.squares if value.power == 1 else None
                value, self._squares = value.plain, known
            else:
                self._squares = None
            if len(self._orders) > 1 and not isinstance(value, PlacedRows):
                self._check_order(value)
            if not is_resting or len(value):  # of no rows there is none
                _grad.__set__(self, value)
                self._state = State.SHOWN if self._state in _SEEN else self._state
        else:
            self.clear()

    @property
    def data(self) -> Tensor:
        """The rows; what is written into them counts as written into the parameter."""
        return self._alias()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.show()
        if isinstance(value, NoRows):
            return  # without rows: what this one was at rest
        if self._state not in _SEEN:
            raise refused("data = values", self.table)
        if value.shape != self.shape:
            raise InvalidInputError(
                f"these are {len(self)} rows of table {self.table.name!r}, {tuple(self.shape)}; "
                f"values of shape {tuple(value.shape)} are of other rows"
            )
        if isinstance(value, PlacedRows):
            one_batch("data__set__", self, value)
        self._hold(plain(value).detach())

    def numel(self) -> int:
        """Return the number of elements of all rows of the tables, as of a weight of torch."""
        found: int = sum(table.rows for table in self.tables) * self.shape[1]
        return found

    nelement = numel

    def __repr__(self, **_: Any) -> str:
        """Show the rows that there are."""
        if self._state is State.REST:
            shown = f"no rows, {tuple(self.shape)}, {self.dtype}"
        else:
            shown = repr(self.detach())
        return f"RowsParameter(of table {self.table.name!r}: {shown})"

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Call a hook with the gradient of the rows of each backward pass, before it is added.

        What it returns, if anything, is added instead. Meanwhile the parameter has the rows of this
        gradient, and `ids` are theirs.
        """
        handle = RemovableHandle(self._hooks_before)
        self._hooks_before[handle.id] = hook
        return handle

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Call a hook with the parameter at the end of each backward pass that reached it."""
        handle = RemovableHandle(self._hooks_after)
        self._hooks_after[handle.id] = hook
        return handle

    def detach(self) -> Tensor:
        """Return the rows, or none, without their history."""
        return self._alias()

    @property
    def ids(self) -> Tensor:
        """The id of each row, int64 `(distinct rows,)`, in no particular order.

        For a collection, each is that of the row's own table; see `table_of`.
        """
        self.show()
        if self._whole is None:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return own_ids(self, self._whole.batch.distinct.clone())

    @property
    def table_of(self) -> Tensor:
        """The number of the table of each row, in `tables`, int64 `(distinct rows,)`.

        Zeros where there is one table.
        """
        ids = self.ids
        if not self._is_joint or self._whole is None:
            return torch.zeros_like(ids)
        found: Tensor = self.table.location.tables_of(self._whole.batch.distinct)
        return found

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that the rows are of."""
        return self.table.tables if isinstance(self.table, JointTable) else (self.table,)

    def part(self, number: int) -> TableRows:
        """Return what stands for one of the tables in a group of an optimizer."""
        if number not in self._parts:
            self._parts[number] = TableRows(self, number)
        return self._parts[number]

    @property
    def requires_grad(self) -> bool:
        """Whether the layers over the field are trained; averages raise InvalidInputError."""
        found: bool = _requires_grad.__get__(self)
        return found

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        for layer in self.layers:
            layer.let_train(value)
        _requires_grad.__set__(self, value)

    def requires_grad_(self, requires_grad: bool = True) -> RowsParameter:
        """Freeze, or train, the layers over the field."""
        self.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Return an ordinary parameter of the values."""
        copy = torch.nn.Parameter(self._values_for("deepcopy").clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary parameter of no rows for an exported program, which looks rows up.

        Raises InvalidInputError elsewhere: what is saved would lack the rows.
        """
        if not _is_exporting():
            raise InvalidInputError(
                f"the parameter of a layer over table {self.table.name!r} would be saved without "
                "rows, which lie in the store: call store.commit() and save model.state_dict(), "
                "which points to them, or leave out what is a tierstore.nn.RowsParameter; "
                "emb.table.read(ids) reads rows as a tensor"
            )
        return torch.nn.Parameter(self._rest, self.requires_grad).__reduce_ex__(protocol)

    # -- what layers and optimizers call

    def trains(self, layer: Any) -> bool:
        """Whether a lookup of a layer over the field keeps its rows for a gradient.

        Layers by key are trained in training mode alone.

        Raises InvalidInputError in `torch.jit.trace`, where ranks that do not share the rows train
        them, and if what replaced the parameter of the layer wants a gradient.
        """
        if _is_tracing():
            raise tracing_refused()
        registered = layer._parameters["rows"]
        if registered is self:
            trained: bool = _requires_grad.__get__(self) and torch.is_grad_enabled()
            trained = trained and (layer.training or not layer.by_key)
            if trained and in_group() and self.optimizers:
                check_not_apart(self.table, self.optimizers)
            return trained
        if registered is not None and (
            registered.shape[:1] != (0,)
            or (registered.requires_grad and torch.is_grad_enabled())
            or _is_differentiated(registered)
        ):
            raise InvalidInputError(
                f"a {type(registered).__name__} replaced the parameter of the layer over table "
                f"{self.table.name!r}; neither it nor its gradient would be that of the rows. Give "
                "fully_shard ignored_params=set(emb.parameters()), and torch.func.functional_call "
                "the parameters of other layers only"
            )
        return False

    def rest(self, empty: Tensor) -> None:
        """Have the value `empty`, `(0, dim)`, while there is no gradient."""
        self._rest = empty.detach()
        if self._state is State.REST:
            self._hold(self._rest)

    def deposit(self, gradient: Gradient) -> None:
        """Take the gradient of a batch, in the middle of a backward pass.

        Raises InvalidInputError for a gradient that no optimizer would use.
        """
        if not self.optimizers:
            raise InvalidInputError(
                f"the gradient of table {self.table.name!r} has nowhere to go: make a "
                "tierstore.optim.TieredOptimizer over this layer before training; give one that "
                "was made while the layer was frozen add_param_group({'params': [layer]}); or "
                "freeze the layer with requires_grad_(False)"
            )
        if self._used_by:
            self._to(State.REST)
        if self._state in _SEEN:
            self._to(State.PENDING)
        self._state = State.PENDING
        self._waiting.append(gradient)
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self._pass = number
            _engine.queue_callback(self._end_pass)
        self._passes += 1
        if self._passes == _FORGOTTEN:
            warn(
                f"{_FORGOTTEN} batches left a gradient of table {self.table.name!r} since the last "
                "step or zero_grad() of its TieredOptimizer",
            )

    def gathered(self) -> Gradient | None:
        """Return the gradient of all batches as one, as clipping and the like have left it.

        None where there is none, or none any more; see `_lose`.
        """
        whole = self._whole
        if self._state in _SEEN and whole is not None:
            if whole.batch.usable and not self._waiting:
                values = _grad.__get__(self)
                return None if values is None else replace(whole, values=plain(values))
            self._to(State.PENDING)
        waiting, whole = self._waiting, self._whole
        alone = whole is None and self._order is None and len(waiting) == 1
        if alone and not waiting[0].batch.lease.ended:
            self._whole = waiting.pop()
            self._seen_by_hooks = 0
        elif waiting or (whole is not None and not whole.batch.usable):
            self._merge()
        return self._whole

    def gradient_for(self, optimizer: Any) -> Gradient | None:
        """Return the gradient that an optimizer has not used yet, once writes have settled.

        Raises ClosedError, once, if rows of it mean something else by now; it is dropped then.
        """
        if self._state is State.REST and not self._lost:
            return None
        if self._state in _SEEN:
            self.settle()
        used = self._used_by and optimizer in self._used_by
        gradient = None if used else self.gathered()
        if self._lost:
            why = self._lost
            self._to(State.REST)
            raise ClosedError(
                f"{why} since the forward pass through table {self.table.name!r} whose gradient "
                "this step would use; call zero_grad() and run the forward pass again"
            )
        return gradient

    def show(self) -> None:
        """Set data and gradient to those of all batches as one."""
        if self._state is State.REST:
            return
        if self._state in _SEEN and not self._waiting:
            if self._whole is not None and (why := self._whole.batch.moved(self._whole.touched)):
                self._lose(why)
            return
        gradient = self.gathered()
        if gradient is not None and self._state is State.PENDING:
            self._to(State.SHOWN)

    def _to(self, state: State) -> None:
        """Change to a state, and with it what torch sees as values and gradient."""
        was_seen = self._state in _SEEN
        if state is State.REST:
            self._lost = ""  # what is written below may be of rows that mean something else
            if self._state is state:
                return
        if was_seen:
            self.settle()
        if state is State.REST:
            for gradient in self._waiting:
                gradient.batch.lease.release()
            self._waiting.clear()
            self._seen_by_hooks = 0
            if self._whole is not None:
                self._whole.batch.lease.release()
            if self._order is not None:
                self._order.lease.release()
            self._whole = self._order = self._squares = self._of_shard = None
            self._kept = False
            self._used_by.clear()
            self._passes = 0
        elif state is State.PENDING:
            self._keep_unseen()
        elif state is State.SHOWN:
            self._set_shown()
        if was_seen:
            _grad.__set__(self, None)
        if state is State.REST or state is State.PENDING:
            self.live_order = None
            self._content = self._rest
            _data.__set__(self, self._rest)
        self._state = state

    def _set_shown(self) -> None:
        """Have torch see the rows of the whole gradient, and that."""
        gradient: Any = self._whole
        gradient.trim()
        rows = gradient.batch.lease.read(self.field)
        rows = rows.float() if self.widened else rows
        self._hold(rows)
        self.live_order = Order(gradient.batch.distinct, weakref.ref(self))
        if not self._in_hook:  # which gets the gradient before it is added
            values = gradient.values.to(rows.dtype)
            values = values.detach()  # not a view, as in torch
            if self._ranks is None and values.device.type == "cpu":
                # On a GPU torch clips tensors of its own at once, and others one by one.
                values = PlacedRows.of(values, self.live_order)
            _grad.__set__(self, values)
        self._orders.append(gradient.batch.distinct)
        self._note()

    def settle(self) -> None:
        """Release what batches left; write into the table what was written into the parameter."""
        if self.abandoned.leases:
            self.abandoned.release()
        if self._state not in _SEEN or self._whole is None or not self._is_written():
            return
        element = self.table.spec.layout.field(self.field).element
        batch, rows = self._whole.batch, self._content.to(element.torch_dtype())
        if batch.usable:
            if self._looks:
                self._look_at_write(batch.lease.read(self.field).to(self._content.dtype))
            batch.lease.write(self.field, rows)
        else:
            with unmoving(self.table):
                why = batch.moved()
                if not why:
                    self.table.write(batch.distinct, rows, self.field)
            self._lost = why if why not in UNDONE else self._lost
        self._note()
        self._kept = True

    def _look_at_write(self, rows: Tensor) -> None:
        """Warn once of values in place of `rows` that torch would write for every row.

        What is written for a row without a gradient is not known. But where that is nothing, as in
        sharpness-aware minimization, rows move along their gradients, or back to where they were.
        """
        gradient, now = _grad.__get__(self), self._content
        gradient = None if gradient is None else plain(gradient)
        if self._looks == 0 or len(rows) == sum(table.rows for table in self.tables):
            return
        self._looks -= 1
        if self._unwritten is None or self._unwritten.shape != rows.shape:
            self._unwritten = rows
        if gradient is None or now.shape != rows.shape or torch.equal(now, rows):
            return
        along = (now - rows) * gradient
        if (along >= 0).all() or (along <= 0).all() or torch.allclose(now, self._unwritten):
            return
        self._looks = 0
        warn(
            f"values written into the parameter between backward() and step() reach {len(rows)} "
            f"rows of table {self.table.name!r}, those of the batch, where torch would change all: "
            "decay, clamps and norms that are written so come to another row once a batch has it. "
            "Give the TieredOptimizer project=, or write rows with emb.table.write",
            LazyUpdatesWarning,
        )

    @property
    def at_rest(self) -> bool:
        """Whether there is no gradient."""
        return self._state is State.REST

    def is_last(self, gradient: Gradient) -> bool:
        """Whether a step by the only optimizer is the last that needs the lease of its gradient."""
        return len(self.optimizers) == 1 and self._state not in _SEEN and gradient is self._whole

    def used(self, by: Any) -> None:
        """Note that an optimizer took its step; after the last one, drop the gradient."""
        if len(self.optimizers) == 1:
            self._to(State.REST)
        else:
            self._used_by.add(by)
            if all(each in self._used_by for each in self.optimizers):
                self._to(State.REST)
            elif self._state in _SEEN:
                self._to(State.PENDING)
        self._unwritten = None
        self._orders.clear()

    def clear(self) -> None:
        """Drop the gradient, as `zero_grad` does.

        Rows that were written stay, in their order: what wrote into them, such as sharpness-aware
        minimization, may write into them again after another backward pass.
        """
        is_written = self._state in _SEEN and (self._kept or self._is_written())
        self._to(State.CLEARED if is_written else State.REST)
        self._passes = 0

    def _check_order(self, value: Tensor) -> None:
        """Warn once if a gradient that is set may be made of one of other rows, seen before."""
        now, present = self._orders[-1], _grad.__get__(self)
        if present is not None and value.data_ptr() == present.data_ptr():
            return
        if all(torch.equal(each, now) for each in self._orders):
            return
        self._orders.clear()
        if not self._told_of_order:
            self._told_of_order = True
            warn(
                f"the gradient that was set is taken for that of the {len(now)} rows of this "
                f"batch of table {self.table.name!r}, in the order of rows.ids; since the last "
                "step there was one of other rows, which would fit by its shape alone. To add "
                "gradients of batches call backward() for each before the step, or go by rows.ids",
                TierStoreWarning,
            )

    def _lose(self, why: str) -> None:
        """Drop the gradient of rows that mean something else by now, for which the next step tells.

        After a rollback nothing is told: it drops what is not committed, and so this.
        """
        self._to(State.REST)
        self._lost = "" if why in UNDONE else why

    # -- between batches

    def _note(self) -> None:
        """Note what the data are, to tell when something writes into them."""
        self._exposed = False
        self._noted = self.data_ptr(), self._version

    def _is_written(self) -> bool:
        return self._exposed or (self.data_ptr(), self._version) != self._noted

    def _keep_unseen(self) -> None:
        """Take the gradient back from where torch sees it, if there is one by now."""
        whole, values = self._whole, _grad.__get__(self)
        if whole is None:
            return
        if values is not None and bool(values.any()):  # or zero_grad(set_to_none=False) was here
            self._whole = replace(whole, values=plain(values))
            return
        self._whole = None
        if self._kept:
            self._order = whole.batch  # for values in the order of these rows may be written again
        else:
            whole.batch.lease.release()

    def _merge(self) -> None:
        """Merge the gradients of all batches, except those that a rollback dropped.

        If rows of any mean something else for another reason, all are dropped; see `_lose`.
        """
        parts = [*(() if self._whole is None else (self._whole,)), *self._waiting]
        self._waiting.clear()
        self._seen_by_hooks = 0
        whys = [part.batch.moved(part.touched) for part in parts]
        if lost := next((why for why in whys if why and why not in UNDONE), ""):
            for part in parts:
                part.batch.lease.release()
            self._lose(lost)
            return
        parts = [part for part, why in zip(parts, whys, strict=True) if not why]
        if not parts:
            self._to(State.REST)
            return
        whole = None
        if self._order is not None:
            whole = placed(self._order, parts)
            if whole is None:
                self._order.lease.release()
            self._order = None
        self._whole = merged(self.table, parts, self.abandoned) if whole is None else whole
        for part in parts:
            part.batch.lease.release()

    def _end_pass(self) -> None:
        """Call hooks, now that every gradient of a backward pass has come."""
        arrived = (self._hooks_before or self._hooks_after) and self._run_hooks()
        if self._ranks is not None:
            self._squares = Squares(self._ranks, self._norm_here())
        if arrived:
            for hook in list(self._hooks_after.values()):
                hook(self)
        if len(self._waiting) >= _WAITING:
            self.gathered()
        if in_group():
            _engine.queue_callback(self._stand_in)  # after DistributedDataParallel looked at it
        else:
            self._stand_in()

    def _run_hooks(self) -> bool:
        """Call the hooks for a gradient that came; return whether one did."""
        arrived = self._waiting[self._seen_by_hooks :]
        if not arrived:
            return False
        gradient = arrived[0]
        if len(arrived) > 1 or not gradient.batch.usable:
            gradient = merged(self.table, arrived, self.abandoned)
            for part in arrived:
                part.batch.lease.release()
        gradient.trim()
        seen, before = self._seen_by_hooks, (self._waiting[: self._seen_by_hooks], self._whole)
        self._waiting, self._whole = [], gradient
        self._in_hook = True
        try:
            for hook in list(self._hooks_before.values()):
                found = hook(self._placed(gradient.values))
                gradient = gradient if found is None else replace(gradient, values=plain(found))
        finally:
            if self._state in _SEEN:
                self.settle()
                self._state = State.PENDING
            self._in_hook = False
            (self._waiting, self._whole), self._seen_by_hooks = before, seen
        self._waiting.append(gradient)
        self._seen_by_hooks += 1
        return True

    def _norm_here(self) -> Tensor:
        """Return the norm of the gradient as it is now, one float64; no GPU is waited for."""
        gradient = self.gathered()
        if gradient is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        lease = gradient.batch.lease
        is_known = lease.trim(wait=False)
        values = gradient.values[: lease.bound]
        if not is_known:  # rows after the distinct ones are undefined
            places = torch.arange(len(values), device=values.device)[:, None]
            values = torch.where(places < lease.count, values, 0.0)
        norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
        return norm

    def _stand_in(self) -> None:
        """Have the shape and strides of rows that are read once an operator needs them.

        The memory is that of the gradient, where it can be: no operator reads it for the rows.
        """
        if self._state in _SEEN or not (self._waiting or self._whole):
            return
        gradient = self._waiting[0] if self._whole is None else self._whole
        values, dtype = gradient.values, torch.float32 if self.widened else gradient.values.dtype
        cover = values
        if values.dtype != dtype or not values.is_contiguous():
            cover = values.new_empty(values.shape, dtype=dtype)
        self._content = cover
        _data.__set__(self, cover)

    # -- what operators see

    @classmethod
    def __torch_dispatch__(
        cls,
        operator: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an operator with the rows; what it gives row by row is of their batch."""
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        for each in args:
            if type(each) is cls and each.live_order is not None:
                name = operator.overloadpacket.__name__
                return like(name, args, kwargs or {}, result, each)
        return result

    def _hold(self, values: Tensor) -> None:
        """Have a value."""
        _data.__set__(self, values)
        self._content = values

    def _values_for(self, operator: str) -> Tensor:
        if operator in FREE:
            return self._content
        self.show()
        if self._state not in _SEEN:
            raise refused(operator, self.table)
        return self._content

    def _table(self) -> Any:
        return self.table

    def _note_write(self) -> None:
        self._exposed = self._state in _SEEN

    def _alias(self) -> Tensor:
        self.show()
        self._exposed = self._state in _SEEN
        if self._state not in _SEEN:
            return NoRows.of(self, self._content)
        return self._placed(self._content.detach())

    def _placed(self, rows: Tensor) -> Tensor:
        order = self.row_order
        return rows if order is None else PlacedRows.of(rows, order)

    @property
    def row_order(self) -> Order | None:
        """Of which rows this is; None where there are none."""
        self.show()
        return self.live_order


class TableRows(torch.nn.Parameter):
    """One table of a collection among the parameters of an optimizer, for options of its own.

    It is always empty: its rows and their gradient are in `whole`, with those of other tables.

    Attributes:
        whole: the parameter of all tables that are trained with it.
        number: its number among these.
    """

    def __new__(cls, whole: RowsParameter, number: int) -> TableRows:
        """Make it empty."""
        made: TableRows = _Parameter.__new__(cls, torch.empty(0, whole.shape[1]))
        return made

    def __init__(self, whole: RowsParameter, number: int) -> None:
        """Stand for a table."""
        self.whole = whole
        self.number = number

    @property
    def table(self) -> Table:
        """The table."""
        return self.whole.tables[self.number]

    def __deepcopy__(self, memo: dict[int, Any]) -> TableRows:
        """Return itself."""
        return self


def _refuse_other_optimizers(optimizer: Any, *_: object) -> None:
    """Raise InvalidInputError before an optimizer that is not tierstore's updates rows.

    Its state would be that of other rows in the next step.
    """
    for group in optimizer.param_groups:
        for rows in group["params"]:
            if type(rows) is not RowsParameter or optimizer in rows.optimizers:
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


def _refuse_other_gradients(rows: RowsParameter) -> Callable[[Tensor | None], None]:
    """Return a hook for a gradient of the parameter itself; those of lookups come to `deposit`."""
    refers = weakref.ref(rows)

    def refuse(gradient: Tensor | None) -> None:
        found = refers()
        if gradient is not None and found is not None:
            raise refused("a gradient of what was computed from the parameter", found.table)

    return refuse


def _is_exporting() -> bool:
    """Tell whether torch.export saves a program, which has the parameters of its modules."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if str(frame.f_globals.get("__name__")).startswith(("torch.export.", "torch._export.")):
            return True
    return False


def tracing_refused() -> InvalidInputError:
    """Return the error for a lookup in `torch.jit.trace`."""
    return InvalidInputError(
        "torch.jit.trace would bake the rows of this batch into the program; use "
        "torch.export.export, whose programs look rows up"
    )


def _is_differentiated(parameter: Any) -> bool:
    """Tell whether a transform of torch.func differentiates with respect to a tensor."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(parameter):
        if functorch.is_gradtrackingtensor(parameter):
            return True
        parameter = functorch.get_unwrapped(parameter)
    return False


def own_ids(parameter: RowsParameter, rows: Tensor) -> Tensor:
    """Return the ids of rows, given as batches of a parameter have them, each in its own table."""
    table = parameter.table
    own: Tensor = table.location.own(rows) if isinstance(table, JointTable) else rows
    shared = sharing(table)
    return own if shared is None else shared.ids_of(own)
