"""From a budget to tiers: what a table gets over its disk tier, and where."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from tierstore._table.tiers import LowestTier, Tiers
from tierstore._tiers import capacity
from tierstore._tiers.gpu import GpuTier
from tierstore._tiers.gpu.device import CudaDevice, Device
from tierstore._tiers.gpu.memory import GpuMemory
from tierstore._tiers.host import HostTier
from tierstore._tiers.memory import available_bytes
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

__all__ = ["check_fit", "check_names", "find_device", "place"]


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


def check_fit(
    tables: Mapping[str, TableSpec],
    budget: Budget,
    policy: Policies | None,
    device: Device | None,
) -> None:
    """Check that tables can be placed, before anything is made for them.

    Raises CapacityError for a budget that is too small for one of them, and what a wrong policy
    raises. Memory that is not there shows only in `place`.
    """
    total = sum(spec.nbytes for spec in tables.values())
    for name, spec in tables.items():
        _slots_of(
            spec.rows,
            spec.layout.record_bytes,
            name,
            budget,
            share=spec.nbytes / total,
            device=device,
            policy=choose(policy, name),
        )


def place(
    disk: LowestTier,
    name: str,
    budget: Budget,
    *,
    share: float,
    device: Device | None,
    policy: PolicySpec,
) -> Tiers:
    """Return the tiers a budget gives to a table over its disk tier.

    `share` is the table's part of what is given for all tables, `policy` is that of both tiers.
    Raises CapacityError.
    """
    rows, width = disk.rows, disk.record_bytes
    slots, on_gpu = _slots_of(rows, width, name, budget, share=share, device=device, policy=policy)
    if slots == 0:
        return Tiers(name, disk)
    disk.queue_bytes = capacity.queue_bytes(width, min(slots, rows))
    if device is None:
        return Tiers(name, disk, HostTier(disk, slots=slots, policy=policy))
    kind = device.arena_kind(capacity.bytes_for(rows, width, slots, policy))
    with device.current():
        host = HostTier(disk, slots=slots, kind=kind, policy=policy)
        try:
            return Tiers(name, disk, host, _gpu_tier(host, on_gpu, device, policy))
        except BaseException:
            host.close()
            raise


def _slots_of(
    rows: int,
    width: int,
    name: str,
    budget: Budget,
    *,
    share: float,
    device: Device | None,
    policy: PolicySpec,
) -> tuple[int, int]:
    """Return the slots of a table of `rows` records of `width` bytes in the host and GPU tiers.

    A GPU tier needs a host tier under it, and a device that was asked for a GPU tier, so there each
    has one slot at least. Raises CapacityError.
    """
    least = 0 if device is None else 1
    whole = capacity.bytes_for(rows, width, rows)
    default = min(whole, int(available_bytes() // 4 * share))
    slots_for = functools.partial(capacity.slots_for, policy=policy)
    on_host = max(_slots(budget, "host", name, rows, width, share, default, slots_for), least)
    if 0 < on_host < rows:
        policy.check(rows)
    if device is None:
        return on_host, 0
    with device.current():
        scored = policy.on_device() is not None
        whole = GpuMemory.bytes_for(rows, width, rows, scored=scored)
        default = min(whole, int(device.free_bytes() // 2 * share))
        slots_for = functools.partial(GpuMemory.slots_for, scored=scored)
        on_gpu = _slots(budget, "gpu", name, rows, width, share, default, slots_for)
        return on_host, max(on_gpu, least)


def _slots(
    budget: Budget,
    tier: str,
    table: str,
    rows: int,
    record_bytes: int,
    share: float,
    default: int,
    slots_for: Callable[[int, int, int], int],
) -> int:
    slots = budget._slots(tier, table)
    if slots is not None:
        return slots
    nbytes = budget._nbytes(tier, table, share)
    return slots_for(rows, record_bytes, default if nbytes is None else nbytes)


def _gpu_tier(host: HostTier, slots: int, device: Device, policy: PolicySpec) -> GpuTier:
    try:
        return GpuTier(host, slots=slots, device=device, policy=policy)
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError" and "cudaErrorMemoryAllocation" not in str(
            error
        ):
            raise
        scored = policy.on_device() is not None
        nbytes = GpuMemory.bytes_for(host.rows, host.record_bytes, slots, scored=scored)
        raise CapacityError(
            f"the GPU has no room for {slots} slots, {nbytes} bytes of {device.free_bytes()} free; "
            "give a smaller gpu budget"
        ) from error
