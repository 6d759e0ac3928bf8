"""The most hits any policy can have: keep the rows used soonest, admit no others.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966, with bypass, batch by batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore.sizing.replay import Rates, first_measured
from tierstore.sizing.streams import Stream

__all__ = ["next_uses", "optimum"]

NEVER = np.iinfo(np.int32).max


def next_uses(stream: Stream) -> list[npt.NDArray[np.int32]]:
    """Return for each row of each batch the number of the batch that uses it next, or NEVER."""
    due = np.full(stream.rows, NEVER, np.int32)
    found: list[npt.NDArray[np.int32]] = []
    for number in range(len(stream.batches) - 1, -1, -1):
        rows = stream.batches[number].rows
        found.append(due[rows])
        due[rows] = number
    return found[::-1]


def optimum(
    stream: Stream,
    slots: int,
    uses: list[npt.NDArray[np.int32]] | None = None,
    *,
    measured: float = 0.5,
) -> Rates:
    """Replay a stream through a tier that knows the future; `uses` may be given for many sizes."""
    uses = next_uses(stream) if uses is None else uses
    due = np.full(stream.rows, NEVER, np.int32)
    kept = np.zeros(stream.rows, np.bool_)
    held = np.empty(0, np.int64)
    rates, first = Rates(), first_measured(stream, measured)
    for number, batch in enumerate(stream.batches):
        hit = kept[batch.rows]
        due[batch.rows] = uses[number]
        candidates = np.concatenate([held, batch.rows[~hit]])
        candidates = candidates[due[candidates] != NEVER]
        if candidates.size > slots:
            candidates = candidates[np.argpartition(due[candidates], slots - 1)[:slots]]
        kept[held] = False
        kept[candidates] = True
        evictions = int(np.count_nonzero(~kept[held]))
        held = candidates
        if number >= first:
            rates.count(batch, hit, evictions)
    return rates
