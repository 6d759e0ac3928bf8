"""The facts that doctor prints."""

import json
from pathlib import Path

from tierstore.machine import report


def test_storage_of_a_path_that_does_not_exist_yet(tmp_path):
    storage = report.examine_storage(tmp_path / "not" / "yet")
    assert storage.path == str(tmp_path)
    assert 0 < storage.free_bytes <= storage.total_bytes


def test_a_memory_cgroup_counts(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n",
        "/sys/fs/cgroup/memory.max": "409600\n",
        "/sys/fs/cgroup/memory.current": "102400\n",
    }
    monkeypatch.setattr(report, "contents", lambda path: files[str(path)])
    assert report._memory() == (409600, 307200)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert report._memory() == (1000 * 1024, 800 * 1024)


def test_a_network_file_system_is_a_problem(monkeypatch):
    monkeypatch.setattr(report, "filesystem", lambda path: "nfs4")
    facts = report.examine(Path())
    assert facts.storage.network
    assert any("nfs4" in problem for problem in facts.problems)


def test_facts_are_plain_data():
    facts = report.examine()
    assert json.loads(json.dumps(facts.to_dict()))["python"] == facts.python
    assert facts.available_bytes <= facts.memory_bytes
