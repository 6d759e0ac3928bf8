"""The compiled core: loops over rows and bytes, in C. README.md there has more on it."""

from __future__ import annotations

import sys
from pathlib import Path

from tierstore._core import sources

if "t" in sys.abiflags:
    raise ImportError("tierstore does not run on free-threaded builds of Python; use another build")

_COMMAND = f"run: {sys.executable} {Path(__file__).parents[2] / 'hatch_build.py'}"
_SOURCES = sources.digest()
try:
    from tierstore._core import compiled
except ImportError as error:
    raise ImportError(
        f"the compiled core of tierstore cannot be loaded ({error}); "
        + (_COMMAND if _SOURCES else "install it again: pip install --force-reinstall tierstore")
    ) from error
if _SOURCES not in ("", compiled.SOURCES):
    raise ImportError(
        f"the compiled core of tierstore is of other sources, {compiled.SOURCES}, than are beside "
        f"it, {_SOURCES}; {_COMMAND}"
    )

from tierstore._core.compiled import (  # noqa: E402  # once it is known to be the right one
    DISPATCH,
    FUSES,
    begin_step,
    check_rows,
    copy_rows,
    crc32c,
    end_step,
    enter_keys,
    find_keys,
    find_slots,
    gather,
    group,
    hash_texts,
    in_memory,
    oldest_slots,
    pack_texts,
    place_keys,
    read_slots,
    scatter,
    set_numbers,
    set_threads,
    sum_groups,
    sum_rows,
    take_texts,
)

__all__ = [
    "DISPATCH",
    "FUSES",
    "NAME",
    "begin_step",
    "check_rows",
    "copy_rows",
    "crc32c",
    "end_step",
    "enter_keys",
    "find_keys",
    "find_slots",
    "gather",
    "group",
    "hash_texts",
    "in_memory",
    "oldest_slots",
    "pack_texts",
    "place_keys",
    "read_slots",
    "scatter",
    "set_numbers",
    "set_threads",
    "sum_groups",
    "sum_rows",
    "take_texts",
]

NAME = f"{DISPATCH} {compiled.SOURCES}"
"""What runs: the way checksums are computed here, and the hash of the sources."""
