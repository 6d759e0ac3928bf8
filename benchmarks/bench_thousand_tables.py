"""What does a store of a thousand tables cost where one of them is used?"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import Answer, arguments, in_turn, medians, workspace

import tierstore

QUESTION = "A commit of one row, opening, a refresh and inspection of a store of a thousand tables"
DIM, ROWS = 16, 100
MOST = {"commit of one row": 1.5}
"""Maximum relative to a store of one table."""
SECONDS = 0.2
"""Maximum time of opening, refreshing and inspecting."""
DESCRIPTORS, LIMIT = 64, 256


class Stored:
    """A store of some tables, open for writing and for reading."""

    def __init__(self, path: Path, tables: int) -> None:
        self.path = path
        specs = {f"t{n}": tierstore.TableSpec(ROWS, DIM) for n in range(tables)}
        self.writer = tierstore.create(path, specs)
        self.values = np.random.default_rng(1)
        for name in specs:
            self.write(name)
        self.writer.commit()
        self.reader = tierstore.open(path)

    def close(self) -> None:
        self.reader.close()
        self.writer.close()

    def write(self, name: str = "t0") -> None:
        self.writer[name].write([3], self.values.random((1, DIM), np.float32))

    def ways(self) -> dict[str, Callable[[], Any]]:
        """Return the calls to measure."""
        return {
            "commit of one row": self.writer.commit,
            "opening": lambda: tierstore.open(self.path).close(),
            "refresh": self.reader.refresh,
            "inspection": self.reader.info,
        }

    def prepare(self, way: str) -> None:
        if way in ("commit of one row", "refresh"):
            self.write()
        if way == "refresh":
            self.writer.commit()

    def descriptors(self) -> int:
        """Return the number of descriptors of a reader that has read every table."""
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, before[1]))
        try:
            closed = len(os.listdir("/proc/self/fd"))
            with tierstore.open(self.path) as reader:
                for table in reader.values():
                    table.read([5])
                return len(os.listdir("/proc/self/fd")) - closed
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def main() -> None:
    parser = arguments(QUESTION, tables=1000)
    options = parser.parse_args()
    answer = Answer(
        "thousand_tables",
        QUESTION,
        "of a commit, one record and what the manifest says of every table",
        f"a commit at most {MOST['commit of one row']} of that of a store of one table, the others "
        f"at most {SECONDS} s, {DESCRIPTORS} descriptors under a limit of {LIMIT}",
    )
    counts = (1, options.tables)
    seconds: dict[tuple[str, int], float] = {}
    with workspace(options) as folder:
        stores = {count: Stored(folder / f"{count}.tier", count) for count in counts}
        for way in stores[1].ways():
            steps = {str(count): stored.ways()[way] for count, stored in stores.items()}

            def before(count: str, way: str = way) -> None:
                stores[int(count)].prepare(way)

            found = medians(in_turn(steps, options.repeat, before))
            seconds |= {(way, int(count)): each for count, each in found.items()}
        opened = stores[options.tables].descriptors()
        for stored in stores.values():
            stored.close()
    met = opened <= DESCRIPTORS
    for way in dict.fromkeys(way for way, _ in seconds):
        one, many = (seconds[way, count] for count in counts)
        answer.rows.append(
            {"what": way, "1 table, ms": 1e3 * one, f"{options.tables} tables, ms": 1e3 * many}
        )
        answer.ratios[f"{way}, {options.tables} tables / 1 table"] = many / one
        met &= many / one <= MOST[way] if way in MOST else many <= SECONDS
    answer.met = met
    answer.notes = [
        f"{opened} descriptors after a read of every table, of {LIMIT} that are allowed"
    ]
    answer.give(options)


if __name__ == "__main__":
    main()
