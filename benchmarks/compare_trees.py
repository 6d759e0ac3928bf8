"""Tell whether one commit is slower than another, on a machine whose speed varies.

    python benchmarks/compare_trees.py OLD NEW                          # the benchmarks of the host
    python benchmarks/compare_trees.py OLD NEW commit "small_steps --dims 16" --rounds 15
    python benchmarks/compare_trees.py HEAD . host_read                 # what is not committed yet
    python benchmarks/compare_trees.py OLD NEW "small_steps --device cuda"              # on a GPU

OLD and NEW are commits, which are checked out side by side in a temporary folder, or folders with a
tree of the project. The benchmarks beside this file run over both libraries, each in a process of
its own: in every round the old one, the new one, and the old one again, in an order that turns. The
two series of the old one tell what this machine calls equal.

Each figure is a ratio of medians, new by old, lower is better, with two spreads that hold 95 % of
the ratios: of old against old, where the two series are exchanged in some rounds and not in others,
which changes nothing between equals; and of new against old, where rounds are drawn again. Not
slower means: at most 1.05, or within the spread of old against old. A figure whose old spread goes
beyond 1.05 cannot show a slowdown of that size: run more rounds, or on a quieter machine.

Exit status: 0 nothing is slower, 1 something is, 2 the trees or benchmarks could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trees import CannotRunError, checked_out, commit_of, run

HERE = Path(__file__).resolve().parent
HOST = ("small_steps", "host_read", "commit", "cold_reads", "recovery")
"""Benchmarks that give figures of the host; others are named by those who have the machine."""
LEAST_ROUNDS = 9
ALLOWED = 1.05
_DRAWS = 2000

Series = Mapping[str, Sequence[float]]
"""Seconds of each round of `old`, `new` and `again`, which is the old one."""


@dataclass(frozen=True)
class Verdict:
    """What the rounds say of one figure.

    Attributes:
        old: median seconds of the old tree, both its series.
        new: median seconds of the new one.
        ratio: new by old.
        equal: the ratio up to which old against old goes, at least 1.
        spread: the ratios of new against old between which 95 % lie.
        slower: the ratio is above `ALLOWED` and above `equal`.
    """

    old: float
    new: float
    ratio: float
    equal: float
    spread: tuple[float, float]
    slower: bool

    def __str__(self) -> str:
        if self.slower:
            return "SLOWER"
        if self.ratio > ALLOWED:
            return "within the old spread"
        return "not slower" if self.equal <= ALLOWED else "not slower, but see the old spread"


def judged(series: Series) -> Verdict:
    """Return the verdict of the rounds of one figure."""
    old, new, again = (np.asarray(series[name]) for name in ("old", "new", "again"))
    rng = np.random.default_rng(0)  # so that the same rounds have the same verdict
    both = np.median(np.concatenate([old, again]))
    ratio = np.median(new) / both
    exchanged = rng.random((_DRAWS, old.size)) < 0.5
    first, second = np.where(exchanged, again, old), np.where(exchanged, old, again)
    equal = np.quantile(np.median(first, 1) / np.median(second, 1), 0.975)
    drawn = rng.integers(0, old.size, (_DRAWS, old.size))
    olds = np.median(np.concatenate([old[drawn], again[drawn]], 1), 1)
    spread = np.quantile(np.median(new[drawn], 1) / olds, (0.025, 0.975))
    return Verdict(
        float(both),
        float(np.median(new)),
        float(ratio),
        max(1.0, float(equal)),
        (float(spread[0]), float(spread[1])),
        bool(ratio > max(ALLOWED, equal)),
    )


def measured(script: Path, options: Sequence[str], tree: Path) -> dict[str, dict[str, Any]]:
    """Run a benchmark over the library of a tree, in a process of its own; return its figures."""
    with tempfile.TemporaryDirectory(prefix="tierstore-figures-") as folder:
        file = Path(folder) / "figures.json"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "cli")]),
            "PYTHONHASHSEED": "0",
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # nobody measures the compiler
        command = [sys.executable, str(script), *options, "--figures", str(file)]
        run(command, cwd=folder, env=environment)
        if not file.exists():
            raise CannotRunError(f"{script.name} gives no figures")
        content = json.loads(file.read_text())
    if Path(content["library"]) != tree / "tierstore":
        raise CannotRunError(f"{script.name} measured {content['library']}, not that of {tree}")
    figures: dict[str, dict[str, Any]] = content["figures"]
    return figures


def compared(
    benchmarks: Sequence[str], trees: Mapping[str, Path], rounds: int, directory: Path = HERE
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Return the series of every figure, and the clock of each.

    The first run of each tree is discarded: it compiles modules and brings files into memory.
    """
    places = {"old": trees["old"], "new": trees["new"], "again": trees["old"]}
    series: dict[str, dict[str, list[float]]] = {}
    clocks = {}
    for benchmark in benchmarks:
        name, *options = shlex.split(benchmark)
        script = directory / f"bench_{name}.py"
        for tree in (trees["old"], trees["new"]):
            measured(script, options, tree)
        for number in range(rounds):
            order = list(places)[number % 3 :] + list(places)[: number % 3]
            for who in order[:: 1 if number % 2 else -1]:
                for figure, found in measured(script, options, places[who]).items():
                    each = series.setdefault(f"{name}: {figure}", {one: [] for one in places})
                    each[who].append(found["seconds"])
                    clocks[f"{name}: {figure}"] = found["clock"]
            print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    for figure, each in series.items():
        if any(len(one) != rounds for one in each.values()):
            raise CannotRunError(f"{figure}: only one of the trees has this figure")
    return series, clocks


def table(verdicts: Mapping[str, Verdict], clocks: Mapping[str, str]) -> str:
    """Return the verdicts as text, a line for each figure."""
    width = max(map(len, verdicts))
    lines = [
        f"{'figure':{width}}  {'clock':9}  {'old':>9}  {'ratio':>5}  {'new / old':^13}  old / old"
    ]
    for name, each in verdicts.items():
        low, high = each.spread
        lines.append(
            f"{name:{width}}  {clocks[name]:9}  {_time(each.old):>9}  {each.ratio:5.3f}  "
            f"{low:.3f} – {high:.3f}  {1 / each.equal:.3f} – {each.equal:.3f}  {each}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Compare two trees; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", metavar="OLD", help="a commit, or a folder with a tree")
    parser.add_argument("new", metavar="NEW", help="a commit, or a folder with a tree")
    parser.add_argument(
        "benchmarks",
        metavar="BENCH",
        nargs="*",
        help=f"names without bench_, options of one in its quotes; default: {' '.join(HOST)}",
    )
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS, help="at least nine")
    parser.add_argument("--output", type=Path, help="file for every round, as JSON")
    options = parser.parse_args(arguments)
    if options.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds {options.rounds}: fewer than {LEAST_ROUNDS} tell little")
    benchmarks = options.benchmarks or list(HOST)
    for each in benchmarks:
        if not (HERE / f"bench_{each.split()[0]}.py").exists():
            parser.error(f"no such benchmark: {each}")
    load = os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # so that the trees go again
    try:
        with checked_out({"old": options.old, "new": options.new}, HERE.parent) as trees:
            commits = {name: commit_of(tree) for name, tree in trees.items()}
            series, clocks = compared(benchmarks, trees, options.rounds)
    except CannotRunError as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        return 2
    verdicts = {name: judged(each) for name, each in series.items()}
    print(f"old {commits['old']}\nnew {commits['new']}")
    print(f"{options.rounds} rounds; load {load:.1f} before and {os.getloadavg()[0]:.1f} after\n")
    print(table(verdicts, clocks))
    slower = [name for name, each in verdicts.items() if each.slower]
    print(f"\nslower: {', '.join(slower)}" if slower else "\nnothing is slower")
    if options.output:
        content = {
            "commits": commits,
            "benchmarks": benchmarks,
            "allowed": ALLOWED,
            "figures": {
                name: {"clock": clocks[name], **asdict(each), "seconds": series[name]}
                for name, each in verdicts.items()
            },
            "machine": {"system": platform.platform(), "cpus": len(os.sched_getaffinity(0))},
            "load_before_and_after": [load, os.getloadavg()[0]],
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    return bool(slower)


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.4g} us"
    return f"{1e3 * seconds:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
