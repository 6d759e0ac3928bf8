"""A commit in the background that fails leaves nothing behind, even if it or its error is kept.

What one thread raises to another has no frames of either. No search for garbage helps here.
"""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.crash import scratch, small_deltas
from tests.durability.faults import FAULTS, Fault, Faulty
from tests.durability.small import make
from tests.durability.test_released import cycles, left_open, no_search
from tests.durability.writer import DIM
from tierstore import _io
from tierstore._store.ledger import Ledger
from tierstore.errors import StoreFullError

KINDS = ["ENOSPC", "EIO", "EIO although done", "EMFILE for ever", "ENOMEM", "KeyboardInterrupt"]


def strike(fault: Fault, number: int, ask: str) -> tuple[bool, list[str]]:
    """Fail an operation of `commit_async`; return whether one failed, and what is left open."""
    with scratch() as root, small_deltas(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(root / "s")
        store = tierstore.open(root / "s", "r+", budget=tierstore.Budget(host_rows=2))
        faulty, kept = Faulty(fault, number), list[Any]()
        with mock.patch.object(_io.system, "calls", faulty):
            try:
                store["t"].write(np.arange(9), np.ones((9, DIM), np.float32))
                kept.append(store.commit_async(payload={"model": b"m" * 99}))
                getattr(kept[0], ask)()
            except BaseException as error:
                kept.append(error)
        try:
            store.close()
        except BaseException as error:
            kept.append(error)
        assert store.closed
        left = left_open(root)
        kept.clear()
        return faulty.struck > 0, left


@pytest.mark.variants(1, 1)
@pytest.mark.fault(34)
@pytest.mark.parametrize(
    "step", [29, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_a_commit_behind_that_fails_keeps_nothing_open(step: int) -> None:
    rng = random.Random(5)
    with no_search():
        for kind in KINDS:
            number, struck = 0, True
            while struck:
                number += 1 + rng.randrange(step)
                struck, left = strike(FAULTS[kind], number, rng.choice(["result", "exception"]))
                assert not left, (kind, number)
                assert not cycles(), (kind, number)


@pytest.mark.fault(34)
def test_a_commit_behind_that_is_over_holds_nothing_of_the_store(tmp_path: Path) -> None:
    make(tmp_path / "s")
    for error in (None, StoreFullError("no space"), MemoryError()):
        store = tierstore.open(tmp_path / "s", "r+", budget=tierstore.Budget(host_rows=2))
        store["t"].write([1], np.ones((1, DIM), np.float32))
        with (
            nullcontext()
            if error is None
            else mock.patch.object(Ledger, "publish", side_effect=error)
        ):
            pending = store.commit_async()
            assert pending.exception() is error
        state = weakref.ref(inside.state(store))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store.close()
        del store
        gc.collect()
        assert state() is None, repr(error)
        assert pending.done()
