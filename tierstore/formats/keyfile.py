"""Keys that come in a file of their own: `--keys FILE`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tierstore.errors import FormatError, InvalidInputError
from tierstore.formats.files import InputFile, open_input
from tierstore.formats.keys import KeyColumn, Keys, as_integers, strings_of
from tierstore.formats.npy_header import read_header
from tierstore.formats.parquet import read_key_column
from tierstore.formats.registry import split_name

__all__ = ["read_keys"]

MAX_LINE_BYTES = 1 << 20


def read_keys(path: str | Path) -> Keys:
    """Return the keys in a file, in order: an int64 array or a list of strings.

    `.txt` has one key a line, in UTF-8; if all are whole numbers they are int64. `.npy` is a 1-D
    array of integers or of fixed-width strings. `FILE.parquet:COLUMN` is a column of either, `key`
    if none is named. Raises FormatError for a file that is none of these, InvalidInputError for
    another suffix.
    """
    file, name = split_name(path)
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return read_key_column(file, "key" if name is None else name)
    if suffix not in (".txt", ".npy") or name is not None:
        raise InvalidInputError(f"{path}: keys are read from .txt, .npy or FILE.parquet:COLUMN")
    with open_input(file) as opened:
        return _from_lines(opened) if suffix == ".txt" else _from_npy(opened)


def _from_lines(file: InputFile) -> Keys:
    stream = file.stream()
    lines: list[str] = []
    while line := stream.readline(MAX_LINE_BYTES):
        text = line.rstrip(b"\r\n")
        if not text or len(line) == MAX_LINE_BYTES:
            raise FormatError(
                f"{file.path}: line {len(lines) + 1} is empty or far too long for a key"
            )
        try:
            lines.append(text.decode())
        except UnicodeDecodeError as error:
            raise FormatError(f"{file.path}: line {len(lines) + 1} is not UTF-8: {error}") from None
    numbers = as_integers(lines)
    return lines if numbers is None else numbers


def _from_npy(file: InputFile) -> Keys:
    header = read_header(file.stream(), file.path)
    if len(header.shape) != 1 or header.dtype.kind not in "iuU":
        raise FormatError(f"{file.path}: holds {header}; need one dimension of integers or strings")
    if file.size != header.nbytes + header.data_bytes:
        raise FormatError(f"{file.path}: {file.size} bytes do not fit {header}")
    values = np.frombuffer(file.read_at(header.nbytes, header.data_bytes), header.dtype)
    if header.dtype.kind == "U":
        return strings_of(file.path, values)
    return KeyColumn(values, len(values)).integer_block(0, len(values))
