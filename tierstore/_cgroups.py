"""Limits of the control groups of this process: cores and memory.

Those of the group itself and of all around it apply. A file that is missing or says "max" sets no
limit.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_RECLAIMED = ("active_file", "inactive_file", "slab_reclaimable")
"""Memory in use that the system takes back when a process needs it: files above all."""


def cores() -> Iterator[int]:
    """Yield the cores that each limit grants in a period, at least 1."""
    for group in _groups(_GROUPS, ""):
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, (group / "cpu.max").read_text().split())
            yield -(-quota // period)


def free_memory() -> Iterator[tuple[int, int]]:
    """Yield the bytes of each limit of memory, and those of them that may still be taken.

    Pages of files count as free, since the system drops or writes them before a limit is exceeded.
    """
    for group in _groups(_GROUPS, ""):
        yield from _free(group, "memory.max", "memory.current", "")
    for group in _groups(_GROUPS / "memory", "memory"):
        yield from _free(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _free(group: Path, limit: str, used: str, of_all: str) -> Iterator[tuple[int, int]]:
    """Yield the limit of one group, if it has any; `of_all` are counts that include inner groups'.

    In the second version of control groups all do.
    """
    with contextlib.suppress(OSError, ValueError):
        most, taken = int((group / limit).read_text()), int((group / used).read_text())
        kept = taken
        with contextlib.suppress(OSError):
            counts = dict(re.findall(r"^(\w+) (\d+)$", (group / "memory.stat").read_text(), re.M))
            kept -= sum(int(counts.get(of_all + name, 0)) for name in _RECLAIMED)
        yield most, min(most, max(0, most - max(0, kept)))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of the group of this process and of those around it, under `root`.

    `controller` is that of a hierarchy of the first version, or "" for the second.
    """
    own = ""
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_GROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(",") and ".." not in path:
                own = path.lstrip("/")  # else it lies outside what is mounted here
    group = Path(own)
    for each in (group, *group.parents):
        yield root / each
