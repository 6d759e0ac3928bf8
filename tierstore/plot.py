"""Plots of simulations, plans and runs, as .svg files, which browsers and word processors show.

Each function draws one plot and writes it atomically to `path`, replacing an existing file. It
needs no library, and follows the light or dark colours of the reader's system.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore import _io, _svg
from tierstore.budget import format_bytes
from tierstore.errors import InvalidInputError
from tierstore.sizing import Plan, Simulation, Stream
from tierstore.stats import History

__all__ = ["WAYS", "heat", "hit_rates", "miss_ratios", "occupancy", "step_times"]

WAYS = {
    "disk_reads": "reading from disk",
    "disk_writes": "writing back",
    "host_gather": "gathering in memory",
    "link": "the link to the GPU",
    "gpu": "in the GPU",
}
"""What the parts of `Plan.seconds` are, in words."""


def _write(chart: str, path: str | os.PathLike[str]) -> None:
    """Write a chart to its file."""
    if Path(path).suffix.lower() != ".svg":
        raise InvalidInputError(
            f"{path}: a plot is an .svg file; name it so, and convert that with another program"
        )
    with _io.publish(Path(path), force=True) as temporary:
        temporary.write_text(_svg.alone(chart), encoding="utf-8")


def miss_ratios(simulation: Simulation, path: str | os.PathLike[str]) -> None:
    """Plot the fraction of distinct rows that each policy misses, by the size of the tier.

    "First touches" is what a tier of any size misses, the rows that are asked for the first time;
    the axis of sizes is logarithmic. Like all functions of this module, raises InvalidInputError
    for invalid arguments and StoreIOError if the plot cannot be written.
    """
    shares = [point.share for point in simulation.curve(simulation.policies[0])]
    missed = {
        policy: [1 - point.unique_hit_rate for point in simulation.curve(policy)]
        for policy in simulation.policies
    }
    missed["first touches"] = [simulation.first_touch_rate] * len(shares)
    ends = (f"{100 * shares[0]:.3g} %", f"{100 * shares[-1]:.3g} % of {simulation.rows:,} rows")
    label = "distinct rows missed, by rows in memory"
    _write(_svg.lines([*map(float, np.log(shares))], missed, ends, label), path)


def hit_rates(history: History, path: str | os.PathLike[str]) -> None:
    """Plot the hit rate of each tier above the disk over the steps of a run."""
    rates = {tier: dict(history.hit_rates(tier)) for tier in history.tiers}
    steps = sorted({step for each in rates.values() for step in each})
    if not steps:
        raise InvalidInputError("the history has no requests: sample it after some steps")
    curves = {tier: [each.get(step) for step in steps] for tier, each in rates.items()}
    label = "ids found in the tier, by step"
    _write(_svg.lines(steps, curves, _ends(steps), label, low_legend=True), path)


def occupancy(history: History, path: str | os.PathLike[str]) -> None:
    """Plot the occupancy of each tier, and its dirty part, over the steps of a run."""
    steps = [sample.step for sample in history.samples]
    curves: dict[str, Sequence[float]] = {}
    for tier in history.samples[0].occupancy:
        full = [sample.occupancy[tier] for sample in history.samples]
        curves[f"{tier}: used"] = [each.used / each.slots for each in full]
        curves[f"{tier}: changed"] = [each.dirty / each.slots for each in full]
    _write(_svg.lines(steps, curves, _ends(steps), "slots, by step", low_legend=True), path)


def _ends(steps: Sequence[int]) -> tuple[str, str]:
    return f"{steps[0]:,}", f"{steps[-1]:,}"


def heat(requests: Stream | npt.ArrayLike, path: str | os.PathLike[str]) -> None:
    """Plot the skew of requests: requests per row, most frequent first, and their sum.

    `requests` is a stream, or the number of requests of each row. The axis of rows is logarithmic,
    and so is that of the requests of a row, which ends at those of the first.
    """
    counts = np.sort(_requests(requests))[::-1]
    counts = counts[counts > 0]
    if not counts.size:
        raise InvalidInputError("no row was requested")
    # A point per row would make an SVG of millions: logarithmic steps are enough.
    places = np.unique(np.geomspace(1, counts.size, min(counts.size, 500)).astype(np.int64))
    total = np.cumsum(counts, dtype=np.float64)
    low, high = np.log(counts[-1]), np.log(counts[0])
    of_row = (np.log(counts[places - 1]) - low) / (high - low or 1)
    curves: dict[str, Sequence[float]] = {
        f"requests of the row, {counts[-1]:,.4g} to {counts[0]:,.4g}": of_row.tolist(),
        "share of all requests so far": (total[places - 1] / total[-1]).tolist(),
    }
    at, ends = np.log(places).tolist(), ("1", f"{counts.size:,}")
    _write(_svg.lines(at, curves, ends, "rows, most requested first"), path)


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
    label = "times of a step"
    if isinstance(steps, Plan):
        tiers = [f"{tier.tier} {format_bytes(tier.nbytes)}" for tier in steps.tiers]
        label = ", ".join([f"{steps.rows:,} rows of {steps.record_bytes} B", *tiers])
        steps = {"planned": {WAYS.get(part, part): took for part, took in steps.seconds.items()}}
    if not any(steps.values()):
        raise InvalidInputError("the plan has no times: it needs a stream and measured speeds")
    took = {
        bar: {part: 1000 * seconds for part, seconds in parts.items()}
        for bar, parts in steps.items()
    }
    _write(_svg.stacked(took, "ms", label), path)
