"""Do torch and CuPy match?"""

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
    monkeypatch.setattr(machine, "contents", lambda path: text)
    assert machine._driver() == "580.95.05"
