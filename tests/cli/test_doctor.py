"""tierstore doctor."""

import resource

import pytest

from tierstore import machine

KEYS = {
    "python",
    "platform",
    "cpus",
    "threads",
    "memory_bytes",
    "available_bytes",
    "lock_limit_bytes",
    "page_reads",
    "core",
    "merge_gap_bytes",
    "packages",
    "cuda",
    "storage",
    "problems",
    "speeds",
    "leftovers",
    "store",
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Make doctor find no problems on any machine unless a test injects them."""
    monkeypatch.setattr(machine, "_driver", lambda: None)
    monkeypatch.setattr(machine, "_torch_cuda", lambda: None)


def test_json_keys(run_json, tmp_path):
    data = run_json("doctor", tmp_path)
    assert set(data) == KEYS
    assert set(data["cuda"]) == {"driver", "devices", "torch", "cupy", "advice"}
    assert set(data["storage"]) == {"path", "filesystem", "tested", "free_bytes", "total_bytes"}
    assert data["storage"]["path"] == str(tmp_path)
    assert data["packages"]["numpy"]
    assert data["problems"] == []


def test_text_names_what_matters(run):
    text = run("doctor").stdout
    for name in ("python", "numpy", "torch", "cupy", "ulimit -l", "disk", "page reads"):
        assert name in text


def test_a_store_with_a_damaged_row_is_damaged(run, single):
    (base,) = single.glob("*/*/rows.npy")
    data = bytearray(base.read_bytes())
    data[4096] ^= 1
    base.chmod(0o644)
    base.write_bytes(data)
    assert f"tierstore verify {single}" in run("doctor", single, code=4).stderr


def test_the_limit_of_locked_memory_has_a_unit(run, tmp_path, monkeypatch):
    for limit, shown in [(8 << 20, "8.0 MiB"), (resource.RLIM_INFINITY, "unlimited")]:
        monkeypatch.setattr(machine.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        (line,) = (each for each in run("doctor", tmp_path).stdout.splitlines() if "ulimit" in each)
        assert line.split(maxsplit=2)[2] == shown


@pytest.mark.slow
def test_speeds_once_they_are_measured(run, run_json, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "not measured yet: tierstore bench" in run("doctor", tmp_path).stdout
    assert run_json("doctor", tmp_path)["speeds"] is None
    measured = run_json("bench", tmp_path, "--size", "1MiB", "--seconds", "0.01")["speeds"]
    assert run_json("doctor", tmp_path)["speeds"] == measured
    text = run("doctor", tmp_path).stdout
    assert "copying memory, one thread" in text
    assert "the link to the GPU" in text


def test_a_wrong_pair_prints_the_line_that_mends_it_and_fails(run, run_json, monkeypatch):
    monkeypatch.setattr(machine, "_torch_cuda", lambda: "13.0")
    monkeypatch.setattr(machine, "_cupy_distributions", lambda: {"cupy-cuda12x": "14.2.0"})
    result = run("doctor", code=1)
    assert "pip uninstall -y cupy-cuda12x && pip install 'cupy-cuda13x[ctk]>=14'" in result.stderr
    assert run_json("doctor", code=1)["problems"][0] in result.stderr


@pytest.mark.slow
def test_what_killed_commands_left_is_listed(run, run_json, single, tmp_path):
    beside = tmp_path / ".other.tier.0123abcd.partial"
    (beside / "t").mkdir(parents=True)
    (beside / "t" / "rows.npy").write_bytes(b"x" * 5000)
    inside = single / ".out\x1b.npy.89abcdef.partial"
    inside.write_bytes(b"y")
    (tmp_path / "mine.partial").write_bytes(b"z")
    found = run_json("doctor", single)["leftovers"]
    assert [each["path"] for each in found] == [str(beside), str(inside)]
    assert found[0]["disk_bytes"] >= 5000
    text = run("doctor", single).stdout
    assert f"{beside}, " in text and "remove it" in text and "\x1b" not in text
    assert run_json("doctor", tmp_path / "nothing" / "here", code=3)["error"]["exit_code"] == 3


@pytest.mark.slow
def test_a_store_is_looked_at(run, run_json, pair):
    found = run_json("doctor", pair)["store"]
    assert (found["damage"], found["version"], found["tables"]) == (False, 3, 2)
    assert found["unfolded_bytes"] > 0
    assert "no damage found" in run("doctor", pair).stdout
    (base,) = pair.glob("item/g*/rows.npy")
    data = bytearray(base.read_bytes())
    data[-70] ^= 1
    base.chmod(0o644)
    base.write_bytes(data)
    assert "tierstore verify" in run("doctor", pair, code=4).stderr
    assert run_json("doctor", pair, code=4)["store"]["bad_rows"]["item"]
