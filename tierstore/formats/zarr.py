""".zarr: a zarr v3 group with the matrix as an array named like the field, and one or two of keys.

Integer keys are an array `keys`; strings are their UTF-8 bytes, `keys`, and where each starts,
`keys_offsets`. zarr has no bfloat16: such arrays are uint16 with the attribute `dtype: bfloat16`.
Read is a group or a single array, of v2 or v3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.errors import FormatError
from tierstore.formats.choice import choose
from tierstore.formats.files import parsing
from tierstore.formats.keys import KeyColumn, Keys, blob_to_strings
from tierstore.formats.seam import Array, Content, Format, Source, Wanted, Write
from tierstore.spec import DTYPES

__all__ = ["FORMAT"]

MAX_CHUNK_ROW_BYTES = 512 << 20
"""Bytes of the chunks that hold a row, all of which are decoded to read it."""

_KEYS, _OFFSETS = "keys", "keys_offsets"
_KEY_CHUNK = 1 << 20


class _ZarrSource(Source):
    def __init__(self, path: Path, array: Any, siblings: dict[str, Any]) -> None:
        rows, dim = array.shape
        super().__init__(path, rows, dim, str(_element(array)))
        self._array = array
        self._siblings = siblings
        self._chunk_rows = _outer_chunks(array)[0]
        if self._chunk_rows * dim * DTYPES[self.dtype].itemsize > MAX_CHUNK_ROW_BYTES:
            raise FormatError(
                f"{path}: chunks of {self._chunk_rows} rows do not fit in memory; at most "
                f"{MAX_CHUNK_ROW_BYTES} bytes of rows a chunk are read: rechunk it"
            )
        _check_complete(path, array)

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        """Read whole chunks, several or a part of one to a block."""
        step = max(1, block_rows // self._chunk_rows) * self._chunk_rows
        for start in range(0, self.rows, step):
            with parsing(self.path, "zarr array", Exception):
                chunks = self._array[start : start + step]
            chunks = np.ascontiguousarray(chunks, DTYPES[self.dtype])
            for at in range(0, len(chunks), block_rows):
                yield chunks[at : at + block_rows]

    @cached_property
    def keys(self) -> Keys | None:
        keys, offsets = self._siblings.get(_KEYS), self._siblings.get(_OFFSETS)
        if keys is None or keys.ndim != 1 or keys is self._array:
            return None
        if keys.dtype.kind in "iu" and keys.dtype.itemsize > 1 and keys.shape == (self.rows,):
            return KeyColumn(self._all(keys), self.rows).integer_block(0, self.rows)
        if offsets is None or keys.dtype != np.uint8:
            return None
        if offsets.shape != (self.rows + 1,) or offsets.dtype != np.int64:
            return None
        return blob_to_strings(self.path, self._all(keys).tobytes(), self._all(offsets))

    def _all(self, array: Any) -> Array:
        _check_complete(self.path, array)
        with parsing(self.path, "zarr array", Exception):
            return np.asarray(array[:])

    def close(self) -> None:
        """Do nothing: zarr opens files as it reads them."""


def _element(array: Any) -> str | None:
    """Return the name of the element type if it is one of a table's."""
    if array.dtype == np.uint16 and array.attrs.get("dtype") == "bfloat16":
        return "bfloat16"
    return array.dtype.name if array.dtype.kind == "f" and array.dtype.name in DTYPES else None


def _outer_chunks(array: Any) -> tuple[int, ...]:
    """Return the shape of what one file holds, a shard or a chunk."""
    return tuple(array.shards or array.chunks)


def _check_complete(path: Path, array: Any) -> None:
    """Raise FormatError if files of chunks are missing: zarr would read them as fill values.

    Some writers leave out chunks that hold nothing else, but a copy that broke off looks the same.
    """
    outer = _outer_chunks(array)
    files = math.prod(-(-n // size) for n, size in zip(array.shape, outer, strict=True))
    chunks = files * math.prod(o // c for o, c in zip(outer, array.chunks, strict=True))
    with parsing(path, "zarr array", Exception):
        present = array.nchunks_initialized
    if present < chunks:
        raise FormatError(
            f"{path}: {chunks - present} of {chunks} chunks are missing; if they are empty on "
            "purpose, write the array with write_empty_chunks=True"
        )


def _open(path: Path, wanted: Wanted) -> Source:
    import zarr

    if not path.is_dir():
        raise FormatError(f"{path}: {'not a directory' if path.exists() else 'no such directory'}")
    with parsing(path, "zarr group or array", Exception):
        node = zarr.open(path, mode="r")
        arrays = {"": node} if isinstance(node, zarr.Array) else dict(node.arrays())
        described = {n: f"{a.dtype} {tuple(a.shape)}" for n, a in arrays.items()}
        matrices = {n: described[n] for n, a in arrays.items() if a.ndim == 2 and _element(a)}
    name = choose(path, wanted, matrices, described)
    with parsing(path, "zarr array", Exception):
        return _ZarrSource(path, arrays[name], arrays)


@contextmanager
def _write(path: Path, content: Content) -> Iterator[Write]:
    import zarr

    group = zarr.create_group(path)
    if content.keys is not None:
        _write_keys(group, content.keys)
    array = group.create_array(
        content.field,
        shape=(content.rows, content.dim),
        chunks=(max(1, min(content.rows, content.block_rows)), content.dim),
        dtype=content.storage,
        attributes={"dtype": content.dtype},
        config={"write_empty_chunks": True},
    )

    def write(start: int, block: Array) -> None:
        array[start : start + len(block)] = block

    yield write


def _write_keys(group: Any, keys: KeyColumn) -> None:
    if keys.integers:
        _write_vector(group, _KEYS, "<i8", len(keys), keys.integer_blocks())
        return
    _write_vector(group, _OFFSETS, "<i8", len(keys) + 1, keys.offset_blocks())
    nbytes = sum(len(key) for block in keys.bytes_blocks() for key in block)
    blobs = (np.frombuffer(b"".join(block), np.uint8) for block in keys.bytes_blocks())
    _write_vector(group, _KEYS, "u1", nbytes, blobs)


def _write_vector(group: Any, name: str, dtype: str, length: int, parts: Iterator[Array]) -> None:
    array = group.create_array(
        name,
        shape=(length,),
        chunks=(max(1, min(length, _KEY_CHUNK)),),
        dtype=dtype,
        config={"write_empty_chunks": True},
    )
    start = 0
    for part in parts:
        array[start : start + len(part)] = part
        start += len(part)


FORMAT = Format((".zarr",), _open, _write, tuple(DTYPES))
