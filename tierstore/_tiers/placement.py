"""From a budget to spaces: which tables share tiers, and what memory those get."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tierstore._tiers.base import LowestTier
from tierstore._tiers.gpu import GpuTier
from tierstore._tiers.gpu.device import CudaDevice, Device
from tierstore._tiers.gpu.memory import GpuMemory
from tierstore._tiers.host import HostTier
from tierstore._tiers.memory import available_bytes
from tierstore._tiers.slots import bytes_for, queue_bytes, slots_for
from tierstore._tiers.space import Space, laid_out, lowest_of
from tierstore.budget import Budget
from tierstore.errors import (
    CapacityError,
    DeviceError,
    InvalidInputError,
    InvalidTypeError,
    UnknownNameError,
)
from tierstore.policy import Policies, PolicySpec, choose
from tierstore.spec import TableSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Placement", "check_names", "find_device"]


def find_device(name: str | torch.device | Device) -> Device | None:
    """Return the device of a name, or None for the CPU: "cpu", "cuda", "cuda:1" or "auto".

    A torch.device stands for its name.

    Raises DeviceError, or MissingExtraError, if a GPU is asked for and cannot be had. CuPy is
    imported for nothing but a GPU.
    """
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(name, torch_module.device):
        name = str(name)
    if not isinstance(name, str):
        if not hasattr(name, "torch_name"):
            raise InvalidTypeError(f"a device is a name such as 'cuda:0', not {name!r}")
        return name
    if name == "cpu":
        return None
    if name == "auto":
        if importlib.util.find_spec("cupy") is None:
            return None
        with contextlib.suppress(DeviceError):
            return CudaDevice(0)
        return None
    match = re.fullmatch(r"cuda(?::(\d{1,3}))?", name)
    if match is None:
        raise InvalidInputError(f"not a device: {name!r}; cpu, cuda, cuda:1 or auto")
    return CudaDevice(int(match.group(1) or 0))


def check_names(tables: Iterable[str], budget: Budget, policy: Policies | None) -> None:
    """Check that a budget and a policy name only tables that exist; raises UnknownNameError."""
    known = set(tables)
    named = {"budget": budget._tables, "policy": set(policy) if isinstance(policy, Mapping) else ()}
    for what, names in named.items():
        for name in names:
            if name not in known:
                raise UnknownNameError(
                    f"the {what} names a table {name!r}; there are: {', '.join(known) or 'none'}"
                )


class Shape(NamedTuple):
    """What decides where a table is placed: its rows, bytes a record, and policy."""

    rows: int
    record_bytes: int
    policy: PolicySpec

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.rows * self.record_bytes


class Placement:
    """Places tables within a budget: which of them share tiers, and how many slots those have."""

    def __init__(self, budget: Budget, policy: Policies | None, device: Device | None) -> None:
        """Take the budget of all tables together, their policies, and the device or None."""
        self._budget = budget
        self._policy = policy
        self._device = device

    def _shapes(self, specs: Mapping[str, TableSpec]) -> dict[str, Shape]:
        by_table = isinstance(self._policy, Mapping)
        policy = choose(None if by_table else self._policy)
        return {
            name: Shape(
                spec.rows,
                spec.layout.record_bytes,
                choose(self._policy, name) if by_table else policy,
            )
            for name, spec in specs.items()
        }

    def groups(self, specs: Mapping[str, TableSpec]) -> list[tuple[str, ...]]:
        """Return the tables that are to share a space, each group in the order of `specs`.

        Their records are equally long, their policy is the same and no table's own, and the budget
        names none of them.
        """
        found: dict[object, list[str]] = {}
        named = self._budget._tables
        for name, shape in self._shapes(specs).items():
            alone = name if shape.policy.by_table or name in named else ""
            found.setdefault((alone, shape.record_bytes, shape.policy), []).append(name)
        return [tuple(names) for names in found.values()]

    def check_fit(self, specs: Mapping[str, TableSpec]) -> None:
        """Check that tables can be placed, before anything is made for them.

        Raises CapacityError for a budget that is too small for one of them, and what a wrong policy
        raises. Memory that is not there shows only in `place`.
        """
        shapes = self._shapes(specs)
        for group in self.groups(specs):
            self._slots({name: shapes[name] for name in group}, shapes)

    def place(self, tiers: Mapping[str, LowestTier], specs: Mapping[str, TableSpec]) -> Space:
        """Return the space of the tables of a group, over their lowest tiers.

        `specs` are those of all tables that share the budget. Raises CapacityError.
        """
        shapes = self._shapes(specs)
        group = {name: shapes[name] for name in tiers}
        extents = laid_out(list(tiers.items()))
        lowest = lowest_of(extents)
        on_host, on_gpu = self._slots(group, shapes)
        if on_host == 0:
            return Space(extents, lowest)
        rows, width, policy = _together(group)
        slots, starts = min(on_host, rows), [extent.start for extent in extents]
        for extent in extents:
            queue = queue_bytes(width, slots)
            extent.tier.queue_bytes = queue * extent.rows // rows
        device = self._device
        if device is None:
            host = HostTier(lowest, slots=slots, policy=policy, starts=starts)
            return Space(extents, lowest, host)
        kind = device.arena_kind(bytes_for(rows, width, slots, policy))
        with device.current():
            host = HostTier(lowest, slots=slots, kind=kind, policy=policy, starts=starts)
            try:
                return Space(extents, lowest, host, _gpu_tier(host, on_gpu, policy, device))
            except BaseException:
                host.close()
                raise

    def _slots(self, group: Mapping[str, Shape], every: Mapping[str, Shape]) -> tuple[int, int]:
        """Return the slots of a group's host tier and of its GPU tier.

        A GPU tier needs a host tier under it, and a device that was asked for a GPU tier, so there
        each has one slot at least. Raises CapacityError.
        """
        rows, width, policy = _together(group)
        share = rows * width / sum(shape.nbytes for shape in every.values())
        least = 0 if self._device is None else 1
        whole = bytes_for(rows, width, rows)
        default = min(whole, int(available_bytes() // 4 * share))
        fitting = functools.partial(slots_for, policy=policy)
        on_host = max(self._slots_in("host", group, share, default, fitting), least)
        if 0 < on_host < rows:
            policy.check(rows)
        if self._device is None:
            return on_host, 0
        with self._device.current():
            scored = policy.on_device() is not None
            whole = GpuMemory.bytes_for(rows, width, rows, scored=scored)
            default = min(whole, int(self._device.free_bytes() // 2 * share))
            fitting = functools.partial(GpuMemory.slots_for, scored=scored)
            on_gpu = self._slots_in("gpu", group, share, default, fitting)
            return on_host, max(on_gpu, least)

    def _slots_in(
        self,
        tier: str,
        group: Mapping[str, Shape],
        share: float,
        default: int,
        fitting: Callable[[int, int, int], int],
    ) -> int:
        """Return the slots that the budget gives a group in a tier, by rows or by bytes."""
        asked = [self._budget._slots(tier, name) for name in group]
        slots = [
            min(count, shape.rows)
            for count, shape in zip(asked, group.values(), strict=True)
            if count is not None
        ]
        if slots:
            return sum(slots)
        rows, width, _ = _together(group)
        nbytes = self._budget._nbytes(tier, next(iter(group)), share)
        return fitting(rows, width, default if nbytes is None else nbytes)


def _together(group: Mapping[str, Shape]) -> Shape:
    """Return the shape of a space of these tables."""
    first = next(iter(group.values()))
    return first._replace(rows=sum(shape.rows for shape in group.values()))


def _gpu_tier(host: HostTier, slots: int, policy: PolicySpec, device: Device) -> GpuTier:
    try:
        return GpuTier(host, slots=slots, device=device, policy=policy)
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError" and (
            "cudaErrorMemoryAllocation" not in str(error)
        ):
            raise
        scored = policy.on_device() is not None
        nbytes = GpuMemory.bytes_for(host.rows, host.record_bytes, slots, scored=scored)
        raise CapacityError(
            f"the GPU has no room for {slots} slots, {nbytes} bytes of {device.free_bytes()} "
            "free; give a smaller gpu budget"
        ) from error
