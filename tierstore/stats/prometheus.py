"""What a store's tiers did, in Prometheus' text form, in a file that a collector picks up.

node_exporter's textfile collector reads such files; nothing listens on a port here. Format:
Prometheus exposition formats, version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tierstore import _io
from tierstore._counters import Occupancy, TierStats
from tierstore._info import StoreInfo, TableInformation

__all__ = ["text", "write"]

COUNTERS = {
    "requested": "Row ids asked of the tier, duplicates included.",
    "hits": "Of these, found in it.",
    "unique": "Distinct row ids, in the batches whose distinct ids were counted.",
    "unique_hits": "Of these, found in it.",
    "evictions": "Records that made room for others.",
    "write_backs": "Evicted or flushed records that had changed.",
    "written": "Records written into the tier from above.",
    "bytes_out": "Bytes handed up.",
    "bytes_in": "Bytes taken from above.",
    "bytes_promoted": "Bytes that came from the tier below.",
    "bytes_written_back": "Bytes that went to the tier below.",
}
SLOTS = {
    "slots": "Records the tier has room for.",
    "used": "Records it holds.",
    "dirty": "Records it holds that the tier below has not seen.",
}
TABLES = {
    "rows": "Rows of the table.",
    "disk_bytes": "Bytes of the base and its checksums.",
    "delta_rows": "Rows committed since the last fold.",
    "delta_bytes": "Bytes of the files that hold them.",
}


class Measured(Protocol):
    """A table."""

    def stats(self) -> dict[str, TierStats]:
        """Return the counters of each tier."""

    def occupancy(self) -> dict[str, Occupancy]:
        """Return how full each tier is."""


class Informed(Protocol):
    """A store."""

    def info(self) -> StoreInfo:
        """Return what it is."""

    def __getitem__(self, name: str) -> Measured:
        """Return a table."""


def text(store: Informed) -> str:
    """Return every counter of every tier of every table, and the sizes of each."""
    return "\n".join([*_lines(store), ""])


def write(store: Informed, path: str | Path) -> None:
    """Write `text` to a file, which is always whole: the old one is replaced at once.

    A name that ends in `.prom` is what node_exporter looks for. Raises StoreIOError.
    """
    with _io.publish(path, force=True) as temporary:
        temporary.write_text(text(store), encoding="utf-8")


def _lines(store: Informed) -> Iterator[str]:
    info = store.info()
    labels = {"store": info.store}
    yield from _metric("version", "Newest committed version.", "gauge", [(labels, info.version)])
    tables: list[tuple[dict[str, str], TableInformation]] = [
        (labels | {"table": table.name}, table) for table in info.tables
    ]
    for name, meaning in TABLES.items():
        rows = [(where, getattr(table, name)) for where, table in tables]
        yield from _metric(name, meaning, "gauge", rows)
    opened = [(labels | {"table": table.name}, store[table.name]) for table in info.tables]
    stats = [(where, table.stats()) for where, table in opened]
    for name, meaning in COUNTERS.items():
        rows = [
            (where | {"tier": tier}, getattr(counts, name))
            for where, tiers in stats
            for tier, counts in tiers.items()
        ]
        yield from _metric(f"{name}_total", meaning, "counter", rows)
    full = [(where, table.occupancy()) for where, table in opened]
    for name, meaning in SLOTS.items():
        rows = [
            (where | {"tier": tier}, getattr(occupancy, name))
            for where, tiers in full
            for tier, occupancy in tiers.items()
        ]
        yield from _metric(name, meaning, "gauge", rows)


def _metric(
    name: str, meaning: str, kind: str, values: list[tuple[dict[str, str], int]]
) -> Iterator[str]:
    """Yield the lines of one metric; none where it has no values."""
    if not values:
        return
    name = f"tierstore_{name}"
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        inside = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        yield f"{name}{{{inside}}} {value}"


def _escaped(label: str) -> str:
    """Return a label's value as the format wants it; what is not UTF-8 becomes escapes."""
    label = label.encode("utf-8", "backslashreplace").decode("utf-8")
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
