"""A torch optimizer over rows of tables and ordinary parameters."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch.optim import optimizer as torch_optimizer

from tierstore._door import interrupts_deferred
from tierstore._progress import Progress, Shown, shown
from tierstore._table.home import StoreOfTable
from tierstore._table.table import Table, check_open, door_of, together
from tierstore.distributed.apart import fail_on_every_rank
from tierstore.errors import (
    InvalidInputError,
    InvalidTypeError,
    UnderflowWarning,
    counted,
    named,
    warn,
)
from tierstore.nn import RowsParameter, TieredEmbedding
from tierstore.nn.apart import check_not_apart, in_group
from tierstore.nn.autograd import Gradient
from tierstore.nn.average import Average
from tierstore.nn.pointers import checked
from tierstore.nn.pointers import to_tensor as pointer_to
from tierstore.nn.rows import TableRows
from tierstore.nn.tied import check_tied
from tierstore.optim.in_place import InPlace
from tierstore.optim.lazy import LazyRows
from tierstore.optim.ordinary import OrdinaryState
from tierstore.optim.probe import StatePlan, as_gradient, probe, ruinous_gradient
from tierstore.optim.rounding import Rounding
from tierstore.optim.state import Handovers, StoredState
from tierstore.optim.trained import Project, Share, TrainedField

__all__ = ["TieredOptimizer"]

_ROWS = (RowsParameter, TableRows)
_NARROW = (None, "bfloat16", "float8")
_set_grad_enabled: Any = torch._C._set_grad_enabled  # torch.no_grad() makes ten calls of it
_hooks_before: Any = torch_optimizer._global_optimizer_pre_hooks
_hooks_after: Any = torch_optimizer._global_optimizer_post_hooks

Trained: TypeAlias = (
    torch.nn.Module
    | Iterable[torch.nn.Module]
    | Iterable[torch.Tensor]
    | Iterable[tuple[str, torch.Tensor]]
    | Iterable[dict[str, Any]]
)
"""A model, some modules or parameters of it, or groups of them with options of their own."""


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Show a step to hooks and a profiler, if there are any, as torch does for every optimizer.

    The range for a profiler takes a tenth of the time of a small step where no profiler runs. Among
    the hooks of all optimizers is one of this library, which has nothing to refuse here.
    """
    seen: Any = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def hooked(self: Any, *args: Any, **options: Any) -> Any:
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        if hooks or len(_hooks_before) > 1 or _hooks_after or torch.autograd._profiler_enabled():
            return seen(self, *args, **options)
        return step(self, *args, **options)

    hooked.hooked = True  # type: ignore[attr-defined]
    return hooked


class TieredOptimizer(torch.optim.Optimizer):
    """A torch optimizer over a model whose tables are in a store.

    Ordinary parameters are trained as by `optimizer_class` itself. Rows of tables are trained by
    the same class with the same options, and their state is kept in their records. From a backward
    pass to `step()` or `zero_grad()` the rows that got a gradient are in the parameter of their
    layer, `(distinct rows, dim)`: gradient clipping, GradScaler and learning rate schedulers work
    as with any optimizer. `step()` updates exactly these rows and then drops their gradients.
    Tables without a gradient are skipped; `table.scalars["step"]` counts the steps in which the
    table was updated.

    Fields for the state are added to the tables when the optimizer is made, which rewrites them
    once and is a commit. State follows its rows through tiers, commits, copies and exports; options
    such as `lr`, and the state of ordinary parameters, are in `state_dict()`.

    `store.rollback()` takes rows and state back, and drops the gradients of rows that have come.

    >>> opt = TieredOptimizer(torch.optim.Adam, [emb], lr=1e-3)
    >>> loss.backward()
    >>> opt.step()
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Trained,
        *,
        progress: Shown = None,
        in_place: bool = True,
        stochastic_rounding: bool = False,
        state_dtype: Literal["bfloat16", "float8"] | None = None,
        rounding_seed: int = 0,
        project: Project | Mapping[TieredEmbedding, Project] | None = None,
        reset: bool = False,
        state: Literal["continue"] | None = None,
        replicated: bool = False,
        ema: float | None = None,
        **options: Any,
    ) -> None:
        """Put an optimizer over a model.

        Args:
            optimizer_class: a class of `torch.optim`, or another whose update a probe finds to be
                row by row.
            params: a module, of which all parameters are trained; modules or parameters; or dicts
                `{"params": [...], "lr": …}` of them with options of their own. Layers over the same
                field of the same table are trained as one. Layers that are frozen now are left out.
                For a collection, `emb.rows_of(feature)` stands for one table.
            progress: called with rows done and in all while fields are added; True shows a bar.
            in_place: on a GPU, update rows where they are, with a kernel of tierstore, where there
                is one: for SGD, Adagrad, RowWiseAdagrad, Adam, AdamW and RMSprop, float32, bfloat16
                and float16, unless options request `foreach=False` or `capturable`, or there is
                `project`. The results are those of torch's `foreach=True`. On the CPU, in the core,
                SGD, Adagrad, RowWiseAdagrad, Adam and AdamW of float32 and float64, with the
                results of torch's default there. False has torch compute them.
            stochastic_rounding: for weights in bfloat16: train them in float32 and round at random,
                so that steps too small for bfloat16 add up. What a row rounds to depends on the
                row and the count of steps alone: results stay the same for any budget.
            state_dtype: "bfloat16" keeps what the optimizer keeps of a row in half the bytes:
                everything is computed in float32, and state is rounded at random as weights are by
                `stochastic_rounding`. "float8" does so in a quarter, with a scale for each row:
                what is never negative, such as `exp_avg_sq`, in float8_e5m2, all else in
                float8_e4m3fn, and a state of one number a row in bfloat16. For weights in float32,
                and for those in bfloat16 with `stochastic_rounding`. None: state in the type that
                torch gives it.
            rounding_seed: 0 to 2^32 - 1; what is rounded at random depends on it, on the count of
                steps, the row and the column, and on nothing else. Resumed runs give the same.
            project: called with the rows of a step after it, `(distinct rows, dim)`, returns what
                is to be written instead, of the same shape; or a dict of such by layer.
            reset: drop the state that an optimizer left in the tables, and start from none: for
                another class, a sweep or fine-tuning. Each table is written anew.
            state: "continue" goes on with the state that an earlier optimizer of this process left
                in the tables. None starts without, as torch does, and says so: it is dropped at the
                first step, for which every row is written. State of a store that was opened, or
                that `load_state_dict` or `load_rows_state` brought, is always gone on with.
            replicated: in a process group of several ranks, take steps although each rank writes
                its own store: for ranks that apply the same gradients to copies of one store.
            ema: keep an exponential moving average of the rows with this decay in their records,
                in fields that are added; `emb.averaged()` looks it up.
            options: what the class takes besides parameters: lr, betas, foreach, fused, …

        Raises ReadOnlyError for a layer that is not frozen over a store that is open for reading,
        and InvalidInputError for a class that cannot train rows, naming the reason, for a table
        whose state is that of another class, where fields must be added to a table with uncommitted
        rows, for stochastic rounding of weights that are not bfloat16, and for a `state_dtype`
        that is not there or not that of the state in the table.
        """
        if not (
            isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
        ):
            raise InvalidTypeError(
                f"an optimizer is made of a class such as torch.optim.Adam, not {optimizer_class!r}"
            )
        if state not in (None, "continue") or (state and reset):
            raise InvalidInputError(
                "state is 'continue', to go on with the state in the tables, or None; 'continue' "
                f"does not go with reset=True: {state!r}"
            )
        groups = _grouped(params)
        self._class = optimizer_class
        self._options = options
        self._progress = shown(progress)
        self._in_place = in_place
        self._rounding = _rounding(stochastic_rounding, state_dtype, rounding_seed)
        self._project = project
        self._reset = reset
        self._continues = state == "continue"
        self.replicated: bool = replicated
        self._ema = ema
        self._sparse = issubclass(optimizer_class, torch.optim.SparseAdam)
        self._ordinary = self._told = False
        self._lazy = LazyRows(optimizer_class, options)
        self._fields: dict[RowsParameter, TrainedField] = {}
        self._beginning: list[TrainedField] = []
        """Those to call at the next step that they take part in; see `StoredState.begin`."""
        self._plans: dict[RowsParameter, StatePlan] = {}
        self._parts: dict[TableRows, None] = {}
        self._inner = optimizer_class(
            [{"params": [torch.nn.Parameter(torch.empty(0, 1))]}], **options
        )
        self._inner_step = _unhooked(self._inner)
        self._inner.param_groups.clear()
        self._inner.state.clear()
        super().__init__([{"params": []}], self._inner.defaults)
        self._share()
        for group in groups:
            self.add_param_group(group)

    def _share(self) -> None:
        """Use the groups and state of the torch optimizer."""
        self.param_groups: list[dict[str, Any]] = self._inner.param_groups
        self._inner.state = OrdinaryState(self._fields, self._inner.state)

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state of ordinary parameters; that of rows is in their records.

        Raises InvalidInputError where the state of rows would be dropped or replaced; see
        `reset_state`.
        """
        found: defaultdict[torch.Tensor, Any] = self._inner.state
        return found

    @state.setter
    def state(self, value: Any) -> None:
        if self._fields and value is not self._inner.state:
            raise InvalidInputError(
                "another state would not reach that of rows, which is kept in their records: call "
                "reset_state() to start anew, or load_state_dict() for one that was saved"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more: `{"params": [...], "lr": …}`. Adds fields to tables.

        A group may name some tables of a collection, by `emb.rows_of`; the group that names the
        whole collection is for all others.
        """
        if not param_group["params"]:
            return  # what the base class starts with
        group = _grouped([param_group])[0]
        named, number = group["params"], len(self._inner.param_groups)
        parts = [each for each in named if type(each) is TableRows]
        whole = [each for each in named if type(each) is RowsParameter]
        before = [rows for rows, field in self._fields.items() if not field.covers(whole)]
        _check_apart([*before, *whole], [*self._parts, *parts])
        found = dict.fromkeys([*whole, *(part.whole for part in parts)])
        own = {key: value for key, value in group.items() if key in self.defaults}
        trained = self._prepared(list(found), {**self._options, **own})
        # A parameter is in one group alone, the first that names it or one of its tables.
        ordinary = [each for each in named if type(each) is not RowsParameter]
        group["params"] = [*(rows for rows in found if rows not in self._fields), *ordinary]
        self._inner.add_param_group(group)
        if group["params"]:  # for a class that makes state for its first groups alone
            begun = self._class([{**group, "params": list(group["params"])}], **self._options)
            for parameter, state in begun.state.items():
                self._inner.state.setdefault(parameter, state)
        self._ordinary |= len(named) > len(parts) + len(whole)
        self._beginning += trained
        self._lazy.add(trained)
        for field in trained:
            self._fields[field.rows] = field
            field.rows.optimizers.add(self)
            field.rows.widened = self._rounding.weights
        for rows in whole:
            self._fields[rows].assign(number)
        for part in parts:
            self._parts[part] = None
            self._fields[part.whole].assign(number, part.number)
        for each in (*found, *parts):
            dict.pop(self._inner.state, each, None)

    def _prepared(
        self, found: Sequence[RowsParameter], options: Mapping[str, Any]
    ) -> list[TrainedField]:
        """Find the state that rows need, and give their tables its fields, in one commit.

        Returns those that are new. Raises InvalidInputError where options require other state than
        that of a table that is trained with others.
        """
        plans = {rows: self._planned(rows, options) for rows in found}
        for rows in found:
            if rows in self._fields and plans[rows].rows != self._plans[rows].rows:
                kept, asked = (
                    ", ".join(each[rows].rows) or "no state" for each in (self._plans, plans)
                )
                raise InvalidInputError(
                    f"tables {rows.table.name} are trained as one, with {kept} in each record; "
                    f"these options ask for {asked}, or for other first values: put their table "
                    "into a collection of its own"
                )
        new = [rows for rows in found if rows not in self._fields]
        for table in itertools.chain.from_iterable(rows.tables for rows in new):
            check_open(table, write=True)
        self._plans.update((rows, plans[rows]) for rows in new)
        states = {rows: self._states_of(rows, plans[rows]) for rows in new}
        if self._continues:
            for each in itertools.chain.from_iterable(states.values()):
                each.anew = False
        if self._reset:
            changes = _Commits("drop")
            for each in itertools.chain.from_iterable(states.values()):
                changes.add(each.table, set(each.stale()))
            changes.apply(self._progress)
        changes = _Commits("add")
        for rows in new:
            for state in states[rows]:
                state.check_owner()
                missing = state.missing_fields()
                if self._ema is not None:
                    missing |= Average(state.table, rows.field).start(self._ema)
                if missing:
                    changes.add(state.table, missing)
        changes.apply(self._progress)
        made = []
        for rows in new:
            project, first = self._project_of(rows), states[rows][0]
            in_place = None
            if self._in_place and project is None:
                in_place = InPlace(
                    self._class, rows.table, rows.field, first.fields, rounding=first.rounding
                )
            made.append(TrainedField(rows, states[rows], plans[rows], in_place, project, self._ema))
        return made

    def _planned(self, rows: RowsParameter, options: Mapping[str, Any]) -> StatePlan:
        """Return the state that rows need."""
        item = rows.table.spec.layout.field(rows.field)
        element = item.element
        if self._rounding.weights and not element.stochastic:
            raise InvalidInputError(
                f"stochastic rounding is for bfloat16; field {rows.field!r} of table "
                f"{rows.table.name!r} is {element.name}"
            )
        dtype = torch.float32 if self._rounding.weights else element.torch_dtype()
        if self._rounding.states is not None and dtype != torch.float32:
            raise InvalidInputError(
                f"state_dtype rounds state that is computed in float32; field {rows.field!r} of "
                f"table {rows.table.name!r} is {element.name}: use float32, or bfloat16 with "
                "stochastic_rounding=True"
            )
        how: Any = {"dim": item.dim, "dtype": dtype, "device": rows.table.device}
        plan = probe(self._class, options, **how)
        if dtype == torch.float16 and not self._told:
            self._tell_of_ruin(rows, options, how)
        return plan

    def _tell_of_ruin(
        self, rows: RowsParameter, options: Mapping[str, Any], how: Mapping[str, Any]
    ) -> None:
        """Warn, once, if small gradients make rows of float16 infinite or NaN, as in torch."""
        gradient = ruinous_gradient(self._class, options, **how)
        if gradient is None:
            return
        self._told = True
        which = f"{gradient:.1g} or less" if gradient else "0"
        eps = f" with eps={options['eps']:g}" if "eps" in options else ""
        warn(
            f"{self._class.__name__}{eps} makes rows of table {rows.table.name!r}, field "
            f"{rows.field!r}, infinite or NaN where a gradient is {which}, as its "
            "square and eps are 0 in float16; the next commit keeps such rows. Use bfloat16 or "
            f"float32, store.alter_table({rows.table.name!r}, dtype='bfloat16'), or a larger eps, "
            "such as 1e-4",
            UnderflowWarning,
        )

    def _states_of(self, rows: RowsParameter, plan: StatePlan) -> list[StoredState]:
        owner = class_name(self._class)
        return [
            StoredState(table, rows.field, plan, owner=owner, rounding=self._rounding)
            for table in rows.tables
        ]

    def _project_of(self, rows: RowsParameter) -> Project | None:
        if not isinstance(self._project, Mapping):
            return self._project
        for layer, project in self._project.items():
            if any(parameter is rows for parameter in layer.parameters()):
                return project
        return None

    # -- training

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield every parameter: for `clip_grad_norm_`, where there is no model to ask."""
        for group in self.param_groups:
            yield from group["params"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients: those of rows always, of ordinary parameters as torch does."""
        for rows in self._fields:
            rows.clear()
        if self._ordinary:
            super().zero_grad(set_to_none)

    @_hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters and rows that got a gradient; drop that of the rows.

        `closure`, if given, runs the model and the backward pass before, and its result is
        returned. After an error while rows are written, `store.rollback()` drops what was written.
        Raises ClosedError, having changed nothing, where a store was closed.
        """
        for rows, field in self._fields.items():
            if in_group():
                check_not_apart(rows.table, [self])
            door = door_of(rows.table)
            if door.reason:
                door.check_open(write=True)  # its gradient went with the store
            field.check_owner()
            if field.held != Handovers.count and field not in self._beginning:
                field.check_holder()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._beginning:
            self._begin()
        with interrupts_deferred():
            enabled = torch.is_grad_enabled()
            _set_grad_enabled(False)
            try:
                gradients = []
                for rows, field in self._fields.items():
                    gradient = rows.gradient_for(self)
                    if gradient is not None:
                        gradients.append((field, gradient))
                self._lazy.wait -= 1
                if not self._lazy.wait:
                    self._lazy.look(gradients, self._inner.param_groups)
                try:
                    self._update(gradients)
                except Exception as error:
                    error.add_note("this step may be written in part; store.rollback() drops it")
                    fail_on_every_rank((each.table for each in self._fields), "take a step", error)
                    raise
            finally:
                _set_grad_enabled(enabled)
        return loss

    def _begin(self) -> None:
        """Begin with fields that have a first gradient; say so where it drops state."""
        dropped, waiting = dict[str, int](), []
        for field in self._beginning:
            if field.rows.at_rest:
                waiting.append(field)
                continue
            for state in field.states:
                if steps := state.begin():
                    dropped[state.table.name] = steps
            if any(state.anew for state in field.states):
                waiting.append(field)
        self._beginning = waiting
        if dropped:
            warn(
                f"this {self._class.__name__} starts with no state, as torch's would: what another "
                f"optimizer of this process left in {named('table', dropped)}, of "
                f"{counted(max(dropped.values()), 'step')}, is dropped; make it with "
                'state="continue" to go on with that'
            )

    def _update(self, gradients: Sequence[tuple[TrainedField, Gradient]]) -> None:
        """Update rows in their slots where that can be done, and all else with the torch optimizer.

        For its step, copies of the rows take the place of the parameters of the layers.
        """
        groups, states = self._inner.param_groups, self._inner.state
        left: list[tuple[TrainedField, Gradient, Share]] = []
        for field, gradient in gradients:
            with together(field.rows.table):
                shares = field.shares(gradient)
                on_device = gradient.batch.lease.device is not None
                last = on_device and len(shares) == 1 and field.rows.is_last(gradient)
                done = True
                for share in shares:
                    if not field.step_in_place(gradient, share, groups[share.of.group], last=last):
                        left.append((field, gradient, share))
                        done = False
                if done:
                    field.rows.used(self)
        if not (left or self._ordinary):
            return
        copied: list[tuple[TrainedField, Gradient, Share, torch.nn.Parameter]] = []
        every = [group["params"] for group in groups]
        given = [[each for each in listed if type(each) not in _ROWS] for listed in every]
        try:
            for field, gradient, share in left:
                copy, state = field.load(gradient, share)
                if self._sparse and copy.grad is not None:
                    copy.grad = as_gradient(self._inner, copy.grad)
                dict.__setitem__(states, copy, state)
                copied.append((field, gradient, share, copy))
                given[share.of.group].append(copy)
            for group, listed in zip(groups, given, strict=True):
                group["params"] = listed
            self._inner_step(self._inner)
            for field, gradient, share, copy in copied:
                field.store(gradient, share, copy, states[copy])
        finally:
            for group, parameters in zip(groups, every, strict=True):
                group["params"] = parameters
            for *_, copy in copied:
                dict.pop(states, copy, None)
        for rows in dict.fromkeys([field.rows for field, *_ in left]):
            rows.used(self)

    # -- the state of rows and parameters

    def reset_state(self) -> None:
        """Reset the optimizer state of all rows and parameters; their values stay.

        Writes the first values of the state over every row of the tables; commit that. Averages
        that `ema` keeps stay.
        """
        for field in self._fields.values():
            for state in field.states:
                state.reset()
                state.anew = False
                state.hold()
        groups = [{**group, "params": list(group["params"])} for group in self._inner.param_groups]
        fresh = self._class(groups, **self._options)
        self._inner.state = OrdinaryState(
            self._fields, {p: state for p, state in fresh.state.items() if not isinstance(p, _ROWS)}
        )

    def load_rows_state(self, layer: TieredEmbedding | TableRows, state: Mapping[str, Any]) -> None:
        """Take over the state that a torch optimizer kept of the weight of an embedding.

        Args:
            layer: over the table that the weight was written into; for a collection,
                `emb.rows_of(feature)`.
            state: an entry of `torch_optimizer.state_dict()["state"]`: for Adam `step` and, of the
                shape of the weight, `exp_avg` and `exp_avg_sq`.

        Every row of the table is written; commit that. Raises InvalidInputError, having written
        nothing, for a state of another optimizer or shape, and a layer that is not trained here.
        """
        rows = layer.whole if isinstance(layer, TableRows) else layer.rows
        field = self._fields.get(rows)
        if field is None:
            raise InvalidInputError(f"this optimizer does not train table {rows.table.name!r}")
        found = field.states[layer.number if isinstance(layer, TableRows) else 0]
        found.take(state)
        found.anew = False
        found.hold()

    def state_dict(self) -> dict[str, Any]:
        """Return options, and the state of ordinary parameters, as torch does.

        The state of rows is kept with them; a pointer to the version that has it replaces it, with
        the table, the field, the class of the optimizer and what it keeps of a row. Raises
        InvalidInputError where rows are not committed.
        """
        state = super().state_dict()
        pointers = {
            number: {"pointer": pointer_to(rows.table.store, **self._named(rows))}
            for number, rows in self._rows().items()
        }
        return {**state, "state": {**state["state"], **pointers}}

    def _rows(self) -> dict[int, RowsParameter]:
        """Return the rows of tables by their number among the parameters."""
        every = enumerate(self.parameters())
        return {number: each for number, each in every if type(each) is RowsParameter}

    def _named(self, rows: RowsParameter) -> dict[str, str]:
        """Return what a pointer states of rows: whose they are, and what their state must match.

        That is the class, and what it keeps of a row, which follows from options such as `amsgrad`,
        `centered`, `momentum` and `ema`.
        """
        table = " ".join(sorted(table.name for table in rows.tables))
        first = self._fields[rows].states[0]
        kept = [*first.fields, *(["ema"] if self._ema is not None else [])]
        narrow = "" if first.state_dtype is None else f" in {first.state_dtype}"
        optimizer = f"{class_name(self._class)} with {', '.join(kept) or 'no state'}{narrow}"
        return {"table": table, "field": rows.field, "optimizer": optimizer}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned, and bring stores to the version they were at then.

        Options become those of the state, `lr` too, as torch does. Raises InvalidInputError, having
        changed nothing, for the state of another class, of other tables or groups, of an optimizer
        that keeps something else of a row, as by `amsgrad` or `momentum`, and of a version that is
        not kept; see `Store.restore`.
        """
        state, groups = dict(state_dict["state"]), state_dict["param_groups"]
        saved = [each for group in groups for each in group["params"]]
        pointers = []
        for number, rows in self._rows().items():
            pointer = state.pop(saved[number], {}).get("pointer") if number < len(saved) else None
            if pointer is None:
                raise InvalidInputError(
                    f"this state has no pointer to rows of table {rows.table.name!r}: it is not "
                    "that of a TieredOptimizer over them"
                )
            named = checked(pointer, **self._named(rows))
            pointers.append((rows.table.store, named))
        sizes = [[len(group["params"]) for group in each] for each in (groups, self.param_groups)]
        if sizes[0] != sizes[1] or any("pointer" in each for each in state.values()):
            raise InvalidInputError(
                "this state is of an optimizer over other parameters, rows of tables where there "
                "are none here; make the optimizer as it was when the state was taken"
            )
        for store, named in pointers:
            store.load_state_dict(named)
        for each in itertools.chain.from_iterable(field.states for field in self._fields.values()):
            each.anew = False
            each.hold()
        self._inner.load_state_dict({"state": state, "param_groups": groups})
        self._share()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copy would train the same rows."""
        self.__reduce_ex__(0)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise InvalidTypeError(
            "an optimizer over rows of a table cannot be pickled or copied: what it needs lies in "
            "the store. Save opt.state_dict(), and load it into an optimizer over the same tables"
        )


def _unhooked(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """Return the step of an optimizer's class without the hooks and the profiler's range.

    The optimizer around it has called its own already. For torch's own classes, the switch of
    gradients is left out too, which a step without a closure does not need: gradients are off.
    """
    step: Any = type(optimizer).step
    differentiable = optimizer.defaults.get("differentiable", False)
    if type(optimizer).__module__.startswith("torch.optim.") and not differentiable:
        step = inspect.unwrap(step)
    elif getattr(step, "hooked", False):
        step = step.__wrapped__
    bare: Callable[[torch.optim.Optimizer], Any] = step
    return bare


def class_name(kind: type[torch.optim.Optimizer]) -> str:
    """Return what tells a class of optimizers from others: "torch.optim.Adam"."""
    module = kind.__module__
    return f"{'torch.optim' if module.startswith('torch.optim.') else module}.{kind.__qualname__}"


def _rounding(weights: bool, state_dtype: object, seed: object) -> Rounding:
    """Return what is rounded at random; raises InvalidInputError for what is not there."""
    if not (state_dtype is None or isinstance(state_dtype, str)) or state_dtype not in _NARROW:
        raise InvalidInputError(
            "state_dtype is 'bfloat16', 'float8', or None for the type that torch gives; not "
            f"{state_dtype!r}"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise InvalidInputError(f"rounding_seed is a number from 0 to 2^32 - 1, not {seed!r}")
    return Rounding(weights=weights, states=state_dtype, seed=seed)


def _check_apart(every: Iterable[RowsParameter], parts: Sequence[TableRows]) -> None:
    """Raise InvalidInputError for a field that is there twice: in two groups, or as a copy."""
    fields = [(table, rows.field) for rows in every for table in rows.tables]
    named = [(part.table, part.whole.field) for part in parts]
    for listed in (fields, named):
        for (table, field), times in Counter(listed).items():
            if times > 1:
                raise InvalidInputError(
                    f"field {field!r} of table {table.name!r} is in two groups, or in a layer and "
                    "a copy of it or a collection; one optimizer trains it once"
                )


class _Commits:
    """Changes of the tables of stores, one commit a store."""

    def __init__(self, what: str) -> None:
        """Collect changes: "add" for fields to add, "drop" for those to drop."""
        self._what = what
        self._stores: dict[int, tuple[StoreOfTable, dict[str, Any]]] = {}

    def add(self, table: Table, fields: Any) -> None:
        """Change a table, also where it is to be changed already."""
        _, known = self._stores.setdefault(id(table.store), (table.store, {}))
        before = known.get(table.name)
        known[table.name] = fields if before is None else before | fields

    def apply(self, progress: Progress | None) -> None:
        """Make the changes."""
        for store, changes in self._stores.values():
            try:
                store.alter_tables(
                    {name: {self._what: fields} for name, fields in changes.items()},
                    progress=progress,
                )
            except InvalidInputError as error:
                fields = dict.fromkeys(itertools.chain.from_iterable(changes.values()))
                raise InvalidInputError(
                    f"the optimizer has to {self._what} {named('field', fields)}, where it keeps "
                    f"the state of each row: {error}"
                ) from error


def _grouped(params: Any) -> list[dict[str, Any]]:
    """Return groups, each with a list of parameters, every one of them once."""
    given = [params] if isinstance(params, torch.nn.Module) else list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    made = []
    for group in groups:
        if not isinstance(group, dict) or "params" not in group:
            raise InvalidInputError("a group is a dict with 'params'")
        one = isinstance(group["params"], torch.nn.Module | torch.Tensor)
        parts = [group["params"]] if one else list(group["params"])
        found = dict.fromkeys(each for part in parts for each in _parameters_of(part))
        trained = [each for each in found if not _is_frozen(each)]
        if not trained:
            raise InvalidInputError("an optimizer needs layers or parameters that can be trained")
        made.append({**group, "params": trained})
    return made


def _is_frozen(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of rows that are not to be trained."""
    rows = parameter.whole if isinstance(parameter, TableRows) else parameter
    return isinstance(rows, RowsParameter) and not rows.requires_grad


def _parameters_of(part: object) -> Iterator[torch.Tensor]:
    """Yield the parameters that something in a group stands for."""
    if isinstance(part, torch.nn.Module):
        check_tied(part)
        yield from part.parameters()
    elif isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple) and len(part) == 2 and isinstance(part[1], torch.Tensor):
        yield part[1]
    else:
        raise InvalidTypeError(
            f"an optimizer takes a model, layers, parameters or dicts of them, not {part!r}"
        )
