""".safetensors: named tensors after a JSON header, as the Hugging Face tools read and write it.

The first eight bytes are the length of the header. The header maps each name to dtype, shape and
span, and the spans fill the rest of the file without gaps. Integer keys are a tensor `keys`;
strings are their UTF-8 bytes, `keys`, and their start offsets, `keys_offsets`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import DEFAULT_DTYPE, ELEMENT_TYPES
from tierstore._formats.base import Array, Content, SpanSource, StoredRows, Write
from tierstore._formats.files import InputFile, distinct, held_scales
from tierstore._formats.keys import OFFSETS, KeyArrays, Keys, blob_to_strings, widened
from tierstore._formats.reading import (
    Column,
    ColumnFormat,
    FileReader,
    array_column,
    with_packed_texts,
)
from tierstore._scaled import SCALE_TYPES
from tierstore.budget import JSON_COST
from tierstore.errors import FormatError

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 64

_NAMES = {each.safetensors: each.name for each in ELEMENT_TYPES.values() if not each.integer}
_POWERS = "F8_E8M0"
_INTEGERS = {
    f"{kind}{8 * n}": np.dtype(f"<{kind.lower()}{n}") for kind in "IU" for n in (1, 2, 4, 8)
}
_WHOLE = {**_INTEGERS, _POWERS: np.dtype("u1")}
_CODES = {dtype: code for code, dtype in _INTEGERS.items()}
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class _Tensor:
    """One entry of the header: element code, shape, and the bytes `start..stop-1` of the data."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.code} {self.shape}"


def _read_header(file: InputFile) -> tuple[dict[str, _Tensor], int]:
    """Return the tensors by name and the offset of the data; raises FormatError."""
    path = file.path
    (length,) = struct.unpack("<Q", file.read_at(0, 8))
    if length > min(MAX_HEADER_BYTES, file.size - 8):
        raise FormatError(
            f"{path}: a header of {length} bytes in a file of {file.size}; "
            f"the limit is {MAX_HEADER_BYTES}"
        )
    file.allowance.check(JSON_COST * length, f"a header of {length} bytes")
    text = file.read_at(8, length)
    if not text.startswith(b"{"):
        raise FormatError(f"{path}: not a .safetensors file: its header does not start with {{")
    try:
        header = json.loads(text.decode(), object_pairs_hook=distinct, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the header is not JSON: {error!s:.200}") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise FormatError(f"{path}: __metadata__ must map names to strings")
    tensors = {name: _tensor(path, name, entry) for name, entry in header.items()}
    _check_spans(path, tensors, file.size - 8 - length)
    return tensors, 8 + length


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _tensor(path: Path, name: str, entry: object) -> _Tensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{path}: {name!r} must have dtype, shape and data_offsets")
    code, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _BITS:
        raise FormatError(f"{path}: {name!r} has an unknown dtype {code!r:.100}")
    if not _are_counts(shape) or not _are_counts(span) or len(span) != 2:
        raise FormatError(f"{path}: {name!r} has an invalid shape or data_offsets")
    bits = math.prod(shape) * _BITS[code]
    if span[1] - span[0] != bits // 8 or bits % 8:
        raise FormatError(
            f"{path}: {name!r} is {code} {tuple(shape)} in a span of {span[1] - span[0]} bytes"
        )
    return _Tensor(code, tuple(shape), span[0], span[1])


def _are_counts(values: object) -> bool:
    if not isinstance(values, list) or len(values) > MAX_DIMENSIONS:
        return False
    return all(type(n) is int and 0 <= n < 2**63 for n in values)


def _check_spans(path: Path, tensors: dict[str, _Tensor], data_bytes: int) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            raise FormatError(f"{path}: {name!r} starts at byte {tensor.start}, not at {end}")
        end = tensor.stop
    if end != data_bytes:
        raise FormatError(
            f"{path}: {data_bytes} bytes of data, but the header makes {end}: "
            f"{'truncated' if data_bytes < end else 'extra bytes follow the tensors'}"
        )


class _FileTensors(FileReader):
    def __init__(self, file: InputFile) -> None:
        """Read the header of `file`, which is closed with this."""
        super().__init__(file)
        self._tensors, self._data_offset = _read_header(file)
        self.columns = with_packed_texts(
            {name: _column(each) for name, each in self._tensors.items()}
        )

    def _span(self, name: str) -> SpanSource:
        tensor = self._tensors[name]
        rows, dim = tensor.shape
        return SpanSource(
            self._file,
            rows,
            dim,
            self.columns[name].read_as or DEFAULT_DTYPE,
            offset=self._data_offset + tensor.start,
            stored=_WHOLE.get(tensor.code),
        )

    def blocks(self, names: Sequence[str], dim: int, block_rows: int) -> Iterator[Array]:
        """Yield the rows of a tensor; powers of two as the floats that they stand for."""
        (name,) = names
        decode = SCALE_TYPES["e8m0"].decode
        for block in self._span(name).blocks(block_rows):
            yield decode(block.astype("u1")) if self._tensors[name].code == _POWERS else block

    def stored(self, name: str) -> StoredRows | None:
        """Return the span; powers of two are no element type and can only be scales."""
        stored = self._span(name).stored()
        if stored is None or self._tensors[name].code != _POWERS:
            return stored
        return dataclasses.replace(stored, dtype=self.columns[name].number)

    def keys(self, name: str) -> Keys:
        """Return a tensor of whole numbers, or the texts in one of bytes."""
        if self.columns[name].kind == "text":
            blob, bounds = self._bytes(name), self._integers(OFFSETS)
            return blob_to_strings(self.path, blob, bounds, self._file.allowance)
        return widened(self._integers(name), self._file.allowance)

    def _bytes(self, name: str) -> bytes:
        tensor = self._tensors[name]
        self._file.allowance.take(tensor.stop - tensor.start, f"keys as {tensor}")
        return self._file.read_at(self._data_offset + tensor.start, tensor.stop - tensor.start)

    def _integers(self, name: str) -> npt.NDArray[Any]:
        return np.frombuffer(self._bytes(name), _INTEGERS[self._tensors[name].code])


def _column(tensor: _Tensor) -> Column:
    if tensor.code == _POWERS and len(tensor.shape) == 2:
        rows, dim = tensor.shape
        return Column(str(tensor), rows, "list", "float8_e8m0fnu", dim, DEFAULT_DTYPE)
    number = _NAMES.get(tensor.code) or _INTEGERS.get(tensor.code) or tensor.code
    return array_column(str(tensor), number, tensor.shape)


def _format_header(content: Content, keys: KeyArrays) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0

    def add(name: str, code: str, *shape: int) -> None:
        nonlocal end
        start, end = end, end + math.prod(shape) * _BITS[code] // 8
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}

    for name, dtype, length, _ in keys[:1]:
        add(name, _CODES[dtype], length)
    add(content.field, ELEMENT_TYPES[content.dtype].safetensors, content.rows, content.dim)
    if content.scale is not None:
        add(content.scale, "F32", content.rows, 1)
    for name, dtype, length, _ in keys[1:]:
        add(name, _CODES[dtype], length)

    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class Safetensors(ColumnFormat):
    """Named tensors, of every element type."""

    suffixes = (".safetensors",)
    in_file = _FileTensors

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write tensors in order of decreasing alignment: integers, matrix, UTF-8.

        Scales are known after their matrix, and follow it.
        """
        keys = [] if content.keys is None else content.keys.arrays()

        def write(arrays: KeyArrays) -> None:
            for part in chain.from_iterable(parts for *_, parts in arrays):
                file.write(part.data)

        with path.open("xb") as file:
            file.write(_format_header(content, keys))
            write(keys[:1])
            with held_scales(content.scale) as scales:
                yield scales.beside(file)
                scales.copy_to(file)
            write(keys[1:])
