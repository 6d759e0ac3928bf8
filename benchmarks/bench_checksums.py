"""How near are checksums of rows, and copies that verify them, to what the processor can do?

The peer is one crc32c over all bytes of the same rows, by the core's own function: three lanes of
an instruction that begins once a cycle and takes three, which is two to three times as fast as the
package google-crc32c. A row of 64 bytes has nine words, of which one is its number, so its checksum
takes nine cycles, 1.125 of the peer's eight, less what the peer takes to join its lanes. A copy is
compared with the peer and NumPy's copy of the rows together, which do the same in two passes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
from common import Answer, arguments

from tierstore import _core

QUESTION = "Processor time of checksums of rows in memory, relative to one crc32c over their bytes"
WIDTHS = (16, 64, 192, 512, 1536)
MOST = 1.25
"""Maximum relative to the peers, for rows of 64 B."""


def contestants(rows: int, width: int) -> dict[str, Callable[[], object]]:
    """Return what is compared, on the same random rows."""
    rng = np.random.default_rng(width)
    ids, at = rng.integers(0, 2**40, rows), rng.permutation(rows)
    records = rng.integers(0, 256, (rows, width), np.uint8)
    sums, bad = np.empty(rows, np.uint32), np.empty(rows, np.int64)
    out = np.empty_like(records)
    _core.sum_rows(ids, records, sums)
    moved, moved_ids, flat, found = sums[at], ids[at], records.reshape(-1), np.empty_like(sums)
    return {
        "one crc32c": lambda: _core.crc32c(flat),
        "NumPy's copy": lambda: np.copyto(out, records),
        "checksums": lambda: _core.sum_rows(ids, records, found),
        "verified": lambda: _core.check_rows(ids, records, sums, False, bad),
        "verified copy": lambda: _core.copy_rows(records, at, moved_ids, moved, False, out, bad),
    }


def processor_times(
    calls: Mapping[str, Callable[[], object]], repeat: int, times: int
) -> dict[str, float]:
    """Return the median processor time of a call, in µs, by name; all take turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeat + 1):
        for name, call in calls.items():
            begin = time.process_time_ns()
            for _ in range(times):
                call()
            if number:
                taken[name].append((time.process_time_ns() - begin) / times / 1e3)
    return {name: statistics.median(each) for name, each in taken.items()}


def main() -> None:
    """Run the benchmark."""
    parser = arguments(QUESTION, rows=2048, times=20)
    parser.set_defaults(repeat=61)
    options = parser.parse_args()
    answer = Answer(
        "checksums",
        QUESTION,
        "every byte once, and its number with each row",
        f"rows of 64 B: at most {MOST} of one crc32c; copied, of one crc32c and one copy",
    )
    for width in WIDTHS:
        taken = processor_times(contestants(options.rows, width), options.repeat, options.times)
        one, copy = taken["one crc32c"], taken["NumPy's copy"]
        ratios = {name: taken[name] / one for name in ("checksums", "verified")}
        ratios["verified copy"] = taken["verified copy"] / (one + copy)
        answer.rows.append(
            {"record": f"{width} B"}
            | {f"{name}, µs": each for name, each in taken.items()}
            | {f"{name} ÷ peers": each for name, each in ratios.items()}
        )
        if width == 64:
            answer.ratios = {f"{name} ÷ peers, 64 B": each for name, each in ratios.items()}
    answer.met = max(answer.ratios.values()) <= MOST
    answer.give(options)


if __name__ == "__main__":
    main()
