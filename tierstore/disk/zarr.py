"""The zarr base: one zarr v3 array of records in whole-row chunks, opened by any zarr reader.

Raw chunks (codec `bytes` alone) are files of records, so they are mapped and read like a memmap
base; nothing here imports zarr. Format: Zarr core specification v3.0.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from tierstore import io
from tierstore.disk.compressed import CompressedRecords
from tierstore.disk.files import Files
from tierstore.disk.ranged import RangedRecords, record_files
from tierstore.disk.records import RecordFiles
from tierstore.errors import CorruptStoreError, InvalidInputError
from tierstore.spec import TableSpec

__all__ = ["chunk_name", "create", "open_records", "with_chunks"]

ARRAY = "rows.zarr"
METADATA = "zarr.json"

_MAPPING_UNIT = 1 << 16
"""Raw chunk files are laid end to end in memory: whole pages, on every page size in use."""
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


def with_chunks(spec: TableSpec) -> TableSpec:
    """Return the spec with its number of rows a chunk decided.

    Raises InvalidInputError if a number was given that raw chunks cannot have.
    """
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


def metadata(spec: TableSpec) -> bytes:
    """Return the array's zarr.json, byte for byte the same for the same spec."""
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
                for name, item in layout.fields
            }
        },
    }
    return json.dumps(array, indent=1).encode()


def chunk_name(number: int) -> str:
    """Return the name of a chunk's file, within the array's directory."""
    return f"c.{number}.0"


def create(
    directory: io.Directory, spec: TableSpec
) -> RecordFiles | RangedRecords | CompressedRecords:
    """Create the array, with space for every row unless it is sparse or compressed, and open it."""
    with directory.make_directory(ARRAY) as array:
        array.write_file(METADATA, metadata(spec))
        if spec.compression is not None:
            return CompressedRecords(io.hold_directory(directory.directory(ARRAY)), spec)
        files = _files(directory, spec)
        created = files.create(sparse=spec.sparse)
        array.sync()
    return _records(files, spec, created)


def open_records(
    directory: io.Holder, spec: TableSpec
) -> RecordFiles | RangedRecords | CompressedRecords:
    """Open the array, whose metadata must be what this table's spec gives."""
    with directory.use() as place, place.directory(ARRAY) as array:
        found = array.read_file(METADATA, 1 << 20)
        if found != metadata(spec):
            raise CorruptStoreError(
                f"{array.join(METADATA)} is not that of a table of {spec.rows} rows; "
                "restore the file from a copy"
            )
        if spec.compression is not None:
            return CompressedRecords(io.hold_directory(place.directory(ARRAY)), spec)
    return _records(_files(directory, spec), spec)


def _files(directory: io.Holder, spec: TableSpec) -> Files:
    nbytes = (spec.chunk_rows or 0) * spec.layout.record_bytes
    count = -(-spec.rows // (spec.chunk_rows or 1))
    return Files(directory, chunk_name, nbytes, count, inside=ARRAY)


def _records(
    files: Files, spec: TableSpec, created: Sequence[io.File] = ()
) -> RecordFiles | RangedRecords:
    return record_files(
        files,
        created,
        rows=spec.rows,
        record_bytes=spec.layout.record_bytes,
        rows_per_file=spec.chunk_rows,
    )
