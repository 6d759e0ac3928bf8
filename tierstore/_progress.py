"""How calls report the progress of their parts, and that they are at the end; a bar of it.

The last call of a `progress` is always with done equal to the total. The total is never 0, since
people divide by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierstore.errors import InvalidTypeError, MissingExtraError

Progress = Callable[[int, int], None]
"""A function that is called with how much is done, and how much there is in all."""

Shown = Progress | bool | None
"""What public functions take as `progress`: a function, or True for a bar of tqdm."""


def shown(progress: Shown) -> Progress | None:
    """Return the function to call, which for True shows a bar of tqdm, in notebooks as well.

    Raises MissingExtraError where tqdm is not installed, and InvalidTypeError.
    """
    if progress is True:
        return _Bar()
    if progress is None or progress is False:
        return None
    if not callable(progress):
        raise InvalidTypeError(
            "progress is True for a bar, or a function that is called with what is done and the "
            f"total, not {type(progress).__name__}"
        )
    return progress


class _Bar:
    """A bar from the first report on, which is closed by the last."""

    def __init__(self) -> None:
        try:
            from tqdm.auto import tqdm
        except ModuleNotFoundError:
            raise MissingExtraError("progress=True shows a bar: pip install tqdm") from None
        self._make: Callable[..., Any] = tqdm
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = self._make(total=total)
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()


def report_nothing(progress: Progress | None) -> None:
    """Report the end of a call that has nothing to do, as 1 of 1."""
    if progress is not None:
        progress(1, 1)


class Overall:
    """Combines the progress of consecutive parts, such as tables, into the total."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        """Report to `progress` how much is done of a `total`."""
        self._progress = progress
        self._total = total
        self._before = 0
        self._reported = -1

    def __call__(self, done: int, _: int) -> None:
        """Report what is done of this part, which reports 1 of 1 if it has nothing to do."""
        done = min(self._before + done, self._total)
        if not self._total or done == self._reported == self._total:
            return
        self._reported = done
        if self._progress is not None:
            self._progress(self._reported, self._total)

    def passed(self, done: int) -> None:
        """Note that this part is done, which had so much to do."""
        self._before += done

    def finish(self) -> None:
        """Report that all is done, unless the last report did."""
        if self._total == 0:
            report_nothing(self._progress)
        elif self._reported != self._total:
            self._before = 0
            self(self._total, self._total)
