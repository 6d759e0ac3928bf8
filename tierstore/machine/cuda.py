"""Which CUDA the packages here were built for, and whether they can be used together."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierstore.machine.proc import contents

__all__ = ["Cuda", "cuda_advice", "examine_cuda"]

FIRST_DRIVER = {12: 525, 13: 580}
PREVIOUS_CUDA = "pip install 'tierstore[cuda12x]'"


@dataclass(frozen=True)
class Cuda:
    """Which CUDA everything was built for.

    Attributes:
        driver: version of the NVIDIA driver, such as "580.95.05"; None without one.
        devices: names of the GPUs that the driver lists.
        torch: CUDA version that torch was built for, such as "13.0"; None for CPU-only or no torch.
        cupy: installed CuPy distributions and their versions.
        advice: what is wrong with the pair and the pip line that mends it; None if nothing is.
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
    """Say what is wrong with this set of CUDA packages and how to mend it; None if nothing is.

    `torch_cuda` is the CUDA version torch was built for, `cupy` maps CuPy distributions to their
    versions, `driver` is the NVIDIA driver's version. CuPy loads the CUDA libraries that torch
    brings, so both must be of one major version: `pip install torch cupy-cuda12x` mixes 13 with 12.
    """
    if torch_cuda is None:
        return None
    major = _major(torch_cuda)
    install = f"pip install 'cupy-cuda{major}x[ctk]>=14'"
    if driver is not None and _major(driver) < FIRST_DRIVER.get(major, 0):
        needs = f"CUDA {torch_cuda} needs driver {FIRST_DRIVER[major]} or newer, this is {driver}"
        return f"{needs}: update the driver, or {_replace(cupy, PREVIOUS_CUDA)}"
    if not cupy:
        return f"a GPU, but no CuPy to use it: {install}" if driver else None
    if len(cupy) > 1:
        return f"{' and '.join(sorted(cupy))} overwrite each other: {_replace(cupy, install)}"
    name = next(iter(cupy))
    built_for = re.fullmatch(r"cupy-cuda(\d+)x", name)
    if built_for and int(built_for[1]) != major:
        wrong = f"torch was built for CUDA {torch_cuda}, {name} for {built_for[1]}"
        return f"{wrong}: {_replace(cupy, install)}"
    return None


def _replace(cupy: Mapping[str, str], install: str) -> str:
    """Return the line that removes these CuPy distributions and installs another set."""
    return f"pip uninstall -y {' '.join(sorted(cupy))} && {install}" if cupy else install


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _cupy_distributions() -> dict[str, str]:
    """Find all distributions that bring the module cupy, under whatever name."""
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
