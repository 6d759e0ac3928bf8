"""Reports: one HTML file about a store, which loads nothing from a network."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierstore import _io, _svg
from tierstore.budget import format_bytes
from tierstore.errors import InvalidInputError, counted
from tierstore.sizing import Simulation
from tierstore.stats import HitRates

if TYPE_CHECKING:
    from tierstore._store.store import Store
    from tierstore._table.table import Table

__all__ = ["write_report"]

_NORMS = 20_000
"""Rows of a table whose norms are drawn."""
_POINTS = 2_000
"""Rows of a table that are drawn as points."""
_BINS = 40
_MOST_TABLES = 20
_SAMPLES = 400
"""Points of a curve over time; of more samples, several are averaged."""
_CURVES = 6
_FEWEST_BARS = 3
"""Versions of which a chart shows more than the table beside it."""
_MUCH_MORE = 1.5
"""Times its data that a store takes on the disk before the page says why."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --dim: #66707d; --rule: #d7dce2; --dot: #2a6fbb }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ec; --dim: #98a2ae; --rule: #3a434e; --dot: #6ea8e6 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1.15rem }
p, figcaption { color: var(--dim) } figure { margin: 1rem 0; max-width: 44rem; overflow-x: auto }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--rule); text-align: left }
.n { text-align: right; white-space: nowrap }
svg { width: 100%; min-width: 32rem; height: auto; font: 11px system-ui, sans-serif }
svg text { fill: var(--dim); paint-order: stroke; stroke: Canvas; stroke-width: 3px;
  stroke-linejoin: round }
svg rect, .dot { fill: var(--dot) } .dot { fill-opacity: .55 }
.far { fill: none; stroke: var(--dot); stroke-opacity: .6 }
.mark { fill: #c8553d } .axis { fill: none; stroke: var(--rule) }
@media (max-width: 40rem) {
  svg { min-width: 0; font-size: 16px } table { font-size: .8rem } td, th { padding-right: .45rem }
}
"""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _LabelledRows:
    """Some rows of a table with their labels."""

    ids: npt.NDArray[np.int64]
    rows: Floats
    names: list[str]


def write_report(
    store: Store,
    path: str | os.PathLike[str],
    *,
    near: tuple[str, Any] | None = None,
    k: int = 10,
    simulation: Simulation | None = None,
    hits: HitRates | None = None,
    tables: Sequence[str] | None = None,
    force: bool = False,
) -> None:
    """Write an HTML page about a store: tables, versions, norms, a picture of rows, neighbours.

    The page is one file without scripts that loads nothing. The picture is a two-dimensional PCA
    plot of at most 2,000 rows of a table; norms are those of at most 20,000 rows. Both are for at
    most 20 tables, which takes memory for one table's sample.

    Args:
        store: an open store.
        path: the file; it appears complete or not at all.
        near: a table's name and a row's id (int) or key (str), whose nearest rows by cosine are
            listed and marked in the picture; the table is read once.
        k: how many.
        simulation: miss ratios to draw, of `tierstore.sizing.simulate`.
        hits: hit rates of a run to draw, of `tierstore.stats.read_hit_rates`.
        tables: the tables that the page is about; all of the store if None.
        force: replace an existing file.

    Raises ExistsError, UnknownNameError, RowIndexError, and the errors of reading rows.
    """
    shown = list(store) if tables is None else [store[name].name for name in tables]
    parts = [*_head(store), *_tables(store, shown), *_versions(store)]
    if hits is not None:
        parts += _hits(hits)
    if simulation is not None:
        parts += _misses(simulation)
    for name in shown[:_MOST_TABLES]:
        if name not in store.damaged:
            chosen = near[1] if near is not None and near[0] == name else None
            parts += _pictures(store[name], chosen, k)
    if near is not None and near[0] not in shown[:_MOST_TABLES]:
        parts += _pictures(store[near[0]], near[1], k)
    title = escape(Path(str(store.path)).name)
    page = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n{chr(10).join(parts)}\n</html>\n"
    )
    with _io.publish(Path(path), force=force) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")


def _grid(headers: Sequence[str], rows: Sequence[Sequence[object]], text: int = 1) -> str:
    """Return a table whose first `text` columns are text and whose others are numbers."""

    def line(cells: Sequence[object], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if number >= text else ''}>{escape(str(cell))}</{tag}>"
            for number, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{line(headers, "th")}</tr>{body}</table></div>'


def _figure(picture: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _head(store: Store) -> Iterator[str]:
    info = store.info()
    step = "" if info.step is None else f", step {info.step:,}"
    rows = sum(each.rows for each in info.tables)
    yield f"<h1>{escape(Path(str(store.path)).name)}</h1>"
    yield (
        f"<p>A store of tierstore: {counted(len(info.tables), 'table')}, {counted(rows, 'row')}, "
        f"as of version {info.version:,}{step}; {info.size}.</p>"
    )
    if (info.allocated_bytes or 0) > _MUCH_MORE * info.data_bytes:
        yield (
            "<p>What is beside the data belongs to older versions, or is not folded yet: "
            "<code>tierstore fold</code> gives it back, and drops these versions.</p>"
        )


def _tables(store: Store, shown: Sequence[str]) -> Iterator[str]:
    info = store.info()
    rows = [
        (
            each.name,
            " ".join(f"{field['name']}:{field['dim']}:{field['dtype']}" for field in each.fields),
            each.keys or "–",
            f"{each.rows:,}",
            format_bytes(each.disk_bytes),
            format_bytes(each.allocated_bytes),
            f"{each.delta_rows:,}",
        )
        for each in info.tables
        if each.name in shown
    ]
    headers = ("table", "fields", "keys", "rows", "size", "on the disk", "row writes not folded")
    yield "<h2>Tables</h2>"
    yield _grid(headers, rows, text=3) if rows else "<p>none</p>"
    for name, error in store.damaged.items():
        yield f"<p>{escape(name)} is damaged: {escape(str(error))}</p>"


def _time(seconds: int | None) -> str:
    return "–" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%F %T")


def _versions(store: Store) -> Iterator[str]:
    versions = store.versions()
    yield "<h2>Versions</h2>"
    if sum(each.written_rows > 0 for each in versions) >= _FEWEST_BARS:
        titles = [
            f"version {each.version}, {_time(each.time)}: {each.written_rows:,} rows"
            for each in versions
        ]
        ends = (str(versions[0].version), str(versions[-1].version))
        picture = _svg.bars([each.written_rows for each in versions], titles, ends, "version")
        yield _figure(picture, "rows written by the versions that are kept")
    rows = [
        (
            ", ".join(each.names) or "–",
            _time(each.time),
            each.version,
            "–" if each.step is None else f"{each.step:,}",
            f"{each.written_rows:,}",
            format_bytes(each.written_bytes),
        )
        for each in reversed(versions)
    ]
    yield _grid(("kept as", "time (UTC)", "version", "step", "rows", "bytes"), rows, text=2)


def _hits(hits: HitRates) -> Iterator[str]:
    step = -(-len(hits.at) // _SAMPLES)
    groups = [slice(start, start + step) for start in range(0, len(hits.at), step)]
    names = list(hits.rates)[:_CURVES]
    curves = {
        " ".join(name).strip(): [_mean(hits.rates[name][group]) for group in groups]
        for name in names
    }
    at = [hits.at[group.start] for group in groups]
    left = len(hits.rates) - len(names)
    more = f"; {left:,} more curves are not drawn" if left else ""
    yield "<h2>Hits over the run</h2>"
    yield _figure(
        _svg.lines(at, curves, _ends(hits.unit, at), hits.unit, low_legend=True),
        f"share of the requested ids that each tier had, between one of {len(hits.at):,} samples "
        f"and the next{more}",
    )


def _ends(unit: str, at: Sequence[float]) -> tuple[str, str]:
    first, last = (f"{value:,.0f}" for value in (at[0], at[-1]))
    return (f"{first} s", f"{last} s") if unit == "seconds" else (first, last)


def _mean(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else None


def _misses(simulation: Simulation) -> Iterator[str]:
    curves = {
        name: [1 - point.unique_hit_rate for point in simulation.curve(name)]
        for name in simulation.policies
    }
    sizes = [point.share for point in simulation.curve(simulation.policies[0])]
    ends = (f"{min(sizes):.1%}", f"{max(sizes):.1%} of the rows")
    yield "<h2>Misses by the size of the cache</h2>"
    yield _figure(
        _svg.lines(sizes, curves, ends, "rows in memory"),
        f"share of the distinct rows of a batch that are not in memory; {simulation.batches:,} "
        "batches of a trace",
    )


def _sampled(table: Table, also: npt.NDArray[np.int64]) -> _LabelledRows:
    """Return a fixed random sample of finite rows, and the rows in `also`."""
    count = min(table.rows, _NORMS)
    ids = np.arange(count, dtype=np.int64)
    if count < table.rows:
        drawn = np.random.default_rng(0).choice(table.rows, count, replace=False, shuffle=False)
        ids = np.sort(drawn).astype(np.int64)
    ids = np.concatenate([also, np.setdiff1d(ids, also)])
    rows = table.by_row.read(ids, cache=False).astype(np.float64)
    finite = np.isfinite(rows).all(axis=1)
    ids, rows = ids[finite], rows[finite]
    keys = [None] * len(ids) if table.keys is None else np.asarray(table.keys[ids]).tolist()
    names = [str(row if key is None else key) for row, key in zip(ids.tolist(), keys, strict=True)]
    return _LabelledRows(ids, rows, names)


def _pictures(table: Table, chosen: Any, k: int) -> Iterator[str]:
    also, neighbours = np.empty(0, np.int64), ""
    if chosen is not None:
        also, scores = _nearest(table, chosen, k)
        neighbours = _listed(table, also, scores)
    sample = _sampled(table, also)
    yield f"<h2>{escape(table.name)}</h2>"
    if not len(sample.ids):
        yield "<p>no finite rows</p>"
        return
    norms = np.linalg.norm(sample.rows, axis=1)
    counts, edges = np.histogram(norms, _BINS)
    titles = [f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges)]
    picture = _svg.bars(counts.tolist(), titles, (f"{edges[0]:.4g}", f"{edges[-1]:.4g}"), "norm")
    yield _figure(picture, f"Euclidean norms of {len(norms):,} of {table.rows:,} rows")
    marked = int(np.isin(sample.ids, also).sum())  # they come first
    stride = -(-len(sample.ids) // _POINTS)
    drawn = [*range(marked), *range(marked, len(sample.ids), stride)]
    places, share = _projected(sample.rows[drawn])
    names = [sample.names[number] for number in drawn]
    picture, far = _svg.points(places, names, range(marked), f"rows of {table.name}")
    rings = f"; the {far:,} rings on the edge lie farther out" if far else ""
    yield _figure(
        picture,
        f"a two-dimensional PCA plot of {len(names):,} rows ({share:.0%} of the variance){rings}; "
        "hover over a point to see its name",
    )
    yield neighbours


def _projected(rows: Floats) -> tuple[Floats, float]:
    """Return rows on their first two principal components, and the share of their variance."""
    centred = rows - rows.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    best = vectors[:, ::-1][:, :2]
    places = centred @ best
    if places.shape[1] < 2:
        places = np.column_stack([places, np.zeros(len(places))])
    total = float(values.sum())
    return places, float(values[-2:].sum()) / total if total > 0 else 1.0


def _nearest(table: Table, chosen: Any, k: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return the chosen row and its nearest rows, with cosines."""
    if isinstance(chosen, bool) or not isinstance(chosen, int | str):
        raise InvalidInputError(f"a row is an id (int) or a key (str), not {chosen!r}")
    row = np.array([chosen]) if isinstance(chosen, int) else table.lookup([chosen])
    query = table.by_row.read(row, cache=False)
    scores, ids = table.topk(query, k, exclude=[row], metric="cosine")
    known = ids[0] >= 0
    return np.concatenate([row, ids[0][known]]), np.concatenate([[1.0], scores[0][known]])


def _listed(table: Table, ids: npt.NDArray[np.int64], scores: Floats) -> str:
    keys = ["–"] * len(ids) if table.keys is None else np.asarray(table.keys[ids]).tolist()
    rows = [
        (key, f"{row:,}", f"{score:.4f}")
        for key, row, score in zip(keys, ids.tolist(), scores.tolist(), strict=True)
    ]
    return "<p>The nearest rows by cosine, marked above:</p>" + _grid(
        ("key", "row", "cosine"), rows
    )
