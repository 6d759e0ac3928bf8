"""A CUDA device made of NumPy arrays and emulator.cpp: the real kernels, without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tierstore._tiers import memory
from tierstore._tiers.gpu import device
from tierstore._tiers.gpu.abi import TIER

HERE = Path(__file__).parent
SHARED = "TIERSTORE_TEST_KERNELS"
"""Names the directory in which the processes of a test run share what they compiled."""


@functools.cache
def library(code: str = TIER.text, *macros: str) -> ctypes.CDLL:
    """Compile the tier's kernels, or another source, with the host compiler, once a test run.

    All kernels of a source take two structures of the same types, whatever these are.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("g++")
    first, second = re.findall(r" tierstore_\w+\(const (\w+) \w+, const (\w+) \w+\)", code)[0]
    # A kernel runs for moments: -O2 and -g would take twice as long to compile and save none.
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-ffp-contract=off"]
    flags.append("-U_FORTIFY_SOURCE")  # whose longjmp takes another stack for a mistake
    flags += ["-fno-exceptions", "-fno-asynchronous-unwind-tables"]  # a sixth less to compile
    flags += [f"-DFIRST_TYPE={first}", f"-DSECOND_TYPE={second}", *(f"-D{m}" for m in macros)]
    if code == TIER.text:
        flags.append("-DCOUNTERS_TYPE=Counters")
    emulator = HERE / "emulator.cpp"
    digest = hashlib.sha256("\0".join([emulator.read_text(), code, *flags]).encode()).hexdigest()
    with tempfile.TemporaryDirectory(prefix="tierstore-emulator-") as alone:
        kept = Path(os.environ.get(SHARED, alone), f"{digest}.so")
        if not kept.exists():
            kernels, made = Path(alone, "kernels.cu"), Path(alone, "kernels.so")
            kernels.write_text(code)
            command = [compiler, *flags, f'-DKERNELS="{kernels}"', str(emulator), "-o", str(made)]
            subprocess.run(command, check=True)
            shutil.move(made, kept.with_suffix(f".{os.getpid()}"))
            kept.with_suffix(f".{os.getpid()}").rename(kept)
        return ctypes.CDLL(str(kept))


def syntax_errors(source: str, *macros: str) -> str:
    """What the host compiler has to say against a source."""
    first, second = re.findall(r" tierstore_\w+\(const (\w+) \w+, const (\w+) \w+\)", source)[0]
    with tempfile.TemporaryDirectory(prefix="tierstore-emulator-") as folder:
        kernels = Path(folder, "kernels.cu")
        kernels.write_text(source)
        flags = [f'-DKERNELS="{kernels}"', f"-DFIRST_TYPE={first}", f"-DSECOND_TYPE={second}"]
        flags += [f"-D{macro}" for macro in macros]
        command = ["g++", "-std=c++17", "-fsyntax-only", *flags, str(HERE / "emulator.cpp")]
        return subprocess.run(command, capture_output=True, text=True).stderr


class OnDevice(np.ndarray):
    """An array that the emulated device has, to be told from those of the host."""


class EmulatedDevice:
    """Runs everything at once, in the order of the calls; streams are numbers and nothing else.

    Plain kernels run on `processors` blocks after another, cooperative ones on as many threads.
    """

    beside = 1
    arrays = np
    torch_name = "cpu"

    def __init__(self, *, processors: int = 2, seed: int = 0) -> None:
        self.processors = processors
        self.waits = 0
        self._seed = seed

    def load(
        self, source: str, name: str, macros: Mapping[str, object], *, cooperative: bool = False
    ) -> tuple[device.Start, int]:
        compiled = library(source, *(f"{key}={value}" for key, value in macros.items()))
        return self._loaded(compiled, name, cooperative=cooperative)

    def _loaded(
        self, found: ctypes.CDLL, name: str, *, cooperative: bool
    ) -> tuple[device.Start, int]:
        function = ctypes.cast(getattr(found, f"tierstore_{name}"), ctypes.c_void_p)

        def launch(blocks: int, arguments: int, stream: int) -> None:
            self._seed += 1
            found.emulate(
                function,
                min(blocks, self.processors) if cooperative else blocks,
                device.BLOCK,
                ctypes.c_void_p(arguments),
                cooperative,
                self._seed % 1000,
            )

        return launch, self.processors

    def range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def allocate(self, size: int, dtype: Any) -> Any:
        return np.zeros(size, dtype).view(OnDevice)

    def borrow(self, size: int, dtype: Any, stream: int | None = None) -> Any:
        noise = np.random.default_rng(size).bytes(size * np.dtype(dtype).itemsize)
        return np.frombuffer(bytearray(noise), dtype).view(OnDevice)

    def stage(self, nbytes: int) -> memory.Arena:
        return memory.allocate(nbytes, "pageable")

    def current(self) -> Any:
        return contextlib.nullcontext()

    def enter(self) -> int:
        return 0

    def leave(self, before: int) -> None:
        pass

    def arena_kind(self, nbytes: int) -> str:
        return "pageable"

    def free_bytes(self) -> int:
        return 1 << 30

    def total_bytes(self) -> int:
        return 1 << 36

    def upload(self, array: Any, stream: int | None = None) -> Any:
        return np.array(array, order="C").view(OnDevice)

    def download(self, array: Any) -> Any:
        return np.array(array)

    def on_host(self, array: Any) -> bool:
        return type(array) is np.ndarray

    def export(self, array: Any, kind: str) -> Any:
        if kind == "torch":
            import torch

            return torch.from_numpy(array)
        return array.copy()

    def pointer(self, array: Any) -> int:
        return int(array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data)

    def host_pointer(self, arena: memory.Arena, view: Any) -> int:
        return int(view.ctypes.data)

    def current_stream(self) -> int:
        return 0

    def capturing(self, stream: int) -> bool:
        return False

    def fill(self, pointer: int, value: int, nbytes: int, stream: int) -> None:
        ctypes.memset(pointer, value, nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def copy_columns(
        self, target: int, source: int, width: int, pitch: int, rows: int, stream: int
    ) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * width, source + row * pitch, width)

    def finish(self) -> None:
        """Wait for every stream."""

    def synchronize(self, stream: int) -> None:
        self.waits += 1

    def drain(self) -> None:
        self.waits += 1

    def event(self) -> Any:
        return None

    def record(self, event: Any, stream: int) -> None:
        pass

    def follow(self, stream: int, event: Any) -> None:
        pass

    def passed(self, event: Any) -> bool:
        return False

    def await_event(self, event: Any) -> None:
        self.waits += 1
