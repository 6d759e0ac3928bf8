"""NumPy's files, written block by block, complete or not at all."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tierstore.io import publish

__all__ = ["Streamed", "load_npz", "save_npy", "save_npz"]


@dataclass(frozen=True)
class Streamed:
    """An array that comes in blocks of its first axis, C-ordered."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    blocks: Iterable[npt.NDArray[Any]]

    def write(self, file: IO[bytes]) -> None:
        """Write the array as `numpy.save` does."""
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": self.shape,
        }
        np.lib.format.write_array_header_1_0(file, header)
        for block in self.blocks:
            file.write(np.ascontiguousarray(block).data)


def save_npy(path: str | Path, array: Streamed) -> None:
    """Write a `.npy` file; the suffix is added where it is missing, as `numpy.save` does."""
    with publish(_with_suffix(path, ".npy"), force=True) as partial, partial.open("xb") as file:
        array.write(file)


def save_npz(path: str | Path, arrays: Mapping[str, Streamed], numbers: Mapping[str, Any]) -> None:
    """Write a `.npz` file of arrays and numbers, as `numpy.savez` does."""
    with (
        publish(_with_suffix(path, ".npz"), force=True) as partial,
        zipfile.ZipFile(partial, "x") as archive,
    ):
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                array.write(member)
        for name, value in numbers.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.asarray(value), allow_pickle=False)


def load_npz(path: str | Path) -> dict[str, npt.NDArray[Any]]:
    """Read all arrays of a `.npz` file, whose suffix may be left out."""
    path = Path(path)
    with np.load(path if path.exists() else _with_suffix(path, ".npz")) as archive:
        return dict(archive)


def _with_suffix(path: str | Path, suffix: str) -> Path:
    path = Path(path)
    return path if path.name.endswith(suffix) else path.with_name(path.name + suffix)
