"""What type checkers say of reads with ids of NumPy; `make lint` runs mypy on this file."""

import os
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import tierstore

Rows = npt.NDArray[np.floating[Any]]


def reads(store: tierstore.Store, ids: npt.NDArray[np.int64]) -> None:
    table = store["item"]
    assert_type(table, tierstore.Table)
    assert_type(table.read(ids), Rows)
    assert_type(table.read([1, 2], "weight"), Rows)
    assert_type(table.read(range(5), cache=False), Rows)
    assert_type(table.read(ids, ["weight", "sum"]), dict[str, Rows])
    assert_type(table.read(ids, ("weight",)), dict[str, Rows])
    assert_type(table.read(ids, out=np.empty((3, 4), np.float32)), Rows)
    assert_type(table[3], Rows)
    assert_type(table[[3, 5]], Rows)
    assert_type(table[3:10], Rows)
    assert_type(table.shape, tuple[int, int])
    assert_type(table.dtype, np.dtype[Any])
    for block in table.scan(3, 7, block_rows=2):
        assert_type(block, npt.NDArray[Any])
    for block in table.scan("weight", start=3):
        assert_type(block, npt.NDArray[Any])


def first_values() -> None:
    field = tierstore.Field(3, init=0.5)
    spec = tierstore.TableSpec(4, 4, init=1)
    assert_type(field.init, tierstore.initializers.Initializer | None)
    assert_type(spec.init, tierstore.initializers.Initializer | None)
    tierstore.TableSpec(4, 4, init="zeros")  # type: ignore[arg-type]


def refused(store: tierstore.Store, ids: npt.NDArray[np.int64]) -> None:
    table = store["item"]
    table.read(ids, 5)  # type: ignore[call-overload]
    table.read(ids, {"weight": 1})  # type: ignore[call-overload]
    table.prefetch(ids, 16)  # type: ignore[call-arg]
    table.scan("weight", 3, 7, 2)  # type: ignore[call-overload]
    tierstore.open("emb.tier", "w")  # type: ignore[arg-type]
    tierstore.open("emb.tier", check_ids="maybe")  # type: ignore[arg-type]
    tierstore.open("emb.tier", policy=5)  # type: ignore[arg-type]
    tierstore.TableSpec(4, 4, backend=None)  # type: ignore[arg-type]
    store.save("copy.tier", damaged="drop")  # type: ignore[arg-type]
    tierstore.export_table(table, "out.npy", damaged="drop")  # type: ignore[arg-type]


def public(store: tierstore.Store) -> None:
    assert_type(tierstore.import_table(store, "rows.npy"), tierstore.ImportResult)
    assert_type(tierstore.export_table(store["item"], "rows.npy"), tierstore.ExportResult)
    assert_type(tierstore.policy.choose("lfu"), tierstore.policy.PolicySpec)
    assert_type(tierstore.initializers.normal(std=0.01), tierstore.initializers.Normal)


def named(store: tierstore.Store, dtype: str, policy: str) -> None:
    """Names that the library knows, and those of a registry that was extended."""
    backend: tierstore.spec.BackendName = "zarr"
    tierstore.TableSpec(4, 4, dtype="bfloat16", backend=backend, compression="zstd")
    tierstore.TableSpec(4, 4, dtype="int8", backend="hdf5")
    tierstore.TableSpec(4, fields={"weight": tierstore.Field(4, dtype)})
    tierstore.open("emb.tier", policy="fifo", device="cuda:1")
    tierstore.open("emb.tier", policy={"item": policy, "user": tierstore.policy.lru()})
    store.alter_table("item", dtype=dtype, backend="memmap", compression="keep")
    assert_type(tierstore.errors.StoreFullError("full"), tierstore.errors.StoreFullError)


def paths(path: os.PathLike[str], history: tierstore.stats.History) -> None:
    """Every path is a str or an os.PathLike."""
    assert_type(tierstore.initializers.from_file(path), tierstore.initializers.Initializer)
    assert_type(tierstore.machine.leftovers(path), list[tierstore.machine.Leftover])
    tierstore.create(path, {}).close()
    tierstore.plot.hit_rates(history, path)
    tierstore.repair(path, path)
