"""Derives budgets, hit rates and step times from rows, memory and speeds."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _html
from tierstore._progress import Overall, Progress, Shown, report_nothing, shown
from tierstore._tiers.gpu.memory import GpuMemory
from tierstore._tiers.memory import available_bytes
from tierstore._tiers.placement import Placement, check_names
from tierstore._tiers.slots import bytes_for, index_bytes, slots_for
from tierstore.budget import Budget, Size, format_bytes, size_of_at_least
from tierstore.errors import InvalidInputError, counted
from tierstore.machine.speeds import HOT_BYTES, ROW_BYTES, BatchTimes, Speeds
from tierstore.policy import Policies, PolicySpec, lru
from tierstore.sizing.simulation import (
    LOAD,
    SIZES,
    Rates,
    Replay,
    first_measured,
    first_touches,
)
from tierstore.sizing.streams import DistinctRows, Stream
from tierstore.spec import TableSpec


@dataclass(frozen=True)
class TierPlan:
    """The size and the expected load of one tier.

    Attributes:
        tier: "gpu" or "host".
        nbytes: its memory, including maps.
        slots, share: its capacity in records, and as a fraction of the rows.
        hit_rate, unique_hit_rate: over requested ids and over distinct rows; None without a stream.
        misses_per_batch: distinct rows per batch that are read from the tier below.
        write_backs_per_batch: rows per batch that are written to the tier below if all change.
        first_touches_per_batch: distinct rows per batch that no earlier batch requested, so that no
            tier of any size can have them.
    """

    tier: str
    nbytes: int
    slots: int
    share: float
    hit_rate: float | None = None
    unique_hit_rate: float | None = None
    misses_per_batch: float | None = None
    write_backs_per_batch: float | None = None
    first_touches_per_batch: float | None = None


@dataclass(frozen=True)
class Plan:
    """The memory for a table, and the cost of a step.

    Attributes:
        rows, record_bytes, disk_bytes: the table.
        policy: the policy of the host tier.
        tiers: the tiers, nearest first.
        index_bytes: what counts for the index of changed rows, also part of the host tier's budget.
        seconds: time per step for `disk_reads`, `disk_writes`, `host_gather`, `link` and `gpu`;
            empty without a stream and speeds. Only what the host gathers for a GPU and the link
            does not hide counts. Reads and writes overlap with computation if batches are
            prefetched.
        notes: remarks for the user.
        commit_seconds: time for a commit of a hundredth of the rows; None without speeds that
            `tierstore bench` measured of tierstore, or without training. A fold writes them again,
            in a separate thread.
    """

    rows: int
    record_bytes: int
    disk_bytes: int
    policy: str
    tiers: tuple[TierPlan, ...]
    index_bytes: int
    seconds: dict[str, float]
    notes: tuple[str, ...]
    commit_seconds: float | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds per step for moving rows, without overlap."""
        return sum(self.seconds.values(), 0.0)

    @property
    def budget(self) -> Budget:
        """The budget with which `open` gives the table these tiers."""
        sizes = {tier.tier: tier.nbytes for tier in self.tiers}
        host = sizes["host"] + self.index_bytes if "host" in sizes else 0
        return Budget(host=size_of_at_least(host), gpu=size_of_at_least(sizes.get("gpu", 0)))

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks."""
        caption = (
            f"{self.rows:,} rows of {self.record_bytes} B, "
            f"{format_bytes(self.disk_bytes)} on disk; {self.budget!r}, {self.policy}"
        )
        if self.seconds:
            caption += f"; {self.step_seconds * 1e3:.3g} ms a step"
        return _html.table_of(caption, {"tier": "tier", "bytes": "nbytes", **LOAD}, self.tiers)

    def to_dict(self) -> dict[str, Any]:
        """Return what `tierstore plan --json` prints."""
        data = asdict(self)
        data["tiers"], data["notes"] = list(data["tiers"]), list(data["notes"])
        budget = {"host": self.budget.host, "gpu": self.budget.gpu}
        return data | {"step_seconds": self.step_seconds, "budget": budget}


@dataclass(frozen=True)
class SpacePlan:
    """What tables that share tiers get of a budget.

    Attributes:
        tables: their names.
        rows, record_bytes, disk_bytes: the rows of all, the length of a record, the size on disk.
        policy: of the host tier.
        tiers: nearest first.
        index_bytes: what counts for the index of changed rows, also part of the host budget.
    """

    tables: tuple[str, ...]
    rows: int
    record_bytes: int
    disk_bytes: int
    policy: str
    tiers: tuple[TierPlan, ...]
    index_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return its part of what `tierstore plan STORE --json` prints."""
        data = asdict(self)
        return data | {"tables": list(data["tables"]), "tiers": list(data["tiers"])}


def _placement(budget: Budget, policy: Policies | None) -> Placement:
    """Return a placement of tables as `open` makes it, without a GPU."""
    return Placement(budget, policy, None, indexed=True)


def plan_tables(
    specs: Mapping[str, TableSpec],
    budget: Budget | Size | None = None,
    *,
    policy: Policies | None = None,
) -> list[SpacePlan]:
    """Return which tables of these specs share tiers, and what memory `open` would give those.

    Without bytes for a GPU there is no GPU tier; the GPU need not be here. Raises CapacityError,
    which names the tables that get too little, and UnknownNameError for a budget or a policy of
    another table.
    """
    given = Budget.of(budget)
    check_names(specs, given, policy)
    on_gpu = given.gpu not in (None, 0) or given.gpu_rows is not None
    spaces = []
    for part in _placement(given, policy).plan(specs, any_gpu=on_gpu):
        sizes = {
            "gpu": (part.gpu_bytes, part.gpu_slots),
            "host": (part.host_bytes - part.index_bytes, part.host_slots),
        }
        tiers = tuple(
            TierPlan(tier, nbytes, slots, slots / part.rows)
            for tier, (nbytes, slots) in sizes.items()
            if slots
        )
        disk_bytes = part.rows * (part.stored_bytes + 4)
        spaces.append(
            SpacePlan(
                part.tables,
                part.rows,
                part.stored_bytes,
                disk_bytes,
                part.policy.name,
                tiers,
                part.index_bytes,
            )
        )
    return spaces


def plan(
    rows: int,
    record_bytes: int,
    *,
    host: int | None = None,
    gpu: int = 0,
    policy: PolicySpec | None = None,
    stream: Stream | None = None,
    speeds: Speeds | None = None,
    training: bool = True,
    depth: int = 4,
    measured: float = 0.5,
    page_cache: int | None = None,
    progress: Shown = None,
) -> Plan:
    """Plan the tiers of a table for a given amount of memory.

    Args:
        rows: number of rows of the table.
        record_bytes: record size of the table; see `TableSpec.layout.record_bytes`.
        host: bytes for the host tier; 0 omits it, None uses a quarter of the available memory of
            this machine.
        gpu: bytes for the GPU tier; 0 omits it.
        policy: policy of the host tier; LRU if None. The GPU tier uses LRU.
        stream: the requested row ids; without it there are no rates.
        speeds: speeds of this machine; without them there are no times.
        training: whether every row of a batch changes, and is leased rather than read.
        depth: number of batches announced ahead, for policies that look ahead.
        measured: the fraction of batches, at the end, that is counted; earlier batches warm up the
            tiers.
        page_cache: bytes of memory in which the kernel may keep files; None for what `host` leaves
            of the available memory of this machine.
        progress: called with the number of batches replayed and the total.

    Times are those of tierstore if `speeds` has them, which `tierstore bench` measures, otherwise
    those of the limits of the machine. Missed rows are read from the page cache as far as it can
    hold the table.

    Raises CapacityError if a budget is too small for the maps, InvalidInputError for a stream with
    more rows than the table.
    """
    progress = shown(progress)
    policy = policy or lru()
    host = available_bytes() // 4 if host is None else host
    if rows < 1 or record_bytes < 1:
        raise InvalidInputError(f"rows and record_bytes must be at least 1: {rows}, {record_bytes}")
    if stream is not None and stream.rows > rows:
        raise InvalidInputError(
            f"the stream has row {stream.rows - 1}, the table {counted(rows, 'row')}"
        )
    maps = {"indexed": True, "mapped": gpu > 0}
    host_slots = slots_for(rows, record_bytes, host, policy, **maps)
    gpu_slots = GpuMemory.slots_for(rows, record_bytes, gpu)
    notes = _notes(rows, host_slots, gpu_slots)
    host_bytes = bytes_for(rows, record_bytes, host_slots, policy, **maps)
    index = index_bytes(rows, host_slots)
    if host_slots:
        notes += _maps(host_slots * record_bytes, host_bytes)
    sizes = {"gpu": gpu_slots, "host": host_slots}
    rates: dict[str, Rates] = {}
    touched, pages = None, 0.0
    if stream is not None:
        rates, pages = _replayed(
            rows, stream, sizes, policy, training, depth, measured, record_bytes, progress
        )
        touched = first_touches(stream, measured)
    else:
        report_nothing(progress)
    tiers = []
    if gpu_slots:
        nbytes = GpuMemory.bytes_for(rows, record_bytes, gpu_slots)
        tiers.append(_tier("gpu", nbytes, gpu_slots, rows, rates.get("gpu"), touched))
    if host_slots:
        nbytes = host_bytes - index
        tiers.append(_tier("host", nbytes, host_slots, rows, rates.get("host"), touched))
    seconds: dict[str, float] = {}
    if stream is not None and speeds is not None:
        free = max(0, available_bytes() - host) if page_cache is None else page_cache
        cached = min(1.0, free / (rows * (record_bytes + 4)))
        far = _far_rows(stream, record_bytes, measured) if speeds.hot else 0.0
        seconds = _seconds(
            stream,
            rows,
            record_bytes,
            rates,
            pages,
            speeds,
            training,
            cached,
            far,
            _once(rows, sizes, touched or 0.0),
            host_slots >= rows,
        )
        notes += _unmeasured(speeds, gpu_slots)
    return Plan(
        rows,
        record_bytes,
        rows * (record_bytes + 4),
        policy.name,
        tuple(tiers),
        index,
        seconds,
        notes,
        _commit_seconds(rows, record_bytes, speeds) if training else None,
    )


def _commit_seconds(rows: int, record_bytes: int, speeds: Speeds | None) -> float | None:
    """Return the time for a commit of a hundredth of the rows; short rows take as long as 512 B."""
    if speeds is None or speeds.committed_rows is None:
        return None
    return rows / 100 / speeds.committed_rows * max(1, record_bytes / ROW_BYTES)


def plan_budgets(
    rows: int,
    record_bytes: int,
    stream: Stream,
    *,
    shares: Sequence[float] = SIZES,
    policy: PolicySpec | None = None,
    progress: Shown = None,
    **options: Any,
) -> list[Plan]:
    """Return plans for host tiers that hold some `shares` of the rows, without a GPU tier.

    `options` are those of `plan`; `progress` is called with batches replayed and the total of all.
    """
    policy = policy or lru()
    report = Overall(shown(progress), len(shares) * len(stream.batches))
    plans = []
    for share in shares:
        slots = max(1, int(rows * share))
        host = bytes_for(rows, record_bytes, slots, policy, indexed=True)
        plans.append(
            plan(
                rows,
                record_bytes,
                host=host,
                policy=policy,
                stream=stream,
                progress=report,
                **options,
            )
        )
        report.passed(len(stream.batches))
    report.finish()
    return plans


def host_for_hits(
    rows: int,
    record_bytes: int,
    stream: Stream,
    hits: float,
    *,
    policy: PolicySpec | None = None,
    training: bool = True,
    depth: int = 4,
    measured: float = 0.5,
    progress: Shown = None,
) -> int:
    """Return the bytes of a host tier that answers a fraction of the ids of a stream.

    It is found by replaying the stream through tiers of several sizes, to one percent of the rows.
    `progress` is called with batches replayed and the most that all replays may have; the other
    arguments are those of `plan`. Raises InvalidInputError if a tier that holds every row
    hits less, since the stream requests too many rows for the first time.
    """
    policy = policy or lru()
    if not 0 < hits <= 1:
        raise InvalidInputError(f"hits is more than 0 and at most 1, not {hits}")

    low, high, close = 0, rows, max(1, rows // 100)
    replays = 1 + (-(-rows // close) - 1).bit_length()
    report = Overall(shown(progress), replays * len(stream.batches))

    def reached(slots: int) -> float:
        sizes = {"host": slots}
        rates, _ = _replayed(
            rows, stream, sizes, policy, training, depth, measured, record_bytes, report
        )
        report.passed(len(stream.batches))
        return rates["host"].hit_rate

    best = reached(rows)
    if best < hits:
        raise InvalidInputError(
            f"a host tier with every row hits {best:.1%} of the ids: the others are asked for the "
            "first time; use a longer trace"
        )
    while high - low > close:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) >= hits else (middle, high)
    report.finish()
    return bytes_for(rows, record_bytes, high, policy, indexed=True)


_PAGE = mmap.PAGESIZE
_ROW_PART = 0.4
"""The part of a measured row's time that even the narrowest row takes."""
_COPIED_AGAIN, _FOUND_AGAIN = 0.5, 0.15
"""The part of a row's time that a repeated read of it in a batch takes, or a repeated lease."""


def _notes(rows: int, host: int, gpu: int) -> tuple[str, ...]:
    notes = []
    if host >= rows:
        notes.append(
            "the host tier holds every row: each is read from the disk once, which no time counts"
        )
    if gpu >= rows:
        notes.append("the GPU tier holds every row: each comes there once, which no time counts")
    return tuple(notes)


def _maps(records: int, nbytes: int) -> tuple[str, ...]:
    """Return a sentence on the budget's memory that holds no records, if it is large."""
    maps = nbytes - records
    if maps * 4 < nbytes:
        return ()
    what = "maps from rows to slots and to deltas, what the policy keeps, and room for moving rows"
    return (f"{format_bytes(maps)} of the host budget are {what}",)


def _unmeasured(speeds: Speeds, gpu: int) -> tuple[str, ...]:
    """Return a sentence for each figure that the times lack."""
    notes = []
    if speeds.cold is None:
        notes.append("times are of the limits of the machine: run tierstore bench again")
    if gpu and speeds.link_bytes is None:
        notes.append("the link to the GPU is not measured, and its time is left out: give --link")
    if gpu and speeds.gpu_warm is None:
        notes.append(
            "what a GPU takes for rows that it has is left out: run tierstore bench on a machine "
            "with one"
        )
    return tuple(notes)


def _tier(
    name: str,
    nbytes: int,
    slots: int,
    rows: int,
    rates: Rates | None,
    first_touches: float | None,
) -> TierPlan:
    if rates is None:
        return TierPlan(name, nbytes, slots, slots / rows)
    return TierPlan(
        name,
        nbytes,
        slots,
        slots / rows,
        hit_rate=rates.hit_rate,
        unique_hit_rate=rates.unique_hit_rate,
        misses_per_batch=rates.misses_per_batch,
        write_backs_per_batch=rates.evictions_per_batch,
        first_touches_per_batch=first_touches,
    )


def _replayed(
    rows: int,
    stream: Stream,
    sizes: dict[str, int],
    policy: PolicySpec,
    training: bool,
    depth: int,
    measured: float,
    record_bytes: int,
    progress: Progress | None,
) -> tuple[dict[str, Rates], float]:
    """Replay a stream through the tiers; each tier gets the misses of the one above.

    Also return the pages of 4 KiB per batch that hold what all of them miss.
    """
    policies = {"gpu": lru(), "host": policy}
    tiers = {
        name: Replay(rows, slots, policies[name], leases=training)
        for name, slots in sizes.items()
        if slots
    }
    rates = {name: Rates() for name in tiers}
    first, announced, pages = first_measured(stream, measured), 0, 0
    for number, batch in enumerate(stream.batches):
        for coming in stream.batches[announced : number + depth + 1]:
            for tier in tiers.values():
                tier.announce(coming)
        announced = max(announced, number + depth + 1)
        for name, tier in tiers.items():
            hit, evictions = tier.use(batch)
            if number >= first:
                rates[name].count(batch, hit, evictions)
            batch = DistinctRows(batch.rows[~hit], batch.counts[~hit])
        if number >= first:
            pages += _pages(batch.rows, record_bytes)
        if progress is not None:
            progress(number + 1, len(stream.batches))
    return rates, pages / max(1, len(stream.batches) - first)


def _pages(rows: npt.NDArray[np.int64], record_bytes: int) -> int:
    """Return the pages that hold these rows; a long record has pages of its own."""
    if record_bytes >= _PAGE:
        return rows.size * -(-record_bytes // _PAGE)
    return int(np.unique(rows * record_bytes // _PAGE).size)


def _far_rows(stream: Stream, record_bytes: int, measured: float) -> float:
    """Return the distinct rows per measured batch that the caches of the CPU do not hold."""
    near = Replay(stream.rows, max(1, HOT_BYTES // record_bytes), lru())
    first, count = first_measured(stream, measured), 0
    for number, batch in enumerate(stream.batches):
        hit, _ = near.use(batch)
        count += int(np.count_nonzero(~hit)) if number >= first else 0
    return count / max(1, len(stream.batches) - first)


def _seconds(
    stream: Stream,
    rows: int,
    record_bytes: int,
    rates: dict[str, Rates],
    pages: float,
    speeds: Speeds,
    training: bool,
    cached: float,
    far: float,
    once: dict[str, float],
    whole_host: bool,
) -> dict[str, float]:
    """Return the seconds per step for each kind of data movement, in a table of `rows`.

    `pages` hold the rows that no tier has, `cached` is the share of the table's files in the page
    cache, `far` the rows that are read from memory rather than the CPU's caches, `once` the misses
    of each tier that end with all rows there, `whole_host` whether the host tier has every row.
    """
    ids = stream.ids / len(stream.batches)
    name = "host" if "host" in rates else "gpu"
    lowest = rates.get(name)
    missed = stream.unique if lowest is None else lowest.misses_per_batch
    misses = max(0.0, missed - once.get(name, 0.0)) if lowest is not None else missed
    pages *= misses / missed if missed else 0.0
    written = stream.unique if lowest is None else lowest.evictions_per_batch
    wide = _width(record_bytes)
    whole = rows * record_bytes / speeds.sequential_bytes  # neighbours are read together
    warm = _from_page_cache(misses * cached, wide, speeds, through=lowest is not None)
    uncached = pages * (1 - cached if speeds.cached else 1.0)
    cold = speeds.cold.of(uncached) if speeds.cold else uncached / speeds.random_reads
    times = {
        "disk_reads": warm + min(cold, whole),
        "disk_writes": written * record_bytes / speeds.append_bytes if training else 0.0,
    }
    if "gpu" in rates:
        moved = max(0.0, rates["gpu"].misses_per_batch - once.get("gpu", 0.0))
        back = rates["gpu"].evictions_per_batch if training else 0.0
        # Kernels fetch rows by themselves from a host tier that has every row.
        gathered = 0.0 if whole_host else moved * record_bytes / (speeds.gather_rows * ROW_BYTES)
        times |= _on_gpu(ids, stream.unique, moved, back, record_bytes, speeds, training, gathered)
    elif lowest is None and speeds.hot:  # rows from files are copied again
        times["host_gather"] = speeds.hot.of(ids, wide)
    else:
        times["host_gather"] = _gather(ids, stream.unique, far, record_bytes, speeds, training)
    return times


def _once(rows: int, sizes: dict[str, int], touched: float) -> dict[str, float]:
    """Return the misses per batch of each tier that end once all rows are there.

    A tier that holds every row, and those below it, miss a row the first time alone.
    """
    misses, whole = {}, False
    for name, slots in sizes.items():  # the nearest first
        whole = whole or slots >= rows
        if whole:
            misses[name] = touched
    return misses


def _from_page_cache(misses: float, wide: float, speeds: Speeds, *, through: bool) -> float:
    """Return the additional seconds of these rows; `through` a tier, which keeps them."""
    if through and speeds.missed and speeds.warm:
        return max(0.0, speeds.missed.of(misses, wide) - speeds.warm.of(misses, wide))
    return speeds.cached.of(misses, wide) if speeds.cached else 0.0


def _gather(
    ids: float, unique: float, far: float, record_bytes: int, speeds: Speeds, training: bool
) -> float:
    """Return the seconds in which a batch is read from the host tier, or trained there.

    Reading copies a row for each id, training each of the `unique` rows once.
    """
    if speeds.warm is None:
        limit = record_bytes / (speeds.gather_rows * ROW_BYTES)
        return ids * limit * (2 if training else 1)
    wide, again = _width(record_bytes), ids - unique
    if training and speeds.leased and speeds.hot_leased:
        count = unique + _FOUND_AGAIN * again
        return _mixed(speeds.leased, speeds.hot_leased, far / unique, count, wide)
    count = unique + _COPIED_AGAIN * again
    seconds = _mixed(speeds.warm, speeds.hot or speeds.warm, far / ids, count, wide)
    return seconds * (2 if training else 1)


def _width(record_bytes: int) -> float:
    """Return the time of a row relative to that of a measured row."""
    return _ROW_PART + (1 - _ROW_PART) * record_bytes / ROW_BYTES


def _on_gpu(
    ids: float,
    unique: float,
    moved: float,
    back: float,
    record_bytes: int,
    speeds: Speeds,
    training: bool,
    gathered: float,
) -> dict[str, float]:
    """Return the seconds in which a GPU tier answers a batch, and those of the link.

    The link works both ways at once. The host gathers rows while it transfers others, so
    that only the longer of the two counts.
    """
    hits = speeds.gpu_leased if training else speeds.gpu_warm
    through = speeds.gpu_lease_missed if training else speeds.gpu_missed
    wide = record_bytes / ROW_BYTES
    times: dict[str, float] = {}
    if hits:
        times["gpu"] = hits.of(unique if training else ids, wide)
    if hits and through:
        times["link"] = max(0.0, through.of(moved, wide) - hits.of(moved, wide))
    elif speeds.link_bytes:
        times["link"] = max(moved, back) * record_bytes / speeds.link_bytes
    times["host_gather"] = max(0.0, gathered - times.get("link", 0.0))
    return times


def _mixed(far: BatchTimes, near: BatchTimes, part: float, ids: float, wide: float) -> float:
    """Return the seconds of a batch of which a `part` is far."""
    return part * far.of(ids, wide) + (1 - part) * near.of(ids, wide)
