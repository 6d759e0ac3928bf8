"""From rows, memory and speeds to budgets, hit rates and step times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tierstore._tiers.gpu.memory import GpuMemory
from tierstore._tiers.memory import available_bytes
from tierstore._tiers.placement import Placement, check_names
from tierstore._tiers.slots import bytes_for, slots_for
from tierstore.budget import Budget, Size
from tierstore.errors import InvalidInputError
from tierstore.machine.speeds import ROW_BYTES, Speeds
from tierstore.policy import Policies, PolicySpec, lru
from tierstore.sizing.simulation import Rates, Replay, first_measured
from tierstore.sizing.streams import Batch, Stream
from tierstore.spec import TableSpec

__all__ = ["Plan", "SpacePlan", "TierPlan", "plan", "plan_tables"]


@dataclass(frozen=True)
class TierPlan:
    """What one tier gets and does.

    Attributes:
        tier: "gpu" or "host".
        nbytes: memory it takes, maps included.
        slots, share: records it holds, and as a part of the rows.
        hit_rate, unique_hit_rate: of the requests it gets, over ids and over distinct rows; None
            without a stream.
        misses_per_batch: distinct rows a batch that the tier below has to give.
        write_backs_per_batch: rows a batch that go to the tier below, if all have changed.
    """

    tier: str
    nbytes: int
    slots: int
    share: float
    hit_rate: float | None = None
    unique_hit_rate: float | None = None
    misses_per_batch: float | None = None
    write_backs_per_batch: float | None = None


@dataclass(frozen=True)
class Plan:
    """What a table needs, and what a step with it costs.

    Attributes:
        rows, record_bytes, disk_bytes: the table.
        policy: of the host tier.
        tiers: nearest first.
        seconds: what a step spends where: `disk_reads`, `disk_writes`, `host_gather`, `link`; empty
            without a stream and speeds. Reads and writes overlap with computing where batches are
            prefetched.
        notes: what to know.
    """

    rows: int
    record_bytes: int
    disk_bytes: int
    policy: str
    tiers: tuple[TierPlan, ...]
    seconds: dict[str, float]
    notes: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        """Seconds a step for moving rows, one thing after another."""
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Return what `tierstore plan --json` prints."""
        data = asdict(self)
        data["tiers"], data["notes"] = list(data["tiers"]), list(data["notes"])
        return data | {"step_seconds": self.step_seconds}


@dataclass(frozen=True)
class SpacePlan:
    """What tables that share tiers get of a budget.

    Attributes:
        tables: their names.
        rows, record_bytes, disk_bytes: of all of them together.
        policy: of the host tier.
        tiers: nearest first.
    """

    tables: tuple[str, ...]
    rows: int
    record_bytes: int
    disk_bytes: int
    policy: str
    tiers: tuple[TierPlan, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return its part of what `tierstore plan --store --json` prints."""
        data = asdict(self)
        return data | {"tables": list(data["tables"]), "tiers": list(data["tiers"])}


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
    found = []
    for part in Placement(given, policy, None).plan(specs, any_gpu=on_gpu):
        sizes = {
            "gpu": (part.gpu_bytes, part.gpu_slots),
            "host": (part.host_bytes, part.host_slots),
        }
        tiers = tuple(
            TierPlan(tier, nbytes, slots, slots / part.rows)
            for tier, (nbytes, slots) in sizes.items()
            if slots
        )
        disk_bytes = part.rows * (part.record_bytes + 4)
        found.append(
            SpacePlan(
                part.tables, part.rows, part.record_bytes, disk_bytes, part.policy.name, tiers
            )
        )
    return found


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
) -> Plan:
    """Work out what memory gives.

    Args:
        rows: of the table.
        record_bytes: of the table; see `TableSpec.layout.record_bytes`.
        host: bytes for the host tier; 0 leaves it out, None gives it a quarter of the available
            memory of this machine.
        gpu: bytes for the GPU tier; 0 leaves it out.
        policy: of the host tier; least recently used if None. The GPU tier is least recently used.
        stream: the row ids requested of the table; without it there are no rates.
        speeds: of this machine; without them there are no times.
        training: every row of a batch is changed, and leased rather than read.
        depth: batches announced ahead, for policies that look ahead.
        measured: the last part of the batches that counts; the rest fills the tiers.

    Raises CapacityError if a budget does not hold the maps, InvalidInputError for a stream of more
    rows than the table has.
    """
    policy = policy or lru()
    host = available_bytes() // 4 if host is None else host
    if rows < 1 or record_bytes < 1:
        raise InvalidInputError(f"a table has rows and bytes, not {rows} and {record_bytes}")
    if stream is not None and stream.rows > rows:
        raise InvalidInputError(f"the stream names row {stream.rows - 1} of a table of {rows} rows")
    host_slots = slots_for(rows, record_bytes, host, policy)
    gpu_slots = GpuMemory.slots_for(rows, record_bytes, gpu)
    notes = _notes(rows, host_slots, gpu_slots)
    sizes = {"gpu": gpu_slots, "host": host_slots}
    rates: dict[str, Rates] = {}
    if stream is not None:
        rates = _replayed(rows, stream, sizes, policy, training, depth, measured)
    tiers = []
    if gpu_slots:
        nbytes = GpuMemory.bytes_for(rows, record_bytes, gpu_slots)
        tiers.append(_tier("gpu", nbytes, gpu_slots, rows, rates.get("gpu")))
    if host_slots:
        nbytes = bytes_for(rows, record_bytes, host_slots, policy)
        tiers.append(_tier("host", nbytes, host_slots, rows, rates.get("host")))
    seconds: dict[str, float] = {}
    if stream is not None and speeds is not None:
        seconds = _seconds(stream, record_bytes, rates, speeds, training)
    return Plan(
        rows, record_bytes, rows * (record_bytes + 4), policy.name, tuple(tiers), seconds, notes
    )


def _notes(rows: int, host: int, gpu: int) -> tuple[str, ...]:
    notes = []
    if host >= rows:
        notes.append("the host tier holds every row: nothing is read from the disk after the first")
    if gpu >= rows:
        notes.append("the GPU tier holds every row")
    return tuple(notes)


def _tier(name: str, nbytes: int, slots: int, rows: int, rates: Rates | None) -> TierPlan:
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
    )


def _replayed(
    rows: int,
    stream: Stream,
    sizes: dict[str, int],
    policy: PolicySpec,
    training: bool,
    depth: int,
    measured: float,
) -> dict[str, Rates]:
    """Replay a stream through the tiers: each gets the misses of the one above."""
    policies = {"gpu": lru(), "host": policy}
    tiers = {
        name: Replay(rows, slots, policies[name], leases=training)
        for name, slots in sizes.items()
        if slots
    }
    rates = {name: Rates() for name in tiers}
    first, announced = first_measured(stream, measured), 0
    for number, batch in enumerate(stream.batches):
        for coming in stream.batches[announced : number + depth + 1]:
            for tier in tiers.values():
                tier.announce(coming)
        announced = max(announced, number + depth + 1)
        for name, tier in tiers.items():
            hit, evictions = tier.use(batch)
            if number >= first:
                rates[name].count(batch, hit, evictions)
            batch = Batch(batch.rows[~hit], batch.counts[~hit])
    return rates


def _seconds(
    stream: Stream, record_bytes: int, rates: dict[str, Rates], speeds: Speeds, training: bool
) -> dict[str, float]:
    """Return the seconds a step spends on each way of moving rows."""
    ids = stream.ids / len(stream.batches)
    lowest = rates.get("host") or rates.get("gpu")
    misses = stream.unique if lowest is None else lowest.misses_per_batch
    written = stream.unique if lowest is None else lowest.evictions_per_batch
    blocks = max(1.0, record_bytes / 4096)
    times = {
        "disk_reads": misses * blocks / speeds.random_reads,
        "disk_writes": written * record_bytes / speeds.append_bytes if training else 0.0,
    }
    gathered = ids * record_bytes / (speeds.gather_rows * ROW_BYTES)
    if "gpu" in rates:
        moved = rates["gpu"].misses_per_batch
        times["host_gather"] = moved * record_bytes / (speeds.gather_rows * ROW_BYTES)
        back = rates["gpu"].evictions_per_batch if training else 0.0
        if speeds.link_bytes:
            times["link"] = (moved + back) * record_bytes / speeds.link_bytes
    else:
        times["host_gather"] = gathered * (2 if training else 1)
    return times
