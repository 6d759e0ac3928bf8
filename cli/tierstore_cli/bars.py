"""Progress on stderr: a bar on a terminal, after a second; elsewhere a line from time to time."""

from __future__ import annotations

import sys
import time

from tierstore_cli.printing import tell

PATIENCE_SECONDS = 1.0
REDRAW_SECONDS = 0.1
LINE_SECONDS = 30.0
"""Seconds between lines, and to the first, in a log file."""

WIDTH = 24


class Progress:
    """A callable `progress(done, total)` that shows how much is done and how long the rest takes.

    A bar is erased at the end of its block. The time that is left follows from what was done since
    the first call, before which files may have been counted.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.terminal = sys.stderr.isatty()
        self.next_draw = time.monotonic() + (PATIENCE_SECONDS if self.terminal else LINE_SECONDS)
        self.begin: tuple[float, int] | None = None
        self.drawn = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.drawn:
            self._write(" " * self.drawn + "\r")

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done."""
        now = time.monotonic()
        if self.begin is None:
            self.begin = now, done
        if now < self.next_draw:
            return
        share = min(done / total, 1.0) if total > 0 else 0.0
        began, before = self.begin
        left = (now - began) * (total - done) / (done - before) if done > before else None
        if self.terminal:
            self.next_draw = now + REDRAW_SECONDS
            line = self.line(share, left)
            self._write(line.ljust(self.drawn) + "\r")
            self.drawn = len(line)
        else:
            self.next_draw = now + LINE_SECONDS
            self._write(f"{self.label}  {share:4.0%}  {_seconds(left)}".rstrip() + "\n")

    def line(self, share: float, left: float | None) -> str:
        """Return the bar as text."""
        filled = round(share * WIDTH)
        bar = "█" * filled + "–" * (WIDTH - filled)
        return f"{self.label}  {bar}  {share:4.0%}  {_seconds(left)}".rstrip()

    def _write(self, text: str) -> None:
        tell(text, end="")


def _seconds(left: float | None) -> str:
    return "" if left is None else f"{left:,.0f} s left"
