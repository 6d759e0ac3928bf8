"""Versions of a store as a table, and by the date of their commit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from tierstore.budget import format_bytes
from tierstore.stats import Version
from tierstore_cli.output import Grid

HEADERS = ("VERSION", "TIME (UTC)", "STEP", "ROWS", "BYTES", "KEPT AS", "PAYLOAD")


def versions_grid(versions: Sequence[Version]) -> Grid:
    """Return a line for each version, in their order."""
    rows = [
        (
            each.version,
            "–" if each.time is None else f"{datetime.fromtimestamp(each.time, UTC):%F %T}",
            "–" if each.step is None else f"{each.step:,}",
            f"{each.written_rows:,}",
            format_bytes(each.written_bytes),
            ", ".join(each.names),
            ", ".join(each.payload),
        )
        for each in versions
    ]
    return Grid(HEADERS, rows, right=frozenset({0, 2, 3, 4}))


def date_of(version: Version) -> str:
    """Return the day of a version's commit in UTC, such as 2026-11-20; today if it is unknown."""
    time = datetime.now(UTC).timestamp() if version.time is None else version.time
    return f"{datetime.fromtimestamp(time, UTC):%F}"
