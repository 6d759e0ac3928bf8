"""Steps of an optimizer on the records of a batch, where they are: a kernel, or torch's operators.

The results are those of torch's optimizer over lists of tensors, to the bit. Steps in place save
copying weights and state out of the records and back, and a pass over them for every operation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tierstore._dtypes import DEFAULT_DTYPE, ELEMENT_TYPES
from tierstore._table.joint import JointTable
from tierstore._table.table import Table
from tierstore._table.values import Columns
from tierstore._tiers.gpu.abi import RECORDS
from tierstore._tiers.gpu.launcher import Kernel
from tierstore.nn.alone import work_alone
from tierstore.nn.zeros import Zeros
from tierstore.optim import row_wise
from tierstore.optim.float8 import SIGNED, SIZES
from tierstore.optim.program import Program, compiled
from tierstore.optim.rounding import Rounding
from tierstore.optim.row_wise import RowWiseAdagrad
from tierstore.spec import Field, RecordLayout

__all__ = ["InPlace"]

Group = Mapping[str, Any]
"""The options of an optimizer."""

_SOURCE = RECORDS.extended("tierstore.optim", "step.cu")
_Step: Any = _SOURCE.structure("Step")


@dataclass(frozen=True)
class _Rule:
    """An optimizer that step.cu knows.

    Attributes:
        name: what step.cu calls it.
        states: the names of its states, in the kernel's order.
        flags: macros.
        numbers: what a step needs, from the options and the number of the step, counted from 1.
    """

    name: str
    states: Callable[[Group], tuple[str, ...]]
    flags: Callable[[Group], dict[str, bool]]
    numbers: Callable[[Group, float], tuple[float, ...]]


@dataclass(frozen=True)
class _HostRule:
    """An optimizer whose steps on the host are taken in the records.

    Attributes:
        program: the name of the program for many rows.
        states: the names of its states, in the program's order.
        numbers: what a step needs, from the options and the number of the step, counted from 1; in
            the order in which the program takes them.
        update: changes the fields of some records, the weight first, given their gradient.
    """

    program: str
    states: tuple[str, ...]
    numbers: Callable[[Group, float], tuple[Any, ...]]
    update: Callable[[Sequence[Tensor], Tensor, Any], None]


class InPlace:
    """The step for a field of a table, for as long as the options of the optimizer allow it."""

    def __init__(
        self,
        optimizer_class: type,
        table: Table | JointTable,
        field: str,
        states: Mapping[str, str],
        *,
        rounding: Rounding,
    ) -> None:
        """Compile nothing yet; `states` are the fields of the optimizer's states."""
        self._rule = _RULES.get(optimizer_class)
        self._on_host = None if rounding else _ON_HOST.get(optimizer_class)
        self._table = table
        self._field = field
        self._states = states
        self._rounding = rounding
        self._places: dict[tuple[Any, ...], _Places | None] = {}
        self._layout: RecordLayout | None = None
        self._block: _Block | None = None

    def step(
        self,
        lease: Any,
        gradient: Tensor,
        trained: Tensor | None,
        group: Group,
        step: int,
        ids: Callable[[], Tensor],
        *,
        ends: bool = False,
        zeros: Zeros | None = None,
    ) -> bool:
        """Update the distinct rows of a lease, of those `trained` if given.

        Args:
            lease: the lease.
            gradient: of its rows, `(bound, dim)`.
            trained: bool `(bound, 1)`.
            group: the options.
            step: the number of the step, counted from 1.
            ids: returns what decides how the rows round at random, int64 `(bound,)`.
            ends: whether the lease may end with the step; on the host it goes on.
            zeros: gets the gradient, once the step has cleared it; only where all rows are trained.

        Returns False, having done nothing, where this is left to torch's optimizer: for another
        class (on the host, all but Adam, AdamW and RowWiseAdagrad), for types that differ, rows
        that are not in the host tier, options that require another way, and on the host a first
        beta of 0.
        """
        rule = self._rule
        if rule is None:
            return False
        if lease.device is None:
            return self._step_on_host(lease, gradient, trained, group, step)
        if not _usual(group):
            return False
        places = self._found(rule, group)
        if places is None:
            return False
        given, gradient = gradient, places.readable(gradient)
        rows = ids() if self._rounding else None
        work = places.work(gradient, trained)
        if given is not gradient or trained is not None:
            zeros = None
        work.clears = zeros is not None
        if rows is not None:
            work.rows, work.count = rows.data_ptr(), step
            work.seed = self._rounding.seed
        numbers = rule.numbers(group, step)
        work.number[: len(numbers)] = numbers
        kernel = places.kernel(gradient)
        lease.launch(kernel, work, lease.bound, writes=places.spans, ends=ends)
        if zeros is not None:
            zeros.put(gradient)
        return True

    def _step_on_host(
        self, lease: Any, gradient: Tensor, trained: Tensor | None, group: Group, step: int
    ) -> bool:
        rule = self._on_host
        if rule is None or not _plain(group):
            return False
        block = self._block
        if block is None or block.columns.layout is not self._table.spec.layout:
            names = (self._field, *map(self._states.__getitem__, rule.states))
            block = self._block = _Block(Columns(self._table.spec.layout, names), rule.program)
        if not block.fits:
            return False
        gradient = gradient.to(block.dtype)
        numbers, before = rule.numbers(group, step), torch.get_num_threads()
        if isinstance(numbers, _Adam) and block.rounds_to_one(numbers.first):
            return False

        def change(data: Any, part: slice) -> None:
            old = data.copy() if trained is not None else data
            here = gradient if len(data) == len(gradient) else gradient[part]
            rule.update(block.fields(data), here, numbers)
            if trained is not None:
                kept = ~trained[part].numpy()
                np.copyto(data, old, where=kept)

        many = None
        if block.program is not None:
            many = functools.partial(_run, block.program, gradient, trained, numbers)
        try:
            done: bool = lease.update(block.columns, change, many)
        finally:
            torch.set_num_threads(before)  # in this thread, and in those to come
        return done

    def _found(self, rule: _Rule, group: Group) -> _Places | None:
        """Return where the fields are now, or None if these are not the fields that are needed."""
        layout = self._table.spec.layout
        if layout is not self._layout:
            self._places.clear()
            self._layout = layout
        states, flags = rule.states(group), rule.flags(group)
        key = (states, *flags.values())
        if key not in self._places:
            self._places[key] = None
            if set(states) == set(self._states):
                names = (self._field, *(self._states[state] for state in states))
                if all(_kernel_type(layout.field(name)) for name in names):
                    columns = self._rounding.columns(states)
                    self._places[key] = _Places(
                        rule, layout, names, flags, self._rounding, [columns[s] for s in states]
                    )
        return self._places[key]


class _Places:
    """Where the fields of an optimizer are in a record, and the kernel for them.

    Attributes:
        spans: the bytes of each field, its first and the one after its last, the weight's first.
    """

    def __init__(
        self,
        rule: _Rule,
        layout: RecordLayout,
        names: tuple[str, ...],
        flags: Mapping[str, bool],
        rounding: Rounding,
        columns: list[int],
    ) -> None:
        self.spans: list[tuple[int, int]] = [layout.span(name) for name in names]
        fields = [layout.field(name) for name in names]
        self._dim = fields[0].dim
        self._starts = [start for start, _ in self.spans]
        sizes = [field.storage.itemsize for field in fields]
        apart = [start // size for start, size in zip(self._starts, sizes, strict=True)]
        self._packed = math.gcd(self._dim, *apart) % 4 == 0
        kinds = [_kernel_type(field) for field in fields] + ["None"] * 3
        types = zip(("WEIGHT", "FIRST", "SECOND", "THIRD"), kinds, strict=False)
        self._macros: dict[str, object] = {"OPTIMIZER": rule.name, **dict(types), **_FLAGS}
        self._macros |= {flag: int(value) for flag, value in flags.items()}
        computed = ELEMENT_TYPES[DEFAULT_DTYPE] if rounding else fields[0].element
        self._computed: torch.dtype = computed.torch_dtype()
        self._macros |= {
            "COMPUTED": computed.kernel,
            "STOCHASTIC": int(rounding.weights),
            "NARROW": int(rounding.states is not None),
            "SCALED": int(any(field.scaled for field in fields)),
        }
        self._kernels: dict[tuple[int, torch.dtype], Kernel] = {}
        self._work: Any = _Step(dim=self._dim, weight=self._starts[0], share=1 / self._dim)
        self._work.state[: len(self._starts) - 1] = self._starts[1:]
        self._work.column[: len(columns)] = columns

    def readable(self, gradient: Tensor) -> Tensor:
        """Return a gradient as the kernel takes it: what float32 holds exactly stays as it is."""
        if self._computed != torch.float32 or gradient.dtype not in _GIVEN:
            gradient = gradient.to(self._computed)
        return gradient.contiguous()

    def work(self, gradient: Tensor, trained: Tensor | None) -> Any:
        """Return what the kernel is to do, all but its numbers; until the next step."""
        work = self._work
        work.gradient = gradient.data_ptr()
        work.trained = 0 if trained is None else trained.data_ptr()
        return work

    def kernel(self, gradient: Tensor) -> Kernel:
        """Return the kernel, for accesses as wide as the address of a gradient allows."""
        vector = 4 if self._packed and gradient.data_ptr() % 16 == 0 else 1
        key = vector, gradient.dtype
        if key not in self._kernels:
            macros = {
                "GIVEN": _GIVEN[gradient.dtype],
                "VECTOR": vector,
                "SQUARES_FUSED": _squares_fused(gradient.device),
            }
            self._kernels[key] = Kernel(_SOURCE, "step", macros={**self._macros, **macros})
        return self._kernels[key]


_GIVEN = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Types of gradients that the kernel reads, as it names them."""


_FLOAT8 = {
    SIGNED.field(1, 0).form: "E4M3FN",
    SIZES.field(1, 0).form: "E5M2",
}


def _kernel_type(item: Field) -> str | None:
    """Return the type of a field in step.cu, None for one that it does not know."""
    return item.element.kernel if item.scaled is None else _FLOAT8.get(item.form)


class _Block:
    """Fields of one type in the bytes of records.

    Attributes:
        columns: the fields, the weight first.
        dtype: their type.
        fits: whether they are of one type that torch computes in.
        program: a step on many of them; None if torch has no way to run it.
    """

    def __init__(self, columns: Columns, program: str) -> None:
        """Find out whether operators can work on the fields in place."""
        self.columns = columns
        items, starts = columns.items, [lo for lo, _ in columns.spans]
        self._storage = items[0].storage
        size = self._storage.itemsize
        self.dtype: torch.dtype = items[0].element.torch_dtype()
        self.fits: bool = (
            self.dtype in (torch.float32, torch.float64)
            and all(item.dtype == items[0].dtype for item in items)
            and all(start % size == 0 for start in (*starts, columns.hi))
        )
        self._dims = [item.dim for item in items]
        self._places = [(start - columns.lo) // size for start in starts]
        ends = [0, *map(operator.add, self._places, self._dims)]
        self._adjacent = all(at == end for at, end in zip(self._places, ends, strict=False))
        programs = compiled()
        self.program: Program | None = None
        if programs is not None:
            run = getattr(programs, f"many_{program}")
            lo, hi = columns.lo, columns.hi
            self.program = Program(run, lo, hi, self._places, self._dims, self._storage)

    def rounds_to_one(self, weight: float) -> bool:
        """Whether a weight is 1 in this type: `lerp_` then returns its end exactly.

        The sign of a zero then depends on how torch traverses memory, which differs between fields
        within records and copies of them.
        """
        return bool(self._storage.type(weight) == 1)

    def fields(self, data: Any) -> Sequence[Tensor]:
        """Return the fields of records `(n, nbytes)`, views of them."""
        values = torch.from_numpy(data.view(self._storage))
        if self._adjacent:
            parts: Sequence[Tensor] = values.split_with_sizes(self._dims, 1)
            return parts
        places = zip(self._places, self._dims, strict=True)
        return [values.narrow(1, at, dim) for at, dim in places]


def _run(
    program: Program,
    gradient: Tensor,
    trained: Tensor | None,
    numbers: tuple[Any, ...],
    records: Any,
    slots: Any,
    part: slice,
) -> None:
    """Have a program change the records of a part of the rows, those `trained` if given."""
    work_alone()
    gradient = gradient[part]
    if trained is not None:
        kept = trained[part].flatten()
        slots, gradient = slots[kept.numpy()], gradient[kept]
    program.run(records, slots, gradient, numbers)


def _plain(group: Group) -> bool:
    """Tell whether options request what the optimizer does on the host by default."""
    if any(map(group.get, ("fused", "foreach", "capturable", "differentiable", "amsgrad"))):
        return False
    numbers = group["lr"], *group.get("betas", ()), group["weight_decay"], group["eps"]
    return not any(map(torch.is_tensor, numbers))


class _Adam(NamedTuple):
    """A step of Adam: which kind, and the numbers of `_adam`."""

    maximize: bool
    decouples: bool
    decay: float
    rate: float
    first: float
    keep: float
    second: float
    deviation: float
    eps: float
    shrink: float


def _adam_on_host(kind: type, group: Group, step: float) -> _Adam:
    decouples = group["weight_decay"] != 0 and _decouples(group, kind)
    return _Adam(group["maximize"], decouples, *_adam(kind, group, step))


def _update_adam(fields: Sequence[Tensor], gradient: Tensor, numbers: _Adam) -> None:
    """Do what `torch.optim.Adam` does, operator by operator.

    Operators that round once agree to the bit in torch and NumPy, and NumPy's take a number in a
    fraction of the time. `deviation` has no gaps: with gaps, torch's root takes ten times as long.
    """
    weight, first, second = fields
    if numbers.maximize:
        gradient = -gradient
    if numbers.decouples:
        weight.mul_(numbers.shrink)
    if numbers.decay != 0:
        gradient = gradient.add(weight, alpha=numbers.decay)
    first.lerp_(gradient, numbers.first)
    kept = second.numpy()
    with np.errstate(all="ignore"):  # as torch, which warns of no infinity
        values = kept * numbers.keep
        deviation = torch.from_numpy(values)
        deviation.addcmul_(gradient, gradient, value=numbers.second)
        kept[:] = values
        deviation.sqrt_()
        values /= numbers.deviation
        values += numbers.eps
    weight.addcdiv_(first, deviation, value=numbers.rate)


class _RowWise(NamedTuple):
    """The numbers of a step of RowWiseAdagrad."""

    maximize: bool
    decay: float
    rate: float
    eps: float


def _row_wise_on_host(group: Group, step: float) -> _RowWise:
    return _RowWise(group["maximize"], *_adagrad(group, step))


def _update_row_wise(fields: Sequence[Tensor], gradient: Tensor, numbers: _RowWise) -> None:
    """Do what `RowWiseAdagrad` does, as one program where there is one."""
    programs = compiled()
    if programs is not None:
        programs.row_wise(list(fields), gradient, torch.empty_like(gradient), *numbers)
    else:
        weight, total = fields
        row_wise.update(weight, total[:, 0], gradient, **numbers._asdict())


_ON_HOST: dict[type, _HostRule] = {
    kind: _HostRule(
        "adam",
        ("exp_avg", "exp_avg_sq"),
        functools.partial(_adam_on_host, kind),
        _update_adam,
    )
    for kind in (torch.optim.Adam, torch.optim.AdamW)
}
_ON_HOST[RowWiseAdagrad] = _HostRule("row_wise", ("sum",), _row_wise_on_host, _update_row_wise)


def _usual(group: Group) -> bool:
    """Tell whether options request the results of the usual way, and are known on the host."""
    if group.get("foreach") is False or group.get("capturable") or group.get("differentiable"):
        return False
    numbers = (group["lr"], *group.get("betas", ()))
    return not any([isinstance(number, Tensor) for number in numbers])  # noqa: C419 - fewer calls


@functools.cache
def _squares_fused(device: torch.device) -> int:
    """Return 1 if torch rounds only once where it adds a square to a number, as torch 2.11 does."""
    one, number = (torch.full((1,), value, device=device) for value in (-1.0, 1 + 2**-12))
    (found,) = torch._foreach_addcmul([one], [number], [number], value=1)
    return int(float(found) != 2**-11)


_FLAGS = dict.fromkeys(("MAXIMIZE", "DECOUPLED", "AMSGRAD", "NESTEROV", "MOMENTUM", "CENTERED"), 0)


def _sgd(group: Group, step: float) -> tuple[float, ...]:
    undamped = 1 - group["dampening"]
    return group["weight_decay"], -group["lr"], group["momentum"], undamped, float(step == 1)


def _decouples(group: Group, kind: type) -> bool:
    """Tell whether the decay is of the weights themselves; torch before 2.7 tells by the class."""
    return bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW))


def _adam(kind: type, group: Group, step: float) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    lr, decay = group["lr"], group["weight_decay"]
    return (
        0.0 if decay == 0 or _decouples(group, kind) else decay,
        -(lr / (1 - beta1**step)),
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        group["eps"],
        1 - lr * decay,
    )


def _adagrad(group: Group, step: float) -> tuple[float, ...]:
    rate = -group["lr"] / (1 + (step - 1) * group["lr_decay"])
    return group["weight_decay"], rate, group["eps"]


def _rmsprop(group: Group, step: float) -> tuple[float, ...]:
    alpha = group["alpha"]
    return (
        group["weight_decay"],
        -group["lr"],
        alpha,
        1 - alpha,
        group["eps"],
        group["momentum"],
    )


def _rmsprop_states(group: Group) -> tuple[str, ...]:
    centered = ("grad_avg",) if group["centered"] else ()
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    return ("square_avg", *centered, *momentum)


_SGD = _Rule(
    "SGD",
    lambda group: ("momentum_buffer",) if group["momentum"] != 0 else (),
    lambda group: {
        "MAXIMIZE": group["maximize"],
        "MOMENTUM": group["momentum"] != 0,
        "NESTEROV": group["nesterov"],
    },
    _sgd,
)


def _adam_rule(kind: type) -> _Rule:
    return _Rule(
        "ADAM",
        lambda group: (
            "exp_avg",
            "exp_avg_sq",
            *(("max_exp_avg_sq",) if group["amsgrad"] else ()),
        ),
        lambda group: {
            "MAXIMIZE": group["maximize"],
            "DECOUPLED": _decouples(group, kind),
            "AMSGRAD": group["amsgrad"],
        },
        functools.partial(_adam, kind),
    )


_ADAGRAD = _Rule(
    "ADAGRAD", lambda _: ("sum",), lambda group: {"MAXIMIZE": group["maximize"]}, _adagrad
)
_RMSPROP = _Rule(
    "RMSPROP",
    _rmsprop_states,
    lambda group: {
        "MAXIMIZE": group["maximize"],
        "CENTERED": group["centered"],
        "MOMENTUM": group["momentum"] > 0,
    },
    _rmsprop,
)
_RULES: dict[type, _Rule] = {
    torch.optim.SGD: _SGD,
    torch.optim.Adam: _adam_rule(torch.optim.Adam),
    torch.optim.AdamW: _adam_rule(torch.optim.AdamW),
    torch.optim.Adagrad: _ADAGRAD,
    torch.optim.RMSprop: _RMSPROP,
    RowWiseAdagrad: dataclasses.replace(_ADAGRAD, name="ROWWISE"),
}
