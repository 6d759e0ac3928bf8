"""How fast are checksums verified, and what does a trainer lose to it?"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
from common import Answer, arguments, workspace

import tierstore

QUESTION = "Verifying every row of a table that is in memory, alone and beside a trainer"
WIDTHS = (16, 64, 256, 512, 1536, 4096)


def verify_seconds(path: Path, repeat: int) -> float:
    """Return the median CPU seconds of verifying a store, all threads of the process together."""
    with tierstore.open(path, budget=tierstore.Budget(host=0)) as store:
        seconds = []
        for _ in range(repeat + 1):
            begin = time.process_time()
            if not store.verify().ok:
                raise RuntimeError("the table is damaged")
            seconds.append(time.process_time() - begin)
    return statistics.median(seconds[1:])


def verify_for_ever(path: Path, go: Event, stop: Event) -> None:
    """Verify a store again and again while `go` is set, at low priority, as the command has."""
    os.nice(10)
    with tierstore.open(path, budget=tierstore.Budget(host=0)) as store:
        while not stop.is_set():
            if go.wait(0.1):
                store.verify(progress=lambda *_: go.wait(60))


def steps_a_second(
    store: tierstore.Store, layer: np.ndarray, rng: np.random.Generator, seconds: float
) -> float:
    """Train for a while: read skewed ids, a layer forward and back, write; commits in between."""
    table = store["t"]
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        ids = np.minimum(rng.pareto(0.5, 4096).astype(np.int64), table.rows - 1)
        rows = table.read(ids)
        hidden = rows @ layer
        table.write(ids, rows - np.float32(0.01) * (hidden @ layer.T))
        count += 1
        if count % 50 == 0:
            store.commit()
    return count / (time.perf_counter() - begin)


def beside(path: Path, turns: int, seconds: float) -> tuple[float, float]:
    """Return median steps a second of a trainer alone and during a verification.

    They take turns of so many seconds.
    """
    context = multiprocessing.get_context("spawn")
    go, stop = context.Event(), context.Event()
    other = context.Process(target=verify_for_ever, args=(path, go, stop))
    other.start()
    rng = np.random.default_rng(2)
    layer = rng.standard_normal((128, 512), dtype=np.float32)
    alone, both = [], []
    with tierstore.open(path, "r+", budget=tierstore.Budget(host=64 << 20)) as store:
        steps_a_second(store, layer, rng, seconds)
        for _ in range(turns):
            go.clear()
            alone.append(steps_a_second(store, layer, rng, seconds))
            go.set()
            both.append(steps_a_second(store, layer, rng, seconds))
        store.rollback()
    stop.set()
    go.set()
    other.join()
    return statistics.median(alone), statistics.median(both)


def main() -> None:
    parser = arguments(QUESTION, mib=512, turn_ms=1500)
    parser.set_defaults(repeat=5)
    options = parser.parse_args()
    answer = Answer(
        "verify",
        QUESTION,
        "every record and its checksum of 4 B, once",
        "1 GB/s a core from 512 B a record on, 4 M rows/s below; a trainer loses at most 10 %",
        notes=["a core: by CPU time, whatever else the machine does"],
    )
    with workspace(options) as directory:
        for width in WIDTHS:
            rows = max(100, (options.mib << 20) // width)
            initializer = tierstore.uniform(-1, 1, seed=width)
            path = directory / f"{width}.tier"
            spec = tierstore.TableSpec(rows, width // 4, init=initializer)
            tierstore.create(path, {"t": spec}).close()
            seconds = verify_seconds(path, options.repeat)
            answer.rows.append(
                {"record": f"{width} B", "rows": rows, "GB/s a core": rows * width / seconds / 1e9}
                | {"M rows/s": rows / seconds / 1e6}
            )
        alone, both = beside(directory / "512.tier", options.repeat, options.turn_ms / 1e3)
    answer.rows.append({"record": "a trainer alone", "steps/s": alone})
    answer.rows.append({"record": "and a verification", "steps/s": both})
    found = dict(zip(WIDTHS, answer.rows, strict=False))
    wide = [found[width]["GB/s a core"] for width in WIDTHS if width >= 512]
    narrow = [found[width]["M rows/s"] for width in WIDTHS if width < 512]
    answer.ratios = {
        "GB/s a core, least from 512 B on": min(wide),
        "M rows/s, least below": min(narrow),
        "trainer beside a verification ÷ alone": both / alone,
    }
    answer.met = min(wide) >= 1 and min(narrow) >= 4 and both >= 0.9 * alone
    answer.give(options)


if __name__ == "__main__":
    main()
