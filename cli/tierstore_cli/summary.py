"""What `tierstore inspect` prints for people, made of what it prints for programs."""

from __future__ import annotations

from typing import Any

from tierstore import Table
from tierstore.budget import format_bytes
from tierstore.spec import BACKENDS
from tierstore_cli.output import Grid
from tierstore_cli.params import Place
from tierstore_cli.rowstats import RowStats

ELEMENTS_SHOWN = 8


def headline(store: Place, data: dict[str, Any]) -> str:
    """Return what there is to say of the store as a whole."""
    facts = [
        f"format {data['format']}",
        f"version {data['version']}",
        None if data["step"] is None else f"step {data['step']:,}",
        "folded" if data["folded"] else "not folded",
        format_bytes(sum(each["disk_bytes"] + each["delta_bytes"] for each in data["tables"])),
    ]
    return f"{store}   {' · '.join(fact for fact in facts if fact)}"


def tables(tables: list[dict[str, Any]]) -> Grid:
    """Return one line a table."""
    headers = ("TABLE", "ROWS", "DIM", "DTYPE", "STATE", "BACKEND", "ROW", "DISK", "DELTA")
    rows = [
        (
            each["name"],
            f"{each['rows']:,}",
            each["dim"],
            each["dtype"],
            " ".join(field["name"] for field in each["fields"][1:]) or "–",
            each["backend"],
            f"{each['record_bytes']} B",
            format_bytes(each["disk_bytes"]),
            f"{each['delta_rows']:,}" if each["delta_rows"] else "–",
        )
        for each in tables
    ]
    return Grid(headers, rows, right=frozenset({1, 2, 6, 7, 8}))


def how_to_open(store: Place, folded: bool, lines: list[str]) -> str:
    """Return `lines`, Python that opens each base file, under a title that says what it shows."""
    title = "open it without tierstore:"
    if not folded:
        title = f"the base files lack what was committed since; `tierstore fold {store}`, then:"
    return "\n  ".join([title, *lines])


def opening_line(table: Table, base: str) -> str:
    """Return one line of Python that opens the first field of a table from its base file."""
    layout = table.spec.layout
    _, field = layout.fields[0]
    line = BACKENDS[table.spec.backend].opening_line(layout, base)
    return f"{line}  # {field.dtype}, as bits" if field.element.as_bits else line


def versions(versions: list[dict[str, Any]]) -> Grid:
    """Return one line a version, oldest first."""
    rows = [
        (
            each["version"],
            "–" if each["step"] is None else f"{each['step']:,}",
            f"{each['delta_rows']:,}",
            format_bytes(each["delta_bytes"]),
        )
        for each in versions
    ]
    headers = ("VERSION", "STEP", "DELTA ROWS", "DELTA")
    return Grid(headers, rows, right=frozenset(range(len(headers))))


def stats(table: Table, stats: RowStats) -> str:
    """Return three lines about the rows of a field."""
    of = "all" if stats.rows_read == table.rows else f"{stats.rows_read:,} of"
    norms = "  ".join(
        f"{name} {'–' if norm is None else f'{norm:.4g}'}" for name, norm in stats.norm.items()
    )
    counts = f"zero {stats.zero_rows:,}  nan {stats.nan_rows:,}  inf {stats.inf_rows:,}"
    return (
        f"{table.name} {stats.field}, {of} {table.rows:,} rows\n"
        f"  norm   {norms}   {stats.sparkline()}\n"
        f"  rows   {counts}"
    )


def values(shown: dict[str, Any]) -> Grid:
    """Return rows as a table of their first elements."""
    keyed = any(row["key"] is not None for row in shown["rows"])
    dim = len(shown["rows"][0]["values"])
    count = min(dim, ELEMENTS_SHOWN)
    headers = ["ROW", *(["KEY"] if keyed else []), *map(str, range(count))]
    rows = [
        [
            row["id"],
            *([row["key"]] if keyed else []),
            *(_number(x) for x in row["values"][:count]),
            *(["…"] if dim > count else []),
        ]
        for row in shown["rows"]
    ]
    if dim > count:
        headers.append(f"… {dim}")
    first = 2 if keyed else 1
    return Grid(headers, rows, right=frozenset({0, *range(first, first + count)}))


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
