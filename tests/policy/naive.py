"""The policies as one would first write them down: one Python number a row, no trick."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from tierstore import policy
from tierstore.policy import PolicySpec
from tierstore.policy.hints import LookaheadSpec


class NaiveLRU:
    """The number of the batch that used a row last."""

    def __init__(self, rows: int) -> None:
        self.score = [0.0] * rows
        self.now = 0

    def use(self, rows: np.ndarray) -> None:
        self.now += 1
        for row in rows.tolist():
            self.score[row] = self.now

    def announce(self, rows: np.ndarray) -> None:
        pass


class NaiveLFU(NaiveLRU):
    """Uses, each halved for every `half_life` batches that have passed."""

    def __init__(self, rows: int, half_life: float) -> None:
        super().__init__(rows)
        self.ageing = 0.5 ** (1 / half_life)

    def use(self, rows: np.ndarray) -> None:
        self.score = [score * self.ageing for score in self.score]
        for row in set(rows.tolist()):
            self.score[row] += 1


class NaiveStatic(NaiveLRU):
    """Given counts."""

    def __init__(self, rows: int, counts: np.ndarray) -> None:
        super().__init__(rows)
        self.score = counts.tolist()

    def use(self, rows: np.ndarray) -> None:
        pass


class NaiveLookahead:
    """Announced rows by how soon they are due, above all others, which another policy ranks."""

    def __init__(self, rows: int, on: Any) -> None:
        self.on = on
        self.coming: deque[set[int]] = deque()
        self.score = list(on.score)

    def announce(self, rows: np.ndarray) -> None:
        self.coming.append(set(rows.tolist()))
        self._rank()

    def use(self, rows: np.ndarray) -> None:
        if self.coming and self.coming[0] == set(rows.tolist()):
            self.coming.popleft()
        self.on.use(rows)
        self._rank()

    def _rank(self) -> None:
        self.score = list(self.on.score)
        for distance, batch in reversed(list(enumerate(self.coming))):
            for row in batch:
                self.score[row] = math.inf if distance == 0 else 1e30 - 1e20 * distance


_TWINS: dict[str, Callable[[int, Any], Any]] = {
    "lru": lambda rows, spec: NaiveLRU(rows),
    "lfu": lambda rows, spec: NaiveLFU(rows, spec.half_life),
    "static": lambda rows, spec: NaiveStatic(rows, np.asarray(spec.counts)),
    "lookahead": lambda rows, spec: NaiveLookahead(rows, twin(spec.on, rows)),
}


def twin(spec: PolicySpec, rows: int) -> Any:
    """The same policy written naively. Every registered policy needs one."""
    if spec.name not in _TWINS:
        raise LookupError(f"policy {spec.name!r} has no twin: add it to tests/policy/naive.py")
    return _TWINS[spec.name](rows, spec)


def device_twin(spec: PolicySpec, rows: int) -> Any:
    """What ranks the rows of a GPU tier: it pins announced rows and leaves the rest to `on`."""
    return twin(spec.on if isinstance(spec, LookaheadSpec) else spec, rows)


def examples(rows: int) -> dict[str, PolicySpec]:
    """One of every registered policy, with arguments under which its twin is exact."""
    counts = np.random.default_rng(5).permutation(rows).astype(np.float32)
    made: dict[str, Callable[[], PolicySpec]] = {
        "lfu": lambda: policy.lfu(half_life=7),
        "static": lambda: policy.static(counts),
        "lookahead": lambda: policy.lookahead(policy.lfu(half_life=7)),
    }
    return {name: made.get(name, spec)() for name, spec in PolicySpec.registry.items()}
