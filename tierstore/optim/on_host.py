"""Steps of an optimizer on the records of a batch in host memory, by the core.

The results are those of torch's optimizers on the CPU, to the bit. The core takes their operations
in the order of torch, and torch takes the square roots, which it does not round in the same way on
all processors. Where torch itself rounds otherwise than the core does, it takes the whole step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore import _core
from tierstore._parts import threads_of_core
from tierstore._tiers.base import Bytes
from tierstore._tiers.slots import Slots
from tierstore.nn.zeros import Zeros
from tierstore.optim.rounding import Rounding
from tierstore.spec import RecordLayout

__all__ = ["OnHost"]

_SGD, _ADAM, _ADAGRAD, _ROWWISE = range(1, 5)
_RULES = {"SGD": _SGD, "ADAM": _ADAM, "ADAGRAD": _ADAGRAD, "ROWWISE": _ROWWISE}
_FLAGS = {"MAXIMIZE": 1, "DECOUPLED": 2, "MOMENTUM": 4, "NESTEROV": 8}
_NUMBERS = 8
_ALONE = 32768
"""Numbers that torch works on in the thread that asks; it starts others for more of them. They
also stay in the processor's own cache between the halves of a step. Where there are several threads
each has as many, four times: the core shares calls from 2 MiB of records on."""
_OTHER_WAYS = "foreach", "fused", "capturable", "differentiable"


class OnHost:
    """Where the fields of an optimizer are in a record, and the core's names for its step."""

    def __init__(
        self, rule: str, flags: Mapping[str, bool], layout: RecordLayout, names: tuple[str, ...]
    ) -> None:
        spans = [layout.span(name) for name in names]
        self._rule = _RULES[rule]
        self._flags = sum(_FLAGS[flag] for flag, is_set in flags.items() if is_set)
        self._starts = tuple(start for start, _ in spans)
        self._span = min(self._starts), max(stop for _, stop in spans)
        self._dtype = layout.field(names[0]).element.torch_dtype()
        self._storage = layout.field(names[0]).storage
        self._dim = layout.field(names[0]).dim
        self._roots = 1 if self._rule == _ROWWISE else self._dim

    @classmethod
    def of(
        cls,
        rule: str,
        layout: RecordLayout,
        names: tuple[str, ...],
        flags: Mapping[str, bool],
        rounding: Rounding,
        states: tuple[str, ...],
    ) -> OnHost | None:
        """Return the step for fields, the weight first; None where the core cannot take it.

        That is for other types than float32 and float64, fields that are not aligned, RMSprop,
        AMSGrad, and on a processor that does not multiply and add in one operation.
        """
        items = [layout.field(name) for name in names]
        dtype, size = items[0].element.torch_dtype(), items[0].storage.itemsize
        starts = [layout.span(name)[0] for name in names]
        if (
            rule not in _RULES
            or not {flag for flag, is_set in flags.items() if is_set} <= _FLAGS.keys()
            or rounding
            or dtype not in (torch.float32, torch.float64)
            or any(item.form != items[0].form for item in items)
            or any(start % size for start in (*starts, layout.record_bytes))
            or not _rounds_as_torch(dtype)
        ):
            return None
        return cls(rule, flags, layout, names)

    @staticmethod
    def takes(group: Mapping[str, Any]) -> bool:
        """Tell whether options request what the optimizer does by default, with plain numbers."""
        kinds = {*map(type, (*group.values(), *group.get("betas", ())))}
        differs = any(map(group.get, _OTHER_WAYS))
        return not (differs or any(map(Tensor.__subclasscheck__, kinds)))

    def step(
        self,
        lease: Any,
        gradient: Tensor,
        trained: Tensor | None,
        numbers: tuple[float, ...],
        step: int,
        ids: Callable[[], Tensor],
        *,
        ends: bool,
        zeros: Zeros | None,
    ) -> bool:
        """Take a step as `InPlace.step` does."""
        if self._rule == _ADAM and self._storage.type(numbers[2]) == 1:
            # `lerp_` returns its end then, exactly; the sign of a zero depends on how torch
            # traverses memory, which differs between fields within records and copies of them.
            return False
        given = gradient.detach().to(self._dtype).contiguous().numpy()
        marks = None if trained is None else trained.numpy().reshape(-1)
        head = self._rule, self._flags, (numbers + (0.0,) * _NUMBERS)[:_NUMBERS]
        threads = threads_of_core()
        most = max(1, _ALONE * (1 if threads == 1 else 4 * threads) // self._dim)

        def change(records: Bytes, slots: Slots) -> None:
            room = np.empty((min(most, slots.size), self._roots), given.dtype)
            for at in range(0, slots.size, most):
                now = slice(at, at + most)
                roots = room[: slots.size - at]
                of = records, slots[now], self._starts, given[now]
                _take(*head, *of, None if marks is None else marks[now], roots)

        done: bool = lease.update(*self._span, change)
        return done


def _take(*given: Any) -> None:
    """Take a step, with the roots of torch; SGD has none."""
    rule, *_, roots = given
    if rule != _SGD:
        _core.begin_step(*given)
        torch.from_numpy(roots).sqrt_()
    _core.end_step(*given)


@functools.cache
def _rounds_as_torch(dtype: torch.dtype) -> bool:
    """Whether torch rounds here as the core does, in the operations that its optimizers call.

    It multiplies and adds in one operation where its own loops are made for this processor.
    """
    if not _core.FUSES:
        return False
    drawn = torch.rand(4, 3, 67, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight, mean, square, gradient = drawn.to(dtype)
    records = np.ascontiguousarray(torch.cat([weight, mean, square], 1).numpy()).view(np.uint8)
    slots, width = np.arange(3, dtype=np.int32), weight.shape[1] * dtype.itemsize
    given, roots = gradient.numpy(), np.empty_like(gradient.numpy())
    adam = 0.3, -0.1, 0.2, 0.9, 0.1, 0.7, 1e-3, 1.0
    _take(_ADAM, 0, adam, records, slots, (0, width, 2 * width), given, None, roots)
    change = gradient.add(weight, alpha=0.3)
    mean.lerp_(change, 0.2)
    square.mul_(0.9).addcmul_(change, change, value=0.1)
    weight.addcdiv_(mean, (square.sqrt() / 0.7).add_(1e-3), value=-0.1)
    expected = torch.cat([weight, mean, square], 1).numpy()
    return bool(records.tobytes() == expected.tobytes())
