"""What the trainer of the matrix writes, and the judgement of what is there afterwards.

A store of three tables (one file of rows, raw zarr, compressed zarr) whose rows follow from the
step alone, so that every version can be compared with NumPy, bit for bit. Tables grow on the way,
and each third commit has a payload.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import tierstore
from tests.durability.matrix.children import Say
from tierstore._disk import write_queue
from tierstore._store import compaction
from tierstore._tiers import slots
from tierstore.budget import Budget

__all__ = ["TABLES", "Lost", "check", "content", "make", "read", "rows_at", "train"]

TABLES: dict[str, dict[str, Any]] = {
    "plain": {"rows": 400, "dim": 6},
    "parts": {"rows": 300, "dim": 4, "backend": "zarr"},
    "packed": {
        "rows": 200,
        "dim": 5,
        "backend": "zarr",
        "chunk_rows": 32,
        "compression": "zstd",
    },
}
_NAMES = list(TABLES)
_GROWTH, _EVERY = 8, 10
_NONE = Budget(host=0)

Rows = dict[str, np.ndarray]
_CONTENTS: list[Rows] = [
    {
        name: np.random.default_rng(0)
        .standard_normal((given["rows"], given["dim"]))
        .astype(np.float32)
        for name, given in TABLES.items()
    }
]


class Lost(Exception):
    """Something acknowledged is not there, or something is there that was never written."""


def make(path: Path) -> None:
    """Make the store at step 0, its rows drawn at random."""
    specs = {
        name: tierstore.TableSpec(**given, init=tierstore.from_array(content(0)[name]))
        for name, given in TABLES.items()
    }
    tierstore.create(path, specs).close()


def rows_at(name: str, step: int) -> int:
    """How many rows a table has when a step is committed: each tenth step one of them grows."""
    times = sum(_NAMES[k % 3] == name for k in range(1, step // _EVERY + 1))
    return int(TABLES[name]["rows"]) + _GROWTH * times


def _changes(name: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, _NAMES.index(name)])
    rows, dim = rows_at(name, step), TABLES[name]["dim"]
    ids = rng.permutation(rows)[: int(rng.integers(1, rows // 2))]
    return ids, rng.standard_normal((ids.size, dim)).astype(np.float32)


def content(step: int) -> Rows:
    """All rows as of a step. Do not change them."""
    while len(_CONTENTS) <= step:
        state = grown(_CONTENTS[-1], len(_CONTENTS))
        for name in TABLES:
            ids, values = _changes(name, len(_CONTENTS))
            state[name][ids] = values
        _CONTENTS.append(state)
    return _CONTENTS[step]


def grown(state: Rows, step: int) -> Rows:
    """A copy of a state with as many rows as a step has; new ones are zero."""
    return {
        name: np.pad(rows, ((0, rows_at(name, step) - len(rows)), (0, 0)))
        for name, rows in state.items()
    }


def _payload(step: int) -> dict[str, Any] | None:
    return {"model": content(step)["packed"].tobytes()} if step % 3 == 0 else None


def train(
    path: Path, say: Say, seed: int, *, steps: int = 1 << 30, behind_it: bool = True, **how: Any
) -> None:
    """Commit step after step, and say each when its commit has returned; `how` goes to `open`.

    With `behind_it`, folds go on behind most of the time, and rows wait for their thread.
    """
    with _busy_behind() if behind_it else contextlib.nullcontext():
        _train(path, say, np.random.default_rng(seed), steps, behind_it, how)


@contextlib.contextmanager
def _busy_behind() -> Iterator[None]:
    """Have folds go on behind most of the time, and as many rows wait as there are slots."""
    with (
        mock.patch.object(compaction, "_MOST_DELTAS", 3),
        mock.patch.object(write_queue, "_MIN_QUEUED_BYTES", 1),
        mock.patch.object(slots, "_QUEUE_SHARE", 1),
    ):
        yield


def _train(
    path: Path, say: Say, rng: np.random.Generator, steps: int, behind_it: bool, how: Any
) -> None:
    budget, keep = Budget(host_rows=int(rng.integers(0, 100))), int(rng.integers(1, 4))
    with tierstore.open(path, "r+", budget=budget, keep=keep, **how) as store:
        first = (store.step or 0) + 1
        for step in range(first, first + steps):
            advance(store, step)
            say(step)
            if behind_it and rng.random() < 0.1:
                store.fold()


def advance(store: tierstore.Store, step: int) -> None:
    """Write and commit one step."""
    for name in TABLES:
        if store[name].rows < rows_at(name, step):
            store.grow(name, rows_at(name, step))
    for name in TABLES:
        store[name].write(*_changes(name, step))
    store.commit(step=step, payload=_payload(step))


def read(store: tierstore.Store) -> Rows:
    """Return all rows of a store."""
    return {name: table.read(np.arange(table.rows)) for name, table in store.items()}


def compare(store: tierstore.Store) -> int:
    """Return the step that a store is at; raise Lost unless all of it is what was committed."""
    step = store.step or 0
    wanted, found = content(step), read(store)
    for name, rows in found.items():
        if len(rows) != len(wanted[name]) and step % _EVERY == _EVERY - 1:
            wanted = {**wanted, name: grown(wanted, step + 1)[name]}  # grown, step to come
        wrong = (
            np.flatnonzero(np.any(rows != wanted[name], axis=1))
            if len(rows) == len(wanted[name])
            else np.arange(len(rows))
        )
        if wrong.size:
            raise Lost(f"step {step}: {wrong.size} rows of {name} are not what was committed")
    if step % 3 == 0 and step and store.payload["model"].read() != _payload(step)["model"]:
        raise Lost(f"step {step}: the payload is not what was committed")
    return step


def check(path: Path, acknowledged: int, **how: Any) -> None:
    """Raise Lost unless a store holds all that was acknowledged, and takes more.

    It may be at the step after, whose commit was under way.
    """
    with tierstore.open(path, budget=_NONE) as reader:
        step = compare(reader)
        if step not in (acknowledged, acknowledged + 1):
            raise Lost(f"step {acknowledged} was acknowledged, the store is at {step}")
        versions = [version.version for version in reader.versions()]
    for version in versions[:-1]:
        with tierstore.open(path, version=version, budget=_NONE) as reader:
            compare(reader)
    train(path, lambda step: None, acknowledged, steps=2, **how)
    with tierstore.open(path, "r+", budget=_NONE, **how) as writer:
        if compare(writer) != step + 2:
            raise Lost(f"the commits after step {step} did not hold")
        report = writer.verify()
        if not report.ok:
            raise Lost(f"verify: {report.bad_rows} {report.bad_files}")
