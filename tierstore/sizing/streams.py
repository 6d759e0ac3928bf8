"""Streams of row ids, loaded from files, for simulations."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._formats.files import open_input
from tierstore._formats.npy import Arrays
from tierstore._formats.parquet import Parquet
from tierstore._table.trace import is_trace, read_trace, trace_rows
from tierstore.budget import DEFAULT_MEMORY, Allowance, Size
from tierstore.errors import FormatError, InvalidInputError, InvalidTypeError, counted

Ids = npt.NDArray[np.int64]

DEFAULT_BATCH = 4096
_BLOCK = 1 << 20


@dataclass(frozen=True)
class DistinctRows:
    """The distinct rows of a batch, in random order, and the number of ids for each."""

    rows: Ids
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True, repr=False)
class Stream:
    """Batches of row ids of a table.

    Attributes:
        rows: number of rows of the table.
        batches: the batches in order of use.
        ids: number of ids in all batches, including repeats.
    """

    rows: int
    batches: Sequence[DistinctRows]
    ids: int

    def __repr__(self) -> str:
        """Count the batches, whose ids may be many."""
        return f"Stream(rows={self.rows:,}, batches={len(self.batches):,}, ids={self.ids:,})"

    @property
    def unique(self) -> float:
        """Mean number of distinct rows in a batch."""
        return sum(batch.rows.size for batch in self.batches) / len(self.batches)


def stream_of(batches: Iterable[Any], rows: int | None = None, seed: int = 0) -> Stream:
    """Make a stream from the ids of each batch; `rows` defaults to one more than the largest id.

    Empty batches are skipped. Raises InvalidInputError if no batch remains or an id is outside the
    table, and InvalidTypeError for ids that are not integers.
    """
    rng = np.random.default_rng(seed)
    made, ids, least, greatest = [], 0, 0, -1
    for given in batches:
        array = np.asarray(given)
        if array.size == 0:
            continue
        if array.dtype.kind not in "iu":
            raise InvalidTypeError(f"row ids must be integers, not {array.dtype}")
        distinct, counts = np.unique(array.ravel(), return_counts=True)
        least, greatest = min(least, int(distinct[0])), max(greatest, int(distinct[-1]))
        order = rng.permutation(distinct.size)
        made.append(DistinctRows(distinct[order].astype(np.int64), counts[order].astype(np.int64)))
        ids += array.size
    if not made:
        raise InvalidInputError("there are no ids to replay")
    rows = greatest + 1 if rows is None else rows
    if least < 0 or greatest >= rows:
        wrong = least if least < 0 else greatest
        raise InvalidInputError(f"id {wrong} is outside a table of {counted(rows, 'row')}")
    return Stream(rows, made, ids)


def load_stream(
    path: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    column: str | None = None,
    rows: int | None = None,
    epochs: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    memory: Size = DEFAULT_MEMORY,
) -> Stream:
    """Read a stream from a file.

    Args:
        path: a trace written by `Table.record`, whose batches are replayed unchanged, or ids in
            `.npy`, `.npz` or `.parquet`.
        batch_size: ids per batch. None means 4,096, or one row of a two-dimensional array per
            batch.
        column: the array of an .npz or the column of a parquet file; optional if only one contains
            integers.
        rows: number of rows of the table; by default that of the trace, or one more than the
            largest id.
        epochs: number of passes over the ids.
        shuffle: draw a new order for each epoch, like a loader of shuffled examples.
        seed: the seed of these orders.
        memory: limit in bytes for the ids of an .npz or .parquet file, which are decompressed as a
            whole.

    Raises FormatError, InvalidInputError, and MissingExtraError for parquet without pyarrow.
    """
    path = Path(path)
    with _io.explained("open", str(path)):
        found = path.is_file()
    if not found:
        raise FormatError(f"{path} is not a file; give a trace, or ids in .npy, .npz or .parquet")
    if epochs < 1 or (batch_size is not None and batch_size < 1):
        raise InvalidInputError("epochs and batch size must be at least 1")
    recorded = is_trace(path)
    if recorded and batch_size is None and not shuffle:
        batches = (ids for _ in range(epochs) for ids in read_trace(path))
        return stream_of(batches, trace_rows(path) if rows is None else rows, seed)
    if recorded:
        ids: npt.NDArray[Any] = np.concatenate([np.empty(0, np.int64), *read_trace(path)])
        rows = trace_rows(path) if rows is None else rows
    else:
        ids = _read_ids(path, column, memory)
    if ids.ndim == 2 and batch_size is None:
        batch_size = ids.shape[1]
    elif ids.ndim > 2:
        raise InvalidInputError(f"{path}: ids must have 1 or 2 dimensions, not {ids.ndim}")
    if rows is None and ids.size and ids.dtype.kind in "iu":
        rows = max(int(ids.max()) + 1, 1)
    return stream_of(_cut(ids.ravel(), batch_size, epochs, shuffle, seed), rows, seed)


def _cut(
    ids: npt.NDArray[Any], size: int | None, epochs: int, shuffle: bool, seed: int
) -> Iterator[npt.NDArray[Any]]:
    """Yield full batches of the concatenated epochs; a partial one only if it is the only one."""
    rng, size = np.random.default_rng(seed), size or DEFAULT_BATCH
    rest = ids[:0]
    for _ in range(epochs):
        rest = np.concatenate([rest, rng.permutation(ids) if shuffle else ids])
        whole = rest.size // size * size
        yield from np.split(rest[:whole], whole // size) if whole else ()
        rest = rest[whole:]
    if rest.size and ids.size * epochs < size:
        yield rest


def _read_ids(path: Path, column: str | None, memory: Size) -> npt.NDArray[Any]:
    kind = path.suffix.lower()
    if kind == ".npy":
        try:
            array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise FormatError(f"cannot read ids from {path}: {error}") from error
        return array
    if kind == ".npz":
        with open_input(path, memory) as file:
            return _read_npz(Arrays(file), column, file.allowance)
    if kind == ".parquet":
        with contextlib.closing(Parquet().reader(path, memory)) as columns:
            able = [name for name, each in columns.columns.items() if each.kind == "integer"]
            return np.asarray(columns.keys(_chosen(path, column, list(columns.columns), able)))
    raise FormatError(f"{path} is neither a recorded trace nor .npy, .npz or .parquet")


def _chosen(path: Path, name: str | None, names: list[str], able: list[str]) -> str:
    """Return the name of the array to use: the given one, or the only one with integers."""
    listed = ", ".join(names) or "nothing"
    if name is None and len(able) != 1:
        raise InvalidInputError(
            f"{path} contains {listed}: name the one with the ids (column=, --column)"
        )
    name = able[0] if name is None else name
    if name not in names:
        raise InvalidInputError(f"{path} has no {name!r}; it has {listed}")
    if name not in able:
        raise InvalidTypeError(f"row ids must be integers; {name!r} in {path} has none")
    return name


def _read_npz(arrays: Arrays, column: str | None, allowance: Allowance) -> npt.NDArray[Any]:
    """Decompress one array in blocks."""
    able = [n for n, header in arrays.headers.items() if header.dtype.kind in "iu" and header.shape]
    name = _chosen(arrays.path, column, list(arrays.columns), able)
    header = arrays.headers[name]
    allowance.take(header.data_bytes, f"the array {name!r}")
    ids = np.empty(math.prod(header.shape), header.dtype.newbyteorder("="))
    filled = 0
    for block in arrays.read(name, _BLOCK):
        ids[filled : filled + block.size] = block
        filled += block.size
    return ids.reshape(header.shape, order="F" if header.fortran_order else "C")
