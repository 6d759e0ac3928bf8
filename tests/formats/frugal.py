"""A file is read in a process that can have little memory: python -m tests.formats.frugal WAY PATH.

It prints what was raised and the most memory that reading took, in this process and its children.
"""

import csv
import io
import json
import mmap
import os
import resource
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np

from tierstore import _formats
from tierstore.errors import FormatError
from tierstore.sizing import load_stream

MEMORY = 32 << 20
"""What reading is allowed."""
HEADROOM = 256 << 20
"""Address space that the process may take beyond what it starts with."""
ENOUGH = 128 << 20
"""What reading within MEMORY may take with all that surrounds it."""


def allowed(path):
    with _formats.open_source(path, memory=MEMORY) as source:
        for _ in source.blocks():
            pass
        return source.keys


def torch_load(path):
    """What torch's own unpickler does, without what torch says of its errors."""
    from torch import _weights_only_unpickler

    with zipfile.ZipFile(path) as archive:
        data = archive.read("archive/data.pkl")
    _weights_only_unpickler.load(io.BytesIO(data))


def zarr_read(path):
    import zarr

    node = zarr.open(path, mode="r")
    for array in [node] if isinstance(node, zarr.Array) else [a for _, a in node.arrays()]:
        array[:]


def parquet_read(path):
    import pyarrow.parquet

    pyarrow.parquet.ParquetFile(path).read(use_threads=False)


def feather_read(path):
    import pyarrow.feather

    pyarrow.feather.read_table(path, memory_map=False, use_threads=False)


def hdf5_read(path):
    import h5py

    def load(name, entry):
        if isinstance(entry, h5py.Dataset):
            entry[:]

    with h5py.File(path) as file:
        file.visititems(load)


def npz_read(path):
    with np.load(path) as arrays:
        for name in arrays.files:
            arrays[name]


def csv_read(path):
    with open(path, newline="") as file:
        for cells in csv.reader(file):
            [float(cell) for cell in cells]


WAYS = {
    "source": allowed,
    "keys": lambda path: _formats.read_keys(path, memory=MEMORY),
    "stream": lambda path: load_stream(path, column="ids", memory=MEMORY),
    "torch": torch_load,
    "zarr": zarr_read,
    "parquet": parquet_read,
    "feather": feather_read,
    "hdf5": hdf5_read,
    "npz": npz_read,
    "npy": np.load,
    "csv": csv_read,
    "json": lambda path: json.loads(Path(path).read_bytes()[8:]),
    "zip": zipfile.ZipFile,
}


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    way, path = sys.argv[1:3]
    if len(sys.argv) > 3:  # what is imported and started on the way to a good file does not count
        WAYS[way](sys.argv[3])
    before, children = peak(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + HEADROOM, hard))
    error = ""
    try:
        WAYS[way](path)
    except FormatError as refused:
        error = f"FormatError: {refused}"
    except BaseException as other:
        error = f"{type(other).__name__}: {other}"[:300]
    grown = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    more = max(peak() - before, grown - children)
    print(json.dumps({"error": error, "more": more}))


def overran(found: dict) -> bool:
    """Whether reading took too much memory, or failed for want of it."""
    return found["more"] >= ENOUGH or "Memory" in found["error"] or found["error"] == "died"


def read_frugally(way: str, path: Path, good: Path | None = None) -> dict:
    """Read a file in a process of its own; one that died raised "died"."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.formats.frugal", way, path, *([good] if good else [])],
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        return {"error": "died", "more": HEADROOM, "stderr": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
