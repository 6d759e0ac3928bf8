"""Folds that take their steps when they are told to: what a thread does at any time, repeatable."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

__all__ = ["Stepwise", "folds_in_steps"]


class Stepwise:
    """Stands in for `compaction.BackgroundWork`, without a thread."""

    newest: Stepwise | None = None

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps: Iterator[None] | None = steps
        self._error: BaseException | None = None
        Stepwise.newest = self

    def step(self) -> None:
        """Take a step, if there is one left."""
        if self._steps is None:
            return
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
        except BaseException as error:
            self._steps, self._error = None, error

    def done(self) -> bool:
        return self._steps is None

    def finish(self) -> None:
        while self._steps is not None:
            self.step()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._steps = None


class Conductor:
    """Tells folds when to go on."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.overlaps = 0
        """How often there was a fold that was not done yet."""

    def advance(self) -> None:
        """Let the newest fold run a number of steps, possibly none."""
        fold = Stepwise.newest
        if fold is not None and not fold.done():
            self.overlaps += 1
            for _ in range(self._random.choice((0, 0, 1, 1, 2, 5))):
                fold.step()


@contextmanager
def folds_in_steps(seed: int = 0, *, most_deltas: int = 1) -> Iterator[Conductor]:
    """Make folds start above `most_deltas` deltas, and run in tiny steps on request."""
    Stepwise.newest = None
    with (
        mock.patch("tierstore._store.compaction.BackgroundWork", Stepwise),
        mock.patch("tierstore._store.compaction._MOST_DELTAS", most_deltas),
        mock.patch("tierstore._disk.merging._STEP_BYTES", 256),
    ):
        yield Conductor(seed)
    Stepwise.newest = None
