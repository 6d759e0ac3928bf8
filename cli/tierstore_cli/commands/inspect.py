"""Show what is in a store."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import click

from tierstore import Attached, Table
from tierstore.budget import format_bytes
from tierstore.errors import counted
from tierstore.spec import BACKENDS
from tierstore.stats import LISTED, SpaceInformation, StoreInfo, Version, label
from tierstore_cli import params
from tierstore_cli.bars import Progress
from tierstore_cli.command import Command
from tierstore_cli.dated import versions_grid
from tierstore_cli.output import Grid, Output
from tierstore_cli.printing import quoted
from tierstore_cli.rowstats import row_stats
from tierstore_cli.shown_rows import rows_data, rows_grids
from tierstore_cli.stores import choose_field, choose_rows, choose_table, open_to_read

_WIDTH = 80
_LEAST_NAMED = 1 << 20
"""Bytes beside the data that are worth a word, if they are also a tenth of the store."""
_SMALL_FILES = 64 << 10
"""Bytes of a table that its directories and the last blocks of its files may take."""
_MANY = "the tables of a line share tiers; --json lists all tables"


@click.command(cls=Command, was={"--rows": "--range", "--versions": "use `tierstore log`"})
@params.READ_STORE
@params.TABLE
@params.FIELD
@click.option("--stats", is_flag=True, help="Show norms and counts of zero, NaN and infinite rows.")
@click.option("--full", is_flag=True, help="With --stats: read all rows, not a sample of 100,000.")
@params.RANGE
@params.VERSION
@click.option("--versions", is_flag=True, help="List the kept versions.")
def inspect(
    out: Output,
    store: params.Place,
    table: str | None,
    field: str | None,
    stats: bool,
    full: bool,
    span: params.Rows | None,
    version: int | str | None,
    versions: bool,
) -> None:
    """Show the tables of STORE, their sizes, and how to open them without tierstore.

    The first line ends with the size of the data and the space of all files on the disk; if much of
    it is taken by older versions or by commits not yet folded, the next lines say so, and which
    commands give it back.

    STATE lists the fields beside the first. DISK is the size of the base file, and what it really
    takes on the disk if that is less. DELTA counts row writes that are committed and not yet folded
    into the base file: a row counts once for each commit. ROWS of a table by key are its keys, how
    many it can hold, and how many more they are than in the version before. Tables whose records
    are equally long share tiers, unless a budget or a policy sets one apart; of more than 20
    tables, those that share have one line together, and --json lists all. STORE may be written
    meanwhile. Damaged
    tables are left out, named under "damaged" in --json, and the exit code is 4.

    STORE may also be a matrix of another program, FILE or FILE::NAME, which is read in place.

    \b
    Examples:
      tierstore inspect emb.tier
      tierstore inspect emb.tier --table item --stats
      tierstore inspect emb.tier --table item --range 0:5 --field exp_avg
      tierstore inspect emb.tier --version yesterday --range 0:5
      tierstore inspect emb.tier --json | jq .version
      tierstore inspect model.safetensors::ple.weight --stats
    """
    if full and not stats:
        raise click.UsageError("--full says which rows --stats reads; give both")
    if field is not None and not stats and span is None:
        raise click.UsageError("--field says what --stats and --range show; give one of them")
    with open_to_read(store, version) as opened:
        if isinstance(opened, Attached):
            if versions:
                raise click.UsageError("a file has no versions; leave --versions out")
            _show_file(out, store, opened, table, field, stats, full, span)
            return
        info = opened.info()
        data = info.to_dict()
        parts: list[str | Grid] = [_headline(store, info), *_around(info)]

        damaged = dict(opened.damaged) if table is None else {}
        if table is None and version is None and not damaged:
            parts += _beside_the_data(store, info, opened.versions()[:-1])
        intact = [name for name in opened if name not in damaged]
        tables = [opened[name] for name in (intact if table is None else [table])]
        names = {each.name for each in tables}
        data["tables"] = [entry for entry in data["tables"] if entry["name"] in names]
        data["spaces"] = [each for each in data["spaces"] if names & set(each["tables"])]
        spaces = [each for each in info.spaces if names & set(each.tables)]
        if len(tables) <= LISTED:
            parts += [_tables(data["tables"]), *_sharing(spaces)]
        else:
            parts += [_spaces(spaces), _MANY]
        parts += _how_to_open(store, info, tables)

        if damaged:
            data["damaged"] = {name: str(error) for name, error in damaged.items()}
        if versions:
            every = opened.versions()
            data["versions"] = [dataclasses.asdict(each) for each in every]
            parts += ["", versions_grid(every)]
        if stats:
            for entry, each in zip(data["tables"], tables, strict=True):
                parts += _add_stats(entry, each, field, full=full)
        _show(out, data, parts, span, opened, table, field)
    for error in damaged.values():
        raise error


def _add_stats(
    data: dict[str, Any], table: Table, field: str | None, *, full: bool
) -> list[str | Grid]:
    """Add the statistics of a field to the data, and return them for people."""
    with Progress(f"reading {table.name}") as progress:
        found = row_stats(table, choose_field(table, field), full, progress)
    data["stats"] = dataclasses.asdict(found)
    return ["", *found.lines(table)]


def _show(
    out: Output,
    data: dict[str, Any],
    parts: list[str | Grid],
    span: params.Rows | None,
    tables: Mapping[str, Table],
    name: str | None,
    field: str | None,
) -> None:
    """Show the findings, then rows of a table if a span is given."""
    if span is None:
        out.show(data, *parts)
        return
    table = choose_table(tables, name)
    field, ids = choose_field(table, field), range(*choose_rows(table, span))
    if out.as_json:
        data["rows"] = rows_data(table, [field], ids)
        out.show(data)
        return
    rows = rows_grids(table, field, ids)
    first = next(rows)  # before anything is shown: it may fail
    out.show(data, *parts, "")
    out.blocks(chain([first], rows))


def _show_file(
    out: Output,
    file: params.Place,
    tables: Mapping[str, Table],
    name: str | None,
    field: str | None,
    stats: bool,
    full: bool,
    span: params.Rows | None,
) -> None:
    """Show a matrix of another program."""
    table = choose_table(tables, name)
    (item,) = table.fields.values()
    facts = {"rows": table.rows, "dim": item.dim, "dtype": item.dtype}
    data: dict[str, Any] = {"file": params.full_name(file), "table": {"name": table.name, **facts}}
    size = format_bytes(table.rows * item.nbytes)
    parts: list[str | Grid] = [
        f"{file}   {counted(table.rows, 'row')} of {item.dim} {item.dtype} · {size} · read in place"
    ]
    if stats:
        parts += _add_stats(data["table"], table, field, full=full)
    _show(out, data, parts, span, tables, name, field)


def _headline(store: params.Place, info: StoreInfo) -> str:
    facts = [
        f"format {info.format}",
        f"version {info.version}",
        None if info.step is None else f"step {info.step:,}",
        "folded" if info.folded else "not folded",
        info.size,
    ]
    return f"{store}   {' · '.join(fact for fact in facts if fact)}"


def _around(info: StoreInfo) -> Iterator[str]:
    """Yield other facts about a version: its payload, kept versions, the writer."""
    if info.payload:
        yield f"payload: {', '.join(info.payload)}"
    if info.names:
        yield f"kept by name: {', '.join(info.names)}"
    if info.writer is not None:
        yield f"open for writing by {info.writer}"


def _beside_the_data(store: params.Place, info: StoreInfo, older: list[Version]) -> Iterator[str]:
    """Yield what the newest version and older ones take beside the data, and what frees it."""
    if info.allocated_bytes is None:
        return
    deltas = sum(table.delta_bytes for table in info.tables)
    bases = sum(min(table.disk_bytes, table.allocated_bytes) for table in info.tables)
    rest = info.allocated_bytes - deltas - bases
    least = max(_LEAST_NAMED, _SMALL_FILES * len(info.tables), info.allocated_bytes // 10)
    found = []
    if deltas > least:
        found.append(f"{format_bytes(deltas)} of commits not yet folded")
    if older and rest > least:
        keys = ["keys"] if any(table.keys for table in info.tables) else []
        owners = [
            counted(len(older), "older version"),
            *keys,
            *(["payload"] if info.payload else []),
        ]
        found.append(f"{format_bytes(rest)} of {', '.join(owners)}")
    if found:
        yield f"beside the data: {'; '.join(found)}"
        names = [name for version in older for name in version.names]
        release = [f"`tierstore release {quoted(store)} {name}`, then " for name in names]
        what = "gives it back, and drops the older versions" if older else "gives it back"
        yield f"{''.join(release)}`tierstore fold {quoted(store)}` {what}"


def _tables(tables: list[dict[str, Any]]) -> Grid:
    headers = ("TABLE", "ROWS", "DIM", "DTYPE", "STATE", "DISK", "KEYS", "DELTA", "ROW", "BACKEND")
    rows = [
        (
            each["name"],
            _rows(each),
            each["dim"],
            each["dtype"],
            " ".join(field["name"] for field in each["fields"][1:]) or "–",
            _size(each),
            each["keys"] or "–",
            f"{each['delta_rows']:,}" if each["delta_rows"] else "–",
            f"{each['record_bytes']} B",
            each["backend"],
        )
        for each in tables
    ]
    return Grid(headers, rows, right=frozenset({1, 2, 5, 7, 8}))


def _rows(table: dict[str, Any]) -> str:
    """Return the rows of a table; of one by key also its capacity, and the keys since before."""
    if table["capacity"] is None:
        return f"{table['rows']:,}"
    new = table["added"]
    since = "" if new is None else f", {new:+,}"
    return f"{table['rows']:,} of {table['capacity']:,}{since}"


def _size(table: dict[str, Any]) -> str:
    """Return the size of a table, and the space on disk if that is much less."""
    size, real = table["disk_bytes"], table["allocated_bytes"]
    text = format_bytes(size)
    return text if real > 0.9 * size else f"{text}, real {format_bytes(real)}"


def _sharing(spaces: list[SpaceInformation]) -> Iterator[str]:
    """Yield lines that name the tables that share tiers."""
    for each in spaces:
        if len(each.tables) > 1:
            text = f"tiers are shared by {', '.join(each.tables)}"
            yield from textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False)


def _spaces(spaces: list[SpaceInformation]) -> Grid:
    headers = ("TABLES", "COUNT", "ROWS", "ROW", "DISK", "DELTA")
    rows = [
        (
            label(each.tables),
            f"{len(each.tables):,}",
            f"{each.rows:,}",
            f"{each.record_bytes} B",
            format_bytes(each.disk_bytes),
            f"{each.delta_rows:,}" if each.delta_rows else "–",
        )
        for each in spaces
    ]
    return Grid(headers, rows, right=frozenset(range(1, len(headers))))


def _how_to_open(store: params.Place, info: StoreInfo, tables: list[Table]) -> Iterator[str]:
    """Yield lines that open tables without tierstore; none where partitions have files each."""
    bases = {each.name: each.base for each in info.tables}
    if not all(bases.values()):
        return
    yield (
        "open it without tierstore:"
        if info.folded
        else f"the base files lack later commits; `tierstore fold {quoted(store)}`, then:"
    )
    many = len(tables) > LISTED
    for each in tables[:1] if many else tables:
        yield f"  {_opening_line(each, bases[each.name])}"
    if many:
        yield f"  # and {len(tables) - 1:,} more; each is shown by --table NAME"


def _opening_line(table: Table, base: str) -> str:
    """Return a line of Python that opens the first field of a table from its base file."""
    layout = table.spec.layout
    _, field = layout.fields[0]
    line = BACKENDS[table.spec.backend].opening_line(layout, base)
    return f"{line}  # {field.form}, as bits" if field.element.as_bits else line
