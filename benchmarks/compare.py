"""Run benchmarks on this machine and print their ratios beside those in `benchmarks/results`.

    python benchmarks/compare.py                     # the figures of the README
    python benchmarks/compare.py host_read plan      # some of them
    python benchmarks/compare.py --list

Options of a benchmark follow `--`, such as `compare.py host_read -- --rows 100000`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Claim(NamedTuple):
    """A figure of the README: the ratio it is of, and how it is said."""

    ratio: str
    said: Callable[[float], str]


def faster(ratio: float) -> str:
    """Return how many times as fast, of how many times as long."""
    return f"{1 / ratio:.1f}" if ratio < 0.9 else f"{1 / ratio:.2f}"


README = {
    "power_cut": Claim("tierstore: new ÷ cuts", lambda kept: f"{20 * (1 - kept):.0f}"),
    "plan": Claim("points apart, at most", "{:.1f}".format),
    "cold_reads": Claim("times LMDB, 32 threads", "{:.1f}".format),
    "gpu_train_step": Claim("missing / FBGEMM cached", faster),
    "gpu_read": Claim("all hits / F.embedding, 131072 ids, alpha 1.05", faster),
    "host_read": Claim("of torch.index_select, 2 threads", "{:.1f}".format),
}
"""The six figures of the README, by the benchmark that measures each."""


def published(name: str) -> dict[str, Any]:
    """Return what a benchmark answered on our machine."""
    content: dict[str, Any] = json.loads((HERE / "results" / f"{name}.json").read_text())
    return content


def runs_here(name: str) -> bool:
    """Whether this machine has the GPU that a benchmark needs."""
    return not name.startswith("gpu_") or importlib.util.find_spec("cupy") is not None


def measured(name: str, options: list[str]) -> dict[str, Any] | None:
    """Run a benchmark; return its answer, None if it failed."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, str(HERE / f"bench_{name}.py"), "--output", output, *options]
        if subprocess.run(command, check=False).returncode:
            return None
        content: dict[str, Any] = json.loads((Path(output) / f"{name}.json").read_text())
        return content


def beside(name: str, ours: dict[str, Any], yours: dict[str, Any]) -> str:
    """Return the ratios of both machines, a line each; * marks the figure of the README."""
    names = list(dict.fromkeys([*ours["ratios"], *yours["ratios"]]))
    width = max(map(len, names), default=0) + 2
    lines = [f"\n{'ratio':{width}}  {'ours':>10}  {'yours':>10}"]
    for each in names:
        mark = "* " if name in README and README[name].ratio == each else "  "
        cells = (machine["ratios"].get(each) for machine in (ours, yours))
        left, right = ("–" if cell is None else f"{cell:.3g}" for cell in cells)
        lines.append(f"{mark + each:{width}}  {left:>10}  {right:>10}")
    if name in README:
        ratio, said = README[name]
        cells = (said(machine["ratios"][ratio]) for machine in (ours, yours))
        lines.append("the README says {}; here that is {}".format(*cells))
    lines.append(f"ours: {ours['machine']['processor']}, {ours['machine']['cpus']} processors")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run what was named, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = sorted(path.stem for path in (HERE / "results").glob("*.json"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: those of the README")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and stop")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    given, options = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(known)}")
    if given.list:
        for name in known:
            print(f"{name:20}{published(name)['question']}")
        return 0
    failed = []
    for name in given.names or README:
        if not runs_here(name):
            print(f"\n== {name}: left out, it needs a GPU and CuPy")
            continue
        print(f"\n== {name}", flush=True)
        answer = measured(name, options)
        if answer is None:
            failed.append(name)
        else:
            print(beside(name, published(name), answer))
    if failed:
        print(f"\nfailed: {', '.join(failed)}; pip install --group bench brings what they compare")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
