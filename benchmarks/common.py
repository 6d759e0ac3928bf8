"""Common code of the benchmarks: interleaved measurements, the machine, and saved answers.

A benchmark asks one question. It states the bytes that must move, measures tierstore and its peers
alternately in the same run, compares medians, prints a small table, and saves it as JSON with the
machine and its load. Trust ratios, not seconds, since they were measured side by side.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from trees import CannotRunError, commit_of

from tierstore import errors
from tierstore.budget import format_bytes
from tierstore.machine import examine

SLOW_IMPORTS = ("torch", "torch._dynamo", "tierstore.optim", "tierstore.speedtorch")
RESULTS = Path(__file__).with_name("results")

if hasattr(errors, "LazyUpdatesWarning"):  # an older tree, for compare_trees.py, has none
    warnings.filterwarnings("ignore", category=errors.LazyUpdatesWarning)


def arguments(question: str, **defaults: int) -> argparse.ArgumentParser:
    """Return a parser for a benchmark: sizes with their defaults, repetitions, and places."""
    parser = argparse.ArgumentParser(description=question)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--repeat", type=int, default=15, help="number of measurements of each")
    parser.add_argument("--directory", type=Path, help="directory for temporary stores")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory for the JSON")
    parser.add_argument(
        "--figures", type=Path, help="write what tierstore alone takes there, for compare_trees.py"
    )
    return parser


@contextmanager
def workspace(options: argparse.Namespace) -> Iterator[Path]:
    """Make a directory for the benchmark's files, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.directory) as path:
        yield Path(path)


def in_turn(
    contestants: Mapping[str, Callable[[], object]],
    repeat: int,
    before: Callable[[str], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time every contestant `repeat` times, alternating in rounds; the first round is discarded.

    `before` prepares each measurement and is not timed. Returns seconds of `clock` by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(repeat + 1):
        for name, run in contestants.items():
            if before is not None:
                before(name)
            begin = clock()
            run()
            if number:
                seconds[name].append(clock() - begin)
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each contestant's seconds."""
    return {name: statistics.median(each) for name, each in seconds.items()}


def back_free_memory(nbytes: int = 64 << 20) -> None:
    """Touch free memory, so that the machine backs the next allocated pages.

    A virtual machine may return freed memory to its host, and the first touch of such a page then
    takes some 10 µs in any program. On other machines this has no effect.
    """
    np.ones(nbytes, np.uint8)


def in_child(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function of a module in a separate process and return its result.

    The process is forked from one that has only imported modules, which takes seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in SLOW_IMPORTS if name in sys.modules])
    with context.Pool(1) as pool:
        return pool.apply(function, given)


def private_bytes(pid: int | str = "self") -> int:
    """Return the private memory of a process: RssAnon + RssShmem; mapped files are not counted."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(
        int(line.split()[1]) * 1024 for line in status if line.startswith(("RssAnon:", "RssShmem:"))
    )


@dataclass
class Answer:
    """The answer to a benchmark's question.

    Attributes:
        name: of the JSON file.
        question: the question.
        must_move: the bytes that any implementation has to move.
        target: the goal for the ratios.
        met: whether the figures reach the target; None if this machine cannot tell.
        rows: the table, one dict per line.
        ratios: the ratios to which the target applies.
        notes: remarks needed to understand the figures.
    """

    name: str
    question: str
    must_move: str
    target: str
    met: bool | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _load: list[float] = field(default_factory=lambda: [os.getloadavg()[0]])

    def give(self, options: argparse.Namespace) -> None:
        """Print the answer and write it to `--output`."""
        machine = _machine(options.directory or tempfile.gettempdir())
        self._load.append(os.getloadavg()[0])
        verdict = {None: "not told", True: "met", False: "MISSED"}[self.met]
        print(self.question)
        print(f"machine: {machine['processor']}, {machine['cpus']} processors, ", end="")
        print(f"{format_bytes(machine['memory_bytes'])}, {machine['filesystem']}, ", end="")
        print(f"load {self._load[0]:.1f} before and {self._load[1]:.1f} after")
        print(f"must move: {self.must_move}\n")
        print(_table(self.rows))
        for name, ratio in self.ratios.items():
            print(f"{name}: {ratio:.2f}")
        for note in self.notes:
            print(f"note: {note}")
        print(f"target: {self.target}: {verdict}")
        content = {
            "question": self.question,
            "must_move": self.must_move,
            "target": self.target,
            "met": self.met,
            "ratios": self.ratios,
            "rows": self.rows,
            "notes": self.notes,
            "arguments": {
                name: value for name, value in vars(options).items() if isinstance(value, int | str)
            },
            "taken": taken(),
            "machine": machine,
            "load_before_and_after": self._load,
        }
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"{self.name}.json"
        path.write_text(json.dumps(content, indent=1) + "\n")


def taken() -> dict[str, Any]:
    """Return what a figure is of: the commit, the format of its stores, and the compiled core.

    None stands for what there is not: a commit outside a checkout, a core that is not built.
    """
    from tierstore._disk.manifest import FORMAT

    try:
        commit = commit_of(Path(__file__).resolve().parents[1])
    except CannotRunError:
        commit = None
    return {"commit": commit, "format": FORMAT, "core": _core()}


def _core() -> str | None:
    """Return the name of the compiled core; None for libraries that had none."""
    if importlib.util.find_spec("tierstore._core") is None:
        return None
    name: str = importlib.import_module("tierstore._core").NAME
    return name


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as aligned text: names to the left, numbers to the right."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        first = line[0].ljust(widths[0])
        rest = (text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))
        lines.append("  " + "  ".join([first, *rest]))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _machine(directory: str | Path) -> dict[str, Any]:
    facts = examine(directory)
    return {
        "processor": _processor(),
        "cpus": facts.cpus,
        "memory_bytes": facts.memory_bytes,
        "filesystem": facts.storage.filesystem,
        "gpus": facts.cuda.devices,
        "driver": facts.cuda.driver,
        "system": platform.platform(),
        "python": facts.python,
        "core": facts.core,
        "packages": {name: version for name, version in facts.packages.items() if version},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
