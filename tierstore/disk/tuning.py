"""How cold pages are best fetched from a disk: measured once, and kept in the user's cache.

The file is `$XDG_CACHE_HOME/tierstore/disks.json` (`~/.cache` without that variable), an entry a
disk. It holds nothing that cannot be measured again; one that cannot be read or written is ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["cache_path", "disk_of", "read_cache", "write_cache"]


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


def read_cache(name: str) -> dict[str, Any]:
    """Return what is kept in a file of the cache, by disk; empty where nothing can be read."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(cache_path(name).read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def write_cache(name: str, content: dict[str, Any]) -> None:
    """Keep something in a file of the cache, where that can be written."""
    path = cache_path(name)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        temporary.replace(path)
