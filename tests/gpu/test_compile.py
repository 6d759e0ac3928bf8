"""The kernels compile for every architecture that is supported, without a GPU or a CUDA toolkit."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.abi import claims
from tierstore._tiers.gpu.abi import RECORDS, TIER
from tierstore._tiers.gpu.keys import KEYS

STEP: dict[str, Any] = {
    "OPTIMIZER": "ADAM",
    "WEIGHT": "F32",
    "COMPUTED": "F32",
    "GIVEN": "F32",
    "STOCHASTIC": 0,
    "NARROW": 0,
    "SCALED": 0,
    "FIRST": "F32",
    "SECOND": "None",
    "THIRD": "None",
    "VECTOR": 4,
    "SQUARES_FUSED": 1,
    **dict.fromkeys(("MAXIMIZE", "DECOUPLED", "AMSGRAD", "NESTEROV", "MOMENTUM", "CENTERED"), 0),
}
BF16 = {"WEIGHT": "BF16", "COMPUTED": "BF16", "GIVEN": "BF16"}
F16 = {"WEIGHT": "F16", "COMPUTED": "F16", "GIVEN": "F16"}
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "tier": ("", {}),
    "sparse tier": ("", {"SPARSE": 1}),
    "keys": ("keys.cu", {}),
    "columns": ("_table/columns.cu", {"UNITS": "32,32,32", "WIDTH": 16}),
    "odd columns": ("_table/columns.cu", {"UNITS": "1,70", "WIDTH": 2}),
    "owners": ("distributed/owners.cu", {}),
    "scaled": (
        "_table/scaled.cu",
        {
            "ELEMENT": "E4M3FN",
            "SCALE": "F32",
            "OUT": "BF16",
            "DIM": 256,
            "BLOCK": 128,
            "SCALES": 256,
            "BYTES": 264,
            "VECTOR": 8,
            "APART": 0,
        },
    ),
    "scaled by powers of two": (
        "_table/scaled.cu",
        {
            "ELEMENT": "I8",
            "SCALE": "E8M0",
            "OUT": "F16",
            "DIM": 7,
            "BLOCK": 3,
            "SCALES": 7,
            "BYTES": 10,
            "VECTOR": 1,
            "APART": 0,
        },
    ),
    "scaled to floats": (
        "_table/scaled.cu",
        {
            "ELEMENT": "E5M2",
            "SCALE": "F32",
            "OUT": "F32",
            "DIM": 128,
            "BLOCK": 128,
            "SCALES": 128,
            "BYTES": 132,
            "VECTOR": 4,
            "APART": 0,
        },
    ),
    "scaled apart": (
        "_table/scaled.cu",
        {
            "ELEMENT": "E4M3FN",
            "SCALE": "F32",
            "OUT": "BF16",
            "DIM": 256,
            "BLOCK": 128,
            "SCALES": 256,
            "BYTES": 256,
            "VECTOR": 16,
            "APART": 1,
        },
    ),
    "split": ("_table/split.cu", {}),
    "sum": ("nn/sum.cu", {"VECTOR": 4, "EACH": "F32"}),
    "sum of halves": ("nn/sum.cu", {"VECTOR": 4, "EACH": "BF16"}),
    "sum of odd rows": ("nn/sum.cu", {"VECTOR": 1, "EACH": "F16"}),
    "pool": ("nn/pool.cu", {"ROW": "F32", "OUT": "F32", "VECTOR": 4, "COLUMNS": 4, "MAXIMA": 0}),
    "pool of halves": (
        "nn/pool.cu",
        {"ROW": "BF16", "OUT": "F32", "VECTOR": 8, "COLUMNS": 8, "MAXIMA": 1},
    ),
    "pool to odd columns": (
        "nn/pool.cu",
        {"ROW": "F16", "OUT": "F16", "VECTOR": 8, "COLUMNS": 1, "MAXIMA": 0},
    ),
    "pool of odd rows": (
        "nn/pool.cu",
        {"ROW": "F32", "OUT": "BF16", "VECTOR": 1, "COLUMNS": 1, "MAXIMA": 1},
    ),
    "sgd": ("optim/step.cu", {**STEP, "OPTIMIZER": "SGD", "MOMENTUM": 1, "NESTEROV": 1}),
    "adam": ("optim/step.cu", {**STEP, "SECOND": "BF16", "THIRD": "F16", "AMSGRAD": 1}),
    "adamw": ("optim/step.cu", {**STEP, "SECOND": "F32", "DECOUPLED": 1, "VECTOR": 1}),
    "adagrad": ("optim/step.cu", {**STEP, **BF16, "OPTIMIZER": "ADAGRAD"}),
    "row-wise": ("optim/step.cu", {**STEP, **F16, "OPTIMIZER": "ROWWISE"}),
    "adam at random": (
        "optim/step.cu",
        {**STEP, "WEIGHT": "BF16", "GIVEN": "BF16", "STOCHASTIC": 1},
    ),
    "narrow adam": (
        "optim/step.cu",
        {**STEP, "FIRST": "BF16", "SECOND": "BF16", "NARROW": 1},
    ),
    "adam in 8 bits": (
        "optim/step.cu",
        {**STEP, "FIRST": "E4M3FN", "SECOND": "E5M2", "NARROW": 1, "SCALED": 1},
    ),
    "bfloat16 rmsprop in 8 bits": (
        "optim/step.cu",
        {
            **STEP,
            "OPTIMIZER": "RMSPROP",
            "WEIGHT": "BF16",
            "STOCHASTIC": 1,
            "MOMENTUM": 1,
            "CENTERED": 1,
            "FIRST": "E5M2",
            "SECOND": "E4M3FN",
            "THIRD": "E4M3FN",
            "NARROW": 1,
            "SCALED": 1,
            "VECTOR": 1,
        },
    ),
    "row-wise at random": (
        "optim/step.cu",
        {**STEP, "OPTIMIZER": "ROWWISE", "WEIGHT": "BF16", "STOCHASTIC": 1},
    ),
    "rmsprop": (
        "optim/step.cu",
        {**STEP, "OPTIMIZER": "RMSPROP", "SECOND": "F32", "THIRD": "F32", "CENTERED": 1},
    ),
}


def source_of(path: str) -> str:
    """The tier's own kernels, or those of a file beside its launcher."""
    package, _, name = path.rpartition("/")
    if name == "keys.cu":
        return KEYS.text
    return (RECORDS.extended(f"tierstore.{package}", name) if path else TIER).text


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


@pytest.mark.parametrize("architecture", ["compute_90", "sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.slow
@pytest.mark.nightly("sm_75", "sm_80", "sm_90")
def test_kernels_compile(name: str, architecture: str) -> None:
    path, macros = SOURCES[name]
    assert log_of(source_of(path), macros, architecture) == ""


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize(
    ("name", "structures"),
    [
        ("tier", "tier"),
        ("sparse tier", "tier"),
        ("sum", "sum"),
        ("pool", "pool"),
        ("adam", "step"),
        ("columns", "columns"),
        ("keys", "keys"),
    ],
)
def test_the_gpu_has_every_member_where_python_has_it(name: str, structures: str) -> None:
    path, macros = SOURCES[name]
    assert log_of(f"{source_of(path)}\n{claims(structures)}", macros, "compute_80") == ""
    if name == "sum":  # the quickest of these
        wrong = claims(structures).replace(") == 8,", ") == 9,")
        said = log_of(f"{source_of(path)}\n{wrong}", macros, "compute_80")
        assert "static assertion failed" in said


def log_of(source: str, macros: dict[str, Any], architecture: str) -> str:
    """What the compiler says of a source; nothing if it made a program of it.

    `sm_80` and the like make machine code, `compute_80` stops before that, in a third of the time:
    whether the machine code of all sources is made is asked at night.
    """
    compiler = nvrtc()
    program = ctypes.c_void_p()
    created = compiler.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
    )
    assert created == 0
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    options += [f"-D{macro}={value}".encode() for macro, value in macros.items()]
    compiled = compiler.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetProgramLog(program, log)
    if compiled == 0:
        machine = architecture.startswith("sm_")
        size_of = compiler.nvrtcGetCUBINSize if machine else compiler.nvrtcGetPTXSize
        assert size_of(program, ctypes.byref(size)) == 0
        assert size.value > 2_000
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode()
