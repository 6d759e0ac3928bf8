"""Plots of simulations, plans and runs, as PNG, SVG or PDF; needs the extra `plot`.

Each function draws one plot and writes it atomically to `path`, replacing an existing file; the
suffix selects the format. No display is needed, and matplotlib's settings do not change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore.budget import format_bytes
from tierstore.errors import InvalidInputError, needs
from tierstore.sizing import Plan, Simulation, Stream
from tierstore.sizing.simulation import OPTIMUM
from tierstore.stats import History

__all__ = ["heat", "hit_rates", "miss_ratios", "occupancy", "step_times"]

FORMATS = (".png", ".svg", ".pdf")
_WAYS = {
    "disk_reads": "reading the disk",
    "disk_writes": "writing back",
    "host_gather": "gathering in memory",
    "link": "the link to the GPU",
    "gpu": "in the GPU",
}


@contextmanager
def _picture(
    path: str | os.PathLike[str], width: float = 6.4, height: float = 4.0
) -> Iterator[Any]:
    """Yield axes to draw in, then write the plot."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise InvalidInputError(f"{path}: the suffix of a plot must be one of {', '.join(FORMATS)}")
    with needs("matplotlib", "plot", "plots need matplotlib"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    yield axes
    with _io.publish(Path(path), force=True) as temporary:
        figure.savefig(temporary, format=suffix[1:], dpi=150)


def miss_ratios(simulation: Simulation, path: str | os.PathLike[str]) -> None:
    """Plot the fraction of distinct rows that each policy misses, by the size of the tier.

    The optimum is dashed; the dotted line is what a tier of any size misses, the rows that are
    asked for the first time. Like all functions of this module, raises InvalidInputError for
    invalid arguments and StoreIOError if the plot cannot be written.
    """
    with _picture(path) as axes:
        for policy in simulation.policies:
            points = sorted(simulation.curve(policy), key=lambda point: point.slots)
            axes.plot(
                [100 * point.share for point in points],
                [100 * (1 - point.unique_hit_rate) for point in points],
                marker="o",
                markersize=3,
                linestyle="--" if policy == OPTIMUM else "-",
                color="black" if policy == OPTIMUM else None,
                label=policy,
            )
        floor = 100 * simulation.first_touch_rate
        axes.axhline(floor, color="black", linestyle=":", linewidth=1, label="first touches")
        axes.set(xlabel="slots, % of the rows", ylabel="distinct rows missed, %", ylim=(0, None))
        title = f"{simulation.rows:,} rows, {simulation.ids_per_batch:,.0f} ids a batch"
        axes.set_title(title, loc="left", fontsize="small")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.legend(frameon=False)


def hit_rates(history: History, path: str | os.PathLike[str]) -> None:
    """Plot the hit rate of each tier above the disk over the steps of a run."""
    with _picture(path) as axes:
        for tier in history.tiers:
            points = history.hit_rates(tier)
            axes.plot([step for step, _ in points], [100 * rate for _, rate in points], label=tier)
        axes.set(xlabel="step", ylabel="ids found in the tier, %", ylim=(0, 101))
        axes.legend(frameon=False)


def occupancy(history: History, path: str | os.PathLike[str]) -> None:
    """Plot the occupancy of each tier, and its dirty part, over the steps of a run."""
    with _picture(path) as axes:
        steps = [sample.step for sample in history.samples]
        for tier in history.samples[0].occupancy:
            full = [sample.occupancy[tier] for sample in history.samples]
            used = [100 * each.used / each.slots for each in full]
            dirty = [100 * each.dirty / each.slots for each in full]
            (line,) = axes.plot(steps, used, label=f"{tier}: used")
            axes.fill_between(
                steps, dirty, alpha=0.3, color=line.get_color(), label=f"{tier}: changed"
            )
        axes.set(xlabel="step", ylabel="slots, %", ylim=(0, 101))
        axes.legend(frameon=False)


def heat(requests: Stream | npt.ArrayLike, path: str | os.PathLike[str]) -> None:
    """Plot the skew of requests: requests per row, most frequent first, and their sum.

    `requests` is a stream, or the number of requests of each row.
    """
    counts = np.sort(_requests(requests))[::-1]
    counts = counts[counts > 0]
    if not counts.size:
        raise InvalidInputError("no row was requested")
    # A point per row would make an SVG of millions: logarithmic steps are enough.
    places = np.unique(np.geomspace(1, counts.size, min(counts.size, 500)).astype(np.int64))
    with _picture(path) as axes:
        axes.plot(places, counts[places - 1], label="requests of the row")
        axes.set(xlabel="rows, most requested first", ylabel="requests", xscale="log", yscale="log")
        share = axes.twinx()
        total = np.cumsum(counts, dtype=np.float64)
        share.plot(places, 100 * total[places - 1] / total[-1], color="black", linestyle="--")
        share.set(ylabel="of all requests so far, % (dashed)", ylim=(0, 101))


def _requests(given: Stream | npt.ArrayLike) -> npt.NDArray[np.float64]:
    if isinstance(given, Stream):
        counts = np.zeros(given.rows)
        for batch in given.batches:
            counts[batch.rows] += batch.counts
        return counts
    counts = np.asarray(given, np.float64).ravel()
    if not (counts >= 0).all():
        raise InvalidInputError("a row cannot be requested fewer than 0 times")
    return counts


def step_times(
    steps: Plan | Mapping[str, Mapping[str, float]], path: str | os.PathLike[str]
) -> None:
    """Plot how long the parts of a step take, one bar per step.

    `steps` is a plan with times, or seconds by name of the bar and of its parts.
    """
    title = ""
    if isinstance(steps, Plan):
        tiers = [f"{tier.tier} {format_bytes(tier.nbytes)}" for tier in steps.tiers]
        title = ", ".join([f"{steps.rows:,} rows of {steps.record_bytes} B", *tiers])
        seconds = {_WAYS.get(part, part): value for part, value in steps.seconds.items()}
        steps = {"planned": seconds}
    if not any(steps.values()):
        raise InvalidInputError("the plan has no times: it needs a stream and measured speeds")
    bars = list(steps)
    parts = list(dict.fromkeys(part for each in steps.values() for part in each))
    with _picture(path, height=1.9 + 0.5 * len(bars)) as axes:
        left = np.zeros(len(bars))
        for part in parts:
            values = np.array([1000 * steps[bar].get(part, 0.0) for bar in bars])
            axes.barh(bars, values, left=left, label=part)
            left += values
        axes.set(xlabel="ms a step")
        axes.set_title(title, loc="left", fontsize="small")
        axes.invert_yaxis()
        axes.figure.legend(frameon=False, fontsize="small", loc="outside lower left", ncols=2)
