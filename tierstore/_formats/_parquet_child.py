"""Reads columns of a Parquet file for another process, within a limit of memory.

Only the decoder knows the decompressed size of a Parquet page, and it allocates memory first. It
therefore runs in a separate process, as a script that imports nothing from this library:

    python -P _parquet_child.py DESCRIPTOR BYTES

A request is one line of JSON. An answer is the length of a JSON object in four bytes, the object,
and the buffers whose sizes it lists.
"""

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

BUFFER_BYTES = 1 << 20
SMALL_BYTES = 32 << 20  # files up to this size are read by whole chunks
SLACK_BYTES = 64 << 20  # for imports and fixed allocations


Answer = tuple[dict[str, Any], list[Any]]


class Damage(Exception):
    """A file that does not hold the requested data."""


class Reader:
    """A Parquet file and the running passes over its columns."""

    def __init__(self, source: BinaryIO) -> None:
        # A buffered read trusts the sizes in page headers; reading a whole chunk is bounded by the
        # file size.
        size = os.fstat(source.fileno()).st_size
        self._file = pyarrow.parquet.ParquetFile(
            source, pre_buffer=False, buffer_size=BUFFER_BYTES if size > SMALL_BYTES else 0
        )
        self._passes: dict[int, Iterator[Answer]] = {}

    def schema(self) -> Answer:
        """Return the number of rows, and the kind of each column: floats, integers or strings."""
        columns = {}
        for field in self._file.schema_arrow:
            columns[field.name] = {"text": str(field.type), **kind_of(field.type)}
        return {"rows": self._file.metadata.num_rows, "columns": columns}, []

    def length(self, column: str) -> Answer:
        """Return the length of the first list."""
        batch = next(self._batches(column, 1), None)
        if batch is None or not batch[0].is_valid:
            raise Damage(f"the first list of {column!r} is missing or null")
        return {"length": len(batch[0])}, []

    def start(self, number: int, column: str, rows: int, dim: int) -> Answer:
        """Start pass `number` over a column, `rows` at a time; `dim` is that of lists, or 0."""
        self._passes[number] = self._blocks(column, rows, dim)
        return {}, []

    def next(self, number: int) -> Answer:
        """Return the next rows of a pass, or none if it is done."""
        found = next(self._passes[number], None)
        if found is None:
            del self._passes[number]
            return {"rows": 0}, []
        return found

    def _batches(self, column: str, rows: int) -> Iterator[Any]:
        for batch in self._file.iter_batches(rows, columns=[column], use_threads=False):
            # A name with a dot selects the parts of a nested column too.
            yield batch.column(batch.schema.get_field_index(column))

    def _blocks(self, column: str, rows: int, dim: int) -> Iterator[Answer]:
        row = 0
        for batch in self._batches(column, rows):
            if len(batch):
                buffers = matrix(batch, column, row, dim) if dim else keys(batch, column)
                yield {"rows": len(batch)}, buffers
            row += len(batch)


def kind_of(kind: Any) -> dict[str, Any]:
    """Return the kind as which a column of this type can be read."""
    types = pyarrow.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        size = kind.list_size if types.is_fixed_size_list(kind) else None
        is_number = types.is_floating(kind.value_type) or types.is_integer(kind.value_type)
        element = kind.value_type.to_pandas_dtype().__name__ if is_number else ""
        return {"element": element, "size": size}
    text = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_integer(kind):
        return {"key": "integer"}
    return {"key": "string"} if types.is_string(text) or types.is_large_string(text) else {}


def matrix(lists: Any, column: str, row: int, dim: int) -> list[Any]:
    """Return lists of `dim` numbers each as one buffer; `row` is the number of the first."""
    values = lists.flatten()
    unequal = (lists.value_lengths().to_numpy(zero_copy_only=False) != dim).any()
    if lists.null_count or values.null_count or unequal:
        raise Damage(
            f"rows {row} to {row + len(lists) - 1} of {column!r} are not all {dim} numbers "
            "without nulls"
        )
    return [values.to_numpy(zero_copy_only=True)]


def keys(batch: Any, column: str) -> list[Any]:
    """Return integers as one buffer, strings as their end offsets and UTF-8 bytes."""
    if batch.null_count:
        raise Damage(f"column {column!r} has nulls, {batch.null_count} of {len(batch)}")
    if pyarrow.types.is_integer(batch.type):
        return [batch.cast(pyarrow.int64()).to_numpy()]
    strings = batch.cast(pyarrow.large_string())
    strings.validate(full=True)  # offsets, and that it is UTF-8
    offsets = pyarrow.Array.from_buffers(
        pyarrow.int64(), len(strings) + 1, [None, strings.buffers()[1]], offset=strings.offset
    ).to_numpy()
    data = strings.buffers()[2]
    text = memoryview(data)[offsets[0] : offsets[-1]] if data else b""
    return [offsets - offsets[0], text]


def answer(output: BinaryIO, header: dict[str, Any], buffers: list[Any]) -> None:
    """Send an answer."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    text = json.dumps({**header, "buffers": [view.nbytes for view in views]}).encode()
    output.write(struct.pack("<I", len(text)) + text)
    for view in views:
        output.write(view)
    output.flush()


def limit(nbytes: int) -> None:
    """Limit the memory of this process to its current size plus `nbytes`."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = taken + nbytes if most == resource.RLIM_INFINITY else min(taken + nbytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))


def main() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process decides when to stop
    descriptor, nbytes = map(int, sys.argv[1:])
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    limit(nbytes + SLACK_BYTES)
    reader = None
    header: dict[str, Any]
    buffers: list[Any]
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            request = json.loads(line)
            try:
                if reader is None:
                    reader = Reader(os.fdopen(descriptor, "rb"))
                header, buffers = getattr(reader, request.pop("do"))(**request)
            except MemoryError:
                header, buffers = {"error": "memory"}, []
            except Damage as error:
                header, buffers = {"error": "damage", "reason": str(error)}, []
            except Exception as error:
                header, buffers = {"error": "parser", "reason": str(error)[:1000]}, []
            answer(output, header, buffers)


if __name__ == "__main__":
    main()
