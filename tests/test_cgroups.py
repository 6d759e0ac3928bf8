"""The limits of control groups, in directories as the system has them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

import tierstore
from tierstore import _cgroups
from tierstore._tiers import memory

GIB = 1 << 30


def stat(files: int, anonymous: int, prefix: str = "") -> str:
    """The part of memory.stat that counts, between others; half of the files were used lately."""
    counts = {
        "anon": anonymous,
        "file": files,
        "inactive_anon": anonymous,
        "active_file": files // 2,
        "inactive_file": files // 2,
        "unevictable": 0,
    }
    return "".join(f"{prefix}{name} {count}\n" for name, count in counts.items())


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_cgroups, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(_cgroups, "_OWN_GROUP", tmp_path / "own")
    return tmp_path


def write(root: Path, files: Mapping[str, str | int]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_no_groups_set_no_limit(groups: Path) -> None:
    assert list(_cgroups.free_memory()) == []
    write(groups, {"own": "0::/", "groups/memory.current": 5, "groups/memory.max": "max"})
    assert list(_cgroups.free_memory()) == []


def test_pages_of_files_count_as_free(groups: Path) -> None:
    write(
        groups,
        {
            "own": "0::/job",
            "groups/job/memory.max": 4 * GIB,
            "groups/job/memory.current": 4 * GIB,
            "groups/job/memory.stat": stat(files=3 * GIB, anonymous=GIB),
        },
    )
    assert list(_cgroups.free_memory()) == [(4 * GIB, 3 * GIB)]


def test_the_limits_of_all_groups_around_count(groups: Path) -> None:
    write(
        groups,
        {
            "own": "0::/outer/inner",
            "groups/outer/memory.max": 2 * GIB,
            "groups/outer/memory.current": GIB,
            "groups/outer/inner/memory.max": "max",
            "groups/outer/inner/memory.current": GIB,
            "groups/memory.max": 8 * GIB,
            "groups/memory.current": 9 * GIB,
            "groups/elsewhere/memory.max": 1,
            "groups/elsewhere/memory.current": 1,
        },
    )
    assert list(_cgroups.free_memory()) == [(2 * GIB, GIB), (8 * GIB, 0)]


def test_the_first_version_has_other_names(groups: Path) -> None:
    write(
        groups,
        {
            "own": "5:cpu,cpuacct:/other\n4:memory:/job\n0::/job",
            "groups/memory/job/memory.limit_in_bytes": 4 * GIB,
            "groups/memory/job/memory.usage_in_bytes": 3 * GIB,
            "groups/memory/job/memory.stat": stat(0, GIB) + stat(2 * GIB, GIB, "total_"),
        },
    )
    assert list(_cgroups.free_memory()) == [(4 * GIB, 3 * GIB)]


def test_the_default_budget_does_not_shrink_by_files_that_were_read(
    groups: Path, tmp_path: Path
) -> None:
    """A store whose files fill the page cache of its container gets as much as an empty one."""
    budgets = []
    for files in (0, 40 << 20):
        write(
            groups,
            {
                "own": "0::/job",
                "groups/job/memory.max": 64 << 20,
                "groups/job/memory.current": (20 << 20) + files,
                "groups/job/memory.stat": stat(files, 20 << 20),
            },
        )
        assert memory.available_bytes() == 44 << 20
        spec = tierstore.TableSpec(200_000, 16)
        with tierstore.create(tmp_path / f"store{files}", {"t": spec}) as store:
            budgets.append(store.info().tables[0].tiers[0].slots)
    assert 0 < budgets[0] == budgets[1] < 200_000
