"""A store beside a plain NumPy account of what it must hold, driven by random steps."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tests.reference import draw
from tests.reference.elements import DTYPES, element
from tierstore.budget import Budget

__all__ = ["State", "Twin", "observe"]

State = dict[str, Any]
"""A store as users see it: version, step, payload and tables, comparable with ==."""

Marked = Callable[[str, str, int], None]


def observe(store: tierstore.Store) -> State:
    """Read all of a store through its public face."""
    return {
        "version": store.version,
        "step": store.step,
        "payload": {name: value.read() for name, value in store.payload.items()},
        "tables": {
            name: {
                "keys": None if table.keys is None else list(table.keys[:]),
                "scalars": dict(table.scalars),
                "fields": {
                    field: values.tobytes()
                    for field, values in getattr(table, "by_row", table)
                    .read(np.arange(table.rows), list(table.fields))
                    .items()
                },
            }
            for name, table in store.items()
        },
    }


class Twin:
    """Performs random steps on a store, and says before each commit what it will be."""

    def __init__(
        self,
        root: Path,
        mark: Marked,
        seed: int,
        *,
        name: str = "s",
        backend: str | None = None,
        device: Any = "cpu",
    ) -> None:
        """Work on the store `name` in `root`; `mark` is told when a state begins and is done."""
        self._device = device
        self.path = root / name
        self.states: list[State] = []
        self._name = name
        self._mark = mark
        self._random = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._backend = backend
        self._tables: dict[str, dict[str, Any]] = {}
        self._committed: list[State] = []
        self._step: int | None = None
        self._copies = 0

    # what is to be there

    def values(self, rows: int, dim: int) -> np.ndarray:
        """Random numbers that every floating type holds exactly, none of them zero."""
        return self._numbers.choice(np.r_[-100:0, 1:100], (rows, dim)).astype(np.float32) / 8

    def _expect(self, payload: dict[str, bytes], version: int) -> State:
        tables = {
            name: {
                "keys": table["keys"],
                "scalars": dict(table["scalars"]),
                "fields": {
                    field: values.astype(element(dtype).reads_as).tobytes()
                    for field, (dtype, values) in table["fields"].items()
                },
            }
            for name, table in self._tables.items()
        }
        return {"version": version, "step": self._step, "payload": payload, "tables": tables}

    def expected(self) -> State:
        """Return what users must see now, uncommitted rows included."""
        return self._expect({}, self.states[-1]["version"])

    def restart(self, root: Path, mark: Marked) -> None:
        """Open the store after a power cut that left it in `root`."""
        self.path, self._mark = root / self._name, mark
        self.open()
        self._adopt(self.states[-1])

    def _commit(self, work: Callable[[], Any], payload: dict[str, bytes] | None = None) -> None:
        """Do what makes the next version, between marks."""
        version = 1 + max((state["version"] for state in self.states), default=0)
        self.states.append(self._expect(payload or {}, version))
        self._mark("begin", self._name, len(self.states) - 1)
        work()
        self._mark("done", self._name, len(self.states) - 1)
        self._remember()

    def _remember(self) -> None:
        self._saved = {
            name: {
                "keys": table["keys"],
                "scalars": dict(table["scalars"]),
                "fields": {f: (d, v.copy()) for f, (d, v) in table["fields"].items()},
            }
            for name, table in self._tables.items()
        }

    # steps

    def create(self) -> None:
        """Make the store with one or two tables."""
        specs = {
            name: self._new_table(name) for name in ["one", "two"][: self._random.choice((1, 2))]
        }
        self._commit(lambda: tierstore.create(self.path, specs, budget=Budget(host=0)).close())
        self.open()

    def open(self, **options: Any) -> None:
        """Open the store for writing, with a random host tier, and a random GPU tier if any."""
        budget = Budget(host_rows=self._random.choice((0, 1, 5, 1000)))
        if self._device != "cpu":
            budget = dataclasses.replace(budget, gpu_rows=self._random.choice((1, 3, 20, 1000)))
            options["device"] = self._device
        self.store = tierstore.open(self.path, "r+", budget=budget, keep=2, **options)

    def _new_table(self, name: str) -> tierstore.TableSpec:
        rows = self._random.randrange(1, 40)
        fields, table = {}, {}
        for field in ["weight", "moment", "rate"][: self._random.randrange(1, 4)]:
            dim, dtype = self._random.randrange(1, 12), draw(self._random, DTYPES)
            values = element(dtype).exact(self.values(rows, dim)).astype(np.float32)
            fields[field] = tierstore.Field(dim, dtype, tierstore.from_array(values))
            table[field] = (dtype, values)
        self._tables[name] = {"keys": None, "scalars": {}, "fields": table}
        backend = self._backend or self._random.choice(("memmap", "zarr", "zstd"))
        if backend == "zstd":
            return tierstore.TableSpec(
                rows, fields=fields, backend="zarr", compression="zstd", chunk_rows=8
            )
        return tierstore.TableSpec(rows, fields=fields, backend=backend)

    def write(self) -> None:
        """Write some rows of some fields of a table, with repetitions."""
        name = self._random.choice(list(self._tables))
        table = self._tables[name]
        chosen = self._random.sample(
            list(table["fields"]), self._random.randrange(1, len(table["fields"]) + 1)
        )
        rows = len(next(iter(table["fields"].values()))[1])
        ids = self._numbers.integers(0, rows, self._random.randrange(1, 2 * rows + 1))
        given = {}
        for field in chosen:
            dtype, values = table["fields"][field]
            new = element(dtype).exact(self.values(ids.size, values.shape[1]))
            given[field] = new
            for row, value in zip(ids, new, strict=True):
                values[row] = value
        self.store[name].write(ids, given)
        if self._random.random() < 0.3:
            table["scalars"]["t"] = self.store[name].scalars["t"] = self._random.random()

    def commit(self) -> None:
        """Commit, sometimes with a payload, sometimes behind the caller."""
        payload = {
            name: self._random.randbytes(self._random.choice((0, 10, 2000)))
            for name in ["model", "reader"][: self._random.choice((0, 0, 1, 2))]
        }
        step = self._random.choice((None, self._random.randrange(1000)))
        confirm = self._random.random() < 0.7
        behind = step is not None and step % 2 == 0

        def work() -> None:
            if behind:
                self.store.commit_async(step, payload=payload or None, confirm=confirm).result()
            else:
                self.store.commit(step, payload=payload or None, confirm=confirm)

        before = self.states[-1]
        self._step = before["step"] if step is None else step
        is_kept = not payload and self._step == before["step"]
        self._commit(work, before["payload"] if is_kept else payload)

    def keep(self) -> None:
        """Give a version that is kept one of two names."""
        version = self._random.choice(self.store.versions()).version
        self.store.keep(version, self._random.choice(("best", "first")))

    def release(self) -> None:
        """Take a name from a version, if any has one."""
        names = sorted(name for each in self.store.versions() for name in each.names)
        if names:
            self.store.release(self._random.choice(names))

    def restore(self) -> None:
        """Bring the open store back to a version that is kept, as a new version."""
        version = self._random.choice(self.store.versions()).version
        state = next(each for each in reversed(self.states) if each["version"] == version)
        number = 1 + max(each["version"] for each in self.states)
        self.states.append({**state, "version": number})
        self._mark("begin", self._name, len(self.states) - 1)
        if self.store.restore(version) != number:  # it was there
            self.states[-1] = {**state, "version": self.store.version}
        self._mark("done", self._name, len(self.states) - 1)
        self._adopt(state)

    def confirm(self) -> None:
        """Confirm the newest version."""
        self.store.confirm(self.store.version)

    def rollback(self) -> None:
        """Drop what was written."""
        self.store.rollback()
        self._tables = self._saved
        self._remember()

    def fold(self) -> None:
        """Merge the deltas into the base."""
        self.rollback()
        for name in {name for each in self.store.versions()[:-1] for name in each.names}:
            self.store.release(name)
        self.store.fold()

    def create_table(self) -> None:
        """Add a table."""
        self.rollback()
        name = f"t{len(self._tables)}"
        spec = self._new_table(name)
        self._step_kept(lambda: self.store.create_table(name, spec))

    def replace_table(self) -> None:
        """Rewrite a table."""
        self.rollback()
        name = self._random.choice(list(self._tables))
        old = self._tables[name]
        spec = self._new_table(name)
        new = self._tables[name]
        new["scalars"] = old["scalars"]
        if old["keys"] is not None and len(old["keys"]) == spec.rows:
            new["keys"] = old["keys"]  # as many rows: their keys stay
        self._step_kept(lambda: self.store.replace_table(name, spec, reinitialize=True))

    def add_fields(self) -> None:
        """Add a field to a table."""
        self.rollback()
        name = self._random.choice(list(self._tables))
        fields = self._tables[name]["fields"]
        new = f"extra{len(fields)}"
        rows = len(next(iter(fields.values()))[1])
        values = self.values(rows, 3)
        fields[new] = ("float32", values)
        item = tierstore.Field(3, "float32", tierstore.from_array(values))
        self._step_kept(lambda: self.store.add_fields(name, {new: item}))

    def grow(self) -> None:
        """Append rows, which are zero, to a table without keys."""
        self.rollback()
        name = self._random.choice(list(self._tables))
        table = self._tables[name]
        if table["keys"] is not None:
            return
        more = self._random.randrange(1, 9)
        for field, (dtype, values) in table["fields"].items():
            new = np.zeros((more, values.shape[1]), np.float32)
            table["fields"][field] = (dtype, np.concatenate([values, new]))
        rows = len(values) + more
        self._step_kept(lambda: self.store.grow(name, rows))

    def set_keys(self) -> None:
        """Give a table keys, ints or texts."""
        self.rollback()
        name = self._random.choice(list(self._tables))
        rows = self.store[name].rows
        numbers = self._random.sample(range(10**6), rows)
        keys: list[Any] = numbers if self._random.random() < 0.5 else [f"k{n}é" for n in numbers]
        self._tables[name]["keys"] = keys
        self._step_kept(lambda: self.store.set_keys(name, keys))

    def _step_kept(self, work: Callable[[], Any]) -> None:
        """Commit a change of the tables' shape, which leaves step and payload as they were."""
        self._commit(work, self.states[-1]["payload"])

    def reopen(self) -> None:
        """Close the store and open it again, sometimes at an older version."""
        self.rollback()
        self.close()
        with tierstore.open(self.path, budget=Budget(host=0)) as reader:
            version = self._random.choice(reader.versions()).version
        if version == self.states[-1]["version"]:
            self.open()
            return
        state = next(each for each in reversed(self.states) if each["version"] == version)
        self.states.append(state)
        self._mark("begin", self._name, len(self.states) - 1)
        self.open(version=version, discard_newer=True)
        self._mark("done", self._name, len(self.states) - 1)
        self._adopt(state)

    def _adopt(self, state: State) -> None:
        """Go on from the content of a state."""
        self._step = state["step"]
        self._tables = {}
        for name, table in state["tables"].items():
            opened = self.store[name]
            fields = {}
            for field, data in table["fields"].items():
                item = opened.fields[field]
                values = np.frombuffer(data, element(item.dtype).reads_as).reshape(-1, item.dim)
                fields[field] = (item.dtype, values.astype(np.float32))
            self._tables[name] = {
                "keys": table["keys"], "scalars": dict(table["scalars"]), "fields": fields
            }  # fmt: skip
        self._remember()

    def save(self) -> None:
        """Copy the store to another path."""
        self._copies += 1
        name = f"copy{self._copies}"
        self._mark("begin", name, len(self.states) - 1)
        self.store.save(self.path.parent / name)
        self._mark("done", name, len(self.states) - 1)

    def close(self) -> None:
        """Close the store."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.store.close()

    def run(self, steps: Iterable[str]) -> None:
        """Perform steps by name."""
        for step in steps:
            getattr(self, step)()
