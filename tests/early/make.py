"""Stores to keep of the first version that must open: python make.py DIRECTORY writes them.

Run with that version's library on the path, commit b041a785; `test_early.py` opens each with this
one. A store lies in an archive NAME.tar.xz, and in it also `contents.json`, what each of its kept
versions holds as `contents` reads it, and whatever else points into the store. It imports nothing
of the project but the library, so that it runs beside any version of it.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tierstore

__all__ = ["MAKERS", "contents"]

NONE = tierstore.Budget(host=0)
NORMAL = tierstore.normal(std=0.5, seed=11)


def contents(store: Any) -> dict[str, Any]:
    """Return all of an open store as JSON can hold it: rows as hexadecimal bytes, by id or key."""
    return {
        "version": store.version,
        "step": store.step,
        "payload": sorted(store.payload),
        "tables": {name: _of_table(table) for name, table in store.items()},
    }


def _of_table(table: Any) -> dict[str, Any]:
    by_key = table.spec.keys is not None
    names = list(table.keys[:]) if table.keys is not None else None
    given = names if by_key else np.arange(table.rows)
    if by_key and not names:
        fields: dict[str, Any] = {}
    elif by_key and isinstance(names[0], str):
        fields = table.read(names, list(table.fields))
    else:
        fields = table.read(np.asarray(given), list(table.fields))
    return {
        "keys": None if names is None else [str(name) for name in names],
        "scalars": json.loads(json.dumps(dict(table.scalars))),
        "fields": {
            name: [np.ascontiguousarray(row).tobytes().hex() for row in values]
            for name, values in fields.items()
        },
    }


def _values(seed: int, rows: int, dim: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype(dtype)


def _plain(path: Path, beside: Path) -> None:
    """Several fields in one file, four versions with payloads, deltas over a folded base."""
    fields = {
        "weight": tierstore.Field(3, init=NORMAL),
        "half": tierstore.Field(2, "float16"),
        "wide": tierstore.Field(1, "float64", tierstore.constant(2.5)),
    }
    specs = {
        "plain": tierstore.TableSpec(40, fields=fields),
        "other": tierstore.TableSpec(7, 5, init=tierstore.uniform(-1, 1, seed=2)),
    }
    with tierstore.create(path, specs, budget=NONE, keep=3) as store:
        for step in range(4):
            if step == 2:
                store.fold()
            store["plain"].write(
                [step, 9], {"weight": _values(step, 2, 3), "half": _values(step, 2, 2, np.float16)}
            )
            store["other"].write([step], _values(20 + step, 1, 5))
            store.commit(step=step, payload={"note": {"step": step}, "raw": bytes(range(step))})


def _zarr(path: Path, beside: Path) -> None:
    """Zarr without compression."""
    spec = tierstore.TableSpec(33, 4, init=NORMAL, backend="zarr")
    with tierstore.create(path, {"t": spec}, budget=NONE, keep=2) as store:
        for step in range(3):
            store["t"].write([step, 32], _values(step, 2, 4))
            store.commit(step=step)


def _compressed(path: Path, beside: Path) -> None:
    """Zarr with both compressions, folded and with a delta."""
    specs = {
        name: tierstore.TableSpec(
            30, 4, init=NORMAL, backend="zarr", compression=name, chunk_rows=8
        )
        for name in ("zstd", "lz4")
    }
    with tierstore.create(path, specs, budget=NONE, keep=2) as store:
        for step in range(3):
            for name in specs:
                store[name].write([step, 29], _values(step, 2, 4))
            store.commit(step=step)
            if step == 1:
                store.fold()


def _by_key(path: Path, beside: Path) -> None:
    """Keys of int64, some removed and one that came again, of a table that grows."""
    spec = tierstore.TableSpec(dim=2, keys="int64", init=NORMAL)
    with tierstore.create(path, {"user": spec}, budget=NONE, keep=3) as store:
        user = store["user"]
        user.write([2**62, -5, 7, 8, 9], _values(1, 5, 2))
        store.commit(step=1)
        user.remove([7, -5])
        user.write([7, 10], _values(2, 2, 2))
        store.commit(step=2)
        user.remove([8])
        store.commit(step=3)


def _by_text(path: Path, beside: Path) -> None:
    """Keys of text with uses; a second table of so many keys at most that admits with the third."""
    specs = {
        "word": tierstore.TableSpec(20, 3, keys="text", init=NORMAL, track_uses=True),
        "late": tierstore.TableSpec(20, 2, keys="text", init=NORMAL, admit_after=3),
    }
    with tierstore.create(path, specs, budget=NONE, keep=3) as store:
        store["word"].write(["a", "ü", "", "long " * 9], _values(3, 4, 3))
        store["late"].write(["x", "y"], _values(4, 2, 2))
        store.commit(step=1)
        store["word"].write(["a"], _values(5, 1, 3))
        gone = [key for keys, _ in store["word"].expire(keep_at_most=3) for key in keys]
        assert len(gone) == 1, gone
        store.commit(step=2)


def _named_keys(path: Path, beside: Path) -> None:
    """Rows by id with external keys, and some added with keys of their own."""
    spec = tierstore.TableSpec(6, 3, init=NORMAL)
    with tierstore.create(path, {"item": spec, "code": spec}, budget=NONE, keep=3) as store:
        store.set_keys("item", [f"sku-{row}" for row in range(6)])
        store.set_keys("code", np.arange(6, dtype=np.int64) * 10**12 - 3)
        store["item"].write([1, 4], _values(6, 2, 3))
        store.commit(step=1)
        store.append("item", _values(7, 2, 3), keys=["new", "newer"])
        store.commit(step=2)


def _in_partitions(path: Path, beside: Path) -> None:
    """Rows by id in four partitions, one of them uneven, and a schema change."""
    spec = tierstore.TableSpec(30, 3, init=NORMAL)
    with tierstore.distributed.create(path, {"t": spec}, partitions=4, budget=NONE) as store:
        store["t"].write(np.arange(0, 30, 3), _values(8, 10, 3))
        store.commit(step=1)
        store.add_fields("t", {"more": tierstore.Field(2, init=tierstore.constant(1.5))})
        store["t"].write([4, 29], {"more": _values(9, 2, 2)})
        store.commit(step=2)


def _keys_in_partitions(path: Path, beside: Path) -> None:
    """Keys of both types in three partitions."""
    specs = {
        "user": tierstore.TableSpec(dim=2, keys="int64", init=NORMAL),
        "word": tierstore.TableSpec(dim=2, keys="text", init=NORMAL),
    }
    with tierstore.distributed.create(path, specs, partitions=3, budget=NONE) as store:
        store["user"].write(np.arange(9) * 10**15, _values(10, 9, 2))
        store["word"].write([f"w{row}" for row in range(9)], _values(11, 9, 2))
        store.commit(step=1)
        store["user"].remove([0, 10**15])
        store["word"].write(["w3", "w99"], _values(12, 2, 2))
        store.commit(step=2)


def _scaled(path: Path, beside: Path) -> None:
    """Narrow elements with scales, and narrow ones without."""
    scale = tierstore.Scale("float32", block=2)
    fields = {
        "eight": tierstore.Field(4, "float8_e4m3fn", scale=scale),
        "whole": tierstore.Field(4, "int8"),
    }
    specs = {
        "q": tierstore.TableSpec(12, fields=fields),
        "b": tierstore.TableSpec(9, 3, "bfloat16"),
    }
    with tierstore.create(path, specs, budget=NONE, keep=2) as store:
        store["q"].write([2, 11], {"eight": _values(13, 2, 4)})
        store["q"].write([3], {"whole": np.array([[1, -2, 3, -128]], np.int8)})
        store["b"].write([1, 8], _values(14, 2, 3))
        store.commit(step=1)


def _sparse(path: Path, beside: Path) -> None:
    """A table with holes in place of rows that were never written."""
    spec = tierstore.TableSpec(500, 3, sparse=True)
    with tierstore.create(path, {"t": spec}, budget=NONE, keep=2) as store:
        store["t"].write([0, 499, 250], _values(15, 3, 3))
        store.commit(step=1)
        store.grow("t", 600)
        store["t"].write([599], _values(16, 1, 3))
        store.commit(step=2)


def _named_versions(path: Path, beside: Path) -> None:
    """Versions with names, one gone back to, and the lineage of a copy."""
    spec = tierstore.TableSpec(10, 2, init=NORMAL)
    with tierstore.create(path, {"t": spec}, budget=NONE, keep=1) as store:
        for step, name in enumerate(["first", None, "best", None]):
            store["t"].write([step], _values(17 + step, 1, 2))
            store.commit(step=step, keep=name)
        store.restore("first")
        store["t"].write([9], _values(21, 1, 2))
        store.commit(step=9)


def _patched(path: Path, beside: Path) -> None:
    """A copy that two patches lead on: one is applied, one lies beside it."""
    spec = tierstore.TableSpec(20, 3, init=NORMAL)
    source = beside / "source"
    with tierstore.create(source, {"t": spec}, budget=NONE, keep=9) as store:
        store.commit(step=1)
        store.save(path)
        for step in (2, 3):
            before = store.version
            store["t"].write([step, 10 + step], _values(22 + step, 2, 3))
            store.commit(step=step, payload={"of": bytes([step])})
            store.write_patch(beside / f"{step}.patch", before)
        (beside / "after.json").write_text(json.dumps(contents(store)))
    with tierstore.open(path, "r+", budget=NONE) as copy:
        copy.apply_patch(beside / "2.patch")
    shutil.rmtree(source)
    (beside / "2.patch").unlink()


def _trained(path: Path, beside: Path, **options: Any) -> None:
    """A layer over rows trained by Adam, its torch states, and others that the payload holds."""
    import torch

    torch.manual_seed(4)
    specs = {
        "item": tierstore.TableSpec(25, 4, init=NORMAL),
        "user": tierstore.TableSpec(15, 4, keys="int64", init=NORMAL),
    }
    with tierstore.create(path, specs, budget=NONE, keep=1) as store:
        rows = {name: tierstore.nn.TieredEmbedding(store[name]) for name in specs}
        model = torch.nn.ModuleDict(rows)
        head = torch.nn.Linear(4, 1)
        adam = tierstore.optim.TieredOptimizer(
            torch.optim.Adam, [*model.parameters(), *head.parameters()], lr=0.05, **options
        )
        for step in range(3):
            ids = torch.randint(0, 25, (6,))
            loss = head(rows["item"](ids) * rows["user"](ids * 7)).square().mean()
            loss.backward()
            adam.step()
            adam.zero_grad()
            name = "best" if step == 1 else None
            store.commit(step=step, payload={"model": model, "head": head}, keep=name)
            if name:
                state = {"model": model.state_dict(), "adam": adam.state_dict()}
                torch.save(state | {"head": head.state_dict()}, beside / "best.pt")


def _narrow_state(path: Path, beside: Path) -> None:
    """The same with optimizer state of two bytes."""
    _trained(path, beside, state_dtype="bfloat16")


def _pickled(path: Path, beside: Path) -> None:
    """Values of this library's classes in pickles: of Python, and of torch beside tensors."""
    import torch

    spec = tierstore.TableSpec(8, 2, init=NORMAL)
    with tierstore.create(path, {"t": spec, "k": tierstore.TableSpec(dim=2, keys="text")}) as store:
        store["k"].write(["a"], _values(30, 1, 2))
        store.commit(step=1)
    with tierstore.open(path) as store:
        values = {
            "store": store,
            "table": store["t"],
            "keyed": store["k"],
            "spec": spec,
            "fields": tierstore.TableSpec(
                8, fields={"q": tierstore.Field(4, "int8", scale=tierstore.Scale("float32"))}
            ),
            "budget": tierstore.Budget(host="1MiB", gpu_rows=5),
            "initializers": [NORMAL, tierstore.zeros(), tierstore.uniform(-1, 1, seed=3)],
            "error": tierstore.errors.RowIndexError("row 9 is not in a table of 8"),
        }
        for name, value in values.items():
            (beside / f"{name}.pickle").write_bytes(pickle.dumps(value))
        torch.save({"config": values["spec"], "weight": torch.arange(3.0)}, beside / "config.pt")


MAKERS: dict[str, Callable[[Path, Path], None]] = {
    maker.__name__.lstrip("_"): maker
    for maker in (
        _plain,
        _zarr,
        _compressed,
        _by_key,
        _by_text,
        _named_keys,
        _in_partitions,
        _keys_in_partitions,
        _scaled,
        _sparse,
        _named_versions,
        _patched,
        _trained,
        _narrow_state,
        _pickled,
    )
}


def make(name: str, archive: Path) -> None:
    """Make the store of a name, read all of its versions, and put both into an archive."""
    with tempfile.TemporaryDirectory() as scratch:
        beside = Path(scratch, name)
        beside.mkdir()
        MAKERS[name](beside / "store", beside)
        read = {}
        with tierstore.open(beside / "store", budget=NONE) as store:
            kept = [each.version for each in store.versions()]
        for version in kept:
            with tierstore.open(beside / "store", version=version, budget=NONE) as store:
                read[str(version)] = contents(store)
        (beside / "contents.json").write_text(json.dumps(read))
        with tarfile.open(archive, "w:xz") as packed:
            packed.add(beside, name)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for each in MAKERS:
        make(each, Path(sys.argv[1], f"{each}.tar.xz"))
