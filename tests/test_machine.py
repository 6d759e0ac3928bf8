"""The facts that doctor prints, above all: do torch and CuPy match?"""

import json
from pathlib import Path

import pytest

from tierstore import machine
from tierstore.machine import cuda_advice


@pytest.mark.parametrize(
    ("torch_cuda", "cupy", "driver"),
    [
        (None, {}, None),
        (None, {}, "580.95.05"),
        (None, {"cupy-cuda12x": "14.0.0"}, "580.95.05"),
        ("12.8", {}, None),
        ("12.8", {"cupy-cuda12x": "14.2.0"}, "550.54.15"),
        ("13.0", {"cupy-cuda13x": "14.2.0"}, "580.95.05"),
        ("13.0", {"cupy-cuda13x": "14.2.0"}, None),
        ("13.0", {"cupy": "14.2.0"}, "580.95.05"),
    ],
)
def test_pairs_that_fit(torch_cuda, cupy, driver):
    assert cuda_advice(torch_cuda, cupy, driver) is None


@pytest.mark.parametrize(
    ("torch_cuda", "cupy", "driver", "line"),
    [
        (
            "13.2",
            {"cupy-cuda12x": "14.2.0"},
            "580.95.05",
            "pip uninstall -y cupy-cuda12x && pip install 'cupy-cuda13x[ctk]>=14'",
        ),
        (
            "12.8",
            {"cupy-cuda13x": "14.2.0"},
            None,
            "pip uninstall -y cupy-cuda13x && pip install 'cupy-cuda12x[ctk]>=14'",
        ),
        (
            "12.6",
            {"cupy-cuda11x": "13.6.0"},
            "550.54.15",
            "pip uninstall -y cupy-cuda11x && pip install 'cupy-cuda12x[ctk]>=14'",
        ),
        (
            "13.0",
            {"cupy-cuda12x": "14.0.0", "cupy-cuda13x": "14.2.0"},
            "580.95.05",
            "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'cupy-cuda13x[ctk]>=14'",
        ),
        ("13.0", {}, "580.95.05", "pip install 'cupy-cuda13x[ctk]>=14'"),
        ("13.0", {}, "550.54.15", "pip install 'tierstore[cuda12x]'"),
        (
            "13.0",
            {"cupy-cuda13x": "14.2.0"},
            "570.10",
            "pip uninstall -y cupy-cuda13x && pip install 'tierstore[cuda12x]'",
        ),
    ],
)
def test_pairs_that_do_not_fit_are_told_the_line_that_mends_them(torch_cuda, cupy, driver, line):
    advice = cuda_advice(torch_cuda, cupy, driver)
    assert advice is not None and advice.endswith(line)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip = None\n", "13.0"),
        ("cuda = '12.8'\n", "12.8"),
        ("cuda: Optional[str] = None\n", None),
        ("__version__ = '2.13.0'\n", None),
    ],
)
def test_torchs_cuda_is_read_without_importing_torch(tmp_path, monkeypatch, text, version):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "version.py").write_text(text)
    spec = machine.importlib.util.spec_from_file_location("torch", package / "__init__.py")
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: spec)
    assert machine._torch_cuda() == version


@pytest.mark.parametrize("module", ["Open Kernel Module for x86_64  ", "x86_64 Kernel Module  "])
def test_the_driver_is_read(monkeypatch, module):
    text = f"NVRM version: NVIDIA UNIX {module}580.95.05  Release Build\n"
    monkeypatch.setattr(machine, "_read", lambda path: text)
    assert machine._driver() == "580.95.05"


def test_storage_of_a_path_that_does_not_exist_yet(tmp_path):
    storage = machine.examine_storage(tmp_path / "not" / "yet")
    assert storage.path == str(tmp_path)
    assert 0 < storage.free_bytes <= storage.total_bytes


def test_a_memory_cgroup_counts(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n",
        "/sys/fs/cgroup/memory.max": "409600\n",
        "/sys/fs/cgroup/memory.current": "102400\n",
    }
    monkeypatch.setattr(machine, "_read", lambda path: files[str(path)])
    assert machine._memory() == (409600, 307200)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine._memory() == (1000 * 1024, 800 * 1024)


def test_a_network_file_system_is_a_problem(monkeypatch):
    monkeypatch.setattr(machine, "filesystem", lambda path: "nfs4")
    facts = machine.examine(Path())
    assert facts.storage.network
    assert any("nfs4" in problem for problem in facts.problems)


def test_facts_are_plain_data():
    facts = machine.examine()
    assert json.loads(json.dumps(facts.to_dict()))["python"] == facts.python
    assert facts.available_bytes <= facts.memory_bytes
