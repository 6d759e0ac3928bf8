""".h5 and .hdf5: matrices among the datasets of HDF5, read with h5py; read only.

A dataset is named by its path, such as `model/weight`. Keys are the dataset `keys`, of one integer
or text a row. Links to other files, and datasets that are stored in them, are not followed.
"""

from __future__ import annotations

from pathlib import Path

from tierstore._formats._columns import Columns
from tierstore._formats.files import InputFile, open_input
from tierstore._formats.reading import ColumnFormat
from tierstore.budget import Size
from tierstore.errors import FormatError

_KIND = "hdf5"
_SIGNATURE = b"\x89HDF\r\n\x1a\n"


class Datasets(Columns):
    """The datasets of a file, each with rows of its own."""

    is_table = False


class Hdf5(ColumnFormat):
    """Named datasets, in groups."""

    suffixes = (".h5", ".hdf5", ".h5ad")

    def reader(self, path: Path, memory: Size) -> Datasets:
        """Open the datasets."""
        with open_input(path) as file:
            if not _is_signed(file):
                raise FormatError(f"{path}: not an HDF5 file, or truncated")
        return Datasets(_KIND, path, memory)


def _is_signed(file: InputFile) -> bool:
    """Whether there is a superblock where HDF5 expects one: at 0, 512, 1024, 2048, …."""
    at = 0
    while at + len(_SIGNATURE) <= file.size:
        if file.read_at(at, len(_SIGNATURE)) == _SIGNATURE:
            return True
        at = max(512, 2 * at)
    return False
