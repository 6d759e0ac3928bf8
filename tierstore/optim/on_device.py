"""Steps of an optimizer on the records of a batch in GPU memory, by a kernel.

The results are those of torch's optimizer over lists of tensors, to the bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tierstore._dtypes import DEFAULT_DTYPE, ELEMENT_TYPES
from tierstore._tiers.gpu.abi import RECORDS
from tierstore._tiers.gpu.launcher import Kernel
from tierstore.nn.zeros import Zeros
from tierstore.optim.float8 import SIGNED, SIZES
from tierstore.optim.rounding import Rounding
from tierstore.spec import Field, RecordLayout

__all__ = ["DeviceStep"]

_SOURCE = RECORDS.extended("tierstore.optim", "step.cu")
_Step: Any = _SOURCE.structure("Step")


class DeviceStep:
    """Where the fields of an optimizer are in a record, and the kernel for them.

    Attributes:
        spans: the bytes of each field, its first and the one after its last, the weight's first.
    """

    @classmethod
    def of(
        cls,
        rule: str,
        layout: RecordLayout,
        names: tuple[str, ...],
        flags: Mapping[str, bool],
        rounding: Rounding,
        states: tuple[str, ...],
    ) -> DeviceStep | None:
        """Return the step for fields, the weight first; None where the kernel lacks a type."""
        if not all(_kernel_type(layout.field(name)) for name in names):
            return None
        return cls(rule, layout, names, flags, rounding, states)

    @staticmethod
    def takes(group: Mapping[str, Any]) -> bool:
        """Tell whether options request the results of the usual way, with numbers of the host."""
        if group.get("foreach") is False or group.get("capturable") or group.get("differentiable"):
            return False
        numbers = (group["lr"], *group.get("betas", ()))
        return not any([isinstance(each, Tensor) for each in numbers])  # noqa: C419 - fewer calls

    def __init__(
        self,
        rule: str,
        layout: RecordLayout,
        names: tuple[str, ...],
        flags: Mapping[str, bool],
        rounding: Rounding,
        states: tuple[str, ...],
    ) -> None:
        self._rounding = rounding
        self.spans: list[tuple[int, int]] = [layout.span(name) for name in names]
        fields = [layout.field(name) for name in names]
        self._dim = fields[0].dim
        self._starts = [start for start, _ in self.spans]
        sizes = [field.storage.itemsize for field in fields]
        apart = [start // size for start, size in zip(self._starts, sizes, strict=True)]
        self._packed = math.gcd(self._dim, *apart) % 4 == 0
        kinds = [_kernel_type(field) for field in fields] + ["None"] * 3
        types = zip(("WEIGHT", "FIRST", "SECOND", "THIRD"), kinds, strict=False)
        self._macros: dict[str, object] = {"OPTIMIZER": rule, **dict(types), **_FLAGS}
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
        columns = rounding.columns(states)
        self._work.column[: len(states)] = [columns[state] for state in states]

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
        given, gradient = gradient, self._readable(gradient)
        rows = ids() if self._rounding else None
        work = self._of(gradient, trained)
        if given is not gradient or trained is not None:
            zeros = None
        work.clears = zeros is not None
        if rows is not None:
            work.rows, work.count = rows.data_ptr(), step
            work.seed = self._rounding.seed
        work.number[: len(numbers)] = numbers
        kernel = self._kernel(gradient)
        lease.launch(kernel, work, lease.bound, writes=self.spans, ends=ends)
        if zeros is not None:
            zeros.put(gradient)
        return True

    def _readable(self, gradient: Tensor) -> Tensor:
        """Return a gradient as the kernel takes it: what float32 holds exactly stays as it is."""
        if self._computed != torch.float32 or gradient.dtype not in _GIVEN:
            gradient = gradient.to(self._computed)
        return gradient.contiguous()

    def _of(self, gradient: Tensor, trained: Tensor | None) -> Any:
        """Return what the kernel is to do, all but its numbers; until the next step."""
        work = self._work
        work.gradient = gradient.data_ptr()
        work.trained = 0 if trained is None else trained.data_ptr()
        return work

    def _kernel(self, gradient: Tensor) -> Kernel:
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


@functools.cache
def _squares_fused(device: torch.device) -> int:
    """Return 1 if torch rounds only once where it adds a square to a number, as torch 2.11 does."""
    one, number = (torch.full((1,), value, device=device) for value in (-1.0, 1 + 2**-12))
    (found,) = torch._foreach_addcmul([one], [number], [number], value=1)
    return int(float(found) != 2**-11)


_FLAGS = dict.fromkeys(("MAXIMIZE", "DECOUPLED", "AMSGRAD", "NESTEROV", "MOMENTUM", "CENTERED"), 0)
