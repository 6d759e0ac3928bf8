"""From how many bytes on do threads pay off for a call of the core, and what do pages cost?"""

from __future__ import annotations

import argparse
import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import Answer, arguments, in_turn, medians, workspace

from tierstore import _core
from tierstore._parts import threads_of_core

QUESTION = (
    "A call of the core by one thread and by several, by bytes of a part; and asking for pages"
)
WIDTH = 256
CALLS_KIB = (512, 1024, 2048, 4096, 16384)
"""What a call moves."""
PARTS_KIB = (256, 512, 1024, 2048, 4096)
"""For each of which a thread comes."""
USUAL, SHARED_KIB = "256 KiB", 2048
"""What the core takes unless it is told otherwise, and from which calls on; one thread below."""
SLOWER = 1.25
"""Times the best way, one thread included, that the usual one may take."""
SPANS_KIB = (1024, 4096, 16384, 17408, 65536)
"""From the first row to the last: up to 16,384 the core asks for every page, above for samples."""
OF_A_COPY = 0.5
"""Most of the time of a copy of the rows that asking for their pages may take."""
ROWS_ASKED = 4096


def calls(kib: int) -> dict[str, Callable[[], object]]:
    """Return calls that move so much: a copy of rows, a read by slot, checksums, a sum by row."""
    rng = np.random.default_rng(kib)
    n = (kib << 10) // WIDTH
    records = rng.integers(0, 256, (1 << 16, WIDTH), np.uint8)
    rows, out = rng.integers(0, len(records), n), np.empty((n, WIDTH), np.uint8)
    values = rng.standard_normal((n, WIDTH // 4), np.float32)
    order, starts, distinct = (
        np.empty(n, np.int64),
        np.empty(n + 1, np.int64),
        np.empty(n, np.int64),
    )
    count = _core.group(rows, order, starts, distinct)
    sums = np.empty((count, WIDTH // 4), np.float32)
    whole = records, None, rows, 0, len(records), 0, out, None, None, 1, None
    return {
        "copy": partial(_core.gather, records, rows, 0, out),
        "read": partial(_core.read_slots, *whole),
        "checksums": partial(_core.sum_rows, rows, out, np.empty(n, np.uint32)),
        "sums by row": partial(_core.sum_groups, [values], order, starts[: count + 1], sums),
    }


def by_parts(answer: Answer, threads: int, repeat: int) -> bool:
    """Add what calls take by bytes of a part; return whether the usual ones are good enough."""
    ways = {"one thread": (1, 0), **{f"{kib} KiB": (threads, kib << 10) for kib in PARTS_KIB}}
    met = True
    for kib in CALLS_KIB:
        for name, call in calls(kib).items():

            def run(way: str, call: Callable[[], object] = call) -> None:
                _core.set_threads(*ways[way])
                for _ in range(8):
                    call()

            found = medians(in_turn({way: partial(run, way) for way in ways}, repeat))
            row: dict[str, Any] = {"call": name, "KiB": kib}
            answer.rows.append(row | {way: 1e6 * found[way] / 8 for way in ways})
            usual = USUAL if kib >= SHARED_KIB else "one thread"
            ratio = found[usual] / min(found.values())
            answer.ratios[f"{name} of {kib} KiB, of the best way"] = ratio
            met &= ratio <= SLOWER
    _core.set_threads(threads_of_core(), 0)
    return met


def by_pages(answer: Answer, directory: Path, repeat: int) -> bool:
    """Add what it takes to ask which pages are in memory, beside a copy of the rows."""
    path = directory / "rows"
    path.write_bytes(b"\1" * (max(SPANS_KIB) << 10))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    records = np.frombuffer(mapped, np.uint8).reshape(-1, WIDTH)
    met = True
    for kib in SPANS_KIB:
        rows = np.linspace(0, (kib << 10) // WIDTH - 1, ROWS_ASKED).astype(np.int64)
        out = np.empty((rows.size, WIDTH), np.uint8)
        if not _core.in_memory(records, rows):
            raise RuntimeError("the rows were written just now, but are not in memory")
        each = {
            "pages": partial(_core.in_memory, records, rows),
            "copy": partial(_core.gather, records, rows, 0, out),
        }
        found = medians(in_turn(each, repeat))
        row: dict[str, Any] = {"call": "pages of rows", "KiB": kib}
        answer.rows.append(row | {"one thread": 1e6 * found["pages"]})
        ratio = found["pages"] / found["copy"]
        answer.ratios[f"pages of rows within {kib} KiB, of a copy of them"] = ratio
        met &= ratio <= OF_A_COPY
    return met


def main() -> None:
    parser = arguments(QUESTION)
    options: argparse.Namespace = parser.parse_args()
    threads = threads_of_core()
    answer = Answer(
        "core_parts",
        QUESTION,
        "what is in the column KiB, once; of pages a bit each",
        f"parts of {USUAL} at most {SLOWER} of the best way, pages {OF_A_COPY} of a copy",
    )
    answer.notes.append(f"{threads} threads; microseconds, by bytes of a part")
    met = by_parts(answer, threads, options.repeat)
    with workspace(options) as directory:
        answer.met = by_pages(answer, directory, options.repeat) and met
    answer.give(options)


if __name__ == "__main__":
    main()
