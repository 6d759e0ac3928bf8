"""Text that is safe to print: nothing a file supplies may steer the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

LISTED = 20
"""Ids that are shown of a longer list."""

BLOCKS = "▁▂▃▄▅▆▇█"
"""A value in eight steps, for small curves."""

# For streams that cannot encode what we print (LC_ALL=C): same width, plain ASCII.
ASCII = str.maketrans("·–—×…▁▂▃▄▅▆▇█", "|--x~_.-~=+*#")


def printable(text: object, keep: str = "") -> str:
    """Return `text` with every character escaped that does not simply print; those in `keep` stay.

    Control characters (terminal escapes), lone surrogates and direction marks become escapes.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def some_ids(ids: Sequence[int]) -> str:
    """Return the first ids as text; --json has them all."""
    rest = len(ids) - LISTED
    return " ".join(map(str, ids[:LISTED])) + (f" … and {rest:,} more" if rest > 0 else "")


def some_rows(table: str, ids: Sequence[int]) -> str:
    """Return how many rows of a table are damaged, and the first of them."""
    return f"{len(ids):,} rows of table {table} are damaged ({some_ids(ids)})"


def fitted(text: str, stream: IO[Any]) -> str:
    """Return `text` so that `stream` can encode it."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text
