"""Reads columns of files of other libraries for another process, within a limit of memory.

Only a decoder knows the decompressed size of what it decodes, and it allocates memory first. What
the file says of its sizes bounds nothing: Parquet that declares a megabyte of pages decodes to
gigabytes of texts, of one entry of a dictionary or of what each shares with the one before; HDF5
unpacks a chunk of a kilobyte to whatever its filter gives, and a thousand texts may be one place in
its heap. Neither pyarrow nor HDF5 takes a limit, and a damaged file may end the process. The
decoder therefore runs in a separate one, as a script that imports nothing from this library:

    python -P _columns_child.py KIND SOCKET BYTES

A request is one line of JSON; for one that starts with a file, the socket holds its descriptor. An
answer is the length of a JSON object in four bytes, the object, and the buffers whose sizes it
lists.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy

BUFFER_BYTES = 1 << 20
SMALL_BYTES = 32 << 20  # files up to this size are read by whole chunks
SLACK_BYTES = 64 << 20  # for imports and fixed allocations
MAX_DATASETS = 10_000
MAX_DEPTH = 16
PACKING = ("add_offset", "scale_factor")  # attributes by which NetCDF packs values
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

Answer = tuple[dict[str, Any], list[Any]]


class Damage(Exception):
    """A file that does not hold the requested data."""


class ArrowTable:
    """A file that pyarrow reads in batches of rows."""

    def schema(self) -> Any:
        """Return the schema, of pyarrow."""
        raise NotImplementedError

    def rows(self) -> int:
        """Return the number of rows."""
        raise NotImplementedError

    def batches(self, columns: list[str], rows: int) -> Iterator[list[Any]]:
        """Yield the arrays of columns, at most `rows` rows at a time."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return the number of rows, and the kind of each column: floats, integers or strings."""
        schema = self.schema()
        columns = {
            name: {"text": str(each.type), **kind_of(each.type)} for name, each in leaves(schema)
        }
        return {"rows": self.rows(), "columns": columns, "notes": index_notes(schema)}

    def length(self, column: str) -> int:
        """Return the length of the first list."""
        for (lists,) in self.batches([column], 1):
            if len(lists):
                if not lists[0].is_valid:
                    break
                return len(lists[0])
        raise Damage(f"the first list of {column!r} is missing or null")

    def blocks(self, columns: list[str], rows: int, dim: int) -> Iterator[Answer]:
        """Yield rows as buffers: keys if `dim` is 0, else `dim` numbers each."""
        import pyarrow

        row = 0
        for found in self.batches(columns, rows):
            count = len(found[0])
            if count and dim:
                numbers = (
                    wide(found, columns)
                    if pyarrow.types.is_primitive(found[0].type)
                    else lists(found[0], columns[0], row, dim)
                )
                yield {"rows": count, "number": numbers.dtype.str}, [numbers]
            elif count:
                values = keys(found[0], columns[0])
                yield {"rows": count, "number": values[0].dtype.str}, values
            row += count


class ParquetTable(ArrowTable):
    """A Parquet file."""

    def __init__(self, source: BinaryIO) -> None:
        import pyarrow.parquet

        # A buffered read trusts the sizes in page headers; reading a whole chunk is bounded by the
        # file size.
        size = os.fstat(source.fileno()).st_size
        self._file = pyarrow.parquet.ParquetFile(
            source, pre_buffer=False, buffer_size=BUFFER_BYTES if size > SMALL_BYTES else 0
        )

    def schema(self) -> Any:
        return self._file.schema_arrow

    def rows(self) -> int:
        return int(self._file.metadata.num_rows)

    def batches(self, columns: list[str], rows: int) -> Iterator[list[Any]]:
        for batch in self._file.iter_batches(rows, columns=columns, use_threads=False):
            # A name with a dot selects the parts of a nested column too.
            yield [column_of(batch, name) for name in columns]


class IpcTable(ArrowTable):
    """A file or a stream of Arrow's, the latter as Hugging Face writes it."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._is_file = source.read(6) == b"ARROW1"
        if not self._is_file:
            source.seek(-len(END_OF_STREAM), os.SEEK_END)
            if source.read() != END_OF_STREAM:
                raise Damage("truncated: the end of the stream is missing")

    def _reader(self, columns: list[str] | None = None) -> Any:
        from pyarrow import ipc

        fields = None
        if columns is not None:
            schema = self.schema()
            fields = [column_index(schema, name)[0] for name in columns]
        self._source.seek(0)
        open_reader = ipc.open_file if self._is_file else ipc.open_stream
        options = ipc.IpcReadOptions(use_threads=False, included_fields=fields)
        return open_reader(self._source, options=options)

    def schema(self) -> Any:
        return self._reader().schema

    def _all(self, columns: list[str]) -> Iterator[Any]:
        reader = self._reader(columns)
        if self._is_file:
            yield from (reader.get_batch(n) for n in range(reader.num_record_batches))
        else:
            yield from reader

    def rows(self) -> int:
        names = self.schema().names
        return sum(batch.num_rows for batch in self._all(names[:1]))

    def batches(self, columns: list[str], rows: int) -> Iterator[list[Any]]:
        for batch in self._all(columns):
            for name in columns:
                column_of(batch, name).validate(full=True)  # offsets that the file claims
            for start in range(0, batch.num_rows, rows):
                part = batch.slice(start, rows)
                yield [column_of(part, name) for name in columns]


class Hdf5File:
    """An HDF5 file; only datasets in the file itself are read: matrices and vectors."""

    def __init__(self, source: BinaryIO) -> None:
        import h5py

        self._source = source
        self._file = h5py.File(f"/proc/self/fd/{source.fileno()}", "r", locking=False)

    def describe(self) -> dict[str, Any]:
        """Return the kind of each dataset, by its path."""
        found = {name: self._kind(dataset) for name, dataset in self._datasets(self._file, "", 0)}
        return {"rows": None, "columns": found, "notes": []}

    def _datasets(self, group: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
        """Yield the datasets below a group. Links to other places are not followed."""
        import h5py

        if depth > MAX_DEPTH or len(group) > MAX_DATASETS:
            raise Damage("groups are nested too deep or hold too many datasets")
        for name in group:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                continue
            entry = group[name]
            if isinstance(entry, h5py.Group):
                yield from self._datasets(entry, f"{prefix}{name}/", depth + 1)
            elif isinstance(entry, h5py.Dataset):
                yield f"{prefix}{name}", entry

    def _kind(self, dataset: Any) -> dict[str, Any]:
        shape: tuple[int, ...] = dataset.shape or ()
        name = dataset.dtype.name
        kind: dict[str, Any] = {
            "text": f"{dataset.dtype} {shape}",
            "rows": shape[0] if shape else None,
            "number": name,
        }
        if dataset.external or dataset.is_virtual:
            return kind | {"text": f"{kind['text']} in other files"}
        if packed := [name for name in PACKING if name in dataset.attrs]:
            return kind | {"text": f"{kind['text']} packed by {' and '.join(packed)}"}
        if len(shape) == 2:
            return kind | {"kind": "list", "dim": shape[1]}
        if len(shape) == 1 and dataset.dtype.kind in "iu":
            return kind | {"kind": "integer"}
        if len(shape) == 1 and dataset.dtype.kind == "f":
            return kind | {"kind": "float"}
        if len(shape) == 1 and (dataset.dtype.kind == "S" or self._is_text(dataset)):
            return kind | {"kind": "text"}
        return kind

    def _is_text(self, dataset: Any) -> bool:
        import h5py

        return h5py.check_string_dtype(dataset.dtype) is not None

    def blocks(self, columns: list[str], rows: int, dim: int) -> Iterator[Answer]:
        """Yield rows as buffers, whole chunks at a time."""
        dataset = self._file[columns[0]]
        chunk = dataset.chunks[0] if dataset.chunks else 1
        step = max(1, rows // chunk) * chunk
        for first in range(0, dataset.shape[0], step):
            found = dataset[first : first + step]
            for start in range(0, len(found), rows):
                part = found[start : start + rows]
                if dim:
                    native = part.astype(part.dtype.newbyteorder("<"), copy=False)
                    values = [numpy.ascontiguousarray(native)]
                elif part.dtype.kind in "iu":
                    values = [part.astype(wide_integer(part.dtype.kind == "u"))]
                else:
                    values = blob(part.tolist(), columns[0])
                yield {"rows": len(part), "number": values[0].dtype.str}, values


def blob(texts: list[Any], column: str) -> list[Any]:
    """Return byte strings as their end offsets and their bytes, which must be UTF-8."""
    encoded = [text.encode() if isinstance(text, str) else bytes(text) for text in texts]
    try:
        b"\n".join(encoded).decode()
    except UnicodeDecodeError:
        raise Damage(f"column {column!r} holds texts that are not UTF-8") from None
    ends = numpy.cumsum([0, *map(len, encoded)], dtype=numpy.int64)
    return [ends, b"".join(encoded)]


def wide_integer(unsigned: bool) -> str:
    """Return the type of integers as the answers have them."""
    return "uint64" if unsigned else "int64"


def stored(kind: Any) -> Any:
    """Return the lists that a tensor of one dimension is stored as, and other types as they are."""
    is_tensor = getattr(kind, "extension_name", "") == "arrow.fixed_shape_tensor"
    return kind.storage_type if is_tensor and len(kind.shape) == 1 else kind


def kind_of(kind: Any) -> dict[str, Any]:
    """Return the kind in which an Arrow column of this type can be read."""
    from pyarrow import types

    kind = stored(kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        size = kind.list_size if types.is_fixed_size_list(kind) else None
        return {"kind": "list", "number": number_of(kind.value_type), "dim": size}
    text = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_integer(kind):
        return {"kind": "integer", "number": number_of(kind)}
    if types.is_floating(kind):
        return {"kind": "float", "number": number_of(kind)}
    is_text = types.is_string(text) or types.is_large_string(text) or types.is_string_view(text)
    return {"kind": "text"} if is_text else {}


def leaves(fields: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield columns by name, those in a struct in its place, unless their paths are names too.

    Raises Damage for two columns of one name, of which one could not be named.
    """
    found: dict[str, Any] = {}
    for each in fields:
        if f"{prefix}{each.name}" in found:
            raise Damage(f"two columns are named {each.name!r}")
        found[f"{prefix}{each.name}"] = each
    for name, each in list(found.items()):
        if str(each.type).startswith("struct<") and prefix.count(".") < MAX_DEPTH:
            inner = [each.type.field(at) for at in range(each.type.num_fields)]
            parts = dict(leaves(inner, f"{name}."))
            if parts and parts.keys().isdisjoint(found):
                del found[name]
                found |= parts
    yield from found.items()


def column_index(schema: Any, name: str) -> tuple[int, list[str]]:
    """Return the index of a column, and the names in it of what is wanted of a struct."""
    within: list[str] = []
    index = schema.get_field_index(name)
    while index < 0:
        name, _, last = name.rpartition(".")
        within.insert(0, last)
        index = schema.get_field_index(name)
    return index, within


def column_of(batch: Any, name: str) -> Any:
    """Return a column of a batch, or of a struct in it."""
    index, within = column_index(batch.schema, name)
    column = batch.column(index)
    for each in within:
        column = column.flatten()[column.type.get_field_index(each)]
    return column if stored(column.type) is column.type else column.storage


def index_notes(schema: Any) -> list[str]:
    """Say what index pandas left in the metadata alone, unless it counts the rows from 0."""
    try:
        found = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
        ranges = [each for each in found.get("index_columns", []) if isinstance(each, dict)]
        bounds = [tuple(int(each[n]) for n in ("start", "stop", "step")) for each in ranges]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # of another program
    return [
        f"not read: the index of pandas, range{each}; save it as a column (reset_index) for keys"
        for each in bounds
        if each[::2] != (0, 1)
    ]


def number_of(kind: Any) -> str:
    """Return NumPy's name of a type of numbers, or nothing."""
    from pyarrow import types

    is_number = types.is_floating(kind) or types.is_integer(kind)
    return str(kind.to_pandas_dtype().__name__) if is_number else ""


def lists(found: Any, column: str, row: int, dim: int) -> Any:
    """Return lists of `dim` numbers each as one array; `row` is the number of the first."""
    values = found.flatten()
    nulls = found.null_count or values.null_count
    if nulls or (numpy.from_dlpack(found.value_lengths()) != dim).any():
        at = next(
            (
                at
                for at, each in enumerate(found)
                if not each.is_valid or len(each) != dim or each.values.null_count
            ),
            0,
        )
        raise Damage(f"row {row + at} of {column!r} is not {dim} numbers without nulls")
    return numpy.from_dlpack(values)  # its to_numpy imports pandas


def wide(found: list[Any], columns: list[str]) -> Any:
    """Return columns of numbers, one for each element, as rows."""
    for array, name in zip(found, columns, strict=True):
        if array.null_count:
            raise Damage(
                f"column {name!r} has nulls, {array.null_count} of {len(array)}; write NaN instead"
            )
    return numpy.stack([numpy.from_dlpack(array) for array in found], axis=1)


def keys(batch: Any, column: str) -> list[Any]:
    """Return integers as one buffer, strings as their end offsets and UTF-8 bytes."""
    import pyarrow

    if batch.null_count:
        raise Damage(f"column {column!r} has nulls, {batch.null_count} of {len(batch)}")
    if pyarrow.types.is_integer(batch.type):
        wide = wide_integer(pyarrow.types.is_unsigned_integer(batch.type))
        return [numpy.from_dlpack(batch.cast(wide))]
    strings = batch.cast(pyarrow.large_string())
    strings.validate(full=True)  # offsets, and that it is UTF-8
    offsets = numpy.from_dlpack(
        pyarrow.Array.from_buffers(
            pyarrow.int64(), len(strings) + 1, [None, strings.buffers()[1]], offset=strings.offset
        )
    )
    data = strings.buffers()[2]
    text = memoryview(data)[offsets[0] : offsets[-1]] if data else b""
    return [offsets - offsets[0], text]


KINDS: dict[str, Any] = {"parquet": ParquetTable, "arrow": IpcTable, "hdf5": Hdf5File}
NEEDS = {"parquet": "pyarrow.parquet", "arrow": "pyarrow.ipc", "hdf5": "h5py"}


class Server:
    """Answers requests for files of one kind."""

    def __init__(self, kind: str, files: socket.socket) -> None:
        self._kind = KINDS[kind]
        self._files = files
        self._passes: dict[int, Iterator[Answer]] = {}

    def _open(self) -> Any:
        _, (descriptor,), _, _ = socket.recv_fds(self._files, 1, 1)
        try:  # opened again, so that each pass has its own position
            return self._kind(open(f"/proc/self/fd/{descriptor}", "rb"))
        finally:
            os.close(descriptor)

    def describe(self) -> Answer:
        """Return the number of rows and the kinds of the columns of a new file."""
        return self._open().describe(), []

    def length(self, column: str) -> Answer:
        """Return the length of the first list of a column of a new file."""
        return {"length": self._open().length(column)}, []

    def start(self, number: int, columns: list[str], rows: int, dim: int) -> Answer:
        """Start pass `number` over columns of a new file, `rows` at a time; 0 is `dim` of keys."""
        self._passes[number] = self._open().blocks(columns, rows, dim)
        return {}, []

    def next(self, number: int) -> Answer:
        """Return the next rows of a pass, or none if it is done."""
        rows = next(self._passes[number], None)
        if rows is None:
            del self._passes[number]
            return {"rows": 0}, []
        return rows


def answer(output: BinaryIO, header: dict[str, Any], buffers: list[Any]) -> None:
    """Send an answer."""
    views = [memoryview(buffer).cast("B") if len(buffer) else memoryview(b"") for buffer in buffers]
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
    kind, channel, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    __import__(NEEDS[kind])
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    limit(nbytes + SLACK_BYTES)
    server = Server(kind, socket.socket(fileno=channel))
    header: dict[str, Any]
    buffers: list[Any]
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            request = json.loads(line)
            try:
                header, buffers = getattr(server, request.pop("do"))(**request)
            except MemoryError:
                header, buffers = {"error": "memory"}, []
            except Damage as error:
                header, buffers = {"error": "damage", "reason": str(error)}, []
            except Exception as error:
                header, buffers = {"error": "parser", "reason": str(error)[:1000]}, []
            answer(output, header, buffers)


if __name__ == "__main__":
    main()
