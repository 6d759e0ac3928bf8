"""Stores of kinds that meet by chance: a random program on each, against a dict.

Names, partitions, element type, files, budget, policy, device, layer, optimizer and lookahead are
drawn for every store, so that kinds meet of which no other test knows. `make test-all` draws twenty
stores, the same each time; `make nightly` four hundred others each night. Values are whole numbers
and sums of gradients small ones, so that every type holds them and rows are equal to the bit.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tierstore
from tests.gpu.emulator import EmulatedDevice
from tests.reference.elements import element
from tierstore.errors import ClosedError, InvalidInputError

torch = pytest.importorskip("torch")

ROWS, DIM, STEPS = 24, 3, 20
FIRST = (2.0,) * DIM
Row = tuple[float, ...]


class Kinds(NamedTuple):
    """What is drawn for a store."""

    names: str = "ids"
    parts: int = 0
    dtype: str = "float32"
    files: str = "memmap"
    slots: int | None = None
    policy: str = "lru"
    device: str = "cpu"
    layer: str = "embedding"
    beside: str = "nothing"
    ahead: int = 0
    behind: bool = False
    grows: bool = False


OPTIONS: dict[str, tuple[Any, ...]] = {
    "names": ("ids", "named", "int64", "text"),
    "parts": (0, 0, 1, 3),
    "dtype": ("float32", "float64", "float16", "bfloat16"),
    "files": ("memmap", "zarr", "zstd", "lz4"),
    "slots": (0, 1, 2, 7, None),
    "policy": ("lru", "lfu", "lookahead"),
    "device": ("cpu", "cpu", "emulated"),
    "layer": ("embedding", "bag", "collection", "bags"),
    "beside": ("nothing", "a like table", "another field", "narrow"),
    "ahead": (0, 0, 2),
    "behind": (False, True),
    "grows": (False, True),
}


def drawn(rng: random.Random) -> Kinds:
    """Draw kinds that may meet: docs/python.md says which do not."""
    while True:
        kinds = Kinds(**{name: rng.choice(values) for name, values in OPTIONS.items()})
        by_key = kinds.names in ("int64", "text")
        if kinds.grows and (kinds.files != "memmap" or not by_key):
            continue
        if by_key and kinds.parts and not kinds.grows:
            continue
        if kinds.dtype == "float64" and kinds.device != "cpu":
            continue
        return kinds


class Program:
    """A store, and the dicts that it must equal: of what is written, and of each commit."""

    def __init__(self, path: Path, kinds: Kinds, rng: random.Random) -> None:
        self.path, self.kinds, self.rng = path, kinds, rng
        self.numbers = np.random.default_rng(rng.getrandbits(32))
        self.is_by_key = kinds.names in ("int64", "text")
        spec = self._spec()
        tables = {"t": spec} | ({"u": spec} if kinds.beside == "a like table" else {})
        create: Callable[..., Any] = tierstore.create
        if kinds.parts:
            create = tierstore.distributed.create
            create(path, tables, partitions=kinds.parts).close()
        else:
            create(path, tables).close()
        self.rows: dict[Any, Row] = {}
        self.committed: dict[Any, Row] = {}
        self.open()
        if kinds.names == "named":
            self.store.set_keys("t", [self.name(row) for row in range(ROWS)])
        if not self.is_by_key:
            given = np.asarray(self.table.read(np.arange(ROWS)), np.float64)
            self.rows = {row: tuple(values) for row, values in enumerate(given)}
        self.committed = dict(self.rows)

    def _spec(self) -> tierstore.TableSpec:
        kinds = self.kinds
        fields = {"weight": tierstore.Field(DIM, kinds.dtype, tierstore.constant(2))}
        if kinds.beside == "another field":
            fields["more"] = tierstore.Field(2, "float16", init=tierstore.constant(2.5))
        if kinds.beside == "narrow":
            fields["more"] = tierstore.Field(4, "int8", scale=tierstore.Scale("float32", block=2))
        files: dict[str, Any] = {"backend": "memmap"}
        if kinds.files != "memmap":
            files = {"backend": "zarr"}
            if kinds.files != "zarr":
                files |= {"compression": kinds.files, "chunk_rows": 8}
        keys = kinds.names if self.is_by_key else None
        rows = None if kinds.grows else ROWS
        return tierstore.TableSpec(rows, fields=fields, keys=keys, **files)

    def open(self) -> None:
        """Open the store for writing, and make its layer and optimizer."""
        kinds = self.kinds
        budget: dict[str, Any] = {} if kinds.slots is None else {"host_rows": kinds.slots}
        options: dict[str, Any] = {"policy": kinds.policy, "keep": 3}
        if kinds.device == "emulated":
            options["device"] = EmulatedDevice(seed=self.rng.getrandbits(16))
            budget["gpu_rows"] = 2 if kinds.slots is None else kinds.slots + 1
        opened = tierstore.distributed.open if kinds.parts else tierstore.open
        self.store: Any = opened(self.path, "r+", budget=tierstore.Budget(**budget), **options)
        self.table = self.store["t"]
        self.layer = self._layer()
        self.optimizer = tierstore.optim.TieredOptimizer(torch.optim.SGD, self.layer, lr=1.0)

    def _layer(self) -> Any:
        nn = tierstore.nn
        if self.kinds.layer == "embedding":
            return nn.TieredEmbedding(self.table)
        if self.kinds.layer == "bag":
            return nn.TieredEmbeddingBag(self.table, mode="sum")
        features = {"a": "t"} | ({"b": "u"} if "u" in self.store else {})
        if self.kinds.layer == "collection":
            return nn.TieredEmbeddingCollection(self.store, features)
        return nn.TieredEmbeddingBagCollection(self.store, features)

    # -- names

    def name(self, row: int) -> Any:
        """Return the name of a number: an id or a key."""
        if self.kinds.names in ("named", "text"):
            return f"k{row}é"
        return (row - 5) * 10**15 if self.kinds.names == "int64" else row

    def given(self, rows: list[int]) -> Any:
        """Return names as calls of the table take them."""
        if self.kinds.names == "text":
            return [self.name(row) for row in rows]
        if self.kinds.names == "named":
            return self.table.lookup([self.name(row) for row in rows])
        return np.array([self.name(row) for row in rows], np.int64)

    def some(self, most: int) -> list[int]:
        return [self.rng.randrange(ROWS) for _ in range(self.rng.randrange(1, most))]

    def values(self, rows: int) -> Any:
        """Return whole numbers, some of them negative, none so large that a type rounds it."""
        return self.numbers.integers(-4, 5, (rows, DIM)).astype(np.float64)

    # -- steps of a program

    def write(self) -> None:
        """Write rows, in which one may repeat: its last values stay."""
        rows = self.some(8)
        values = self.values(len(rows))
        self.table.write(self.given(rows), {"weight": self._typed(values)})
        self.rows.update(zip(rows, map(tuple, values), strict=True))

    def _typed(self, values: Any) -> Any:
        return values.astype(element(self.kinds.dtype).reads_as)

    def train(self) -> None:
        """Take a step of SGD whose gradients are whole numbers, over batches that repeat rows."""
        batches = [self.some(7) for _ in range(1 + self.kinds.ahead)]
        for rows in self._ahead(batches):
            gradients = self.numbers.integers(-1, 2, (len(rows), DIM)).astype(np.float32)
            self.optimizer.zero_grad()
            out = self._forward(rows)
            ((out.float() * torch.from_numpy(gradients)).sum()).backward()
            self.optimizer.step()
            for row, gradient in zip(rows, gradients, strict=True):
                before = self.rows.get(row, FIRST)
                self.rows[row] = tuple(np.subtract(before, gradient))
        if max((abs(value) for row in self.rows.values() for value in row), default=0) > 100:
            self.store.rollback()
            self.rows = dict(self.committed)

    def _ahead(self, batches: list[list[int]]) -> Iterator[list[int]]:
        if not self.kinds.ahead:
            yield from batches
            return
        tables = {self.table: self.given}
        yield from tierstore.lookahead(batches, tables, depth=self.kinds.ahead)

    def _forward(self, rows: list[int]) -> Any:
        ids = self.given(rows)
        if self.kinds.names != "text":
            ids = torch.as_tensor(np.asarray(ids))
        offsets = torch.arange(len(rows))
        if self.kinds.layer == "embedding":
            return self.layer(ids)
        if self.kinds.layer == "bag":
            return self.layer(ids, offsets)
        bags = (ids, offsets) if self.kinds.layer == "bags" else ids
        features = {"a": bags} | ({"b": bags} if "u" in self.store else {})
        return self.layer(features)["a"]

    def remove(self) -> None:
        """Remove keys, or refuse to where rows are numbered."""
        rows = sorted(set(self.some(4)))
        if not self.is_by_key:
            with pytest.raises((InvalidInputError, AttributeError, TypeError)):
                self.table.remove(self.given(rows))
            return
        gone = [row for row in rows if row in self.rows]
        assert self.table.remove(self.given(rows)) == len(gone)
        for row in gone:
            del self.rows[row]

    def commit(self) -> None:
        """Commit, at once or behind."""
        if self.kinds.behind and not self.kinds.parts:
            self.store.commit_async().result()
        else:
            self.store.commit()
        self.committed = dict(self.rows)

    def rollback(self) -> None:
        """Drop what was not committed."""
        self.store.rollback()
        self.rows = dict(self.committed)

    def fold(self) -> None:
        """Commit and merge the deltas into the base."""
        self.commit()
        self.store.fold()

    def reopen(self) -> None:
        """Commit, and go on in a store that is opened again."""
        self.commit()
        self.store.close()
        self.open()

    def copy(self) -> None:
        """Read a copy that was saved, with what the last commit had."""
        self.commit()
        target = self.path.with_name(f"copy{self.rng.getrandbits(40)}")
        self.store.save(target)
        with tierstore.open(target, budget=tierstore.Budget(host_rows=2)) as copy:
            self.check(copy["t"], self.committed)

    def check(self, table: Any, expected: dict[Any, Row]) -> None:
        """Compare the rows of all names with a dict; a key without a row reads as its first."""
        known = [row for row in range(ROWS) if row in expected]
        if self.is_by_key:
            contained = np.asarray(table.contains(self.given(list(range(ROWS)))))
            assert np.flatnonzero(contained).tolist() == known
        order = self.rng.sample(range(ROWS), ROWS)
        first = {"missing": "init"} if self.is_by_key else {}
        read = np.asarray(table.read(self.given(order), ["weight"], **first)["weight"], np.float64)
        wanted = [expected.get(row, FIRST) for row in order]
        assert np.array_equal(read, np.array(wanted))

    def run(self) -> None:
        """Take random steps, and look at all rows after each."""
        steps = {
            self.write: 6, self.train: 8, self.remove: 2, self.commit: 3, self.rollback: 1,
            self.fold: 1, self.reopen: 1, self.copy: 1,
        }  # fmt: skip
        try:
            for step in self.rng.choices([*steps], [*steps.values()], k=STEPS):
                step()
                self.check(self.table, self.rows)
            with tierstore.open(self.path) as reader:
                self.check(reader["t"], self.committed)
                assert reader.verify().ok
        finally:
            with suppress(ClosedError):
                self.store.rollback()
            self.store.close()


def try_kinds(path: Path, seed: int) -> None:
    """Draw kinds and run a program on a store of them; say both if it fails."""
    rng = random.Random(seed)
    kinds = drawn(rng)
    try:
        Program(path, kinds, rng).run()
    except BaseException as error:
        error.add_note(f"seed {seed}: {kinds}")
        raise


@pytest.mark.variants(6)
@pytest.mark.parametrize("seed", range(20))
def test_kinds_that_meet_by_chance_agree_with_a_dict(tmp_path: Path, seed: int) -> None:
    try_kinds(tmp_path / "s", seed)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(400))
def test_other_kinds_each_night(tmp_path: Path, number: int) -> None:
    try_kinds(tmp_path / "s", secrets.randbits(40))
