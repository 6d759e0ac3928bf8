"""Does a run have the hit rates that `tierstore plan` predicts from the ids of an earlier one?

The plan is made from one run's stream; the run that is measured shuffles, or draws, its ids anew.
Both fill the tier with the first half of their batches and count the second.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from common import Answer, arguments, workspace

import tierstore
from tierstore.policy import choose
from tierstore.sizing import Stream, load_stream, plan, stream_of

QUESTION = "Hit rates of the host tier over the second half of a run: predicted, and measured"
SHARES = (0.02, 0.1, 0.3)
POLICIES = ("lru", "lfu")
DIM = 16
DATA = {
    "Gowalla items, B 4,096": ("gowalla.npz", "item", 4096),
    "NELL-995, B 16,384": ("nell995.npz", "stream", 16384),
}


def streams(options: argparse.Namespace, seed: int) -> dict[str, Stream]:
    """Return the streams of one run; another seed gives those of another."""
    rng = np.random.default_rng(seed)
    ids = (np.exp(rng.random((200, options.batch)) * np.log(options.rows)) - 1).astype(np.int64)
    places = np.random.default_rng(0).permutation(options.rows)
    found = {"made up, power law": stream_of(places[ids], options.rows, seed)}
    for name, (file, array, batch) in DATA.items() if options.data else ():
        found[name] = load_stream(
            options.data / file, column=array, batch_size=batch, epochs=4, shuffle=True, seed=seed
        )
    return found


def run(path: Path, stream: Stream, budget: int, policy: str) -> tuple[float, float]:
    """Lease every batch of a stream; return the hit rates over ids and over distinct rows."""
    given = tierstore.Budget(host=budget)
    with tierstore.open(path, "r+", budget=given, policy=policy) as store:
        table = store["item"]
        seen = [np.zeros(4)]
        for number, batch in enumerate(stream.batches, 1):
            with table.lease(np.repeat(batch.rows, batch.counts)) as lease:
                lease.write("weight", lease.read("weight") + np.float32(0.01))
            if number in (len(stream.batches) // 2, len(stream.batches)):
                at = table.stats()["host"]
                seen.append(np.array([at.requested, at.hits, at.unique, at.unique_hits]))
        store.rollback()
    requested, hits, unique, unique_hits = (seen[-1] - seen[-2]).tolist()
    return hits / requested, unique_hits / unique


def main() -> None:
    parser = arguments(QUESTION, rows=100_000, batch=4096)
    parser.add_argument("--data", type=Path, help="the directory of gowalla.npz and nell995.npz")
    options = parser.parse_args()
    answer = Answer(
        "plan",
        QUESTION,
        "nothing: what is compared are counts",
        "predicted within 2 points of measured, over ids and over distinct rows",
        notes=[" ".join(line.strip() for line in (__doc__ or "").splitlines()[2:]).strip()],
    )
    off = 0.0
    with workspace(options) as directory:
        earlier, later = streams(options, 1), streams(options, 2)
        for number, (name, stream) in enumerate(later.items()):
            path = directory / f"{number}.tier"
            spec = tierstore.TableSpec(stream.rows, DIM, init=tierstore.normal(seed=number))
            tierstore.create(path, {"item": spec}).close()
            width = spec.layout.record_bytes
            for policy in POLICIES:
                for share in SHARES:
                    budget = int(stream.rows * (share * width + 16))
                    found = plan(
                        stream.rows,
                        width,
                        host=budget,
                        policy=choose(policy),
                        stream=earlier[name],
                    )
                    (host,) = found.tiers
                    predicted = (host.hit_rate or 0.0, host.unique_hit_rate or 0.0)
                    measured = run(path, stream, budget, policy)
                    apart = 100 * np.subtract(predicted, measured)
                    off = max(off, float(np.abs(apart).max()))
                    answer.rows.append(
                        {"stream": name, "policy": policy, "slots, % of rows": 100 * host.share}
                        | {"predicted": 100 * predicted[0], "measured": 100 * measured[0]}
                        | {"distinct, predicted": 100 * predicted[1]}
                        | {"distinct, measured": 100 * measured[1]}
                    )
    answer.ratios["points apart, at most"] = off
    answer.met = off <= 2
    answer.give(options)


if __name__ == "__main__":
    main()
