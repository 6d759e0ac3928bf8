"""A store against a plain account of it: steps that hypothesis chooses, power cuts included."""

from __future__ import annotations

import random
import warnings
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import tierstore
from tests.durability.crash import durable, scratch, small_deltas
from tests.durability.disk import Disk
from tests.durability.recorder import Recorder
from tests.durability.stepwise import folds_in_steps
from tests.durability.twin import State, Twin, observe
from tests.tries import tries
from tierstore import _io
from tierstore.budget import Budget
from tierstore.errors import LockedError

STEPS = ["write", "write", "commit", "confirm", "rollback", "create_table", "replace_table"]
STEPS += ["add_fields", "grow", "set_keys", "reopen"]


class StoreMachine(RuleBasedStateMachine):
    """Every read shows the account; every reader its version; every power cut the last commit."""

    device: Any = "cpu"

    @initialize(seed=st.integers(0, 2**32), backend=st.sampled_from(["memmap", "zarr", "zstd"]))
    def create(self, seed: int, backend: str) -> None:
        self.readers: list[tuple[tierstore.Store, State]] = []
        self.quiet = warnings.catch_warnings()
        self.quiet.__enter__()
        warnings.simplefilter("ignore")
        self.small = small_deltas(threads=True)
        self.small.__enter__()
        self.folds = folds_in_steps(seed, most_deltas=0)
        self.conductor = self.folds.__enter__()
        self.scratches: list[Any] = []
        self.calls = ExitStack()
        self._record([])
        self.twin = Twin(self.root, self.recorder.mark, seed, backend=backend, device=self.device)
        self._do("create")

    def _record(self, events: list[Any]) -> None:
        self.scratches.append(scratch())
        self.root = self.scratches[-1].__enter__()
        self.recorder = Recorder(self.root, events)
        # Between steps too: threads write evicted rows behind them.
        self.calls.close()
        self.calls.enter_context(mock.patch.object(_io.system, "calls", self.recorder))

    def _do(self, step: str) -> None:
        getattr(self.twin, step)()

    @rule(step=st.sampled_from(STEPS))
    def step(self, step: str) -> None:
        self._do(step)

    @rule()
    def fold(self) -> None:
        try:
            self._do("fold")
        except LockedError:
            assert self.readers

    @rule()
    def train(self) -> None:
        """Write and commit so often that a fold begins."""
        for step in ("write", "commit") * 3:
            self._do(step)

    @rule()
    def a_fold_goes_on(self) -> None:
        self.conductor.advance()

    @rule()
    def open_reader(self) -> None:
        reader = tierstore.open(self.twin.path, budget=Budget(host_rows=2))
        self.readers.append((reader, self.twin.states[-1]))

    @rule(data=st.data())
    def refresh_reader(self, data: st.DataObject) -> None:
        if self.readers:
            at = data.draw(st.integers(0, len(self.readers) - 1))
            reader, _ = self.readers[at]
            reader.refresh()
            self.readers[at] = reader, self.twin.states[-1]

    @rule()
    def close_readers(self) -> None:
        for reader, _ in self.readers:
            reader.close()
        self.readers.clear()

    @rule(seed=st.integers(0, 2**32), hostile=st.booleans())
    def power_cut(self, seed: int, hostile: bool) -> None:
        self.close_readers()
        image = Disk(self.recorder.log).crash(random.Random(seed), hostile=hostile)
        self.twin.close()
        self._record(durable(image))
        self.twin.restart(self.root, self.recorder.mark)

    @invariant()
    def shows_the_account(self) -> None:
        found = observe(self.twin.store)
        assert found["tables"] == self.twin.expected()["tables"]
        assert found["version"] == self.twin.states[-1]["version"]
        for table in self.twin.store.values():
            ids = np.array([table.rows - 1, 0, 0])
            assert np.array_equal(table.read(ids)[1], table.read([0])[0], equal_nan=True)

    @invariant()
    def readers_keep_their_version(self) -> None:
        for reader, state in self.readers:
            assert observe(reader) == state

    def teardown(self) -> None:
        if hasattr(self, "twin"):
            self.close_readers()
            self.twin.close()
            self.calls.close()
            for place in self.scratches:
                place.__exit__(None, None, None)
            self.folds.__exit__(None, None, None)
            self.small.__exit__(None, None, None)
            self.quiet.__exit__(None, None, None)


class TestStore(StoreMachine.TestCase):  # type: ignore[misc]
    settings = tries(12, stateful_step_count=15)


@pytest.mark.torture
class TestStoreForLong(StoreMachine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=500, stateful_step_count=60)
