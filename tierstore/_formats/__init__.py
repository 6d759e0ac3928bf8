"""Files of vectors: what other tools write and read, as blocks of rows.

Everything streams, in blocks of a few MiB. What a file claims is held against an allowance before
memory is taken for it, and no code that comes with a file is run.

A format is one module with one `Format` (base.py) a kind of file, found by its suffix. A module
with a leading underscore belongs to the format that imports it.
"""

from tierstore._formats.base import FORMATS, Source
from tierstore._formats.keys import Keys
from tierstore._formats.registry import open_source, read_keys
from tierstore._formats.sink import Sink, open_sink

__all__ = [
    "SINK_SUFFIXES",
    "SOURCE_SUFFIXES",
    "Keys",
    "Sink",
    "Source",
    "open_sink",
    "open_source",
    "read_keys",
]

SOURCE_SUFFIXES = tuple(FORMATS)
"""Endings of files that can be read."""

SINK_SUFFIXES = tuple(suffix for suffix, each in FORMATS.items() if each.is_written)
"""Endings of files that can be written."""
