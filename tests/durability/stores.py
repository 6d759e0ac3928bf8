"""Stores of the present format to keep: python -m tests.durability.stores writes those of today.

A version of the library that changes the format adds a directory with its number beside those that
are there, and opens all of them.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import tierstore
from tests.durability.crash import small_deltas
from tests.durability.sample import make_sample
from tests.durability.twin import State, observe
from tierstore._disk.manifest import FORMAT
from tierstore.budget import Budget

__all__ = ["STORES", "described"]

STORES = Path(__file__).with_name("stores")
_NONE = Budget(host=0)


def described(store: tierstore.Store) -> Any:
    """Return all of an open store as JSON would give it back."""

    def plain(value: Any) -> Any:
        return value.hex() if isinstance(value, bytes) else int(value)

    return json.loads(json.dumps(observe(store), default=plain))


def _folding(path: Path) -> None:
    """A store whose fold was cut short: it is begun, and half of the base written."""
    initializer = tierstore.uniform(-1, 1, seed=3)
    spec = tierstore.TableSpec(
        9, 4, init=initializer, backend="zarr", compression="lz4", chunk_rows=4
    )
    with tierstore.create(path, {"t": spec}, budget=_NONE) as store:
        rng = np.random.default_rng(8)
        for step in range(3):
            store["t"].write([step, 5], rng.standard_normal((2, 4)).astype(np.float32))
            store.commit(step=step)
        with (
            mock.patch("tierstore._disk.base.Base.sync", side_effect=KeyboardInterrupt),
            mock.patch("tierstore._store.compaction.Folder.fold_if_quick"),
        ):
            try:
                store.fold()
            except KeyboardInterrupt:
                store.close()


def _write(name: str, make: Any) -> None:
    path = STORES / str(FORMAT) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    contents: dict[str, State] = {}
    with small_deltas(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(path)
        with tierstore.open(path, budget=_NONE) as reader:
            versions = [each.version for each in reader.versions()]
        for version in versions:
            with tierstore.open(path, version=version, budget=_NONE) as reader:
                contents[str(version)] = described(reader)
    (path / "LOCK").write_bytes(b"")  # it names a machine
    path.with_suffix(".json").write_text(json.dumps(contents, indent=1) + "\n")


if __name__ == "__main__":
    _write("whole", lambda path: make_sample(path, 5))
    _write("folding", _folding)
    _write("counted", lambda path: make_sample(path, 6))
