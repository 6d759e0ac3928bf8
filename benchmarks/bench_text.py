"""How long does it take to load a table of text, compared with readers of data frames?

Keys and numbers of the same CSV file go into a store, committed, and into the columns of pandas,
polars and pyarrow, which decide the types of all columns as well and write nothing. gensim's form
of the same rows, word2vec text, has no reader among them and is shown for comparison.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import Answer, arguments, in_turn, medians, workspace

import tierstore

QUESTION = "Seconds to load rows with keys from text"
OURS = "tierstore, committed"
MOST = 2.0
"""Maximum of loading relative to pandas, which writes nothing."""


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


def peers(csv: Path) -> dict[str, Callable[[], object]]:
    """Return the readers of the data frames that are installed."""
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
        from pyarrow import csv as reader

        found["pyarrow.csv.read_csv"] = lambda: reader.read_csv(csv)
    except ImportError:
        pass
    return found


def load(source: Path, place: Path) -> None:
    """Load a file into a new store."""
    tierstore.import_table(place, source)


def main() -> None:
    parser = arguments(QUESTION, rows=200_000, dim=64)
    parser.set_defaults(repeat=5)
    options = parser.parse_args()
    answer = Answer(
        "text",
        QUESTION,
        "each byte of the file is looked at once; the rows are written",
        f"at most {MOST:g} times as long as pandas, which writes nothing",
        notes=["files are in the page cache"],
    )
    with workspace(options) as directory:
        csv, vec = written(directory, options.rows, options.dim)
        place = directory / "read.tier"
        contestants = {
            OURS: lambda: load(csv, place),
            "tierstore, word2vec text, committed": lambda: load(vec, place),
            **peers(csv),
        }
        times = in_turn(
            contestants,
            options.repeat,
            before=lambda _: shutil.rmtree(place, ignore_errors=True),
        )
        seconds = medians(times)
        shutil.rmtree(place, ignore_errors=True)
        load(csv, place)
        with tierstore.open(place) as store:
            last = store["embeddings"].read([options.rows - 1])[0]
            key = store["embeddings"].keys[options.rows - 1]
        text = csv.read_text().splitlines()[-1].split(",")
        if key != text[0] or not np.array_equal(last, np.array(text[1:], np.float32)):
            raise RuntimeError("other rows were loaded")
        sizes = {name: (vec if "word2vec" in name else csv).stat().st_size for name in seconds}
    answer.rows = [
        {"reader": name, "seconds": each, "MB/s": sizes[name] / each / 1e6}
        for name, each in seconds.items()
    ]
    answer.ratios = {
        f"{OURS} / {name}": seconds[OURS] / seconds[name]
        for name in seconds
        if not name.startswith("tierstore")
    }
    pandas = answer.ratios.get(f"{OURS} / pandas.read_csv")
    answer.met = None if pandas is None else pandas <= MOST
    answer.give(options)


if __name__ == "__main__":
    main()
