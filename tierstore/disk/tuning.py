"""How cold pages are best fetched from a disk: measured once, and kept in the user's cache.

The file is `$XDG_CACHE_HOME/tierstore/speeds.json` (`~/.cache` without that variable), an entry a
disk, written by `tierstore bench`. It holds nothing that cannot be measured again; one that cannot
be read or written, whatever it is, is ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from tierstore import io
from tierstore.disk.paging import USUAL_GAP

__all__ = ["SPEEDS", "cache_path", "disk_of", "merge_gap", "read_cache", "write_cache"]

SPEEDS = "speeds.json"
_MOST_BYTES = 1 << 20
_GAPS = (4 << 10, 256 << 10)


def cache_path(name: str) -> Path:
    """Return where a file of this name is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "tierstore" / name


def disk_of(path: str | Path) -> str:
    """Return what tells the disk under `path`, or its nearest parent there is, from others."""
    there = Path(os.path.abspath(path))
    while not there.exists():
        there = there.parent
    device = os.stat(there).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def merge_gap(path: str | Path) -> int:
    """Return the bytes that the disk under `path` reads in the time of one more request.

    Pages that lie less than this apart are best read in one piece: bandwidth ÷ requests a second,
    as measured last, or what is usual.
    """
    entry: Any = read_cache(SPEEDS).get(disk_of(path))
    with contextlib.suppress(TypeError, KeyError, ValueError, ZeroDivisionError, OverflowError):
        gap = int(entry["sequential_bytes"] / entry["random_reads"])
        return min(max(gap, _GAPS[0]), _GAPS[1])
    return USUAL_GAP


def read_cache(name: str) -> dict[str, Any]:
    """Return what is kept in a file of the cache, by disk; empty where nothing can be read."""
    path = cache_path(name)
    with contextlib.suppress(Exception), io.Directory.open(path.parent) as directory:
        content = json.loads(directory.read_file(path.name, _MOST_BYTES))
        if isinstance(content, dict):
            return content
    return {}


def write_cache(name: str, content: dict[str, Any]) -> None:
    """Keep something in a file of the cache, where that can be written."""
    path = cache_path(name)
    with contextlib.suppress(Exception):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        temporary.replace(path)
