"""Do tables that share one host tier hit more than with the same bytes divided among them?

Recipe. The tables of a stream have records of one length and are laid end to end. Shared: one tier
of C slots over all rows. Divided: a tier for each table, whose slots are its part of C in
proportion to its bytes, one at least. A batch has the ids of all tables for as many samples; it
hits the rows that the tiers hold. As in training every row of it is admitted if the tier has room
for all, otherwise the policy decides. Counted are distinct rows over the second half of the
batches. Gowalla's check-ins are shuffled anew for each of four epochs; the 26 tables have the
cardinalities of Criteo's click log, scaled, and ids from a power law, drawn independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from common import Answer, arguments

from tierstore.policy import choose
from tierstore.sizing import stream_of
from tierstore.sizing.simulation import Rates, replay
from tierstore.stats import tally

QUESTION = (
    "Distinct rows of a batch found in host tiers of 1, 5, 10 and 20 % of the rows, in percent"
)
SHARES = (0.01, 0.05, 0.1, 0.2)
CRITEO = [
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
]
EXPONENT = 1.05

Ids = npt.NDArray[np.int64]


def gowalla(data: Path, batch: int) -> tuple[list[int], list[Ids]]:
    """Return the rows of users and items, and the ids of each, `(batches, batch)`."""
    with np.load(data / "gowalla.npz") as arrays:
        pairs = np.stack([arrays["user"], arrays["item"]]).astype(np.int64)
    rng = np.random.default_rng(0)
    epochs = [pairs[:, rng.permutation(pairs.shape[1])] for _ in range(4)]
    order = np.concatenate(epochs, axis=1)
    order = order[:, : order.shape[1] // batch * batch]
    return (pairs.max(axis=1) + 1).tolist(), [each.reshape(-1, batch) for each in order]


def clicks(rows: Sequence[int], batches: int, batch: int) -> list[Ids]:
    """Return the ids of each table, `(batches, batch)`, by a power law over ranks."""
    rng, found = np.random.default_rng(0), []
    for count in rows:
        weights = np.arange(1, count + 1) ** -EXPONENT
        ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random((batches, batch)))
        found.append(rng.permutation(count)[np.minimum(ranks, count - 1)])
    return found


def shared(rows: Sequence[int], ids: Sequence[Ids], slots: int, policy: str) -> Rates:
    """Replay all tables through one tier."""
    starts = np.cumsum([0, *rows])
    together = np.concatenate([each + at for each, at in zip(ids, starts, strict=False)], axis=1)
    stream = stream_of(together, int(starts[-1]))
    return replay(stream, choose(policy), slots, leases=True, chance=True)


def divided(rows: Sequence[int], ids: Sequence[Ids], slots: int, policy: str) -> Rates:
    """Replay each table through a tier of its part of the slots."""
    total = Rates()
    for count, each in zip(rows, ids, strict=True):
        own = max(1, slots * count // sum(rows))
        found = replay(stream_of(each, count), choose(policy), own, leases=True, chance=True)
        tally(total, unique=found.unique, unique_hits=found.unique_hits)
    return total


def measure(answer: Answer, name: str, rows: Sequence[int], ids: Sequence[Ids]) -> list[float]:
    """Add the rows of a stream; return the additional hits of sharing in points, by size."""
    gains = []
    for policy in ("lru", "lfu"):
        percent = {
            way.__name__: [
                100 * way(rows, ids, max(1, int(share * sum(rows))), policy).unique_hit_rate
                for share in SHARES
            ]
            for way in (divided, shared)
        }
        for way, values in percent.items():
            columns = {f"{share:.0%}": round(v, 1) for share, v in zip(SHARES, values, strict=True)}
            answer.rows.append({"stream": name, "policy": policy, "tiers": way, **columns})
        both = zip(percent["shared"], percent["divided"], strict=True)
        gains += [one - other for one, other in both]
    return gains


def main() -> None:
    parser = arguments(QUESTION, rows=340_000, batch=2048, batches=200)
    parser.add_argument("--data", type=Path, help="the directory of gowalla.npz")
    options = parser.parse_args()
    answer = Answer(
        "shared_space",
        QUESTION,
        "nothing: it is a simulation",
        "sharing never hits less than dividing, and 3 points more in the mean",
        notes=[" ".join(line.strip() for line in (__doc__ or "").splitlines()[2:]).strip()],
    )
    gains = {}
    if options.data is None:
        answer.notes.append("without --data: Gowalla is left out")
    else:
        for batch in (options.batch, 8 * options.batch):
            name = f"Gowalla users and items, B {batch:,}"
            gains[name] = measure(answer, name, *gowalla(options.data, batch))
    rows = [max(min(count, 3), count * options.rows // sum(CRITEO)) for count in CRITEO]
    name = f"26 tables of {sum(rows):,} rows, B {options.batch:,}"
    gains[name] = measure(answer, name, rows, clicks(rows, options.batches, options.batch))
    for name, points in gains.items():
        answer.ratios[f"{name}: points gained, mean"] = float(np.mean(points))
        answer.ratios[f"{name}: points gained, least"] = min(points)
    every = np.concatenate(list(gains.values()))
    answer.met = bool(every.min() >= 0 and every.mean() >= 3)
    answer.give(options)


if __name__ == "__main__":
    main()
