"""A small store with a file of every kind, and what it holds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tierstore
from tests.durability.crash import scratch, seeded, small_deltas
from tests.durability.twin import State, observe
from tierstore.budget import Budget

__all__ = ["Sample", "make_sample", "sample"]

_NONE = Budget(host=0)


@dataclass(frozen=True)
class Sample:
    """A store at `path` and its kept versions."""

    path: Path
    versions: dict[int, State]

    @property
    def newest(self) -> int:
        """The newest version."""
        return max(self.versions)

    def files(self) -> list[Path]:
        """All files but the one that only a lock lives in."""
        found = (path for path in sorted(self.path.rglob("*")) if path.is_file())
        return [path for path in found if path.name != "LOCK"]


def make_sample(path: Path, seed: int) -> None:
    """Write a store that has a file of every kind and three versions."""

    def values(rows: int, dim: int, number: int) -> np.ndarray:
        rng = np.random.default_rng([seed, number])
        return rng.standard_normal((rows, dim)).astype(np.float32)

    specs = {
        "plain": tierstore.TableSpec(6, 3, init=tierstore.from_array(values(6, 3, 1))),
        "pair": tierstore.TableSpec(
            5,
            fields={
                "weight": tierstore.Field(4, "bfloat16", tierstore.from_array(values(5, 4, 2))),
                "moment": tierstore.Field(2, "float64", tierstore.from_array(values(5, 2, 3))),
            },
            backend="zarr",
        ),
        "packed": tierstore.TableSpec(
            7,
            4,
            init=tierstore.from_array(values(7, 4, 4)),
            backend="zarr",
            compression="zstd",
            chunk_rows=3,
        ),
        "holes": tierstore.TableSpec(9, 4, sparse=True),
    }
    store = tierstore.create(path, specs, budget=_NONE, keep=3)
    store.set_keys("plain", [f"word {row}" for row in range(6)])
    store.set_keys("pair", list(range(100, 105)))
    for step in range(2):
        for name in ("plain", "pair", "holes"):
            table = store[name]
            table.write([step, 4], values(2, table.dim, 10 + step))
        store["packed"].write([2 + step], values(1, 4, 20 + step))
        store["plain"].scalars["step"] = step
        store.commit(step=step, payload={"model": {"w": values(2, 3, 30)}, "note": b"n" * step})
    store.close()


@contextmanager
def sample(seed: int = 5) -> Iterator[Sample]:
    """Make the store, and read each of its versions."""
    with scratch() as root, seeded(seed), small_deltas(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_sample(root / "s", seed)
        versions = {}
        with tierstore.open(root / "s", budget=_NONE) as reader:
            numbers = [version.version for version in reader.versions()]
        for number in numbers:
            with tierstore.open(root / "s", version=number, budget=_NONE) as reader:
                versions[number] = observe(reader)
        yield Sample(root / "s", versions)
