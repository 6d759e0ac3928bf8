"""A progress bar on stderr, on a terminal only and after a second."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import click

from tierstore_cli.text import fitted

PATIENCE_SECONDS = 1.0
REDRAW_SECONDS = 0.1
WIDTH = 24


class Progress:
    """A callable `progress(done, total)` that draws a bar, erased at the end of its block."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.started = time.monotonic()
        self.next_draw = self.started + PATIENCE_SECONDS
        self.drawn = 0
        self.terminal = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self.drawn:
            self._write(" " * self.drawn + "\r")

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done."""
        now = time.monotonic()
        if not self.terminal or now < self.next_draw:
            return
        self.next_draw = now + REDRAW_SECONDS
        line = self.line(done, total, now - self.started)
        self._write(line.ljust(self.drawn) + "\r")
        self.drawn = len(line)

    def line(self, done: int, total: int, seconds: float) -> str:
        """Return the bar as text."""
        share = min(done / total, 1.0) if total > 0 else 0.0
        filled = round(share * WIDTH)
        left = f"{seconds / share - seconds:,.0f} s left" if share else ""
        return (
            f"{self.label}  {'█' * filled}{'–' * (WIDTH - filled)}  {share:4.0%}  {left}".rstrip()
        )

    def _write(self, text: str) -> None:
        click.echo(fitted(text, sys.stderr), err=True, nl=False)
