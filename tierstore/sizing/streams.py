"""Streams of row ids from files: what a simulation replays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import FormatError, InvalidInputError, InvalidTypeError, MissingExtraError
from tierstore.table.trace import is_trace, read_trace, trace_rows

__all__ = ["Batch", "Stream", "load_stream", "stream_of"]

Ids = npt.NDArray[np.int64]

DEFAULT_BATCH = 4096


@dataclass(frozen=True)
class Batch:
    """The distinct rows of a batch, in random order, and how many of its ids name each."""

    rows: Ids
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """Batches of row ids of a table of `rows`.

    Attributes:
        rows: rows of the table.
        batches: in the order of use.
        ids: ids in all batches, repeats included.
    """

    rows: int
    batches: Sequence[Batch]
    ids: int

    @property
    def unique(self) -> float:
        """Mean number of distinct rows in a batch."""
        return sum(batch.rows.size for batch in self.batches) / len(self.batches)


def stream_of(batches: Iterable[Any], rows: int | None = None, seed: int = 0) -> Stream:
    """Make a stream from the ids of each batch; `rows` defaults to one more than the greatest id.

    Empty batches are left out. Raises InvalidInputError if nothing is left, or an id is outside the
    table, and InvalidTypeError for ids that are not whole numbers.
    """
    rng = np.random.default_rng(seed)
    made, ids, least, greatest = [], 0, 0, -1
    for given in batches:
        array = np.asarray(given)
        if array.size == 0:
            continue
        if array.dtype.kind not in "iu":
            raise InvalidTypeError(f"row ids are whole numbers, not {array.dtype}")
        distinct, counts = np.unique(array.ravel(), return_counts=True)
        least, greatest = min(least, int(distinct[0])), max(greatest, int(distinct[-1]))
        order = rng.permutation(distinct.size)
        made.append(Batch(distinct[order].astype(np.int64), counts[order].astype(np.int64)))
        ids += array.size
    if not made:
        raise InvalidInputError("there are no ids to replay")
    rows = greatest + 1 if rows is None else rows
    if least < 0 or greatest >= rows:
        wrong = least if least < 0 else greatest
        raise InvalidInputError(f"id {wrong} is outside a table of {rows} rows")
    return Stream(rows, made, ids)


def load_stream(
    path: str | Path,
    *,
    batch_size: int | None = None,
    column: str | None = None,
    rows: int | None = None,
    epochs: int = 1,
    shuffle: bool = False,
    seed: int = 0,
) -> Stream:
    """Read a stream from a file.

    Args:
        path: a trace that `Table.record` wrote, whose batches are replayed as they were; or ids in
            `.npy`, `.npz` or `.parquet`.
        batch_size: ids a batch; 4,096 if None, or in a two-dimensional array a row a batch.
        column: the array of an .npz or the column of a parquet file; may be left out if only one
            holds whole numbers.
        rows: rows of the table; by default the trace's, or one more than the greatest id.
        epochs: how often to go through the ids.
        shuffle: draw a new order for each epoch, as a loader of shuffled examples does.
        seed: of these orders.

    Raises FormatError, InvalidInputError, and MissingExtraError for parquet without pyarrow.
    """
    path = Path(path)
    if not path.is_file():
        raise FormatError(f"{path} is not a file; give a trace, or ids in .npy, .npz or .parquet")
    if epochs < 1 or (batch_size is not None and batch_size < 1):
        raise InvalidInputError("epochs and the batch size are at least 1")
    recorded = is_trace(path)
    if recorded and batch_size is None and not shuffle:
        batches = (ids for _ in range(epochs) for ids in read_trace(path))
        return stream_of(batches, trace_rows(path) if rows is None else rows, seed)
    if recorded:
        ids: npt.NDArray[Any] = np.concatenate([np.empty(0, np.int64), *read_trace(path)])
        rows = trace_rows(path) if rows is None else rows
    else:
        ids = _read_ids(path, column)
    if ids.ndim == 2 and batch_size is None:
        batch_size = ids.shape[1]
    elif ids.ndim > 2:
        raise InvalidInputError(f"{path} holds an array of {ids.ndim} dimensions; ids have 1 or 2")
    if rows is None and ids.size and ids.dtype.kind in "iu":
        rows = max(int(ids.max()) + 1, 1)
    return stream_of(_cut(ids.ravel(), batch_size, epochs, shuffle, seed), rows, seed)


def _cut(
    ids: npt.NDArray[Any], size: int | None, epochs: int, shuffle: bool, seed: int
) -> Iterator[npt.NDArray[Any]]:
    """Yield whole batches of the epochs laid end to end, and the rest, if that is all there is."""
    rng, size = np.random.default_rng(seed), size or DEFAULT_BATCH
    rest = ids[:0]
    for _ in range(epochs):
        rest = np.concatenate([rest, rng.permutation(ids) if shuffle else ids])
        whole = rest.size // size * size
        yield from np.split(rest[:whole], whole // size) if whole else ()
        rest = rest[whole:]
    if rest.size and ids.size * epochs < size:
        yield rest


def _read_ids(path: Path, column: str | None) -> npt.NDArray[Any]:
    kind = path.suffix.lower()
    try:
        if kind == ".npy":
            array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            return array
        if kind == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return _chosen({name: arrays[name] for name in arrays.files}, column, path)
        if kind == ".parquet":
            return _read_parquet(path, column)
    except (ValueError, OSError, EOFError) as error:
        if isinstance(error, (FormatError, InvalidInputError)):
            raise
        raise FormatError(f"cannot read ids from {path}: {error}") from error
    raise FormatError(f"{path} is no recorded trace, and not .npy, .npz or .parquet")


def _chosen(arrays: dict[str, npt.NDArray[Any]], name: str | None, path: Path) -> npt.NDArray[Any]:
    """Return the array of that name, or the only one that can hold ids."""
    if name is None:
        able = [each for each, array in arrays.items() if array.dtype.kind in "iu" and array.ndim]
        if len(able) != 1:
            raise InvalidInputError(
                f"{path} holds {', '.join(arrays) or 'nothing'}: which has the ids?"
            )
        name = able[0]
    if name not in arrays:
        raise InvalidInputError(f"{path} has no {name!r}; it has {', '.join(arrays)}")
    return arrays[name]


def _read_parquet(path: Path, column: str | None) -> npt.NDArray[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtraError(
            "reading parquet needs pyarrow: pip install 'tierstore[parquet]'"
        ) from None
    import pyarrow

    try:
        file = parquet.ParquetFile(path)
        names = [field.name for field in file.schema_arrow if pyarrow.types.is_integer(field.type)]
        if column is None and len(names) == 1:
            column = names[0]
        if column is None or column not in file.schema_arrow.names:
            names = file.schema_arrow.names
            raise InvalidInputError(f"{path} holds {', '.join(names)}: which has the ids?")
        values = file.read(columns=[column]).column(0).combine_chunks()
    except pyarrow.ArrowException as error:
        raise FormatError(f"cannot read ids from {path}: {error}") from error
    if values.null_count:
        raise FormatError(f"{path}: column {column!r} has {values.null_count} ids that are null")
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array
