"""How much processor time do a load and an export of text take, compared with data frames?

Keys and numbers of the same CSV file go into a store, committed, and into the columns of pandas,
polars and pyarrow, which decide the types of all columns as well and write nothing. The same rows
then go from the store into CSV, and from a table of pyarrow. word2vec text of the same rows is
shown for comparison. Processor time, as pyarrow reads with a thread for each processor.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import Answer, arguments, in_turn, medians, workspace

import tierstore

QUESTION = "Processor seconds to load rows with keys from text, and to export them"
LOAD, EXPORT = "tierstore, load", "tierstore, export"
READ, WRITE = "pyarrow.csv.read_csv", "pyarrow.csv.write_csv"
MOST = 1.5
"""Maximum of the processor time relative to pyarrow, which writes no rows and reads none."""


def written(directory: Path, rows: int, dim: int) -> tuple[Path, Path]:
    """Write the same rows as CSV with a header, and as word2vec text."""
    path = directory / "source.tier"
    spec = tierstore.TableSpec(rows, dim, init=tierstore.normal(seed=3))
    csv, vec = directory / "rows.csv", directory / "rows.vec"
    with tierstore.create(path, {"item": spec}, budget=tierstore.Budget(host=0)) as store:
        keys = [f"item-{row:08}" for row in range(rows)]
        for out in (csv, vec):
            tierstore.export_table(store["item"], out, keys=keys)
    shutil.rmtree(path)
    return csv, vec


def peers(csv: Path, out: Path) -> dict[str, Callable[[], object]]:
    """Return the readers and writers of the data frames that are installed."""
    found: dict[str, Callable[[], object]] = {}
    try:
        import pandas

        found["pandas.read_csv"] = lambda: pandas.read_csv(csv)
    except ImportError:
        pass
    try:
        import polars

        found["polars.read_csv"] = lambda: polars.read_csv(csv)
    except ImportError:
        pass
    try:
        import pyarrow
        from pyarrow import csv as text
    except ImportError:
        return found
    wide = text.read_csv(csv)
    table = wide.cast(
        pyarrow.schema(
            each if each.type == pyarrow.string() else pyarrow.field(each.name, pyarrow.float32())
            for each in wide.schema
        )
    )
    found[READ] = lambda: text.read_csv(csv)
    found[WRITE] = lambda: text.write_csv(table, out)
    return found


def load(source: Path, place: Path) -> None:
    """Load a file into a new store."""
    tierstore.import_table(place, source)


def export(place: Path, out: Path) -> None:
    """Export the rows of a store."""
    with tierstore.open(place) as store:
        tierstore.export_table(store["embeddings"], out)


def main() -> None:
    parser = arguments(QUESTION, rows=1_000_000, dim=64)
    parser.set_defaults(repeat=3)
    options = parser.parse_args()
    answer = Answer(
        "text",
        QUESTION,
        "each byte of the file is looked at once; the rows are written",
        f"at most {MOST:g} of the processor time of pyarrow's own read_csv and write_csv",
        notes=["files are in the page cache"],
    )
    with workspace(options) as directory:
        csv, vec = written(directory, options.rows, options.dim)
        place, kept, out = directory / "read.tier", directory / "kept.tier", directory / "out.csv"
        load(csv, kept)
        contestants = {
            LOAD: lambda: load(csv, place),
            f"{LOAD} word2vec text": lambda: load(vec, place),
            EXPORT: lambda: export(kept, out),
            **peers(csv, out),
        }

        def cleared(_: str) -> None:
            shutil.rmtree(place, ignore_errors=True)
            out.unlink(missing_ok=True)

        times = in_turn(contestants, options.repeat, before=cleared, clock=time.process_time)
        seconds = medians(times)
        cleared("")
        export(kept, out)
        load(out, place)
        last = options.rows - 1
        with tierstore.open(place) as store:
            row, key = store["embeddings"].read([last])[0], store["embeddings"].keys[last]
        text = csv.read_text().splitlines()[-1].split(",")
        if key != text[0] or not np.array_equal(row, np.array(text[1:], np.float32)):
            raise RuntimeError("other rows were loaded")
        sizes = {name: (vec if "word2vec" in name else csv).stat().st_size for name in seconds}
    answer.rows = [
        {"contestant": name, "seconds": each, "MB/s": sizes[name] / each / 1e6}
        for name, each in seconds.items()
    ]
    readers = [name for name in seconds if name.endswith("read_csv")]
    answer.ratios = {f"{LOAD} / {name}": seconds[LOAD] / seconds[name] for name in readers}
    if WRITE in seconds:
        answer.ratios[f"{EXPORT} / {WRITE}"] = seconds[EXPORT] / seconds[WRITE]
        pairs = [f"{LOAD} / {READ}", f"{EXPORT} / {WRITE}"]
        answer.met = all(answer.ratios[each] <= MOST for each in pairs)
    answer.give(options)


if __name__ == "__main__":
    main()
