"""The policies as one would first write them down: one Python number a row, no trick."""

from __future__ import annotations

import math
from collections import deque

import numpy as np


class NaiveLRU:
    """The number of the batch that used a row last."""

    def __init__(self, rows: int, **_: object) -> None:
        self.worth = [0.0] * rows
        self.now = 0

    def use(self, rows: np.ndarray) -> None:
        self.now += 1
        for row in rows.tolist():
            self.worth[row] = self.now

    def announce(self, rows: np.ndarray) -> None:
        pass


class NaiveLFU(NaiveLRU):
    """Uses, each halved for every `half_life` batches that have passed."""

    def __init__(self, rows: int, half_life: float) -> None:
        super().__init__(rows)
        self.ageing = 0.5 ** (1 / half_life)

    def use(self, rows: np.ndarray) -> None:
        self.worth = [worth * self.ageing for worth in self.worth]
        for row in set(rows.tolist()):
            self.worth[row] += 1


class NaiveStatic(NaiveLRU):
    """Given counts."""

    def __init__(self, rows: int, counts: np.ndarray) -> None:
        super().__init__(rows)
        self.worth = counts.tolist()

    def use(self, rows: np.ndarray) -> None:
        pass


class NaiveLookahead(NaiveLRU):
    """Announced rows by how soon they are due, above all others, which go by recency."""

    def __init__(self, rows: int, **_: object) -> None:
        super().__init__(rows)
        self.coming: deque[set[int]] = deque()
        self.recency = self.worth

    def announce(self, rows: np.ndarray) -> None:
        self.coming.append(set(rows.tolist()))
        self._rank()

    def use(self, rows: np.ndarray) -> None:
        if self.coming and self.coming[0] == set(rows.tolist()):
            self.coming.popleft()
        self.worth = self.recency
        super().use(rows)
        self._rank()

    def _rank(self) -> None:
        self.worth = list(self.recency)
        for distance, batch in reversed(list(enumerate(self.coming))):
            for row in batch:
                self.worth[row] = math.inf if distance == 0 else 1e9 - distance
