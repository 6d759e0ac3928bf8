"""Random programs over a table, through its public interface, beside plain arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.tiers.stack import check
from tierstore import Budget, Field, TableSpec
from tierstore.errors import ClosedError

FIELDS = {"weight": Field(5), "sum": Field(2)}
ROWS = 60

Arrays = dict[str, np.ndarray]


class Program:
    """A store on a device, what its table must show, and the leases that are open."""

    def __init__(self, path: Path, device: Any, seed: int, *, host: int, gpu: int) -> None:
        self.rng = np.random.default_rng([seed, host, gpu])
        spec = TableSpec(ROWS, fields=FIELDS)
        budget = Budget(host_rows=host, gpu_rows=gpu)
        self.store = tierstore.create(path, {"t": spec}, budget=budget, device=device)
        self.table = self.store["t"]
        self.now: Arrays = {name: self.values(ROWS, name) for name in FIELDS}
        self.table.write(np.arange(ROWS), self.now)
        self.leases: list[tuple[Any, np.ndarray]] = []
        self.dead: list[Any] = []
        self.recent = np.arange(4)
        self.commit()

    def values(self, n: int, name: str) -> np.ndarray:
        return self.rng.standard_normal((n, FIELDS[name].dim)).astype(np.float32)

    def ids(self, most: int = 20) -> np.ndarray:
        """A few ids, anywhere, side by side, or of a batch before."""
        n, rows = int(self.rng.integers(0, most)), len(self.now["weight"])
        match int(self.rng.integers(0, 4)):
            case 0:
                return self.rng.integers(0, rows, n)
            case 1:
                return self.recent[: max(1, n // 3)].copy()
        self.recent = self.rng.integers(0, rows - n) + np.arange(n)
        return self.recent.copy()

    def field(self) -> str:
        return str(self.rng.choice(list(FIELDS)))

    def work(self, steps: int) -> None:
        """Make a number of random calls, and check everything at the end."""
        calls = [
            *[self.read, self.write, self.prefetch] * 4,
            *[self.lease, self.use_lease] * 3,
            *[self.release, self.transient, self.warm, self.rollback] * 2,
            *[self.scan, self.commit, self.stats, self.grow],
        ]
        for number in self.rng.integers(0, len(calls), steps):
            calls[number]()
            check(inside.space(self.table).host)
        self.check()

    def check(self) -> None:
        self.use_dead()
        for lease, ids in self.leases:
            self.look(lease, ids)
        self.scan()
        self.commit()
        assert self.store.verify().ok
        self.store.close()
        with tierstore.open(self.store.path) as store:
            for name, rows in self.now.items():
                np.testing.assert_array_equal(store["t"].read(np.arange(len(rows)), name), rows)

    # -- the calls

    def read(self, ids: np.ndarray | None = None) -> None:
        ids, name = self.ids() if ids is None else ids, self.field()
        np.testing.assert_array_equal(self.table.read(ids, name), self.now[name][ids])

    def transient(self) -> None:
        ids = self.ids(50)
        found = self.table.read(ids, list(FIELDS), cache=False)
        for name, rows in found.items():
            np.testing.assert_array_equal(rows, self.now[name][ids])

    def write(self) -> None:
        ids = self.ids()
        names = list(FIELDS) if self.rng.random() < 0.5 else [self.field()]
        given = {name: self.values(ids.size, name) for name in names}
        self.table.write(ids, given)
        for name, rows in given.items():
            self.now[name][ids] = rows

    def lease(self) -> None:
        if len(self.leases) < 4:
            ids = self.ids(30)
            self.leases.append((self.table.lease(ids), ids.copy()))
            self.look(*self.leases[-1])

    def look(self, lease: Any, ids: np.ndarray) -> None:
        name = self.field()
        np.testing.assert_array_equal(lease.expand(name), self.now[name][ids])
        lease.trim(wait=True)
        np.testing.assert_array_equal(lease.rows[lease.positions], ids)
        np.testing.assert_array_equal(lease.read(name), self.now[name][lease.rows])

    def use_lease(self) -> None:
        if not self.leases:
            return
        lease, ids = self.leases[int(self.rng.integers(len(self.leases)))]
        self.look(lease, ids)
        name = self.field()
        rows = self.values(lease.bound, name)
        lease.write(name, rows)
        self.now[name][lease.rows] = rows

    def release(self) -> None:
        if self.leases:
            self.leases.pop(int(self.rng.integers(len(self.leases))))[0].release()

    def use_dead(self) -> None:
        """Use leases that have ended: nothing may be read or written."""
        for lease in self.dead:
            for use in (
                lambda lease=lease: lease.read("weight"),
                lambda lease=lease: lease.expand("sum"),
                lambda lease=lease: lease.write("weight", self.values(lease.bound, "weight")),
                lambda lease=lease: lease.trim(wait=True),
            ):
                with pytest.raises(ClosedError):
                    use()
            lease.release()

    def end_leases(self) -> None:
        self.dead += [lease for lease, _ in self.leases]
        self.leases.clear()
        self.use_dead()

    def scan(self) -> None:
        name = self.field()
        np.testing.assert_array_equal(np.concatenate(list(self.table.scan(name))), self.now[name])

    def prefetch(self) -> None:
        before = self.recent
        self.table.prefetch(self.ids(), window=int(self.rng.integers(1, 6)))
        inside.state(self.store).prefetcher.wait()  # so that a program is the same each time
        if self.rng.random() < 0.5:
            self.read(before[-2:])  # which waits for nothing if they are there
        if self.rng.random() < 0.3:
            self.warm()

    def warm(self) -> None:
        self.table.warm(self.ids(50))

    def commit(self) -> None:
        self.store.commit()
        self.committed = {name: rows.copy() for name, rows in self.now.items()}

    def rollback(self) -> None:
        self.store.rollback()
        self.now = {name: rows.copy() for name, rows in self.committed.items()}
        self.end_leases()

    def stats(self) -> None:
        assert self.table.stats()["gpu"].requested >= 0
        assert self.table.occupancy()["host"].used <= len(self.table)

    def grow(self) -> None:
        self.commit()
        self.table.store.grow(self.table.name, len(self.table) + 3)
        for name, item in FIELDS.items():
            self.now[name] = np.concatenate([self.now[name], np.zeros((3, item.dim), np.float32)])
        self.committed = {name: rows.copy() for name, rows in self.now.items()}
        self.end_leases()
