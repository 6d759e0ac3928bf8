"""Which format a file has, by its suffix, and opening files with it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore._allowance import DEFAULT_MEMORY
from tierstore._dtypes import DEFAULT_DTYPE, check_dtype
from tierstore._formats.base import FORMATS, Format, Source, Wanted
from tierstore._formats.keys import Keys
from tierstore._io import reach
from tierstore.budget import Size
from tierstore.errors import InvalidInputError

__all__ = ["Location", "format_of", "locate", "open_source", "read_keys", "split_name"]


def format_of(path: Path, *, write: bool = False) -> Format:
    """Return the format of a file by its suffix, in either case.

    Raises InvalidInputError, listing those that can be read or written.
    """
    suffix = path.suffix.lower()
    known = [name for name, each in FORMATS.items() if each.is_written or not write]
    if suffix not in known:
        verb = "written" if write else "read"
        raise InvalidInputError(
            f"{path}: files ending in {suffix!r} cannot be {verb}; use one of {' '.join(known)}"
        )
    return FORMATS[suffix]


def split_name(source: str | Path) -> tuple[Path, str | None]:
    """Split `FILE:NAME` into the file and the array, tensor or column in it.

    A file that exists under the whole text is meant by it, and so is one without a name.
    """
    text = str(source)
    colon = text.find(":")
    while colon >= 0 and not Path(text).exists():
        if Path(text[:colon]).suffix.lower() in FORMATS:
            return Path(text[:colon]), text[colon + 1 :]
        colon = text.find(":", colon + 1)
    return Path(text), None


@dataclass(frozen=True)
class Location:
    """Where vectors are.

    Attributes:
        path: the file, with `:NAME` if it was given so; of a zarr store its name, whose suffix
            says the format.
        store: the zarr store, or None for a file.
    """

    path: Path
    store: Any = None


def locate(where: Any, *, write: bool = False) -> Location:
    """Return the location that a path, a URL or a zarr store stands for; a location as it is.

    Raises InvalidInputError for a URL of a format that is not read from stores.
    """
    if isinstance(where, Location):
        return where
    able = [suffix for suffix, each in FORMATS.items() if each.takes_stores]
    if isinstance(where, str) and "://" in where:
        if Path(where.rstrip("/")).suffix not in able:
            raise InvalidInputError(
                f"{where}: only {' '.join(able)} is read from and written to a URL"
            )
        where = reach(where, write=write)
    if isinstance(where, str | os.PathLike):
        return Location(Path(where))
    return Location(Path(f"{where}".rstrip("/").removesuffix(able[0]) + able[0]), where)


def open_source(
    path: Any,
    *,
    field: str | None = None,
    text_dtype: str = DEFAULT_DTYPE,
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
    found = locate(path)
    dtype = check_dtype(text_dtype)
    if found.store is not None:
        wanted = Wanted(None, field, dtype, memory)
        return format_of(found.path).open_store(found.store, found.path, wanted)
    file, name = split_name(found.path)
    return format_of(file).open(file, Wanted(name, field, dtype, memory))


def read_keys(path: str | Path, *, memory: Size = DEFAULT_MEMORY) -> Keys:
    """Return the keys in a file of keys, in order: an int64 array or a list of strings.

    `.txt` has one key a line, in UTF-8; if all are whole numbers they are int64. `.npy` is a 1-D
    array of integers or of fixed-width strings. `FILE.parquet:COLUMN` is a column of either, `key`
    if none is named. Raises FormatError for a file that is none of these or whose keys take more
    than `memory` bytes, InvalidInputError for another suffix.
    """
    file, name = split_name(path)
    able = [suffix for suffix, each in FORMATS.items() if each.holds_keys_alone]
    if file.suffix.lower() not in able:
        raise InvalidInputError(f"{path}: keys are read from {' '.join(able)} files")
    return format_of(file).read_keys(file, name, memory)
