"""Text that is safe to print: no character from a file reaches the terminal as a control code."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from typing import IO, Any

import click

LISTED = 20
"""Ids shown of a longer list."""

BLOCKS = "▁▂▃▄▅▆▇█"
"""Eight heights, for small curves."""

# For streams that cannot encode the characters used here (LC_ALL=C): same width, plain ASCII.
ASCII = str.maketrans("·–—×…▁▂▃▄▅▆▇█", "|--x~_.-~=+*#")


def printable(text: object, keep: str = "") -> str:
    """Return `text` with every character escaped that is neither printable nor in `keep`.

    Control characters (terminal escapes), lone surrogates and direction marks become escapes, and
    so do bytes of file names that are not in the encoding of the locale: `caf\\xe9`.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else ascii(character)[1:-1]


def fitted(text: str, stream: IO[Any]) -> str:
    """Return `text` with the characters replaced that `stream` cannot encode."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


def quoted(path: object) -> str:
    """Return a path as a shell reads it, for a command to copy."""
    return shlex.quote(str(path))


def tell(message: str, stream: IO[Any] | None = None, *, end: str = "\n") -> None:
    """Write a message to stderr; a failure to write it, as to a full disk, ends no command."""
    stream = stream or sys.stderr
    try:
        click.echo(fitted(message + end, stream), file=stream, nl=False)
    except OSError:
        discard(stream)


def discard(stream: IO[Any]) -> None:
    """Drop the rest of a stream's buffer, so that Python ends without a message."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def some_ids(ids: Sequence[int]) -> str:
    """Return the first ids as text; --json lists all of them."""
    rest = len(ids) - LISTED
    return " ".join(map(str, ids[:LISTED])) + (f" … and {rest:,} more" if rest > 0 else "")


def some_rows(table: str, ids: Sequence[int]) -> str:
    """Return how many rows of a table are damaged, and the first of them."""
    damaged = "1 row is" if len(ids) == 1 else f"{len(ids):,} rows are"
    return f"{damaged} damaged in table {table} ({some_ids(ids)})"


def sparkline(values: Sequence[float], top: float = 1.0) -> str:
    """Return values in 0..top as one block character each, a blank for 0."""
    steps = [min(-(-value * len(BLOCKS) // top), len(BLOCKS)) if top else 0 for value in values]
    return "".join(BLOCKS[int(step) - 1] if step > 0 else " " for step in steps)


def percent(rate: float | None) -> str:
    """Return a rate in 0..1 as text, a dash for None."""
    return "–" if rate is None else f"{100 * rate:.1f} %"
