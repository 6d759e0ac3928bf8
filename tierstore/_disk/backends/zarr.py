"""The zarr base: one zarr v3 array of records in whole-row chunks, for any zarr reader.

Uncompressed chunks (only the codec `bytes`) are plain files of records, mapped and read like a
memmap base; zarr itself is not imported. Format: Zarr core specification v3.0.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from tierstore import _io
from tierstore._disk.backends import Backend, PlainFiles, Records
from tierstore._disk.compressed import CompressedRecords
from tierstore._disk.records import Files, record_files
from tierstore.errors import CorruptStoreError, InvalidInputError
from tierstore.spec import RecordLayout, TableSpec

ARRAY = "rows.zarr"
METADATA = "zarr.json"
MAX_CHUNKS = 2**20
MAX_DECODED_CHUNK_BYTES = 2**28

_MAPPING_UNIT = 1 << 16
"""Uncompressed chunks are mapped end to end, so they fill whole pages of any common size."""
_RAW_CHUNK_BYTES = (16 << 20, 256 << 20)
_COMPRESSED_CHUNK_BYTES = 256 << 10
_CODECS: dict[str | None, list[dict[str, Any]]] = {
    None: [],
    "zstd": [{"name": "zstd", "configuration": {"level": 3, "checksum": False}}],
    "lz4": [
        {
            "name": "blosc",
            "configuration": {
                "typesize": 4,
                "cname": "lz4",
                "clevel": 5,
                "shuffle": "shuffle",
                "blocksize": 0,
            },
        }
    ],
}


def metadata(spec: TableSpec) -> bytes:
    """Return the array's zarr.json; equal specs give equal bytes."""
    layout = spec.layout
    element = layout.element
    columns = {
        name: [layout.offsets[name] // element.itemsize, item.nbytes // element.itemsize]
        for name, item in layout.fields
    }
    width = layout.record_bytes // element.itemsize
    array = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [spec.rows, width],
        "data_type": element.name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [spec.chunk_rows, width]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0.0 if element.kind == "f" else 0,
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}}
            if element.itemsize > 1
            else {"name": "bytes"},
            *_CODECS[spec.compression],
        ],
        "attributes": {
            "fields": {
                name: {"dtype": item.dtype, "columns": columns[name]}
                | ({} if item.scale is None else {"scale": vars(item.scale)})
                for name, item in layout.fields
            }
        },
    }
    return json.dumps(array, indent=1).encode()


def chunk_name(number: int) -> str:
    """Return the name of a chunk's file, within the array's directory."""
    return f"c.{number}.0"


class Zarr(Backend):
    """One array in chunks of whole rows, readable by any zarr reader."""

    name = "zarr"
    summary = "one zarr v3 array"
    entry = ARRAY
    inner = re.compile(r"zarr\.json|c\.\d{1,13}\.0(?:\.[0-9a-f]{8}\.partial)?")
    partial = re.compile(r"c\.\d{1,13}\.0\.[0-9a-f]{8}\.partial")
    compressions = ("zstd", "lz4")
    on_objects = "zarr"

    def check(self, spec: TableSpec) -> None:
        """Limit the memory of compressed chunks, and the number of uncompressed chunk files."""
        if spec.chunk_rows is None:
            return
        nbytes = spec.chunk_rows * spec.layout.record_bytes
        count = -(-spec.rows // spec.chunk_rows)
        if spec.compression is not None and nbytes > MAX_DECODED_CHUNK_BYTES:
            raise InvalidInputError(
                f"a compressed chunk of {spec.chunk_rows} rows would take {nbytes} bytes; at most "
                f"{MAX_DECODED_CHUNK_BYTES} are decoded at a time; choose fewer chunk_rows"
            )
        if spec.compression is None and count > MAX_CHUNKS:
            raise InvalidInputError(
                f"{spec.rows} rows in chunks of {spec.chunk_rows} would make {count} files; at "
                f"most {MAX_CHUNKS} are opened; choose more chunk_rows"
            )

    def completed(self, spec: TableSpec) -> TableSpec:
        """Choose the rows per chunk; raise InvalidInputError if they do not fill whole pages."""
        width = spec.layout.record_bytes
        if spec.compression is not None:
            rows = spec.chunk_rows or max(1, _COMPRESSED_CHUNK_BYTES // width)
            return dataclasses.replace(spec, chunk_rows=min(rows, spec.rows))
        unit = _MAPPING_UNIT // math.gcd(_MAPPING_UNIT, width)
        if spec.chunk_rows is None:
            least, most = _RAW_CHUNK_BYTES
            wanted = min(max(least, spec.nbytes // 64), most)
            rows = -(-wanted // (unit * width)) * unit
        else:
            rows = spec.chunk_rows
        if rows >= spec.rows:
            rows = spec.rows
        elif rows % unit:
            raise InvalidInputError(
                f"chunk_rows={rows} would not fill whole pages; use a multiple of {unit}"
            )
        return dataclasses.replace(spec, chunk_rows=rows)

    def create(self, directory: _io.Directory, spec: TableSpec) -> Records:
        """Create the array and open it."""
        with directory.make_directory(ARRAY) as array:
            array.write_file(METADATA, metadata(spec))
            if spec.compression is not None:
                return CompressedRecords(_io.hold_directory(directory.directory(ARRAY)), spec)
            files = _files(directory, spec)
            created = files.create(sparse=spec.sparse)
            array.sync()
        return _records(files, spec, created)

    def open(self, directory: _io.Holder, spec: TableSpec) -> Records:
        """Open the array and check that its metadata matches the spec byte for byte."""
        with directory.use() as place, place.directory(ARRAY) as array:
            found = array.read_file(METADATA, 1 << 20)
            if found != metadata(spec):
                raise CorruptStoreError(
                    f"{array.join(METADATA)} does not match a table of {spec.rows} rows; "
                    "restore the file from a copy"
                )
            if spec.compression is not None:
                return CompressedRecords(_io.hold_directory(place.directory(ARRAY)), spec)
        return _records(_files(directory, spec), spec)

    def plain_files(self, spec: TableSpec) -> PlainFiles | None:
        """Return the files of uncompressed chunks."""
        if spec.compression is not None:
            return None
        rows = spec.chunk_rows or spec.rows
        return PlainFiles(chunk_name, -(-spec.rows // rows), rows, directory=ARRAY)

    def open_unchecked(self, directory: _io.Holder, spec: TableSpec) -> Records:
        """Open compressed chunks."""
        with directory.use() as place:
            return CompressedRecords(_io.hold_directory(place.directory(ARRAY)), spec)

    def disk_bytes(self, directory: _io.Holder, spec: TableSpec) -> int:
        """Return the size of all chunks; the sizes of compressed chunks are queried."""
        if spec.compression is None:
            return spec.nbytes
        with directory.use() as place, place.directory(ARRAY) as array:
            return sum(map(array.size, array.names()))

    def opening_line(self, layout: RecordLayout, path: str) -> str:
        """Open the array and select the columns of the field."""
        name, field = layout.fields[0]
        lo, hi = (edge // layout.element.itemsize for edge in layout.span(name))
        line = f"zarr.open({path!r}, mode='r')[:, {lo}:{hi}]"
        return line if layout.element == field.storage else f"{line}.view({field.storage.str!r})"


def _files(directory: _io.Holder, spec: TableSpec) -> Files:
    nbytes = (spec.chunk_rows or 0) * spec.layout.record_bytes
    count = -(-spec.rows // (spec.chunk_rows or 1))
    return Files(directory, chunk_name, nbytes, count, inside=ARRAY)


def _records(files: Files, spec: TableSpec, created: Sequence[_io.File] = ()) -> Records:
    return record_files(
        files,
        created,
        rows=spec.rows,
        record_bytes=spec.layout.record_bytes,
        rows_per_file=spec.chunk_rows,
    )
