"""Does finding the nearest rows take hardly longer than reading the table?

A search compares the query with every row, so reading them is the least that it can take. NumPy
maps the same base file for the peers: a pass over it in blocks, and the products of all rows. With
--device cuda the products are multiplied on the GPU, over which the table is streamed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from common import Answer, arguments, in_turn, medians, workspace

import tierstore

QUESTION = "Milliseconds to find the ten nearest rows of a table, and to read the table"
WITHIN = 1.3
BLOCK = 16384


def mapped(path: Path) -> np.ndarray:
    """Return the base file of the table as NumPy maps it."""
    (file,) = path.rglob("rows.npy")
    found: np.ndarray = np.load(file, mmap_mode="r")
    return found


def read_mapped(rows: np.ndarray) -> None:
    """Copy all rows, block by block."""
    out = np.empty((BLOCK, rows.shape[1]), rows.dtype)
    for start in range(0, len(rows), BLOCK):
        part = rows[start : start + BLOCK]
        np.copyto(out[: len(part)], part)


def search_mapped(rows: np.ndarray, query: np.ndarray, k: int = 10) -> np.ndarray:
    """Return the rows with the largest products, of which all are held."""
    scores = rows @ query
    best = np.argpartition(scores, len(scores) - k)[-k:]
    return best[np.argsort(-scores[best])]


def main() -> None:
    parser = arguments(QUESTION, rows=10_000_000, dim=64)
    parser.set_defaults(repeat=7)
    parser.add_argument("--device", default="cpu", help="cuda: multiply on the GPU")
    options = parser.parse_args()
    nbytes = options.rows * options.dim * 4
    answer = Answer(
        "near" if options.device == "cpu" else "gpu_near",
        QUESTION,
        f"{nbytes / 1e9:.2g} GB, once",
        f"at most {WITHIN} times as long as reading the table, for cosines and products",
        notes=["files are in the page cache; the reading is that of table.scan(), block by block"],
    )
    with workspace(options) as directory:
        path = directory / "bench.tier"
        spec = tierstore.TableSpec(options.rows, options.dim, init=tierstore.normal(seed=7))
        tierstore.create(path, {"item": spec}, budget=tierstore.Budget(host=0)).close()
        rows = mapped(path)
        none, least = tierstore.Budget(host=0), tierstore.Budget(host_rows=1, gpu_rows=1)
        budget = none if options.device == "cpu" else least
        with tierstore.open(path, budget=budget, device=options.device) as store:
            table = store["item"]
            query = table.read([options.rows // 2])

            def scan() -> None:
                for _ in table.scan():
                    pass

            contestants = {
                "reading the table": scan,
                "nearest by product": lambda: table.topk(query, 10),
                "nearest by cosine": lambda: table.topk(query, 10, metric="cosine"),
                "NumPy: reading the file": lambda: read_mapped(rows),
                "NumPy: products of all rows": lambda: search_mapped(rows, query[0]),
            }
            seconds = medians(in_turn(contestants, options.repeat))
            found = table.topk(query, 10)[1][0]
            if found.tolist() != search_mapped(rows, query[0]).tolist():
                raise RuntimeError("other rows are the nearest")
    answer.rows = [
        {"what": name, "ms": 1000 * each, "GB/s": nbytes / each / 1e9}
        for name, each in seconds.items()
    ]
    searches = ("nearest by product", "nearest by cosine")
    answer.ratios = {
        f"{name} / {reading}": seconds[name] / seconds[reading]
        for name in searches
        for reading in ("reading the table", "NumPy: reading the file")
    }
    answer.met = all(answer.ratios[f"{name} / reading the table"] <= WITHIN for name in searches)
    answer.give(options)


if __name__ == "__main__":
    main()
