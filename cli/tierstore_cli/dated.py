"""Versions of a store as a table, and by the date of their commit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from tierstore.budget import format_bytes
from tierstore.stats import Version
from tierstore_cli.output import Grid

_NAMED = 3
"""Tables of a version that are named on its line; --json has all."""
HEADERS = ("VERSION", "TIME (UTC)", "STEP", "ROWS", "BYTES", "TABLES", "KEPT AS", "PAYLOAD")


def versions_grid(versions: Sequence[Version]) -> Grid:
    """Return a line for each version, in their order."""
    rows = [
        (
            each.version,
            "–" if each.time is None else f"{datetime.fromtimestamp(each.time, UTC):%F %T}",
            "–" if each.step is None else f"{each.step:,}",
            f"{each.written_rows:,}",
            format_bytes(each.written_bytes),
            _tables(each),
            ", ".join(each.names),
            ", ".join(each.payload),
        )
        for each in versions
    ]
    return Grid(HEADERS, rows, right=frozenset({0, 2, 3, 4}))


def _tables(version: Version) -> str:
    """Return the tables that a version changed, with the rows of each of several."""
    counts = list(version.tables.items())
    if len(counts) == 1 and counts[0][1] is not None:
        return counts[0][0]
    told = [f"{name} {'dropped' if n is None else f'{n:,}'}" for name, n in counts[:_NAMED]]
    rest = len(counts) - _NAMED
    return ", ".join([*told, *([f"{rest:,} more"] if rest > 0 else [])])


def date_of(version: Version) -> str:
    """Return the day of a version's commit in UTC, such as 2026-11-20; today if it is unknown."""
    time = datetime.now(UTC).timestamp() if version.time is None else version.time
    return f"{datetime.fromtimestamp(time, UTC):%F}"
