"""Choosing a policy: by name, or by a value with parameters, before there is a tier to serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.policy.base import Policy
from tierstore.policy.frequency import AgedFrequency, Counts, count_keys
from tierstore.policy.hints import Lookahead
from tierstore.policy.ranked import Ranked, Ranking
from tierstore.policy.recency import LRU, Recency

__all__ = [
    "NAMES",
    "Choice",
    "Policies",
    "PolicyLike",
    "choose",
    "lfu",
    "lookahead",
    "lru",
    "static",
]

NAMES = ("lru", "lfu", "lookahead")
"""The policies that have a name; `static` needs counts."""

_WINDOW = 256


@dataclass(frozen=True, eq=False)
class Choice:
    """A policy that was chosen, with its parameters; see `lru`, `lfu`, `static` and `lookahead`."""

    name: str
    half_life: float | None = None
    counts: Any = None
    on: Choice | None = None
    window: int = _WINDOW

    def bytes_for(self, rows: int, slots: int) -> int:
        """Most bytes the policy takes in a tier, but for the batches that lookahead queues."""
        if self.name == "lru":
            return LRU.bytes_for(slots)
        return Ranked.bytes_for(slots) + self._ranking_bytes(rows)

    def _ranking_bytes(self, rows: int) -> int:
        if self.name == "lru":
            return Recency.bytes_for(rows)
        below = 0 if self.on is None else Lookahead.bytes_for(rows) + self.on._ranking_bytes(rows)
        return below or AgedFrequency.bytes_for(rows)

    def check(self, rows: int) -> None:
        """Raise InvalidInputError or InvalidTypeError if this is no policy for `rows` rows."""
        if self.name == "static":
            count_keys(self.counts, rows)
        if self.on is not None:
            self.on.check(rows)

    def make(
        self, rows: int, slots: int, slot_of: npt.NDArray[np.int32], row_of: npt.NDArray[np.int64]
    ) -> Policy:
        """Make the policy of a tier whose maps are `slot_of` `(rows,)` and `row_of` `(slots,)`."""
        if self.name == "lru":
            return LRU(slots)
        return Ranked(self._ranking(rows, slots), slot_of, row_of)

    def _ranking(self, rows: int, slots: int) -> Ranking:
        if self.name == "lfu":
            return AgedFrequency(rows, slots, self.half_life)
        if self.name == "static":
            return Counts(count_keys(self.counts, rows))
        if self.on is not None:
            return Lookahead(self.on._ranking(rows, slots), rows, self.window)
        return Recency(rows)


PolicyLike = str | Choice
"""The name of a policy, or a value that `lru`, `lfu`, `static` or `lookahead` returned."""


Policies = PolicyLike | Mapping[str, PolicyLike]
"""One policy for all tables, or one by table's name; tables that are left out get "lru"."""


def lru() -> Choice:
    """Evict the least recently used row: the default, and right where use is local in time."""
    return Choice("lru")


def lfu(half_life: float | None = None) -> Choice:
    """Evict the least frequently used row, where a use counts half after `half_life` batches.

    None: four turnovers of the tier, 4 × slots ÷ distinct rows of a batch. A row that is worth less
    than all that are kept is not admitted. Costs 4 bytes a row and 4 a slot.
    """
    if half_life is not None and not half_life > 0:
        raise InvalidInputError(f"a half-life is above 0 batches, not {half_life}")
    return Choice("lfu", half_life=half_life)


def static(counts: Any) -> Choice:
    """Keep the rows of the highest `counts`, one number a row, whatever is used.

    Costs 4 bytes a row and 4 a slot.
    """
    return Choice("static", counts=counts)


def lookahead(on: PolicyLike = "lfu", *, window: int = _WINDOW) -> Choice:
    """Keep the rows that announced batches (`table.prefetch`) use soonest; the others by `on`.

    Costs 8 bytes a row more than `on`, and 12 a row of each announced batch, of which `window` are
    kept.
    """
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise InvalidInputError(f"the window is at least one batch, not {window}")
    below = choose(on)
    if below.name == "lookahead":
        raise InvalidInputError("lookahead stands on lru, lfu or static, not on lookahead")
    return Choice("lookahead", on=below, window=window)


def choose(policy: Policies | None, table: str = "") -> Choice:
    """Return the policy for `table`: by name, by value, or from a dict by table; None is "lru".

    A table that a dict leaves out gets "lru".
    """
    if isinstance(policy, Mapping):
        policy = policy.get(table)
    if policy is None or policy == "lru":
        return lru()
    if isinstance(policy, Choice):
        return policy
    if policy == "lfu":
        return lfu()
    if policy == "lookahead":
        return lookahead()
    if not isinstance(policy, str):
        raise InvalidTypeError(
            f"a policy is a name or a value of tierstore.policy, such as static(counts): {policy!r}"
        )
    raise InvalidInputError(
        f"no policy {policy!r}; there are {', '.join(NAMES)}, and tierstore.policy.static(counts)"
    )
