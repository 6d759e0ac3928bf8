"""From a budget to spaces: which tables share tiers, and what memory those get."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tierstore._dtypes import imported_class
from tierstore._tiers.base import LowestTier, MappedTier, Tier
from tierstore._tiers.gpu import GpuTier
from tierstore._tiers.gpu.device import CudaDevice, Device
from tierstore._tiers.gpu.memory import GpuMemory
from tierstore._tiers.gpu.whole import WholeColumns
from tierstore._tiers.host import HostTier
from tierstore._tiers.memory import allocate, available_bytes
from tierstore._tiers.slots import bytes_for, index_bytes, queue_bytes, slots_for
from tierstore._tiers.space import Space, laid_out, lowest_of
from tierstore._tiers.split import Selected, Selection, Split
from tierstore.budget import Budget, format_bytes, parse_bytes, size_of_at_least
from tierstore.errors import (
    CapacityError,
    DeviceError,
    InvalidInputError,
    InvalidTypeError,
    UnknownNameError,
    counted,
)
from tierstore.policy import Policies, PolicySpec, choose
from tierstore.spec import RECORD_ALIGNMENT, RecordLayout, TableSpec

if TYPE_CHECKING:
    import torch

_EXPECTED_ROWS = 1 << 20
"""Least rows that a table without a capacity is expected to have, when memory is divided."""


def find_device(name: str | torch.device | Device) -> Device | None:
    """Return the device of a name, or None for the CPU: "cpu", "cuda", "cuda:1" or "auto".

    A torch.device stands for its name.

    Raises DeviceError for a requested GPU that is not there, and MissingExtraError for one without
    CuPy, which is imported only for a GPU.
    """
    if isinstance(name, imported_class("torch", "device")):
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


def tables_of(budget: Budget) -> dict[str, None]:
    """Return the tables with values of their own in a budget, as keys, in the order given."""
    values = (budget.host, budget.gpu, budget.host_rows, budget.gpu_rows)
    return {name: None for value in values if isinstance(value, Mapping) for name in value}


def slots_of(budget: Budget, tier: str, table: str) -> int | None:
    """Return the number of slots of a table in a tier, or None if bytes determine it."""
    value = budget.host_rows if tier == "host" else budget.gpu_rows
    return value.get(table) if isinstance(value, Mapping) else value


def nbytes_of(budget: Budget, tier: str, table: str) -> int | None:
    """Return the bytes for a table alone in a tier, or None where there are none."""
    value = budget.host if tier == "host" else budget.gpu
    if not isinstance(value, Mapping) or table not in value:
        return None
    return parse_bytes(value[table])


def total_of(budget: Budget, tier: str) -> int | None:
    """Return the bytes of a tier for all tables together, or None where none are given."""
    value = budget.host if tier == "host" else budget.gpu
    return None if value is None or isinstance(value, Mapping) else parse_bytes(value)


def check_names(tables: Iterable[str], budget: Budget, policy: Policies | None) -> None:
    """Check that a budget and a policy name only tables that exist; raises UnknownNameError."""
    known = dict.fromkeys(tables)
    named = {"budget": tables_of(budget), "policy": policy if isinstance(policy, Mapping) else ()}
    for what, names in named.items():
        for name in names:
            if name not in known:
                raise UnknownNameError(
                    f"the {what} names a table {name!r}; there are: {', '.join(known) or 'none'}"
                )


class Part(NamedTuple):
    """The tables that share a space, and its share of a budget.

    Attributes:
        tables: their names, in the order of the store.
        rows: of all of them.
        record_bytes: of each.
        policy: of the tiers.
        host_slots, gpu_slots: records that the tiers hold.
        growing: the present rows of a table that grows in place; `rows` are its expected rows.
        split: how records are split, if a GPU holds columns of the table whole; `record_bytes` is
            the size of the rest of a record.
        indexed: whether the tables below have an index of changed rows, which counts too.
        mapped: whether a GPU reads the map of the host tier, if that is not too large.
        keyed: whether a GPU tier also has a map of int64 keys, as many as it has slots.
    """

    tables: tuple[str, ...]
    rows: int
    record_bytes: int
    policy: PolicySpec
    host_slots: int = 0
    gpu_slots: int = 0
    growing: int | None = None
    split: Split | None = None
    indexed: bool = False
    mapped: bool = False
    keyed: bool = False

    @property
    def grows(self) -> bool:
        """Whether its table grows in place."""
        return self.growing is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.rows * self.record_bytes

    @property
    def whole_bytes(self) -> int:
        """Bytes of the columns that a GPU holds whole."""
        return 0 if self.split is None else self.rows * self.split.whole.nbytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of a record on the disk."""
        return self.record_bytes if self.split is None else self.split.record_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes that count for the index of changed rows below the host tier."""
        return index_bytes(self.rows, self.host_slots) if self.indexed else 0

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier, maps and the index below included."""
        return _host_bytes(self, self.host_slots) if self.host_slots else 0

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the GPU tier, maps and the columns that it holds whole included."""
        return _gpu_bytes(self, self.gpu_slots) if self.gpu_slots else 0

    def __str__(self) -> str:
        """Name the tables, as messages do."""
        if len(self.tables) == 1:
            return f"table {self.tables[0]!r}"
        first, second, *others = self.tables
        more = f" and {len(others)} more" if others else ""
        return f"tables {first!r}, {second!r}{more}, which share tiers,"


class Sizes(NamedTuple):
    """How bytes and slots of a tier convert, for a part of a budget.

    Attributes:
        bytes_for: the bytes of so many slots, maps included.
        slots_for: the slots that bytes hold; raises CapacityError if they hold none.
        free: bytes that all tables may take if the budget states none.
    """

    bytes_for: Callable[[Part, int], int]
    slots_for: Callable[[Part, int], int]
    free: Callable[[], float]


def _host_bytes(part: Part, slots: int) -> int:
    return bytes_for(part.rows, part.record_bytes, slots, part.policy, **_maps(part))


def _host_slots(part: Part, nbytes: int) -> int:
    return slots_for(part.rows, part.record_bytes, nbytes, part.policy, **_maps(part))


def _maps(part: Part) -> Mapping[str, bool]:
    """Return which maps there are besides the tier's own."""
    return {"indexed": part.indexed, "mapped": part.mapped}


def _gpu_bytes(part: Part, slots: int) -> int:
    scored = part.policy.on_device() is not None
    nbytes = GpuMemory.bytes_for(
        part.rows, part.record_bytes, slots, scored=scored, keyed=part.keyed
    )
    return nbytes + part.whole_bytes


def _gpu_slots(part: Part, nbytes: int) -> int:
    scored = part.policy.on_device() is not None
    if part.whole_bytes > nbytes:
        raise CapacityError(
            f"{nbytes} bytes of GPU memory do not hold the columns of gpu_whole, which take "
            f"{part.whole_bytes}; give a larger gpu budget, or fewer columns"
        )
    left = nbytes - part.whole_bytes
    return GpuMemory.slots_for(part.rows, part.record_bytes, left, scored=scored, keyed=part.keyed)


_ON_HOST = Sizes(_host_bytes, _host_slots, lambda: available_bytes() / 4)


class Placement:
    """Places tables within a budget: which of them share tiers, and how many slots those have."""

    def __init__(
        self,
        budget: Budget,
        policy: Policies | None,
        device: Device | None,
        *,
        indexed: bool = False,
        writable: bool = True,
    ) -> None:
        """Take the budget of all tables together, their policies, and the device or None.

        `indexed` states whether the tables below have an index of changed rows, `writable` whether
        rows are ever changed.
        """
        self._budget = budget
        self._policy = policy
        self._device = device
        self._indexed = indexed
        self._writable = writable

    def parts(self, specs: Mapping[str, TableSpec], *, on_gpu: bool) -> list[Part]:
        """Return the tables that are to share a space, without slots yet, in the order of `specs`.

        Their records are equally long, they share a policy that is no table's own, the budget names
        none of them, none grows, and a GPU holds no columns of them whole.
        """
        splits = _splits(specs, self._budget.gpu_whole)
        splits = splits if on_gpu else dict.fromkeys(specs)
        by_table = isinstance(self._policy, Mapping)
        policy = choose(None if by_table else self._policy)
        named = tables_of(self._budget)
        found: dict[tuple[str, int, PolicySpec], list[str]] = {}
        for name, spec in specs.items():
            chosen = choose(self._policy, name) if by_table else policy
            split = splits[name]
            own = chosen.by_table or name in named or spec.grows or split is not None
            record_bytes = spec.layout.record_bytes if split is None else split.cached.nbytes
            found.setdefault((name if own else "", record_bytes, chosen), []).append(name)
        return [
            self._part(tuple(names), specs, record_bytes, chosen)._replace(
                split=splits[names[0]], mapped=on_gpu
            )
            for (_, record_bytes, chosen), names in found.items()
        ]

    def _part(
        self,
        names: tuple[str, ...],
        specs: Mapping[str, TableSpec],
        record_bytes: int,
        policy: PolicySpec,
    ) -> Part:
        rows, growing = sum(specs[name].rows for name in names), None
        if self._device is None and specs[names[0]].grows:
            rows, growing = max(2 * rows, _EXPECTED_ROWS), rows
        keyed = growing is None and any(specs[name].keys == "int64" for name in names)
        return Part(
            names,
            rows,
            record_bytes,
            policy,
            growing=growing,
            indexed=self._indexed,
            keyed=keyed,
        )

    def plan(self, specs: Mapping[str, TableSpec], *, any_gpu: bool = False) -> list[Part]:
        """Return the spaces of tables of these specs, with the slots that each gets.

        A GPU tier needs a host tier below it, and a requested device needs a GPU tier, so there
        each has at least one slot. With `any_gpu` the budget's bytes count for a GPU that this
        machine need not have. Raises CapacityError for a budget that is too small, naming the
        tables, and the errors of a wrong policy. `check` also detects that memory is missing.
        """
        least = 0 if self._device is None and not any_gpu else 1
        parts = self.parts(specs, on_gpu=bool(least))
        on_host = self._slots("host", parts, specs, _ON_HOST)
        parts = [
            part._replace(host_slots=max(min(slots, part.rows - part.grows), least))
            for part, slots in zip(parts, on_host, strict=True)
        ]
        for part in parts:
            if 0 < part.host_slots < part.rows:
                part.policy.check(part.rows)
        if not least:
            return parts
        with contextlib.nullcontext() if self._device is None else self._device.current():
            on_gpu = self._slots("gpu", parts, specs, self._on_gpu)
        return [
            part._replace(gpu_slots=max(slots, least))
            for part, slots in zip(parts, on_gpu, strict=True)
        ]

    def check(self, specs: Mapping[str, TableSpec]) -> None:
        """Check that tables of these specs can be placed, before anything is written for them.

        Raises what `plan` does, and CapacityError for tiers that are larger than the memory that
        this machine, or its GPU, can give at all. What others leave free only `place` detects.
        """
        for part in self.plan(specs):
            nbytes = part.host_slots * part.record_bytes
            try:
                allocate(nbytes).close()  # no page of it is taken
            except CapacityError as error:
                raise CapacityError(
                    f"{part} cannot be placed: {counted(part.host_slots, 'row')} in host memory "
                    f"take {format_bytes(nbytes)}, which this machine cannot give ({error}); give "
                    "a smaller host budget"
                ) from None
            if self._device is None:
                continue
            most = self._device.total_bytes()
            if part.gpu_bytes > most:
                raise CapacityError(
                    f"{part} cannot be placed: {counted(part.gpu_slots, 'row')} on the GPU take "
                    f"{format_bytes(part.gpu_bytes)}, and it has {format_bytes(most)}; give a "
                    "smaller gpu budget"
                )

    @property
    def _on_gpu(self) -> Sizes:
        device = self._device
        return Sizes(_gpu_bytes, _gpu_slots, lambda: device.free_bytes() / 2 if device else 0)

    def place(
        self,
        part: Part,
        tiers: Mapping[str, LowestTier],
        select: Callable[[LowestTier, Selection], MappedTier] = Selected,
    ) -> Space:
        """Return the space of the tables of a part, over their lowest tiers; raises CapacityError.

        This call allocates its memory. `select` returns a tier of some bytes of each record.
        """
        extents = laid_out([(name, tiers[name]) for name in part.tables])
        split = part.split
        lowest = lowest_of(extents)
        if split is not None:
            lowest = select(extents[0].tier, split.cached)
        if part.host_slots == 0:
            return Space(extents, lowest)
        rows, width, policy, slots = part.rows, part.record_bytes, part.policy, part.host_slots
        starts = [extent.start for extent in extents]
        queue = queue_bytes(width, slots)
        for extent in extents:
            extent.tier.queue_bytes = queue if part.grows else queue * extent.rows // rows
        device = self._device
        if device is None:
            host = HostTier(lowest, slots=slots, policy=policy, starts=starts, grows=part.grows)
            return Space(extents, lowest, host)
        kind = device.arena_kind(part.host_bytes)
        with device.current():
            host = HostTier(
                lowest, slots=slots, kind=kind, policy=policy, starts=starts, mapped=part.mapped
            )
            try:
                whole = None
                if split is not None:
                    whole = _whole(device, select(extents[0].tier, split.whole), split)
                gpu = self._gpu_tier(host, part.gpu_slots, policy, device)
                return Space(extents, lowest, host, gpu, whole)
            except BaseException:
                host.close()
                raise

    def _gpu_tier(self, host: HostTier, slots: int, policy: PolicySpec, device: Device) -> GpuTier:
        scored = policy.on_device() is not None
        nbytes = GpuMemory.bytes_for(host.rows, host.record_bytes, slots, scored=scored)
        with _explained(device, f"{slots} slots, {nbytes} bytes"):
            return GpuTier(host, slots=slots, device=device, policy=policy, writable=self._writable)

    def _slots(
        self, tier: str, parts: Sequence[Part], specs: Mapping[str, TableSpec], sizes: Sizes
    ) -> list[int]:
        """Return the slots of each part in a tier: as requested, or as many as its bytes hold."""
        slots = [self._asked(tier, part, specs) for part in parts]
        by_bytes = [part for part, count in zip(parts, slots, strict=True) if count is None]
        own = {part: nbytes_of(self._budget, tier, part.tables[0]) for part in by_bytes}
        rest = [part for part in by_bytes if own[part] is None]
        total = total_of(self._budget, tier)
        may_do_without = tier == "host" and total is None and self._device is None
        if rest and total is None:
            whole = sum(part.nbytes for part in rest) / sum(part.nbytes for part in parts)
            total = int(sizes.free() * whole)
        sharing = rest
        if sum(_least(part, sizes) for part in rest) > (total or 0):
            sharing = [_present(part) for part in rest]  # no room for rows that are yet to come
        divisions = divided(total or 0, sharing, sizes)
        shares = {
            part: max(divisions[each], min(total or 0, 1))  # 0 bytes would be a wish for none
            for part, each in zip(rest, sharing, strict=True)
        }
        held = {}
        for part, nbytes in own.items():
            try:
                held[part] = _held(part, shares[part] if nbytes is None else nbytes, sizes)
            except CapacityError:
                if nbytes is None and len(rest) > 1 and not may_do_without:
                    needed = size_of_at_least(sum(_least(each, sizes) for each in sharing))
                    raise CapacityError(
                        f"{part} cannot be placed: a {tier} budget of {total} bytes cannot hold "
                        f"the maps and one record of each table that shares it; give at least "
                        f"{tier}={needed!r}, or 0 for no {tier} tier"
                    ) from None
                if nbytes is not None or not may_do_without:
                    raise
                held[part] = 0  # drop a default host tier that is too large for this machine
        return [
            held[part] if count is None else count for part, count in zip(parts, slots, strict=True)
        ]

    def _asked(self, tier: str, part: Part, specs: Mapping[str, TableSpec]) -> int | None:
        """Return the slots that the budget requests by number, or None if bytes decide."""
        asked = [(name, slots_of(self._budget, tier, name)) for name in part.tables]
        most = {name: part.rows if part.grows else specs[name].rows for name in part.tables}
        counts = [min(count, most[name]) for name, count in asked if count is not None]
        return sum(counts) if counts else None


def divided(total: int, parts: Sequence[Part], sizes: Sizes) -> dict[Part, int]:
    """Return how many of `total` bytes each part of a budget gets.

    Parts that fit whole in an equal share get their full size, the smallest first: a table of ten
    rows is not worth a division. The others divide the rest in proportion to their own bytes, but
    each gets at least its maps and one record if `total` allows that.
    """
    shares: dict[Part, int] = {}
    whole = {part: sizes.bytes_for(part, part.rows) for part in parts}
    least = {part: _least(part, sizes) for part in parts}
    left, needed = total, sum(least.values())
    rest = sorted(parts, key=lambda part: whole[part])
    while rest:
        part = rest[0]
        spare = left - needed + least[part]
        if whole[part] > min(spare, left // len(rest)):
            break
        shares[rest.pop(0)] = whole[part]
        left -= whole[part]
        needed -= least[part]
    while rest:
        weight = sum(part.nbytes for part in rest)
        short = [part for part in rest if left * part.nbytes // weight < least[part]]
        if not short or needed > left:
            return shares | {part: left * part.nbytes // weight for part in rest}
        for part in short:
            rest.remove(part)
            shares[part] = least[part]
            left -= least[part]
            needed -= least[part]
    return shares


def _least(part: Part, sizes: Sizes) -> int:
    """Return the bytes of the maps of a part and one record."""
    return min(sizes.bytes_for(part, 1), sizes.bytes_for(part, part.rows))


def _present(part: Part) -> Part:
    """Return a part with only the rows that its table has now, if that grows in place."""
    if part.growing is None:
        return part
    return part._replace(rows=part.growing)


def _held(part: Part, nbytes: int, sizes: Sizes) -> int:
    """Return the slots that bytes hold; CapacityError, naming the tables, if they hold none."""
    try:
        return sizes.slots_for(part, nbytes)
    except CapacityError as error:
        fewer = _present(part)
        if fewer != part:
            return _held(fewer, nbytes, sizes)
        raise CapacityError(f"{part} cannot be placed: {error}") from None


def _splits(specs: Mapping[str, TableSpec], columns: Sequence[str]) -> dict[str, Split | None]:
    """Return for each table how its records are split, where it has some of these columns.

    Raises UnknownNameError for a column that no table has, and InvalidInputError for a table that
    would have no other column, or whose rows are found by key.
    """
    for column in columns:
        if all(spec.layout.column(column) is None for spec in specs.values()):
            known = {name: None for spec in specs.values() for name in spec.fields}
            raise UnknownNameError(
                f"gpu_whole names a column {column!r}, which no table has; the fields are "
                f"{', '.join(known) or 'none'}, and FIELD.scale is the scales of a field"
            )
    return {name: _split(name, spec, columns) for name, spec in specs.items()}


def _split(name: str, spec: TableSpec, columns: Sequence[str]) -> Split | None:
    layout = spec.layout
    whole = _united(span for column in columns if (span := layout.column(column)) is not None)
    if not whole:
        return None
    if spec.keys is not None:
        raise InvalidInputError(f"table {name!r} is by key, and gpu_whole is for tables by id")
    cached = [span for each in layout.offsets for span in _rest(layout, each, whole)]
    if not cached:
        raise InvalidInputError(
            f"gpu_whole names every column of table {name!r}, which leaves none to cache: give a "
            "gpu budget for all of its rows instead"
        )
    split = Selection.of(cached, RECORD_ALIGNMENT), Selection.of(whole)
    return Split(*split, layout.record_bytes)


def _united(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return byte ranges without those that are within another one."""
    given = sorted(set(spans))
    return [
        one
        for one in given
        if not any(other[0] <= one[0] and one[1] <= other[1] for other in given if other != one)
    ]


def _rest(
    layout: RecordLayout, field: str, whole: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the byte range of a field that is not held whole: all, its elements, or nothing."""
    lo, hi = layout.span(field)
    if (lo, hi) in whole:
        return []
    scaled = layout.field(field).scaled
    if scaled is not None and (lo + scaled.scales_at, hi) in whole:
        return [(lo, lo + scaled.dim)]
    return [(lo, hi)]


def _whole(device: Device, below: Tier, split: Split) -> WholeColumns:
    nbytes = below.rows * split.whole.nbytes
    with _explained(device, f"the columns of gpu_whole, {nbytes} bytes"):
        return WholeColumns(device, below, split)


@contextlib.contextmanager
def _explained(device: Device, what: str) -> Iterator[None]:
    """Raise CapacityError where the device has no memory left for `what`."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError" and (
            "cudaErrorMemoryAllocation" not in str(error)
        ):
            raise
        raise CapacityError(
            f"the GPU has no room for {what} of {device.free_bytes()} free; give a smaller gpu "
            "budget"
        ) from error
