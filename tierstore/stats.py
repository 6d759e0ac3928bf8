"""Statistics of a store: counters of the tiers, their history, `store.info()`, Prometheus.

The tiers themselves maintain the counters. `store.info()` prints as text and converts to JSON.
`write_prometheus` writes a file in the exposition format, version 0.0.4, for the textfile collector
of node_exporter; nothing listens on a port.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from tierstore import _html, _io
from tierstore._html import brief
from tierstore._kinds import check_store, check_table
from tierstore.budget import format_bytes
from tierstore.errors import FormatError, InvalidInputError

__all__ = [
    "History",
    "HitRates",
    "Hits",
    "Occupancy",
    "Sample",
    "SpaceInformation",
    "StoreInfo",
    "TableInformation",
    "TierInformation",
    "TierStats",
    "Version",
    "prometheus",
    "read_hit_rates",
    "read_prometheus",
    "write_prometheus",
]

LISTED = 20
"""Tables that are shown one by one; of more, those that share tiers are shown together."""

_COUNTERS_HELP = {
    "requested": "Row ids requested from the tier, including duplicates.",
    "hits": "Of these, found in it.",
    "unique": "Distinct row ids of each batch; of reads estimated from a sample of the batches.",
    "unique_hits": "Of these, found in it.",
    "evictions": "Records evicted to make room for others.",
    "write_backs": "Modified records evicted or flushed.",
    "written": "Records written into the tier from above.",
    "bytes_out": "Bytes read from the tier.",
    "bytes_in": "Bytes written into the tier from above.",
    "bytes_promoted": "Bytes loaded from the tier below.",
    "bytes_written_back": "Bytes written to the tier below.",
}
_SLOTS_HELP = {
    "slots": "Capacity of the tier in records.",
    "used": "Records in the tier.",
    "dirty": "Records in the tier with changes that the tier below lacks.",
}
_TABLES_HELP = {
    "rows": "Rows of the table.",
    "disk_bytes": "Bytes of the base files and their checksums.",
    "delta_rows": "Rows committed since the last fold.",
    "delta_bytes": "Bytes of the delta files.",
}


@dataclass(frozen=True)
class Occupancy:
    """The occupancy of a tier.

    Attributes:
        slots: capacity in records.
        used: records in the tier.
        dirty: records with changes that the tier below lacks.
    """

    slots: int
    used: int
    dirty: int


@dataclass
class Hits:
    """Requests to a tier, and those that it could serve.

    Attributes:
        requested: row ids requested, including duplicates.
        hits: requested ids that were found in the tier.
        unique, unique_hits: the same over the distinct ids of each batch. Reads are counted in a
            sample of the batches, each of which counts for all that it stands for: right on
            average, after two batches as after a million.
    """

    requested: int = 0
    hits: int = 0
    unique: int = 0
    unique_hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits divided by requested ids; 0 before the first request."""
        return self.hits / self.requested if self.requested else 0.0

    @property
    def unique_hit_rate(self) -> float:
        """Hits divided by requests, over distinct ids per batch; it determines the bytes moved.

        0 before the first request; NaN if no batch of a table so far was one of the sample.
        """
        if self.unique:
            return self.unique_hits / self.unique
        return math.nan if self.requested else 0.0


def tally(counters: Hits, **amounts: int) -> None:
    """Add to the named counters."""
    for name, amount in amounts.items():
        setattr(counters, name, getattr(counters, name) + amount)


@dataclass
class TierStats(Hits):
    """Counters of one tier since it was opened, in addition to those of `Hits`.

    Attributes:
        unique_of: requested ids of the batches in which distinct ids were counted; less than
            `requested` if only a sample was.
        evictions: records evicted to make room for others.
        write_backs: modified records evicted or flushed to the tier below.
        written: records written into the tier from above.
        bytes_out, bytes_in: bytes read from the tier, and bytes written into it from above.
        bytes_promoted, bytes_written_back: bytes loaded from, and written to, the tier below.
    """

    unique_of: int = 0
    evictions: int = 0
    write_backs: int = 0
    written: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_promoted: int = 0
    bytes_written_back: int = 0

    @property
    def misses(self) -> int:
        """Requested ids that were not found in the tier."""
        return self.requested - self.hits

    @property
    def unique_sampled(self) -> bool:
        """Whether distinct ids were counted only in a sample of the batches."""
        return self.unique_of < self.requested

    def __sub__(self, before: TierStats) -> TierStats:
        """Return what was counted since `before`, an earlier copy of the same counters."""
        if not isinstance(before, TierStats):
            return NotImplemented
        earlier = asdict(before)
        return TierStats(**{name: count - earlier[name] for name, count in asdict(self).items()})

    def to_dict(self) -> dict[str, int | float | bool]:
        """Return the counters and rates under stable keys."""
        return {
            **asdict(self),
            "misses": self.misses,
            "hit_rate": self.hit_rate,
            "unique_hit_rate": self.unique_hit_rate,
            "unique_sampled": self.unique_sampled,
        }


class Counters(dict[str, TierStats]):
    """The counters of each tier by its name, the nearest first: a dict that notebooks show well."""

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks."""
        rows = [
            [tier, *(getattr(each, name) for name in _SHOWN.values())]
            for tier, each in self.items()
        ]
        return _html.table("Since the store was opened", ["tier", *_SHOWN], rows)


_SHOWN = {"ids": "requested", "hit rate": "hit_rate", "of distinct": "unique_hit_rate"}
_SHOWN |= {"evictions": "evictions", "write-backs": "write_backs", "bytes up": "bytes_promoted"}


class Measured(Protocol):
    """A table, or any object with the same counters."""

    def stats(self) -> dict[str, TierStats]:
        """Return copies of the counters of each tier."""

    def occupancy(self) -> dict[str, Occupancy]:
        """Return the occupancy of each tier."""


@dataclass(frozen=True)
class Sample:
    """The counters and the occupancy of each tier after a step."""

    step: int
    stats: dict[str, TierStats]
    occupancy: dict[str, Occupancy]


class History:
    """Samples of a table's counters over time; `tierstore.plot` plots them.

    >>> history = History(table)
    >>> for step, batch in enumerate(loader):
    ...     train(batch)
    ...     if step % 100 == 0:
    ...         history.sample(step)
    """

    def __init__(self, table: Measured) -> None:
        """Take a first sample, as of step 0."""
        check_table(table, "a history")
        self._table = table
        self.samples: list[Sample] = []
        self.sample(0)

    def __repr__(self) -> str:
        """Say how many samples there are, and up to which step."""
        return f"History({len(self.samples)} samples, up to step {self.samples[-1].step})"

    def sample(self, step: int) -> None:
        """Take a sample after a step. Waits for the GPU, if there is one.

        Raises InvalidInputError for a step before the last sample.
        """
        if self.samples and step < self.samples[-1].step:
            raise InvalidInputError(
                f"step {step} is before the last sample, of step {self.samples[-1].step}"
            )
        self.samples.append(Sample(step, self._table.stats(), self._table.occupancy()))

    @property
    def tiers(self) -> list[str]:
        """The tiers with a hit rate (all but the disk), nearest first."""
        return [tier for tier in self.samples[0].stats if tier != "disk"]

    def hit_rates(self, tier: str) -> list[tuple[int, float]]:
        """Return the steps and the hit rates since the sample before each.

        Rates are over requested ids. Samples without requests since the previous one are omitted.
        """
        rates = []
        for before, after in pairwise(self.samples):
            requested = after.stats[tier].requested - before.stats[tier].requested
            hits = after.stats[tier].hits - before.stats[tier].hits
            if requested:
                rates.append((after.step, hits / requested))
        return rates

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the hit rates to a file for `tierstore report --history`, replacing an old one.

        A line is JSON, with the keys of those that `tierstore top --json` prints. Raises
        StoreIOError.
        """
        name = getattr(self._table, "name", "")
        steps: dict[int, list[dict[str, Any]]] = {}
        for tier in self.tiers:
            for step, rate in self.hit_rates(tier):
                found = {"table": name, "tier": tier, "hit_rate": rate}
                steps.setdefault(step, []).append(found)
        lines = [json.dumps({"step": step, "tiers": steps[step]}) + "\n" for step in sorted(steps)]
        with _io.publish(os.fspath(path), force=True) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return all samples as plain numbers."""
        return {
            "samples": [
                {
                    "step": each.step,
                    "stats": {tier: stats.to_dict() for tier, stats in each.stats.items()},
                    "occupancy": {
                        tier: {"slots": full.slots, "used": full.used, "dirty": full.dirty}
                        for tier, full in each.occupancy.items()
                    },
                }
                for each in self.samples
            ]
        }


@dataclass(frozen=True)
class HitRates:
    """Hit rates over a run, which is over.

    Attributes:
        unit: of `at`: "step", or "seconds" since the first sample.
        at: when each sample was taken, ascending.
        rates: by (table, tier), a rate for each sample, None if the sample has no requests.
    """

    __repr__ = brief

    unit: str
    at: tuple[float, ...]
    rates: Mapping[tuple[str, str], tuple[float | None, ...]]


def read_hit_rates(path: str | os.PathLike[str]) -> HitRates:
    """Read what `History.save` wrote, or the lines of `tierstore top --json --metrics FILE`.

    Raises FormatError for a file in which no line has a hit rate.
    """
    found: list[tuple[dict[str, float], dict[tuple[str, str], float]]] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found.append(_sampled(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise FormatError(
                    f"{path}, line {number}, is none of History.save or of tierstore top --json "
                    f"({type(error).__name__}: {error})"
                ) from error
    named = sorted({name for _, rates in found for name in rates})
    if not named:
        raise FormatError(
            f"{path} has no hit rates; History.save writes them, and tierstore top --json with "
            "--metrics prints them from its second line on"
        )
    shared = [name for name in ("time", "step") if all(name in when for when, _ in found)]
    if not shared:
        raise FormatError(f"{path} has lines with a time and others with a step; give one kind")
    by = shared[0]
    found.sort(key=lambda sample: sample[0][by])
    first = found[0][0][by] if by == "time" else 0.0
    at = tuple(when[by] - first for when, _ in found)
    rates = {name: tuple(each.get(name) for _, each in found) for name in named}
    return HitRates("seconds" if by == "time" else "step", at, rates)


def _sampled(data: dict[str, Any]) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    """Return when a sample was taken, and its rates by (table, tier)."""
    when = {name: float(data[name]) for name in ("time", "step") if data.get(name) is not None}
    if not when:
        raise KeyError("step")
    rates = {
        (str(each["table"]), str(each["tier"])): float(each["hit_rate"])
        for each in data["tiers"]
        if each["hit_rate"] is not None and each["tier"] != "disk"
    }
    if any(not 0 <= rate <= 1 for rate in rates.values()):
        raise ValueError(f"a hit rate is from 0 to 1: {rates}")
    if not all(map(math.isfinite, when.values())):
        raise ValueError(f"no time: {when}")
    return when, rates


@dataclass(frozen=True)
class TierInformation:
    """The memory of a tier in this process: bytes, slots, kind, and the tables that share it.

    `nbytes` is what is reserved for it, as the budget allows; `Table.occupancy` tells how many of
    the `slots` hold rows. `policy` is the name of the policy that makes room in it once it is full.
    """

    tier: str
    nbytes: int
    slots: int
    kind: str
    tables: tuple[str, ...] = ()
    policy: str = "lru"

    def __str__(self) -> str:
        """Return the line for it in `str(store.info())`."""
        shared = f" for {len(self.tables)} tables" if len(self.tables) > 1 else ""
        return f"{self.tier} {format_bytes(self.nbytes)} {self.policy}{shared}"


@dataclass(frozen=True)
class TableInformation:
    """One table: its shape, its files and its tiers.

    `fields` are dicts of name, dim, dtype, init, which is the initializer as text or None, and of
    scale where there is one. `base` is the path of the file or zarr array that a fold makes whole,
    and empty for a table in partitions, each of which has its own. `disk_bytes` is the size of the
    base and its checksums, `allocated_bytes` what the files of the generation take on the disk:
    less where blocks were never written, as of sparse tables. `keys` is the kind of external keys,
    "int64" or "str", or None. `delta_rows` and `delta_bytes` count what was committed since the
    last fold; `index_bytes` is the memory that their index takes. `capacity`, of a table by
    key alone, is how many keys it can hold, and `added` how many more it has than in the version
    before, or None where that is not kept.
    """

    name: str
    rows: int
    dim: int
    dtype: str
    fields: tuple[dict[str, Any], ...]
    backend: str
    record_bytes: int
    disk_bytes: int
    delta_rows: int
    delta_bytes: int
    base: str
    index_bytes: int
    tiers: tuple[TierInformation, ...]
    allocated_bytes: int = 0
    keys: str | None = None
    sparse: bool = False
    compression: str | None = None
    capacity: int | None = None
    added: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return its part of the object that `tierstore inspect --json` prints."""
        left_out = ("base", "index_bytes", "tiers")
        data = {key: value for key, value in vars(self).items() if key not in left_out}
        return data | {"fields": [dict(field) for field in self.fields]}

    def cells(self) -> tuple[str, str, str, str, str, str, str]:
        """Return the cells of its line in `str(StoreInfo)`."""
        return (
            self.name,
            f"{self.rows:,}",
            ", ".join(f"{field['name']} {field['dim']} {field['dtype']}" for field in self.fields),
            self.backend,
            format_bytes(self.disk_bytes),
            format_bytes(self.delta_bytes),
            ", ".join(map(str, self.tiers)),
        )


@dataclass(frozen=True)
class SpaceInformation:
    """Tables that share tiers: their names, rows in all, bytes a record, bytes on the disk, tiers.

    `disk_bytes`, `delta_rows` and `delta_bytes` are added up over the tables.
    """

    __repr__ = brief

    tables: tuple[str, ...]
    rows: int
    record_bytes: int
    disk_bytes: int
    delta_rows: int
    delta_bytes: int
    tiers: tuple[TierInformation, ...]

    @classmethod
    def of(cls, tables: Sequence[TableInformation]) -> Self:
        """Add up the tables of one space."""
        return cls(
            tuple(table.name for table in tables),
            sum(table.rows for table in tables),
            tables[0].record_bytes,
            sum(table.disk_bytes for table in tables),
            sum(table.delta_rows for table in tables),
            sum(table.delta_bytes for table in tables),
            tables[0].tiers,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return its part of the object that `tierstore inspect --json` prints."""
        data = {key: value for key, value in vars(self).items() if key != "tiers"}
        return data | {"tables": list(self.tables)}

    def cells(self) -> tuple[str, ...]:
        """Return the cells of its line in the text of a `StoreInfo` of many tables."""
        return (
            label(self.tables),
            f"{len(self.tables):,}",
            f"{self.rows:,}",
            f"{self.record_bytes} B",
            format_bytes(self.disk_bytes),
            format_bytes(self.delta_bytes),
            ", ".join(map(str, self.tiers)),
        )


def label(tables: Sequence[str]) -> str:
    """Return the name of the only table, or the first and the last, for a line of text."""
    if len(tables) == 1:
        return tables[0]
    return " … ".join(_short(tables[which]) for which in (0, -1))


def _short(name: str, most: int = 12) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


_OF_TABLES = ("table", "rows", "fields", "backend", "disk", "deltas", "tiers")
_OF_SPACES = ("tables", "count", "rows", "record", "disk", "deltas", "tiers")


@dataclass(frozen=True, repr=False)
class StoreInfo:
    """A store as it is open: `store.info()`.

    `tables` are those that are whole, `spaces` which of them share tiers. A writer keeps the `keep`
    newest versions and every version with a name in `names`. `payload` lists the names of this
    version's payload values. `writer` says which process has the store open for writing, if this
    machine knows one. `allocated_bytes` is what all files of the store take on the disk, those of
    other versions and of partitions on this host among them, or of a rank's share those of its
    partitions; None for objects.
    """

    store: str
    format: int
    uuid: str
    version: int
    step: int | None
    folded: bool
    tables: tuple[TableInformation, ...]
    spaces: tuple[SpaceInformation, ...]
    keep: int
    names: tuple[str, ...] = ()
    payload: tuple[str, ...] = ()
    writer: str | None = None
    allocated_bytes: int | None = None

    @property
    def data_bytes(self) -> int:
        """Size of the base files and their checksums, which is that of the data once folded."""
        return sum(table.disk_bytes for table in self.tables)

    @property
    def size(self) -> str:
        """The size of the data and what all files take, such as "16.0 MiB of data, 89.0 MiB …"."""
        data = f"{format_bytes(self.data_bytes)} of data"
        if self.allocated_bytes is None:
            return data
        return f"{data}, {format_bytes(self.allocated_bytes)} on disk"

    def __str__(self) -> str:
        """Return a table for people: two lines for the store, one for each table.

        Where there are more than 20 tables, those that share tiers have one line together.
        """
        step = "" if self.step is None else f", step {self.step}"
        state = "folded" if self.folded else "not folded"
        facts = f"version {self.version}{step}, {state}, format {self.format}"
        lines = [f"{self.store}: {facts}", f"  {self.size}"]
        cells: list[tuple[str, ...]]
        if len(self.tables) <= LISTED:
            cells = [_OF_TABLES]
            cells += [table.cells() for table in self.tables]
        else:
            cells = [_OF_SPACES]
            cells += [space.cells() for space in self.spaces]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(f"  {line}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks."""
        caption, size = str(self).split("\n")[:2]
        many = len(self.tables) > LISTED
        names = _OF_SPACES if many else _OF_TABLES
        rows = [each.cells() for each in (self.spaces if many else self.tables)]
        return _html.table(f"{caption}; {size.strip()}", names, rows)

    def __repr__(self) -> str:
        """Name the store and its version; `str` describes the tables."""
        return f"StoreInfo({self.store!r}, version={self.version}, {len(self.tables)} tables)"

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `tierstore inspect --json` prints."""
        tables = [table.to_dict() for table in self.tables]
        data = vars(self) | {"tables": tables, "spaces": [one.to_dict() for one in self.spaces]}
        return data | {"names": list(self.names), "payload": list(self.payload)}


@dataclass(frozen=True)
class Version:
    """A version that can be opened: its number, step, manifest number and deltas.

    `names` are the names under which it is kept, `payload` the names of its committed values.
    `time` is when its file was written, in seconds since 1970 UTC, None if unknown; equal versions
    may differ in it, as those of a copy do.
    `written_rows` are the rows that the version changed or added, counted when it was made, of all
    partitions: those of a commit, in which a row may count again where it was written repeatedly;
    all of a table that was created, loaded or converted; of one that grew, the new rows; of a
    version that was restored, none. `written_bytes` were written for them: a table that was written
    anew counts whole. Versions that earlier programs wrote have those of their own deltas.
    `tables` are these rows by table: 0 for one with other scalars or keys alone, None for one that
    was dropped. A version that restored one, or that earlier programs wrote, has none.
    """

    __repr__ = brief

    version: int
    step: int | None
    seq: int
    delta_rows: int
    delta_bytes: int
    names: tuple[str, ...] = ()
    payload: tuple[str, ...] = ()
    time: int | None = field(default=None, compare=False)
    written_rows: int = 0
    written_bytes: int = 0
    tables: Mapping[str, int | None] = field(default_factory=dict)


class Versions(list[Version]):
    """Versions, oldest first: a list that notebooks show as a table."""

    __repr__ = brief

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks; of many versions, that of the newest."""
        rows = [
            (
                each.version,
                "" if each.time is None else str(np.datetime64(each.time, "s")).replace("T", " "),
                each.step,
                each.written_rows,
                format_bytes(each.written_bytes),
                ", ".join(each.tables),
                ", ".join(each.names),
                ", ".join(each.payload),
            )
            for each in self[-LISTED:]
        ]
        names = ("version", "time (UTC)", "step", "rows", "bytes", "tables", "kept as", "payload")
        return _html.table(f"{len(self):,} versions that can be opened", names, rows)


class Informed(Protocol):
    """A store."""

    def info(self) -> StoreInfo:
        """Return information about the store."""

    def __getitem__(self, name: str) -> Measured:
        """Return a table."""


def prometheus(store: Informed) -> str:
    """Return all counters and sizes of all tables as text for Prometheus."""
    check_store(store, "a page for Prometheus")
    return "\n".join([*_lines(store), ""])


def write_prometheus(store: Informed, path: str | os.PathLike[str]) -> None:
    """Write `prometheus(store)` to a file, replacing the old one atomically.

    node_exporter looks for names that end in `.prom`. Raises StoreIOError.
    """
    with _io.publish(os.fspath(path), force=True) as temporary:
        temporary.write_text(prometheus(store), encoding="utf-8")


_LINE = re.compile(r"tierstore_(\w+)\{(.*)\} (\S+)", re.ASCII)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"', re.ASCII)
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def read_prometheus(path: str | os.PathLike[str]) -> dict[tuple[str, str, str], float]:
    """Return the figures in a file of `write_prometheus`, by (name, table, tier).

    Names are without `tierstore_`; table and tier are "" where a figure has none. Lines of other
    programs are skipped. Raises FormatError for a file that has none of tierstore.
    """
    figures = {}
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        if (match := _LINE.fullmatch(line)) is None:
            continue
        labels = {
            key: re.sub(r'\\[\\"n]', lambda each: _ESCAPES[each[0]], value)
            for key, value in _LABEL.findall(match[2])
        }
        with contextlib.suppress(ValueError):
            where = (match[1], labels.get("table", ""), labels.get("tier", ""))
            figures[where] = float(match[3])
    if not figures:
        raise FormatError(f"{path} has no figures of tierstore; write_prometheus writes such files")
    return figures


def _lines(store: Informed) -> Iterator[str]:
    info = store.info()
    labels = {"store": info.store}
    yield from _metric("version", "Newest committed version.", "gauge", [(labels, info.version)])
    tables: list[tuple[dict[str, str], TableInformation]] = [
        (labels | {"table": table.name}, table) for table in info.tables
    ]
    for name, meaning in _TABLES_HELP.items():
        rows = [(where, getattr(table, name)) for where, table in tables]
        yield from _metric(name, meaning, "gauge", rows)
    opened = [(labels | {"table": table.name}, store[table.name]) for table in info.tables]
    stats = [(where, table.stats()) for where, table in opened]
    for name, meaning in _COUNTERS_HELP.items():
        rows = [
            (where | {"tier": tier}, getattr(counts, name))
            for where, tiers in stats
            for tier, counts in tiers.items()
        ]
        yield from _metric(f"{name}_total", meaning, "counter", rows)
    full = [(where, table.occupancy()) for where, table in opened]
    for name, meaning in _SLOTS_HELP.items():
        rows = [
            (where | {"tier": tier}, getattr(occupancy, name))
            for where, tiers in full
            for tier, occupancy in tiers.items()
        ]
        yield from _metric(name, meaning, "gauge", rows)


def _metric(
    name: str, meaning: str, kind: str, values: list[tuple[dict[str, str], int]]
) -> Iterator[str]:
    """Yield the lines of one metric, or none if it has no values."""
    if not values:
        return
    name = f"tierstore_{name}"
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        inside = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        yield f"{name}{{{inside}}} {value}"


def _escaped(label: str) -> str:
    """Escape a label's value for the format; bytes that are not UTF-8 become escapes."""
    label = label.encode("utf-8", "backslashreplace").decode("utf-8")
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
