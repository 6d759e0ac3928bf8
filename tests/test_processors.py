"""The processors that the tests start workers for."""

import os

import pytest

from tests import processors


@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_without_control_groups_the_affinity_counts(tmp_path, monkeypatch):
    assert processors.usable(tmp_path) == len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 7})
    assert processors.usable(tmp_path) == 3


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ("300000 100000", "max 100000", 3),
        ("max 100000", "250000 100000", 2),
        ("50000 100000", "max 100000", 1),
        ("700000 100000", "500000 100000", 5),
        ("max 100000", "max 100000", 64),
    ],
)
def test_the_least_quota_counts(tmp_path, many, inner, outer, expected):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/cpu.max": outer + "\n",
            "sys/fs/cgroup/outer/inner/cpu.max": inner + "\n",
        },
    )
    assert processors.usable(tmp_path) == expected


def test_the_first_version_has_a_file_for_quota_and_period(tmp_path, many):
    group = "sys/fs/cgroup/cpu,cpuacct/job"
    files = {
        "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n0::/job\n",
        f"{group}/cpu.cfs_quota_us": "600000\n",
        f"{group}/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    write(tmp_path, files)
    assert processors.usable(tmp_path) == 6
    write(tmp_path, {f"{group}/cpu.cfs_quota_us": "-1\n"})
    assert processors.usable(tmp_path) == 64
