"""What a benchmark measures of tierstore alone, so that two versions of it can be compared.

Run with `--figures FILE`, a benchmark leaves out its peers and its verdict and writes what the
library itself takes: seconds by name, each with its clock. Work of the host is measured in
processor time, all threads together, which other programs on the machine disturb least; work of a
device between two CUDA events, which no wait of the host is part of.

`benchmarks/compare_trees.py` runs the same script over the libraries of two trees. So what is
measured here uses public names only, which both have.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import tierstore

_MEMORY = Path("/dev/shm")


class Figure(NamedTuple):
    """Seconds of one call, and the clock that told them."""

    seconds: float
    clock: str = "processor"


def keep_in_memory(options: argparse.Namespace) -> None:
    """Put the files of a benchmark into memory, unless it was told a folder.

    Waiting for a disk leaves the processor's caches to others, and the same work then takes up to
    twice the processor time. A benchmark that needs pages to be cold cannot do so.
    """
    if options.directory is None and os.access(_MEMORY, os.W_OK):
        options.directory = _MEMORY


def nothing() -> None:
    """Prepare nothing before a measurement."""


def processor(
    call: Callable[[], object],
    repeat: int,
    before: Callable[[], object] = nothing,
    times: int = 1,
) -> Figure:
    """Return the median processor time of a call, which is made `times` times in each measurement.

    `before` prepares each measurement and is not part of it; the first is discarded.
    """
    taken = []
    for _ in range(repeat + 1):
        before()
        begin = time.process_time_ns()
        for _ in range(times):
            call()
        taken.append(time.process_time_ns() - begin)
    return Figure(statistics.median(taken[1:]) / times / 1e9)


def device(
    call: Callable[[], object], repeat: int, before: Callable[[], object] = nothing
) -> Figure:
    """Return the median time of a call between two events of torch's current CUDA stream."""
    import torch

    taken = []
    for _ in range(repeat + 1):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return Figure(statistics.median(taken[1:]) / 1e3, "cuda")


def give(options: argparse.Namespace, figures: Mapping[str, Figure]) -> None:
    """Write figures to the file of `--figures`, with the place of the library they are of."""
    content = {
        "library": str(Path(tierstore.__file__).resolve().parent),
        "figures": {name: figure._asdict() for name, figure in figures.items()},
    }
    options.figures.write_text(json.dumps(content, indent=1) + "\n")
