"""Does an export take little memory, for a table of any size?"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import Answer, arguments, private_bytes, workspace

import tierstore

QUESTION = "Peak private memory of `tierstore export`, format by format"
MIB = 1 << 20
COMMAND = "from tierstore_cli.main import cli; cli()"
SUFFIXES = (".npy", ".npz", ".safetensors", ".parquet", ".zarr", ".bin", ".vec", ".tsv")


def export(store: Path, target: Path) -> tuple[float, int]:
    """Run the command in a process of its own; return its seconds and peak private bytes."""
    begin, peak = time.perf_counter(), 0
    command = [sys.executable, "-c", COMMAND, "export", str(store), str(target)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, private_bytes(process.pid))
        time.sleep(0.002)
    if process.returncode:
        raise RuntimeError(f"the export to {target.name} ended with {process.returncode}")
    return time.perf_counter() - begin, peak


def main() -> None:
    parser = arguments(QUESTION, rows=1 << 21, dim=128)
    parser.add_argument("--formats", nargs="+", default=SUFFIXES, metavar="SUFFIX")
    options = parser.parse_args()
    nbytes = options.rows * 4 * options.dim
    answer = Answer(
        "export",
        QUESTION,
        f"{nbytes / MIB:,.0f} MiB read in order and written in order; text is 3.4 times as many",
        "at most 300 MB in every format that is streamed",
        notes=["seconds are of one run, writing and syncing included, Python's start too"],
    )
    with workspace(options) as directory:
        store = directory / "bench.tier"
        spec = tierstore.TableSpec(options.rows, options.dim, init=tierstore.normal(seed=7))
        tierstore.create(store, {"item": spec}, budget=tierstore.Budget(host=0)).close()
        for suffix in options.formats:
            target = directory / f"out{suffix}"
            seconds, peak = export(store, target)
            files = [target] if target.is_file() else [f for f in target.rglob("*") if f.is_file()]
            written = sum(file.stat().st_size for file in files)
            answer.rows.append(
                {"format": suffix, "peak MB": peak / 1e6, "file MiB": written // MIB}
                | {"seconds": seconds, "MB/s": nbytes / seconds / 1e6}
            )
            shutil.rmtree(target) if target.is_dir() else target.unlink()
    answer.ratios["largest peak, MB"] = max(row["peak MB"] for row in answer.rows)
    answer.met = answer.ratios["largest peak, MB"] <= 300
    answer.give(options)


if __name__ == "__main__":
    main()
