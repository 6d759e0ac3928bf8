"""What does a step cost while new keys arrive, and how much memory does the map of keys take?"""

from __future__ import annotations

import time

import numpy as np
from common import Answer, arguments, private_bytes

from tierstore._keys.growing import key_map

QUESTION = "Keys that arrive in a power law: the cost of a batch, and memory of the map"


def arrivals(keys: int, batch: int, rng: np.random.Generator) -> np.ndarray:
    """Return a batch in which low numbers are frequent, as hashes of the numbers."""
    numbers = keys ** rng.random(batch)
    return numbers.astype(np.int64) * np.int64(0x1E3779B97F4A7C15)


def main() -> None:
    """Measure and print the answer."""
    parser = arguments(QUESTION, new=32_768, steps=300, batch=32_768)
    options = parser.parse_args()
    rng, keys = np.random.default_rng(1), key_map("int64")
    before, seconds, processor, largest = private_bytes(), [], [], 0.0
    for step in range(options.steps):  # each brings keys that were never there, and known ones
        start = step * options.new
        given = np.concatenate(
            [
                np.arange(start, start + options.new) * np.int64(0x1E3779B97F4A7C15),
                arrivals(start + options.new, options.batch, rng),
            ]
        )
        begin, used = time.perf_counter(), time.thread_time()
        keys.add(keys.asked(given))
        seconds.append(time.perf_counter() - begin)
        processor.append(time.thread_time() - used)
        if len(keys) > 1 << 16:
            largest = max(largest, keys.nbytes / len(keys))
    median, longest = float(np.median(seconds)), max(seconds)
    own = max(processor) / float(np.median(processor))  # without the time of other processes
    answer = Answer(
        name="keyed_arrival",
        question=QUESTION,
        must_move=f"{options.new:,} new keys and {options.batch:,} known ones a step",
        target="no step takes more than 4 times the median; at most 40 bytes a key",
        ratios={"longest / median": longest / median, "longest / median, CPU time": own},
        met=longest <= 4 * median and largest <= 40,
    )
    answer.rows.append(
        {
            "keys": len(keys),
            "median, ms": 1e3 * median,
            "p99, ms": 1e3 * float(np.quantile(seconds, 0.99)),
            "longest, ms": 1e3 * longest,
            "bytes a key": keys.nbytes / len(keys),
            "most bytes a key": largest,
            "private bytes a key": (private_bytes() - before) / len(keys),
        }
    )
    answer.give(options)


if __name__ == "__main__":
    main()
