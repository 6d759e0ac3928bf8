"""Are the rows that changed found and written without reading those that did not?

Without versions, as with any checkpoint, the rows that changed are found by comparing two copies of
all rows, which the peer does with NumPy's maps of two exports; making the exports is not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
from common import Answer, arguments, in_turn, medians, workspace

import tierstore

QUESTION = "Milliseconds to write the changed rows of a table to a patch, as `tierstore diff --out`"
COMMAND = [sys.executable, "-m", "tierstore"]
BLOCK = 65536


def run(*given: object, compiled: Path) -> None:
    """Run a command in a process of its own, as a user does; pip too compiles modules once."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(compiled)
    subprocess.run([*COMMAND, *map(str, given)], check=True, stdout=subprocess.DEVNULL, env=env)


def compare(before: Path, after: Path, out: Path) -> None:
    """Write the ids and values of rows that differ between two exports."""
    old, new = (np.load(path, mmap_mode="r") for path in (before, after))
    parts = [
        start + np.flatnonzero((old[start : start + BLOCK] != new[start : start + BLOCK]).any(1))
        for start in range(0, len(old), BLOCK)
    ]
    ids = np.concatenate(parts)
    np.savez(out, ids=ids, values=new[ids])


def main() -> None:
    parser = arguments(QUESTION, rows=10_000_000, dim=64, changed=5000)
    parser.set_defaults(repeat=5)
    options = parser.parse_args()
    nbytes = options.changed * options.dim * 4
    answer = Answer(
        "diff",
        QUESTION,
        f"{options.changed:,} rows, {nbytes / 1e6:.3g} MB",
        "at most 1 s, and a patch of at most 3 times the bytes of the rows",
        notes=["Python's start is counted for the command, modules compiled; files are cached"],
    )
    rng = np.random.default_rng(3)
    with workspace(options) as directory:
        path, patch = directory / "bench.tier", directory / "a.patch"
        spec = tierstore.TableSpec(options.rows, options.dim, init=tierstore.normal(seed=7))
        with tierstore.create(path, {"item": spec}, budget=tierstore.Budget(host=0)) as store:
            store.keep(store.version, "before")
            ids = rng.choice(options.rows, options.changed, replace=False)
            values = rng.standard_normal((options.changed, options.dim), dtype=np.float32)
            store["item"].write(ids, values)
            store.commit()
        command = partial(run, compiled=directory / "compiled")
        exports = directory / "before.npy", directory / "after.npy"
        command("export", path, exports[0], "--version", "before")
        command("export", path, exports[1])
        contestants = {
            "tierstore diff --out": lambda: command(
                "diff", path, "before", "--out", patch, "--force"
            ),
            "tierstore diff": lambda: command("diff", path, "before"),
            "tierstore --version": lambda: command("--version"),
            "NumPy: comparing two exports": lambda: compare(*exports, directory / "changed.npz"),
        }
        seconds = medians(in_turn(contestants, options.repeat))
        written = patch.stat().st_size
        found = np.load(directory / "changed.npz")
        with tierstore.open(path) as store:
            if store.changed("before")["item"].tolist() != found["ids"].tolist():
                raise RuntimeError("other rows are said to differ")
    answer.rows = [{"what": name, "ms": 1000 * each} for name, each in seconds.items()]
    answer.ratios = {
        "seconds of diff --out": seconds["tierstore diff --out"],
        "bytes of the patch / bytes of the rows": written / nbytes,
    }
    answer.met = all(
        value <= most for value, most in zip(answer.ratios.values(), (1.0, 3.0), strict=True)
    )
    answer.give(options)


if __name__ == "__main__":
    main()
