"""Other ways to keep a table of rows on disk and gather some of them, where installed.

Each is built once from the rows and opened again for every measurement, as its manual advises.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tierstore.exporting import export_table

Rows = np.ndarray
THREADS = 32
_BLOCK = 1 << 16


class Contestant:
    """A way to keep rows: `path` is what it reads, `close` leaves nothing mapped."""

    needs = "numpy"

    def __init__(self, directory: Path, rows: Rows, shared: Path) -> None:
        """Write `rows` below `directory`, or refer to a store that is `shared`."""
        self.path = directory

    def open(self) -> None:
        pass

    def read(self, ids: Rows) -> Rows:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Tierstore(Contestant):
    """tierstore without a host tier: every row comes from the disk tier."""

    backend = "memmap"

    def __init__(self, directory: Path, rows: Rows, shared: Path) -> None:
        self.path = shared / f"{self.backend}.tier"

    def open(self) -> None:
        self._store = tierstore.open(self.path, budget=tierstore.Budget(host=0))

    def read(self, ids: Rows) -> Rows:
        found: Rows = self._store["item"].read(ids)
        return found

    def close(self) -> None:
        self._store.close()


class TierstoreZarr(Tierstore):
    """The same over raw zarr chunks."""

    backend = "zarr"


class Memmap(Contestant):
    """np.load(mmap_mode="r") and an index."""

    def __init__(self, directory: Path, rows: Rows, shared: Path) -> None:
        (self.path,) = (shared / "memmap.tier").rglob("rows.npy")

    def open(self) -> None:
        self._rows: Any = np.load(self.path, mmap_mode="r")

    def read(self, ids: Rows) -> Rows:
        return np.asarray(self._rows[ids])

    def close(self) -> None:
        del self._rows


class TorchMapping(Memmap):
    """torch.index_select on a tensor over the mapping."""

    needs = "torch"

    def read(self, ids: Rows) -> Rows:
        import warnings

        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mapping is read-only
            tensor = torch.from_numpy(self._rows)
        found: Rows = tensor.index_select(0, torch.from_numpy(ids)).numpy()
        return found


class Safetensors(Contestant):
    """safe_open, whose torch tensors use a mapping, and index_select."""

    needs = "safetensors"

    def __init__(self, directory: Path, rows: Rows, shared: Path) -> None:
        self.path = directory / "rows.safetensors"
        with tierstore.open(shared / "memmap.tier", budget=tierstore.Budget(host=0)) as store:
            export_table(store["item"], self.path)

    def open(self) -> None:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            (name,) = file.keys()
            self._rows = file.get_tensor(name)

    def read(self, ids: Rows) -> Rows:
        import torch

        found: Rows = self._rows.index_select(0, torch.from_numpy(ids)).numpy()
        return found

    def close(self) -> None:
        del self._rows


class ZarrPython(TierstoreZarr):
    """zarr-python's own reader, over the raw chunks that tierstore wrote."""

    needs = "zarr"

    def __init__(self, directory: Path, rows: Rows, shared: Path) -> None:
        (self.path,) = (shared / "zarr.tier").rglob("rows.zarr")

    def open(self) -> None:
        import zarr

        self._array: Any = zarr.open_array(self.path, mode="r")

    def read(self, ids: Rows) -> Rows:
        return np.asarray(self._array.oindex[ids])

    def close(self) -> None:
        del self._array


class TensorStore(Contestant):
    """TensorStore over zarr v3 shards whose inner chunks are one block of the disk."""

    needs = "tensorstore"

    def __init__(self, directory: Path, rows: Rows, shared: Path) -> None:
        self.path = directory / "rows.zarr"
        inner = max(1, 4096 // (rows.shape[1] * 4))
        shard = min(-(-len(rows) // inner) * inner, 8192 * inner)
        codec = {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [inner, rows.shape[1]],
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
                "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            },
        }
        array = self._open(
            create=True,
            metadata={
                "shape": list(rows.shape),
                "data_type": "float32",
                "codecs": [codec],
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": [shard, rows.shape[1]]},
                },
            },
        )
        for start in range(0, len(rows), shard):
            stop = min(start + shard, len(rows))
            array[start:stop].write(rows[start:stop]).result()

    def _open(self, **more: Any) -> Any:
        import tensorstore

        kvstore = {"driver": "file", "path": str(self.path)}
        return tensorstore.open({"driver": "zarr3", "kvstore": kvstore, **more}).result()

    def open(self) -> None:
        self._array = self._open()

    def read(self, ids: Rows) -> Rows:
        return np.asarray(self._array[ids].read().result())

    def close(self) -> None:
        del self._array


class Lance(Contestant):
    """Lance: take() of a column of fixed-size lists."""

    needs = "lance"

    def __init__(self, directory: Path, rows: Rows, shared: Path) -> None:
        import lance
        import pyarrow as pa

        self.path = directory / "rows.lance"
        self._dim = rows.shape[1]
        schema = pa.schema([("row", pa.list_(pa.float32(), self._dim))])

        def batches() -> Iterator[Any]:
            for block in _blocks(rows):
                values = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), self._dim)
                yield pa.record_batch([values], schema=schema)

        lance.write_dataset(
            pa.RecordBatchReader.from_batches(schema, batches()), str(self.path), schema=schema
        )

    def open(self) -> None:
        import lance

        self._dataset = lance.dataset(str(self.path))

    def read(self, ids: Rows) -> Rows:
        column = self._dataset.take(ids)["row"].combine_chunks()
        found: Rows = column.flatten().to_numpy().reshape(-1, self._dim)
        return found

    def close(self) -> None:
        del self._dataset


class Lmdb(Contestant):
    """LMDB with read-ahead off, read by many threads."""

    needs = "lmdb"

    def __init__(self, directory: Path, rows: Rows, shared: Path) -> None:
        import lmdb

        self.path = directory
        self._width = rows.shape[1]
        size = 3 * rows.nbytes + (64 << 20)
        with lmdb.open(str(directory), map_size=size, sync=False) as environment:
            for start, block in _numbered(rows):
                keys = _keys(np.arange(start, start + len(block)))
                with environment.begin(write=True) as transaction:
                    for key, row in zip(keys, block, strict=True):
                        transaction.put(key, row.tobytes(), append=True)
            environment.sync(True)

    def open(self) -> None:
        import lmdb

        self._environment = lmdb.open(
            str(self.path), readonly=True, readahead=False, lock=False, max_readers=2 * THREADS
        )
        self._pool = ThreadPoolExecutor(THREADS)

    def read(self, ids: Rows) -> Rows:
        out = np.empty((ids.size, self._width), np.float32)

        def part(which: Rows) -> None:
            with self._environment.begin(buffers=True) as transaction:
                for number, key in zip(which.tolist(), _keys(ids[which]), strict=True):
                    out[number] = np.frombuffer(transaction.get(key), np.float32)

        list(self._pool.map(part, np.array_split(np.arange(ids.size), 4 * THREADS)))
        return out

    def close(self) -> None:
        self._pool.shutdown()
        self._environment.close()


class RocksDb(Contestant):
    """RocksDB: one multi-get of all keys, by rocksdict."""

    needs = "rocksdict"

    def __init__(self, directory: Path, rows: Rows, shared: Path) -> None:
        import rocksdict

        self.path = directory
        self._width = rows.shape[1]
        database = rocksdict.Rdict(str(directory), rocksdict.Options(raw_mode=True))
        for start, block in _numbered(rows):
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key, row in zip(_keys(np.arange(start, start + len(block))), block, strict=True):
                batch.put(key, row.tobytes())
            database.write(batch)
        database.flush()
        database.compact_range(None, None)
        database.close()

    def open(self) -> None:
        import rocksdict

        self._database = rocksdict.Rdict(
            str(self.path),
            rocksdict.Options(raw_mode=True),
            access_type=rocksdict.AccessType.read_only(),
        )

    def read(self, ids: Rows) -> Rows:
        values = self._database[_keys(ids)]
        return np.frombuffer(b"".join(values), np.float32).reshape(ids.size, self._width)

    def close(self) -> None:
        self._database.close()


CONTESTANTS: dict[str, Callable[[Path, Rows, Path], Contestant]] = {
    "tierstore": Tierstore,
    "tierstore, zarr": TierstoreZarr,
    "Lance take": Lance,
    f"LMDB, {THREADS} threads": Lmdb,
    "RocksDB multi-get": RocksDb,
    "TensorStore, 4 KiB chunks": TensorStore,
    "memmap": Memmap,
    "torch on a mapping": TorchMapping,
    "safetensors": Safetensors,
    "zarr-python": ZarrPython,
}


def installed() -> dict[str, Callable[[Path, Rows, Path], Contestant]]:
    """Return the contestants that can be run here."""
    return {
        name: kind
        for name, kind in CONTESTANTS.items()
        if importlib.util.find_spec(kind.needs)  # type: ignore[attr-defined]
    }


def _blocks(rows: Rows) -> Iterator[Rows]:
    for start in range(0, len(rows), _BLOCK):
        yield np.ascontiguousarray(rows[start : start + _BLOCK])


def _numbered(rows: Rows) -> Iterator[tuple[int, Rows]]:
    for number, block in enumerate(_blocks(rows)):
        yield number * _BLOCK, block


def _keys(ids: Rows) -> list[bytes]:
    """Return ids as keys in their order: eight bytes, big-endian."""
    whole = ids.astype(">u8").tobytes()
    return [whole[at : at + 8] for at in range(0, len(whole), 8)]
