"""The facts that doctor prints."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tierstore import _cgroups, machine


def test_storage_of_a_path_that_does_not_exist_yet(tmp_path):
    storage = machine.examine_storage(tmp_path / "not" / "yet")
    assert storage.path == str(tmp_path)
    assert 0 < storage.free_bytes <= storage.total_bytes


def test_free_is_what_this_user_may_take(monkeypatch, tmp_path):
    """Of 5 free blocks, 2 are kept for root."""
    blocks = SimpleNamespace(f_bavail=3, f_bfree=5, f_blocks=10, f_frsize=4096, f_bsize=1 << 20)
    monkeypatch.setattr(machine.os, "statvfs", lambda _: blocks)
    storage = machine.examine_storage(tmp_path)
    assert (storage.free_bytes, storage.total_bytes) == (3 * 4096, 10 * 4096)


def test_a_memory_cgroup_counts(monkeypatch):
    facts = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n"
    monkeypatch.setattr(machine, "contents", lambda path: facts)
    limits = [(409600, 307200), (1 << 40, 1 << 39)]
    monkeypatch.setattr(_cgroups, "free_memory", lambda: iter(limits))
    assert machine._memory() == (409600, 307200)
    limits.clear()
    assert machine._memory() == (1000 * 1024, 800 * 1024)


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", ""])
def test_a_file_system_that_was_not_tested_is_a_problem(monkeypatch, kind):
    monkeypatch.setattr(machine, "filesystem", lambda path: kind)
    facts = machine.examine(Path())
    assert not facts.storage.tested
    assert any((kind or "unknown") in problem for problem in facts.problems)


def test_facts_are_plain_data():
    facts = machine.examine()
    assert json.loads(json.dumps(facts.to_dict()))["python"] == facts.python
    assert facts.available_bytes <= facts.memory_bytes


def test_leftovers_beside_a_path_and_in_it(tmp_path):
    beside, inside = (
        tmp_path / ".a.tier.0123abcd.partial",
        tmp_path / "s" / ".b.npy.89abcdef.partial",
    )
    beside.mkdir()
    inside.parent.mkdir()
    (beside / "rows.npy").write_bytes(b"x" * 5000)
    inside.write_bytes(b"y")
    (tmp_path / "mine.partial").write_bytes(b"z")
    (tmp_path / ".current.0123abcd.partial").symlink_to(tmp_path)
    (tmp_path / ".tierstore-bench-x").write_bytes(b"z" * 9000)
    found = machine.leftovers(tmp_path / "s")
    names = [".a.tier.0123abcd.partial", ".current.0123abcd.partial", ".tierstore-bench-x"]
    assert [each.path for each in found] == [*(tmp_path / name for name in names), inside]
    assert found[0].disk_bytes >= 5000
    assert found[1].disk_bytes <= 4096 < 9000 <= found[2].disk_bytes
    assert machine.leftovers(tmp_path / "missing" / "path") == []
