"""Information about the machine: processor, memory, storage, GPU, CUDA packages and speeds."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierstore import _cgroups, _core
from tierstore._disk import readahead
from tierstore._io import TESTED, allocated_bytes, filesystem
from tierstore._io import leftovers as partial_files
from tierstore._parts import threads_of_core
from tierstore.machine.speeds import BENCH_PREFIX, Speeds, known_speeds

__all__ = [
    "Cuda",
    "Leftover",
    "Machine",
    "Speeds",
    "Storage",
    "core",
    "cuda_advice",
    "examine",
    "examine_storage",
    "known_speeds",
    "leftovers",
]


def core() -> str:
    """Return how the compiled core computes checksums here, and the hash of its sources."""
    return _core.NAME


def contents(path: Path) -> str:
    """Return the text of a system file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


FIRST_DRIVER = {12: 525, 13: 580}
PREVIOUS_CUDA = "pip install 'tierstore[cuda12x]'"


@dataclass(frozen=True)
class Cuda:
    """The CUDA versions of the driver and the installed packages.

    Attributes:
        driver: version of the NVIDIA driver, such as "580.95.05"; None without one.
        devices: names of the GPUs that the driver lists.
        torch: CUDA version that torch was built for, such as "13.0"; None for CPU-only or no torch.
        cupy: installed CuPy distributions and their versions.
        advice: the conflict between the packages and the pip command that resolves it, or None.
    """

    driver: str | None
    devices: list[str]
    torch: str | None
    cupy: dict[str, str]
    advice: str | None


def examine_cuda() -> Cuda:
    """Find out what is installed, without importing any of it."""
    driver, torch, cupy = _driver(), _torch_cuda(), _cupy_distributions()
    return Cuda(driver, _devices(), torch, cupy, cuda_advice(torch, cupy, driver))


def cuda_advice(torch_cuda: str | None, cupy: Mapping[str, str], driver: str | None) -> str | None:
    """Return the conflict in a set of CUDA packages and its remedy, or None.

    `torch_cuda` is the CUDA version for which torch was built, `cupy` maps CuPy distributions to
    their versions, `driver` is the version of the NVIDIA driver. CuPy loads the CUDA libraries
    installed with torch, so both need the same major version: `pip install torch cupy-cuda12x`
    mixes 13 and 12.
    """
    if torch_cuda is None:
        return None
    major = _major(torch_cuda)
    install = f"pip install 'cupy-cuda{major}x[ctk]>=14'"
    if driver is not None and _major(driver) < FIRST_DRIVER.get(major, 0):
        needs = f"CUDA {torch_cuda} needs driver {FIRST_DRIVER[major]} or newer, this is {driver}"
        return f"{needs}: update the driver, or {_replace(cupy, PREVIOUS_CUDA)}"
    if not cupy:
        return f"there is a GPU, but no CuPy to use it: {install}" if driver else None
    if len(cupy) > 1:
        return f"{' and '.join(sorted(cupy))} overwrite each other: {_replace(cupy, install)}"
    name = next(iter(cupy))
    built_for = re.fullmatch(r"cupy-cuda(\d+)x", name)
    if built_for and int(built_for[1]) != major:
        wrong = f"torch was built for CUDA {torch_cuda}, {name} for {built_for[1]}"
        return f"{wrong}: {_replace(cupy, install)}"
    return None


def _replace(cupy: Mapping[str, str], install: str) -> str:
    """Return the command that replaces these CuPy distributions by another set."""
    return f"pip uninstall -y {' '.join(sorted(cupy))} && {install}" if cupy else install


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _cupy_distributions() -> dict[str, str]:
    """Find all distributions that provide the module cupy, under any name."""
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    return {name: version for name, version in installed.items() if re.match(r"cupy\b", name)}


def _torch_cuda() -> str | None:
    """Read the CUDA version from torch's version file, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = contents(Path(spec.origin).with_name("version.py"))
    match = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None


def _driver() -> str | None:
    match = re.search(
        r"Kernel Module +(?:for \S+ +)?([\d.]+)", contents(Path("/proc/driver/nvidia/version"))
    )
    return match[1] if match else None


def _devices() -> list[str]:
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = (re.search(r"^Model:\s*(.+?)\s*$", contents(gpu), re.MULTILINE) for gpu in gpus)
    return [model[1] for model in models if model]


PACKAGES = (
    "tierstore",
    "numpy",
    "click",
    "zarr",
    "torch",
    "pyarrow",
    "rich",
)


@dataclass(frozen=True)
class Storage:
    """The file system under a path.

    Attributes:
        path: the path, or its nearest existing parent.
        filesystem: its type, such as "ext4", or "" if unknown.
        tested: whether locks and syncs were tested on this file system.
        free_bytes, total_bytes: the space available to the user, and the total size.
    """

    path: str
    filesystem: str
    tested: bool
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Machine:
    """Information about the machine; sizes are in bytes.

    Attributes:
        packages: versions by package; None if not installed.
        threads: maximum number of threads that share the work of a large batch.
        memory_bytes, available_bytes: total and available RAM within the memory cgroup.
        lock_limit_bytes: limit of locked memory (`ulimit -l`); None if unlimited.
        page_reads: the system call that prefetches pages of scattered rows.
        core: how the compiled core computes checksums here, and the hash of its sources.
        merge_gap_bytes: maximum gap between pages that are read in one piece, as measured by
            `tierstore bench`, or a typical value.
    """

    python: str
    platform: str
    cpus: int
    threads: int
    memory_bytes: int
    available_bytes: int
    lock_limit_bytes: int | None
    page_reads: str
    core: str
    merge_gap_bytes: int
    packages: dict[str, str | None]
    cuda: Cuda
    storage: Storage

    @property
    def problems(self) -> list[str]:
        """The problems found, each with its remedy."""
        problems = [] if self.cuda.advice is None else [self.cuda.advice]
        if not self.storage.tested:
            problems.append(
                f"{self.storage.path} is on {self.storage.filesystem or 'an unknown file system'}, "
                "on which locks and syncs were not tested: keep stores on one of "
                f"{', '.join(sorted(TESTED))}"
            )
        return problems

    def to_dict(self) -> dict[str, Any]:
        """Return everything, including problems, as plain dicts, lists, strings and numbers."""
        return asdict(self) | {"problems": self.problems}


def examine(path: str | os.PathLike[str] = ".") -> Machine:
    """Collect the information; `path` selects the file system and need not exist."""
    memory, available = _memory()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Machine(
        python=platform.python_version(),
        platform=platform.platform(),
        cpus=len(os.sched_getaffinity(0)),
        threads=threads_of_core(),
        memory_bytes=memory,
        available_bytes=available,
        lock_limit_bytes=None if limit == resource.RLIM_INFINITY else limit,
        page_reads=readahead.method(),
        core=core(),
        merge_gap_bytes=readahead.merge_gap(Path(path)),
        packages={name: _version(name) for name in PACKAGES},
        cuda=examine_cuda(),
        storage=examine_storage(path),
    )


def examine_storage(path: str | os.PathLike[str] = ".") -> Storage:
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


@dataclass(frozen=True)
class Leftover:
    """A temporary file or directory of a killed or running process.

    Attributes:
        path: its temporary name.
        disk_bytes: the disk space that it uses.
    """

    path: Path
    disk_bytes: int


def leftovers(path: str | os.PathLike[str] = ".") -> list[Leftover]:
    """Return unfinished files and stores next to `path`, then those in it.

    They are left of killed processes, or written just now.
    """
    path = Path(os.path.abspath(path))
    found: list[Path] = []
    for directory in (path.parent, path):
        with contextlib.suppress(OSError):  # missing or unreadable
            found += partial_files(directory)
            found += sorted(directory.glob(f"{BENCH_PREFIX}*"))
    return [Leftover(each, allocated_bytes(each)) for each in found]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory() -> tuple[int, int]:
    """Return total and available bytes of RAM within the memory cgroup."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", contents(Path("/proc/meminfo")), re.MULTILINE)
    kib = {name: int(value) for name, value in lines}
    total, available = kib.get("MemTotal", 0) * 1024, kib.get("MemAvailable", 0) * 1024
    for limit, free in _cgroups.free_memory():
        total, available = min(total, limit), min(available, free)
    return total, available
