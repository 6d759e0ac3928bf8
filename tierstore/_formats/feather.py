""".arrow, .feather, .arrows: record batches of Arrow, with columns as in .parquet. Needs pyarrow.

Files and streams are read under each suffix, the latter as Hugging Face keeps data sets. A
directory is one that `Dataset.save_to_disk` made, whose state.json lists the files, or holds files
of one of the suffixes, which are read in the order of their names. Written files can be mapped into
memory; .arrows is written as a stream.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, ClassVar

from tierstore._formats._columns import ArrowFormat
from tierstore._formats.base import Content
from tierstore._formats.files import InputFile, document, open_input
from tierstore.budget import JSON_COST, Size
from tierstore.errors import FormatError

_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_FIRST_VERSION = b"FEA1"


class Arrow(ArrowFormat):
    """Files and streams of Arrow, or the directory of some."""

    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather")
    kind = "arrow"

    def claims(self, directory: Path) -> bool:
        """Whether it is a data set of Hugging Face, or there are files of Arrow."""
        is_set = (directory / _STATE).exists() or (directory / _SPLITS).exists()
        return is_set or super().claims(directory)

    def parts(self, path: Path, memory: Size) -> list[Path]:
        """Return the files of a data set as it lists them, or those of a directory."""
        if (path / _SPLITS).exists():
            splits = sorted(each.name for each in path.iterdir() if each.is_dir())
            raise FormatError(
                f"{path}: holds the splits {', '.join(splits[:8])}; name one, as in "
                f"{path / splits[0] if splits else path}"
            )
        is_set = (path / _STATE).exists()
        return _data_files(path, memory) if is_set else super().parts(path, memory)

    def check(self, path: Path, file: InputFile) -> None:
        """Raise FormatError for a file that is neither file nor stream of Arrow."""
        start = file.read_at(0, 8) if file.size >= 16 else b""
        if start[:4] == _FIRST_VERSION:
            raise FormatError(
                f"{path}: a file of Feather's first version, which pyarrow reads only as a whole; "
                f"pyarrow.feather.write_feather(pyarrow.feather.read_table({path.name!r}), "
                "'new.feather') makes one of the second"
            )
        if start[:6] != b"ARROW1" and start[:4] != b"\xff\xff\xff\xff":
            raise FormatError(f"{path}: not a file of Arrow, or truncated")
        if start[:6] == b"ARROW1" and file.read_at(file.size - 6, 6) != b"ARROW1":
            raise FormatError(f"{path}: truncated: its last bytes are not those of Arrow")

    def writer(self, file: IO[bytes], schema: Any, content: Content) -> Any:
        """Return a writer of the file format, which can be mapped."""
        from pyarrow import ipc

        return ipc.new_file(file, schema)


class ArrowStream(Arrow):
    """The same columns, written as a stream."""

    suffixes = (".arrows",)

    def claims(self, directory: Path) -> bool:
        """Whether there are such streams."""
        return ArrowFormat.claims(self, directory)

    def writer(self, file: IO[bytes], schema: Any, content: Content) -> Any:
        """Return a writer of a stream."""
        from pyarrow import ipc

        return ipc.new_stream(file, schema)


def _data_files(path: Path, memory: Size) -> list[Path]:
    """Return the files of a data set in the order of its state; raises FormatError."""
    with open_input(path / _STATE, memory) as file:
        file.allowance.check(JSON_COST * file.size, f"JSON of {file.size} bytes")
        found = document(path / _STATE, file.read_at(0, file.size))
    state = found if isinstance(found, dict) else {}
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not listed or not all(map(_is_beside, listed)):
        raise FormatError(f"{path / _STATE}: _data_files does not list the files beside it")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise FormatError(
            f"{path}: its rows are selected by indices; save it again after flatten_indices()"
        )
    return [path / each["filename"] for each in listed]


def _is_beside(entry: object) -> bool:
    name = entry.get("filename") if isinstance(entry, dict) else None
    return isinstance(name, str) and Path(name).name == name
