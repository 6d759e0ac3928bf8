"""What do the policies hit on real streams, compared with published figures and the optimum?

Recipe. The ids of a stream are cut into batches of B; interactions and triples are shuffled anew
for each of four epochs, text stays in reading order. A batch is its distinct rows, in random
order. It hits the rows the tier holds; afterwards at most C rows of tier and batch stay. Counted
are distinct rows over the second half of the batches. Where LRU has more rows of one batch than
it may keep, chance decides. The policies are the library's own classes in its own slot map; the
optimum keeps the rows used soonest and may bypass.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import Answer, arguments

from tierstore.sizing import Stream, load_stream, simulate, stream_of

QUESTION = "Distinct rows of a batch found in a tier of 1, 5, 10 and 20 % of the rows, in percent"
SHARES = (0.01, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Case:
    """A stream, and what was published for it: LRU and the optimum at each size."""

    name: str
    file: str
    array: str
    batch: int
    shuffled: bool
    lru: tuple[float, ...]
    optimum: tuple[float, ...]


CASES = (
    Case("Gowalla items, B 4,096", "gowalla.npz", "item", 4096, True,
         (2.0, 9.8, 19.1, 33.3), (11.4, 34.1, 47.6, 63.3)),
    Case("Gowalla items, B 16,384", "gowalla.npz", "item", 16384, True,
         (1.3, 6.7, 13.4, 26.7), (3.6, 17.9, 35.8, 54.4)),
    Case("Gowalla items, B 65,536", "gowalla.npz", "item", 65536, True,
         (1.0, 5.3, 10.5, 20.9), (1.5, 7.4, 14.9, 29.8)),
    Case("NELL-995, B 16,384", "nell995.npz", "stream", 16384, True,
         (2.2, 10.8, 21.6, 36.0), (8.0, 33.5, 47.4, 61.5)),
    Case("text tokens, B 4,096", "text.npz", "tokens", 4096, False,
         (28.0, 68.6, 82.2, 91.2), (51.6, 82.8, 90.5, 95.2)),
    Case("text tokens, B 65,536", "text.npz", "tokens", 65536, False,
         (6.9, 34.7, 57.8, 76.2), (12.0, 53.1, 73.8, 86.1)),
)  # fmt: skip


def stream_for(case: Case, data: Path) -> Stream:
    """Read the stream of a case by the recipe."""
    return load_stream(
        data / case.file,
        column=case.array,
        batch_size=case.batch,
        epochs=4 if case.shuffled else 1,
        shuffle=case.shuffled,
    )


def drawn(options: argparse.Namespace) -> Stream:
    """Make a stream of independent draws from a power law, where there are no data."""
    rng = np.random.default_rng(0)
    ids = (np.exp(rng.random((200, options.batch)) * np.log(options.rows)) - 1).astype(np.int64)
    return stream_of(rng.permutation(options.rows)[ids], options.rows)


def measure(answer: Answer, name: str, stream: Stream, published: Case | None) -> list[float]:
    """Add the rows of a stream; return how far LRU and the optimum are off, and LFU below LRU."""
    found = simulate(stream, policies=("lru", "lfu"), sizes=SHARES, chance=True)
    percent = {
        policy: [100 * point.unique_hit_rate for point in found.curve(policy)]
        for policy in found.policies
    }
    expected = {} if published is None else {"lru": published.lru, "optimum": published.optimum}
    for policy, values in percent.items():
        columns = {f"{share:.0%}": round(v, 1) for share, v in zip(SHARES, values, strict=True)}
        there = {
            f"published {share:.0%}": value
            for share, value in zip(SHARES, expected.get(policy, ()), strict=False)
        }
        answer.rows.append({"stream": name, "policy": policy, **columns, **there})
    off = [
        abs(a - b) for each in expected for a, b in zip(percent[each], expected[each], strict=True)
    ]
    below = max(a - b for a, b in zip(percent["lru"], percent["lfu"], strict=True))
    return [max(off, default=0.0), below]


def main() -> None:
    parser = arguments(QUESTION, rows=20_000, batch=1024)
    parser.add_argument("--data", type=Path, help="the directory of gowalla.npz, text.npz, …")
    options = parser.parse_args()
    answer = Answer(
        "hit_rates",
        QUESTION,
        "nothing: it is a simulation",
        "LRU and the optimum within 0.5 point of what was published, aged LFU never below LRU by "
        "more than 0.2 point",
        notes=[" ".join(line.strip() for line in (__doc__ or "").splitlines()[2:]).strip()],
    )
    if options.data is None:
        answer.notes.append("without --data: independent draws from a power law, made up")
        measure(answer, "made up", drawn(options), None)
    else:
        found = [measure(answer, c.name, stream_for(c, options.data), c) for c in CASES]
        off, below = (max(column) for column in zip(*found, strict=True))
        answer.ratios["largest distance from what was published, points"] = off
        answer.notes.append(f"LFU is at worst {-below:+.2f} points from LRU")
        answer.met = off <= 0.5 and below <= 0.2
    answer.give(options)


if __name__ == "__main__":
    main()
