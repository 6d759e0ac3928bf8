"""Which format a file has: its suffix says so, here and nowhere else."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tierstore._allowance import DEFAULT_MEMORY
from tierstore._dtypes import check_dtype
from tierstore._formats import (
    delimited,
    npy,
    npz,
    parquet,
    safetensors,
    torch,
    word2vec_binary,
    word2vec_text,
    zarr,
)
from tierstore._formats.base import Format, Source, Wanted
from tierstore._formats.sink import Sink, open_sink_of
from tierstore._io import reach
from tierstore.budget import Size
from tierstore.errors import InvalidInputError

__all__ = [
    "SINK_SUFFIXES",
    "SOURCE_SUFFIXES",
    "format_of",
    "is_store",
    "open_sink",
    "open_source",
    "path_of",
    "reached",
    "split_name",
]

_FORMATS = (
    npy.FORMAT,
    npz.FORMAT,
    safetensors.FORMAT,
    torch.FORMAT,
    parquet.FORMAT,
    word2vec_text.FORMAT,
    word2vec_binary.FORMAT,
    zarr.FORMAT,
    delimited.CSV,
    delimited.TSV,
)
_BY_SUFFIX = {suffix: format_ for format_ in _FORMATS for suffix in format_.suffixes}

SOURCE_SUFFIXES = tuple(suffix for suffix, format_ in _BY_SUFFIX.items() if format_.reader)
"""Endings of files that can be read."""

SINK_SUFFIXES = tuple(suffix for suffix, format_ in _BY_SUFFIX.items() if format_.writer)
"""Endings of files that can be written."""


def format_of(path: Path, *, write: bool = False) -> Format:
    """Return the format of a file by its suffix, in either case.

    Raises InvalidInputError, listing those that can be read or written.
    """
    known = SINK_SUFFIXES if write else SOURCE_SUFFIXES
    suffix = path.suffix.lower()
    if suffix not in known:
        verb = "written" if write else "read"
        raise InvalidInputError(
            f"{path}: files ending in {suffix!r} cannot be {verb}; use one of {' '.join(known)}"
        )
    return _BY_SUFFIX[suffix]


def split_name(source: str | Path) -> tuple[Path, str | None]:
    """Split `FILE:NAME` into the file and the array, tensor or column in it.

    A file that exists under the whole text is meant by it, and so is one without a name.
    """
    text = str(source)
    colon = text.find(":")
    while colon >= 0 and not Path(text).exists():
        if Path(text[:colon]).suffix.lower() in SOURCE_SUFFIXES:
            return Path(text[:colon]), text[colon + 1 :]
        colon = text.find(":", colon + 1)
    return Path(text), None


def path_of(where: Any) -> Path:
    """Return a path as one, and for a zarr store its name, with the suffix of one."""
    if isinstance(where, str | os.PathLike):
        return Path(where)
    return Path(f"{where}".rstrip("/").removesuffix(".zarr") + ".zarr")


def reached(where: Any, *, write: bool = False) -> Any:
    """Return the zarr store that a URL stands for; anything else as it is."""
    if not isinstance(where, str) or "://" not in where:
        return where
    if not where.rstrip("/").endswith(".zarr"):
        raise InvalidInputError(f"{where}: only .zarr is read from and written to a URL")
    return reach(where, write=write)


def is_store(where: Any) -> bool:
    """Whether this is a zarr store rather than a path."""
    return not isinstance(where, str | os.PathLike)


def open_source(
    path: Any,
    *,
    field: str | None = None,
    text_dtype: str = "float32",
    memory: Size = DEFAULT_MEMORY,
) -> Source:
    """Open a file of vectors for reading, chosen by its suffix; see `Source` for what it gives.

    Args:
        path: the file, or `FILE:NAME` for an array, tensor or column of one that holds several; or
            a URL that fsspec knows, such as "s3://bucket/items.zarr", or a zarr store.
        field: the one to prefer where no name is given; a file that holds just one needs neither.
        text_dtype: the element type that formats in text, which name none, are read as.
        memory: bytes that reading may take beside a block of rows, such as 536870912 or "512MiB";
            what the file claims is held against it before it is believed.

    Raises:
        FormatError: there is no such file, or it is damaged, or holds no such matrix, or what it
            holds takes more than `memory`.
        InvalidInputError: the suffix is unknown; the message lists the known ones.
        MissingExtraError: the format needs a package that is not installed.
    """
    path = reached(path)
    if is_store(path):
        wanted = Wanted(None, field, check_dtype(text_dtype), memory)
        return zarr.open_in(path, path_of(path), wanted)
    file, name = split_name(path)
    reader = format_of(file).reader
    if reader is None:  # not reached: format_of refuses what is not read
        raise InvalidInputError(f"{file}: cannot be read")
    return reader(file, Wanted(name, field, check_dtype(text_dtype), memory))


def open_sink(
    path: Any,
    *,
    rows: int,
    dim: int,
    dtype: str,
    field: str = "weight",
    keys: Any = None,
    first_row: int = 0,
    force: bool = False,
) -> AbstractContextManager[Sink]:
    """Open a file of vectors for writing, chosen by its suffix, as a context manager.

    The file appears under its name, synced, when the context ends with all rows written; after any
    error nothing is left.

    Args:
        path: the file; `.zarr` makes a directory. Or a zarr store: what is written there appears
            at once, and is refused by readers until it is complete.
        rows: rows of the whole matrix; 0 is possible.
        dim: elements of a row.
        dtype: element type of the blocks. Where a format cannot hold it, half precisions are
            written as float32, which is exact, and the rest is refused.
        field: name of the matrix, where the format gives it one.
        keys: one for each row, integers or strings, in a sequence that is only sliced; or None.
        first_row: number of the first row. Formats that need a word in each row count from it if
            there are no keys.
        force: replace an existing file.

    Raises:
        ExistsError: the file exists, or is a link or a directory.
        InvalidInputError: the suffix is unknown, or the format cannot hold the keys or the dtype.
        MissingExtraError: the format needs a package that is not installed.
        StoreFullError, StoreIOError: the file system failed.
    """
    target = path_of(path)
    return open_sink_of(
        format_of(target, write=True),
        target,
        rows=rows,
        dim=dim,
        dtype=dtype,
        field=field,
        keys=keys,
        first_row=first_row,
        force=force,
        store=path if is_store(path) else None,
    )
