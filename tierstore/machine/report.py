"""What this machine and its Python packages are like, as far as a store is concerned.

Nothing here imports torch or CuPy, makes a CUDA call, or changes anything: versions come from the
packages' metadata, everything else from the operating system.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierstore.disk import paging, tuning
from tierstore.io import TESTED, filesystem
from tierstore.machine.cuda import Cuda, examine_cuda
from tierstore.machine.proc import contents

__all__ = ["Machine", "Storage", "examine", "examine_storage"]

PACKAGES = (
    "tierstore",
    "numpy",
    "click",
    "zarr",
    "crc32c",
    "torch",
    "pyarrow",
    "safetensors",
    "rich",
)


@dataclass(frozen=True)
class Storage:
    """The file system under a path.

    Attributes:
        path: the path, or its nearest parent that exists.
        filesystem: its kind, such as "ext4"; "" if it cannot be told.
        tested: whether it was tested that locks and syncs hold there.
        free_bytes, total_bytes: what a user may still write, and its size.
    """

    path: str
    filesystem: str
    tested: bool
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Machine:
    """The facts, in bytes where they are sizes.

    Attributes:
        packages: version by package; None for what is not installed.
        memory_bytes, available_bytes: RAM, and what is free of it, both within the memory cgroup.
        lock_limit_bytes: how much memory may be locked (`ulimit -l`); None for no limit.
        page_reads: the system call by which pages of scattered rows are fetched.
        merge_gap_bytes: pages at most this far apart are fetched in one piece, as `tierstore bench`
            found it best, or as is usual.
    """

    python: str
    platform: str
    cpus: int
    memory_bytes: int
    available_bytes: int
    lock_limit_bytes: int | None
    page_reads: str
    merge_gap_bytes: int
    packages: dict[str, str | None]
    cuda: Cuda
    storage: Storage

    @property
    def problems(self) -> list[str]:
        """What is wrong, each with its remedy; empty if all is well."""
        found = [] if self.cuda.advice is None else [self.cuda.advice]
        if not self.storage.tested:
            found.append(
                f"{self.storage.path} is on {self.storage.filesystem or 'an unknown file system'}, "
                "where it was not tested whether locks and syncs hold: keep stores on one of "
                f"{', '.join(sorted(TESTED))}"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything, problems included, as plain dicts, lists, strings and numbers."""
        return asdict(self) | {"problems": self.problems}


def examine(path: str | Path = ".") -> Machine:
    """Gather the facts; `path` chooses the file system and need not exist."""
    memory, available = _memory()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Machine(
        python=platform.python_version(),
        platform=platform.platform(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=memory,
        available_bytes=available,
        lock_limit_bytes=None if limit == resource.RLIM_INFINITY else limit,
        page_reads=paging.method(),
        merge_gap_bytes=tuning.merge_gap(path),
        packages={name: _version(name) for name in PACKAGES},
        cuda=examine_cuda(),
        storage=examine_storage(path),
    )


def examine_storage(path: str | Path = ".") -> Storage:
    """Describe the file system under `path`, or under its nearest parent that exists."""
    there = Path(os.path.abspath(path))
    while not there.exists():
        there = there.parent
    kind = filesystem(there)
    space = os.statvfs(there)
    return Storage(
        path=str(there),
        filesystem=kind,
        tested=kind in TESTED,
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory() -> tuple[int, int]:
    """Return total and available bytes of RAM, no more than the memory cgroup allows."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", contents(Path("/proc/meminfo")), re.MULTILINE)
    kib = {name: int(value) for name, value in lines}
    total, available = kib.get("MemTotal", 0) * 1024, kib.get("MemAvailable", 0) * 1024
    limit = contents(Path("/sys/fs/cgroup/memory.max")).strip()
    if limit.isdigit():
        used = contents(Path("/sys/fs/cgroup/memory.current")).strip()
        total = min(total, int(limit))
        available = max(0, min(available, int(limit) - int(used or 0)))
    return total, available
