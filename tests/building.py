"""Builds the compiled core of this tree if it is missing or of other sources."""

import fcntl
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "tierstore" / "_core"


def build_core() -> None:
    """Tests are of the sources beside them; workers that start together build it once."""
    with (ROOT / "hatch_build.py").open() as program:
        fcntl.flock(program, fcntl.LOCK_EX)
        digest = runpy.run_path(str(CORE / "sources.py"))["digest"]()
        library = CORE / "compiled.abi3.so"
        if not library.exists() or digest.encode() + b"\0" not in library.read_bytes():
            subprocess.run([sys.executable, program.name], check=True)
