"""How many processors this process may use, which may be fewer than the machine has."""

import os
from pathlib import Path


def usable(root: Path = Path("/")) -> int:
    """Count those that the scheduler may choose, and no more than the quota of any control group.

    A quota of half a processor counts as one, and so does one of one and a half. `root` stands
    for / in tests.
    """
    quotas = [max(1, int(quota)) for quota in _quotas(root) if quota > 0]
    return min([len(os.sched_getaffinity(0)), *quotas])


def _quotas(root: Path) -> list[float]:
    """Return the processors that each control group above this process grants, of both versions."""
    found = []
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        here = top / path.lstrip("/")
        for folder in (here, *here.parents):
            if not folder.is_relative_to(top):
                break
            try:
                if controllers:
                    quota = (folder / "cpu.cfs_quota_us").read_text()
                    period = (folder / "cpu.cfs_period_us").read_text()
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                found.append(int(quota) / int(period))
            except (OSError, ValueError):  # not there, or "max"
                continue
    return found
