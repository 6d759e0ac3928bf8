"""Keys that come in a file of their own: `--keys FILE`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

from tierstore._allowance import DEFAULT_MEMORY
from tierstore._formats.base import Array, block_rows_for
from tierstore._formats.files import InputFile, open_input
from tierstore._formats.keys import Keys, as_integers, integers_of, strings_of, take_words
from tierstore._formats.npy import NpyHeader, read_header
from tierstore._formats.parquet import read_key_column
from tierstore._formats.registry import split_name
from tierstore.budget import Size
from tierstore.errors import FormatError, InvalidInputError

__all__ = ["read_keys"]

MAX_LINE_BYTES = 1 << 20


def read_keys(path: str | Path, *, memory: Size = DEFAULT_MEMORY) -> Keys:
    """Return the keys in a file, in order: an int64 array or a list of strings.

    `.txt` has one key a line, in UTF-8; if all are whole numbers they are int64. `.npy` is a 1-D
    array of integers or of fixed-width strings. `FILE.parquet:COLUMN` is a column of either, `key`
    if none is named. Raises FormatError for a file that is none of these or whose keys take more
    than `memory` bytes, InvalidInputError for another suffix.
    """
    file, name = split_name(path)
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return read_key_column(file, "key" if name is None else name, memory)
    if suffix not in (".txt", ".npy") or name is not None:
        raise InvalidInputError(f"{path}: keys are read from .txt, .npy or FILE.parquet:COLUMN")
    with open_input(file, memory) as opened:
        return _from_lines(opened) if suffix == ".txt" else _from_npy(opened)


def _from_lines(file: InputFile) -> Keys:
    lines = take_words(_lines(file), file.allowance)
    numbers = as_integers(lines, file.allowance)
    return lines if numbers is None else numbers


def _lines(file: InputFile) -> Iterator[str]:
    stream = file.stream()
    for number in count(1):
        line = stream.readline(MAX_LINE_BYTES)
        if not line:
            return
        text = line.rstrip(b"\r\n")
        if not text or len(line) == MAX_LINE_BYTES:
            raise FormatError(f"{file.path}: line {number} is empty or far too long for a key")
        try:
            yield text.decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"{file.path}: line {number} is not UTF-8: {error}") from None


def _from_npy(file: InputFile) -> Keys:
    header = read_header(file.stream(), file.path)
    if len(header.shape) != 1 or header.dtype.kind not in "iuU":
        raise FormatError(f"{file.path}: holds {header}; need one dimension of integers or strings")
    if file.size != header.nbytes + header.data_bytes:
        raise FormatError(f"{file.path}: {file.size} bytes do not fit {header}")
    blocks = _npy_blocks(file, header)
    if header.dtype.kind == "U":
        return strings_of(file.path, blocks, file.allowance)
    return integers_of(blocks, header.shape[0], file.allowance)


def _npy_blocks(file: InputFile, header: NpyHeader) -> Iterator[Array]:
    """Yield the elements of an array in blocks."""
    size = header.dtype.itemsize
    step = block_rows_for(size) * size
    for at in range(0, header.data_bytes, step):
        nbytes = min(step, header.data_bytes - at)
        yield np.frombuffer(file.read_at(header.nbytes + at, nbytes), header.dtype)
