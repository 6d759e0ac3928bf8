"""Random programs of keys beside training: every gradient reaches its key, or the call raises.

    python -m tests.training.key_programs --programs 100000 --seed 1 --jobs 8

A program writes, removes and expires keys, runs forward and backward passes, steps, accumulates,
commits, folds, rolls back and refreshes a reader, in any order, alone or beside another thread. The
oracle is a dict from key to row. Gradients are whole numbers and the learning rate is 1: rows are
equal to the bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tierstore
from tierstore import Budget, TableSpec
from tierstore.errors import ClosedError
from tierstore.nn import TieredEmbedding, TieredEmbeddingBag
from tierstore.optim import TieredOptimizer

__all__ = ["Wrong", "run"]

KEYS, DIM = 12, 2
PER_STORE = 250
"""Programs that one store runs, each beginning with what the one before left."""
_SLOTS = (1, 2, 6, 64)


class Wrong(Exception):
    """A row, a key or an error is not that of the oracle."""


class Pass:
    """A forward pass whose gradient is still to come, or is accumulated."""

    def __init__(self, loss: Tensor, sums: dict[int, int]) -> None:
        self.loss = loss
        self.sums = sums
        self.may_raise = False
        """Whether rows may have other meanings since: keys were removed, or rolled back."""
        self.lost: set[int] = set()
        """Keys that were removed since, whose gradient nothing can take."""


class Programs:
    """A store, and the dict that it must equal; a table by key, a layer and its optimizer."""

    def __init__(self, path: Path, rng: np.random.Generator) -> None:
        self.rng = rng
        self.log: list[str] = []
        self.kind = str(rng.choice(["int64", "text"]))
        self.parts = bool(rng.random() < 0.25)
        spec = {"t": TableSpec(dim=DIM, keys=self.kind, track_uses=True)}
        options: dict[str, Any] = {"budget": Budget(host_rows=int(rng.choice(_SLOTS)))}
        if self.parts:
            tierstore.distributed.create(path, spec, partitions=3).close()
            self.store: Any = tierstore.distributed.open(path, "r+", **options)
        else:
            self.store = tierstore.create(path, spec, **options)
        self.table = self.store["t"]
        self.reader = tierstore.open(path, budget=Budget(host_rows=2))
        self.is_bag = bool(rng.integers(2))
        self.layer: Any = (TieredEmbeddingBag if self.is_bag else TieredEmbedding)(
            self.table, **({"mode": "sum"} if self.is_bag else {})
        )
        self.optimizer = TieredOptimizer(torch.optim.SGD, self.layer, lr=1.0)
        self.rows: dict[int, np.ndarray] = {}
        self.committed: dict[int, np.ndarray] = {}
        self.seen: dict[int, np.ndarray] = {}
        self.pending: list[Pass] = []
        self.gathered: list[Pass] = []

    def close(self) -> None:
        self.reader.close()
        self.store.rollback()
        self.store.close()

    # -- what keys and rows are

    def named(self, keys: Any) -> Any:
        """Return keys as the table has them."""
        return [f"k{key}" for key in keys] if self.kind == "text" else [*map(int, keys)]

    def numbers(self, keys: Any) -> list[int]:
        return [int(key[1:]) if self.kind == "text" else int(key) for key in keys]

    def some(self, most: int = 5) -> list[int]:
        return [*map(int, self.rng.choice(KEYS, int(self.rng.integers(1, most)), replace=False))]

    def read(self, store: Any) -> dict[int, np.ndarray]:
        table = store["t"]
        every = np.arange(KEYS)
        known = every[np.asarray(table.contains(self.named(every)))]
        rows = np.asarray(table.read(self.named(known))) if known.size else ()
        return dict(zip(known.tolist(), rows, strict=True))

    def check(self, store: Any, expected: dict[int, np.ndarray]) -> None:
        found = self.read(store)
        if found.keys() != expected.keys():
            raise Wrong(f"keys are {sorted(found)}, not {sorted(expected)}")
        for key, row in found.items():
            if not np.array_equal(row, expected[key]):
                raise Wrong(f"the row of {key} is {row}, not {expected[key]}")

    def ended(self, keys: Any = ()) -> None:
        """Note that rows of before may mean something else, and those of `keys` nothing."""
        for each in (*self.pending, *self.gathered):
            each.may_raise = True
            each.lost.update(keys)

    # -- what programs do

    def write(self) -> None:
        keys = self.some()
        values = self.rng.integers(-9, 9, (len(keys), DIM)).astype(np.float32)
        self.table.write(self.named(keys), values)
        self.rows.update(zip(keys, values, strict=True))

    def remove(self) -> None:
        keys = self.some(4)
        gone = [key for key in keys if key in self.rows]
        if self.table.remove(self.named(keys)) != len(gone):
            raise Wrong(f"{len(gone)} of {keys} were to be removed")
        self.forget(gone)

    def forget(self, gone: list[int]) -> None:
        for key in gone:
            del self.rows[key]
        if gone:
            self.ended(gone)

    def expire(self) -> None:
        most = int(self.rng.integers(KEYS // 2, KEYS))
        gone = [key for keys, _ in self.table.expire(keep_at_most=most) for key in keys.tolist()]
        if len(gone) != max(0, len(self.rows) - most):
            raise Wrong(f"{len(gone)} of {len(self.rows)} keys expired, of which {most} stay")
        self.forget(self.numbers(gone))

    def forward(self, without: Any = ()) -> None:
        keys = self.rng.choice(KEYS, int(self.rng.integers(1, 6)))
        keys = keys[~np.isin(keys, list(without))]
        if not keys.size:
            return
        weights = self.rng.integers(1, 9, keys.size)
        names = self.named(keys)
        asked = names if self.kind == "text" else torch.tensor(names)
        found = self.layer(asked, torch.arange(keys.size)) if self.is_bag else self.layer(asked)
        sums: dict[int, int] = {}
        for at, (key, weight) in enumerate(zip(keys.tolist(), weights.tolist(), strict=True)):
            expected = self.rows.setdefault(key, np.zeros(DIM, np.float32))
            if not np.array_equal(found[at].detach().numpy(), expected):
                raise Wrong(f"a pass read {found[at].tolist()} for {key}, not {expected}")
            sums[key] = sums.get(key, 0) + weight
        loss = (found * torch.from_numpy(weights).float()[:, None]).sum()
        self.pending.append(Pass(loss, sums))

    def backward(self) -> None:
        if not self.pending:
            return
        one = self.pending.pop(int(self.rng.integers(len(self.pending))))
        if self.raises([one], one.loss.backward):
            return
        self.gathered.append(one)

    def step(self) -> None:
        gathered, self.gathered = self.gathered, []
        raised = self.raises(gathered, self.optimizer.step)
        self.optimizer.zero_grad()
        if not raised:
            for each in gathered:
                for key, total in each.sums.items():
                    self.rows[key] = self.rows[key] - np.float32(total)

    def raises(self, passes: list[Pass], call: Callable[[], object]) -> bool:
        """Return whether a call with the gradients of passes raised; check that it may, or must."""
        try:
            call()
        except ClosedError as error:
            if not any(each.may_raise for each in passes):
                raise Wrong(f"nothing ended these passes, but: {error}") from error
            return True
        if lost := [key for each in passes for key in each.sums if key in each.lost]:
            raise Wrong(f"the gradient of {lost}, which were removed, went elsewhere or nowhere")
        return False

    def zero(self) -> None:
        self.optimizer.zero_grad()
        self.gathered = []

    def commit(self) -> None:
        self.store.commit()
        self.committed = dict(self.rows)

    def fold(self) -> None:
        self.commit()
        self.reader.refresh()
        self.seen = dict(self.committed)
        self.store.fold()

    def rollback(self) -> None:
        self.store.rollback()
        self.ended(range(KEYS))
        for each in self.gathered:  # a rollback drops gradients that have come
            each.sums = {}
        self.rows = dict(self.committed)

    def refresh(self) -> None:
        self.reader.refresh()
        self.seen = dict(self.committed)

    def beside(self) -> None:
        """Run a whole step while another thread removes and writes keys that are not in it."""
        gone = [key for key in self.some() if key in self.rows]
        if not gone:
            return
        failed: list[BaseException] = []
        value = np.full((1, DIM), 3, np.float32)

        def other() -> None:
            try:
                for key in gone:
                    self.table.remove(self.named([key]))
                self.table.write(self.named(gone[:1]), value)
            except BaseException as error:
                failed.append(error)

        thread = Thread(target=other)
        self.ended()  # from now on, at any moment
        thread.start()
        try:
            count = len(self.pending)
            self.forward(without=gone)
            for each in self.pending[count:]:
                each.may_raise = True
            self.backward()
            self.step()
        finally:
            thread.join()
        if failed:
            raise failed[0]
        for key in gone:
            del self.rows[key]
        self.rows[gone[0]] = value[0]
        self.ended(gone)

    def run(self) -> None:
        """Run one program, and compare all rows at its end."""
        steps = self.rng.choice(len(_STEPS), int(self.rng.integers(4, 10)), p=_ODDS)
        names = [_STEPS[each][0] for each in steps.tolist()]
        self.log = []
        for name in names:
            self.log.append(name)
            getattr(self, name)()
        self.pending.clear()
        self.step()
        self.check(self.store, self.rows)
        self.check(self.reader, self.seen)


_STEPS = (
    *(("write", 3), ("remove", 2), ("expire", 1), ("forward", 6), ("backward", 6), ("step", 4)),
    *(("zero", 0.3), ("commit", 0.7), ("fold", 0.1), ("rollback", 0.5), ("refresh", 0.5)),
    ("beside", 0.2),
)
_ODDS = np.array([odds for _, odds in _STEPS]) / sum(odds for _, odds in _STEPS)


def run(seed: int, programs: int, folder: Path) -> None:
    """Run programs in one store; raises Wrong with what repeats it."""
    rng = np.random.default_rng(seed)
    every = Programs(folder / f"{seed}.tier", rng)
    for number in range(programs):
        try:
            every.run()
        except Exception as error:
            where = "partitions" if every.parts else "one process"
            raise Wrong(
                f"seed {seed}, program {number} ({every.kind}, {where}): {every.log}: {error!r}"
            ) from error
    every.close()


def _job(seed: int, programs: int) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        run(seed, programs, Path(folder))
    return programs


def _memory() -> str | None:
    """Return a directory in memory, if there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def main() -> int:
    """Run programs in several processes, and say how many."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    begin, done, wrong = time.monotonic(), 0, 0
    counts = [min(PER_STORE, given.programs - at) for at in range(0, given.programs, PER_STORE)]
    with ProcessPoolExecutor(given.jobs) as pool:
        seeds = range(given.seed, given.seed + len(counts))
        for future in [pool.submit(_job, *each) for each in zip(seeds, counts, strict=True)]:
            try:
                done += future.result()
            except Wrong as error:
                wrong += 1
                print(error)
    print(f"{done} programs in {time.monotonic() - begin:.1f} s, {wrong} stores wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
