"""The kernels compile for every architecture that is supported, without a GPU or a CUDA toolkit."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "tierstore" / "kernels.cu"


def nvrtc() -> ctypes.CDLL:
    """NVIDIA's run-time compiler, from the wheel nvidia-cuda-nvrtc."""
    for package in ("nvidia.cuda_nvrtc", "nvidia.cu13"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec and spec.submodule_search_locations) or ():
            for library in sorted(Path(folder, "lib").glob("libnvrtc.so.*")):
                return ctypes.CDLL(str(library))
    pytest.skip("needs the wheel nvidia-cuda-nvrtc-cu12")


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90"])
def test_kernels_compile(architecture: str) -> None:
    compiler = nvrtc()
    program = ctypes.c_void_p()
    source = KERNELS.read_bytes()
    created = compiler.nvrtcCreateProgram(
        ctypes.byref(program), source, b"kernels.cu", 0, None, None
    )
    assert created == 0
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    compiled = compiler.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetProgramLog(program, log)
    assert compiled == 0, log.value.decode()
    assert not log.value, log.value.decode()
    assert compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    assert size.value > 10_000
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
