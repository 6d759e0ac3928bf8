""".zarr: a zarr v3 group with the matrix as an array named like the field, and arrays of keys.

Integer keys are an array `keys`; strings are their UTF-8 bytes, `keys`, and their start offsets,
`keys_offsets`. The attribute `dtype` of the matrix names its element type. Types that zarr lacks
are widened; arrays of their bits, from before, are read. The reader accepts a group or a single
array, of v2 or v3.

In addition to paths, zarr stores are supported: object stores, file systems of fsspec, memory.
These have no rename, so the attribute `complete` of the group records whether writing was finished;
incomplete groups are refused.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tierstore._door import interrupts_deferred
from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats.base import (
    Array,
    Content,
    Source,
    StoredChunks,
    StoredRows,
    Wanted,
    Write,
)
from tierstore._formats.files import parsing, taken_by
from tierstore._formats.keys import KEYS, OFFSETS, Keys, blob_to_strings, widened
from tierstore._formats.reading import (
    PACKING,
    Column,
    ColumnFormat,
    Reader,
    ReadSource,
    array_column,
    with_packed_texts,
)
from tierstore.budget import JSON_COST, Allowance, Size
from tierstore.errors import ExistsError, FormatError

_CHUNK_COST = 3
"""Copies of a chunk in memory while it is decoded: compressed, decompressed and in the block."""
_METADATA_BYTES = 16 << 20
MAX_DEPTH = 16
_METADATA = frozenset({"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"})
_COMPLETE = "complete"
_KEY_CHUNK = 1 << 20


class _ZarrArrays(Reader):
    def __init__(self, where: Any, path: Path, allowance: Allowance) -> None:
        """Open a group or array in `where`, any store of zarr; `path` is its name for messages."""
        import zarr

        self.path = path
        self._allowance = allowance
        self._checked: dict[str, Any] = {}
        with parsing(path, "zarr group or array", Exception):
            node = zarr.open(where, mode="r")
            if node.attrs.get(_COMPLETE, True) is not True:
                raise FormatError(f"{path}: writing was interrupted; write it again")
            self._arrays = {"": node} if isinstance(node, zarr.Array) else _members(node)
            columns = {name: _column(each) for name, each in self._arrays.items()}
        self.columns = with_packed_texts(columns)

    def check(self, name: str) -> None:
        """Raise FormatError for chunks that are too large or missing; see `_checked`."""
        self._checked[name] = _checked(self.path, self._arrays[name], self._allowance)

    def filled(self, name: str) -> tuple[str, ...]:
        """Say how many chunks are not stored."""
        array = self._arrays[name]
        left_out = _left_out(self.path, array)
        which = (
            "1 chunk is not stored and reads"
            if left_out == 1
            else f"{left_out} chunks are not stored and read"
        )
        return (f"{which} as {array.fill_value}, the fill value",) if left_out else ()

    def blocks(self, names: Sequence[str], dim: int, block_rows: int) -> Iterator[Array]:
        """Read whole chunks; a block has several chunks or a part of one."""
        (name,) = names
        chunk_rows = _outer_chunks(self._arrays[name])[0]
        step = max(1, block_rows // chunk_rows) * chunk_rows
        for start in range(0, self._arrays[name].shape[0], step):
            chunks = self._read(name, start, start + step)
            for at in range(0, len(chunks), block_rows):
                yield chunks[at : at + block_rows]

    def _read(self, name: str, start: int, stop: int) -> Array:
        with parsing(self.path, "zarr array", Exception):
            chunks = self._checked[name][start:stop]
        return np.ascontiguousarray(chunks, chunks.dtype.newbyteorder("<"))

    def stored(self, name: str) -> StoredRows | StoredChunks | None:
        """Return plain chunks that can be mapped end to end, or else chunks to decode.

        None for an array that is not in a directory, or of numbers that no table holds.
        """
        array, dtype = self._arrays[name], self.columns[name].number
        if not self.path.is_dir() or not array.shape[0] or dtype not in ELEMENT_TYPES:
            return None
        step, files = _outer_chunks(array)[0], _chunk_files(self.path, array)
        nbytes = step * array.shape[1] * array.dtype.itemsize
        whole = len(files) == 1 or nbytes % mmap.PAGESIZE == 0
        if whole and _is_plain(array) and _have_size(files, nbytes):
            return StoredRows(dtype, tuple(each for (each,) in files), 0, step)

        def decode(number: int) -> Array:
            return self._read(name, number * step, (number + 1) * step)

        return StoredChunks(dtype, files, step, decode)

    def held_bytes(self, name: str, enough: int) -> int:
        """Return the bytes of the chunks that are stored, in a directory or elsewhere."""
        if self.path.is_dir():
            return taken_by(self.path / self._arrays[name].path, enough)
        with parsing(self.path, "zarr array", Exception):
            return int(self._arrays[name].nbytes_stored())

    def keys(self, name: str) -> Keys:
        """Return an array of whole numbers, or the texts in one of bytes."""
        if self.columns[name].kind == "text":
            blob, bounds = self._all(name).tobytes(), self._all(OFFSETS)
            return blob_to_strings(self.path, blob, bounds, self._allowance)
        return widened(self._all(name), self._allowance)

    def _all(self, name: str) -> Array:
        array = self._arrays[name]
        nbytes = array.shape[0] * array.dtype.itemsize
        self._allowance.take(2 * nbytes, f"the array {name!r} of {nbytes} bytes")
        checked = _checked(self.path, array, self._allowance)
        with parsing(self.path, "zarr array", Exception):
            return np.asarray(checked[:])


def _members(group: Any) -> dict[str, Any]:
    """Return the arrays of a group and of the groups in it, by their paths."""
    import zarr

    found = group.members(max_depth=MAX_DEPTH)
    return dict(sorted((path, each) for path, each in found if isinstance(each, zarr.Array)))


def _column(array: Any) -> Column:
    text, number = f"{array.dtype} {tuple(array.shape)}", str(array.attrs.get("dtype"))
    if packed := sorted(PACKING.intersection(array.attrs)):
        rows = array.shape[0] if array.shape else None
        return Column(f"{text} packed by {' and '.join(packed)}", rows, "other", array.dtype.name)
    named = number in ELEMENT_TYPES
    if named and array.dtype.newbyteorder("<") == ELEMENT_TYPES[number].stored and array.ndim == 2:
        rows, dim = array.shape
        return Column(text, rows, "list", number, dim, number)
    return array_column(text, array.dtype.name, array.shape)


def _outer_chunks(array: Any) -> tuple[int, ...]:
    """Return the shape of the part in one file, a shard or a chunk."""
    return tuple(array.shards or array.chunks)


def _chunk_files(path: Path, array: Any) -> tuple[tuple[Path, ...], ...]:
    """Return the files of each row of chunks, whether they exist or not."""
    counts = [-(-n // size) for n, size in zip(array.shape, _outer_chunks(array), strict=True)]
    keys, place = array.metadata, path / array.path
    return tuple(
        tuple(place / keys.encode_chunk_key((row, column)) for column in range(counts[1]))
        for row in range(counts[0])
    )


def _is_plain(array: Any) -> bool:
    """Whether chunks are the elements of whole rows as a table stores them."""
    metadata, dtype = array.metadata, array.dtype
    if array.chunks[1] != array.shape[1] or dtype != dtype.newbyteorder("<"):
        return False
    if metadata.zarr_format == 3:
        names = [type(codec).__name__ for codec in metadata.codecs]
        big = getattr(getattr(metadata.codecs[0], "endian", None), "value", "little") == "big"
        return names == ["BytesCodec"] and not (big and dtype.itemsize > 1)
    return metadata.compressor is None and not metadata.filters and metadata.order == "C"


def _have_size(files: tuple[tuple[Path, ...], ...], nbytes: int) -> bool:
    """Whether there is one file for each row of chunks, of that size."""
    try:
        return all(each.stat().st_size == nbytes for (each,) in files)
    except OSError:
        return False


def _checked(path: Path, array: Any, allowance: Allowance) -> Any:
    """Return an array that limits the decoded size of every chunk.

    Raises FormatError if a row of chunks is too large to decode, or if chunk files are larger than
    their rows or missing, unless they may be (`_left_out`).
    """
    outer = _outer_chunks(array)
    chunk_row_bytes = outer[0] * math.prod(array.shape[1:]) * array.dtype.itemsize
    chunk_row_bytes = max(chunk_row_bytes, math.prod(outer) * array.dtype.itemsize)
    allowance.check(
        _CHUNK_COST * chunk_row_bytes,
        f"{outer[0]} rows of {array.shape} in a chunk (rechunk it)",
    )
    if path.is_dir():  # listing objects is expensive, and `complete` makes it unnecessary
        _check_files(path, array)
    from tierstore._formats._zarr_codecs import bounded  # imports zarr, which is slow

    with parsing(path, "zarr array", Exception):
        return bounded(array)


def _check_files(path: Path, array: Any) -> None:
    outer = _outer_chunks(array)
    inner = math.prod(o // size for o, size in zip(outer, array.chunks, strict=True))
    most = math.prod(outer) * array.dtype.itemsize * 9 // 8 + 64 * inner + (64 << 10)
    for parent, _, names in os.walk(path / array.path):
        for name in names:
            status = os.stat(os.path.join(parent, name))
            if not stat.S_ISREG(status.st_mode) or status.st_size > max(most, _METADATA_BYTES):
                raise FormatError(f"{path}: {name} is not a chunk file of at most {most} bytes")
    if _left_out(path, array) and not _may_leave_out(array):
        raise FormatError(
            f"{path}: some chunk files of {array.basename!r} are missing: it was copied only in "
            "part, or has no fill value"
        )


def _may_leave_out(array: Any) -> bool:
    """Whether a missing chunk means fill values, as for zarr and xarray.

    Written arrays have all chunks here, so that an interrupted copy is detected.
    """
    return "dtype" not in array.attrs and array.fill_value is not None


def _left_out(path: Path, array: Any) -> int:
    """Return how many chunk files of an array are missing; raises FormatError if all are."""
    if not path.is_dir():  # listing objects is expensive, and `complete` makes it unnecessary
        return 0
    outer = _outer_chunks(array)
    needed = math.prod(-(-n // size) for n, size in zip(array.shape, outer, strict=True))
    files = sum(len(set(names) - _METADATA) for _, _, names in os.walk(path / array.path))
    if files >= needed:  # zarr's own count takes time in proportion to the shape
        inner = math.prod(o // size for o, size in zip(outer, array.chunks, strict=True))
        with parsing(path, "zarr array", Exception):
            files = array.nchunks_initialized // inner
    if needed and not files:
        raise FormatError(f"{path}: all {needed} chunk files of {array.basename!r} are missing")
    return int(max(0, needed - files))


def _check_metadata(path: Path, allowance: Allowance) -> None:
    """Raise FormatError if the metadata of a group and its arrays is too large or not in files."""
    for directory in _nodes(path, MAX_DEPTH):
        for name in _METADATA:
            try:
                status = os.stat(directory / name)
            except OSError:
                continue  # missing, or a dangling link: zarr reports that
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{path}: {name} is not a regular file")
            allowance.take(JSON_COST * status.st_size, f"its metadata in {name}")


def _nodes(path: Path, depth: int) -> Iterator[Path]:
    """Yield the directory of a group, and those in it that can be groups or arrays."""
    yield path
    inner = (each for each in path.iterdir() if depth and each.is_dir())
    for each in inner:
        if any(os.path.lexists(each / name) for name in _METADATA):
            yield from _nodes(each, depth - 1)


@contextmanager
def _filled(group: Any, content: Content) -> Iterator[Write]:
    """Fill a new group: keys first, then the matrix block by block."""
    for described in [] if content.keys is None else content.keys.arrays():
        _write_vector(group, *described)
    rows = max(1, min(content.rows, content.block_rows))
    writers = [
        _new_array(
            group,
            name,
            shape=(content.rows, dim),
            chunks=(rows, dim),
            dtype=ELEMENT_TYPES[dtype].stored,
            attributes={"dtype": dtype},
            dimension_names=["row", last],
        )
        for name, dim, dtype, last in (
            (content.field, content.dim, content.dtype, "dim"),
            (content.scale, 1, "float32", "scale"),
        )
        if name is not None
    ]

    def write(start: int, *blocks: Array) -> None:
        for writer, block in zip(writers, blocks, strict=True):
            writer(start, block)

    yield write


def _new_array(group: Any, name: str, **described: Any) -> Write:
    """Return what writes to a new array of a group.

    Threads of zarr write the files. An interrupt waits for them, or they would continue while
    the caller removes the written files.
    """
    with interrupts_deferred():
        array = group.create_array(name, config={"write_empty_chunks": True}, **described)

    def write(start: int, block: Array) -> None:
        with interrupts_deferred():
            array[start : start + len(block)] = block

    return write


def _write_vector(
    group: Any, name: str, dtype: np.dtype[Any], length: int, parts: Iterator[Array]
) -> None:
    write = _new_array(
        group,
        name,
        shape=(length,),
        chunks=(max(1, min(length, _KEY_CHUNK)),),
        dtype=dtype,
        dimension_names=["row" if name == KEYS and dtype.itemsize > 1 else name],
    )
    start = 0
    for part in parts:
        write(start, part)
        start += len(part)


class Zarr(ColumnFormat):
    """Named arrays, of element types that NumPy supports, in a directory or a zarr store."""

    suffixes = (".zarr",)
    takes_stores = True
    is_directory = True
    elements = "numpy"

    def wrote(self, directory: Path) -> bool:
        """Whether it is a group or array of zarr, and no store of tables."""
        names = {each.name for each in directory.iterdir()}
        return bool(names & _METADATA) and "STORE.json" not in names

    def reader(self, path: Path, memory: Size) -> Reader:
        """Open a directory, checking the size of its metadata first."""
        if not path.is_dir():
            raise FormatError(
                f"{path}: {'not a directory' if path.exists() else 'no such directory'}"
            )
        allowance = Allowance(path, memory)
        _check_metadata(path, allowance)
        return _ZarrArrays(path, path, allowance)

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write a group of arrays."""
        import zarr

        with interrupts_deferred():
            group = zarr.create_group(path)
        with _filled(group, content) as write:
            yield write

    def open_store(self, store: Any, path: Path, wanted: Wanted) -> Source:
        """Open a matrix in any store that zarr accepts."""
        return ReadSource(_ZarrArrays(store, path, Allowance(path, wanted.memory)), wanted)

    @contextmanager
    def write_store(
        self, store: Any, path: Path, content: Content, *, force: bool
    ) -> Iterator[Write]:
        """Write a group in any store that zarr accepts; it is incomplete while the body runs."""
        import zarr

        try:
            group = zarr.create_group(store, overwrite=force, attributes={_COMPLETE: False})
        except (ValueError, FileExistsError) as error:
            raise ExistsError(f"{path} is not empty; force replacing it: {error}") from error
        with _filled(group, content) as write:
            yield write
        group.attrs[_COMPLETE] = True
