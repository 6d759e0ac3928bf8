"""Memory that runs out at any allocation of any call: the store is right, or it is closed.

Row 33 of docs/faults.md. What a call raises is ours, MemoryError, or Python's own argument error.
"""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.crash import scratch
from tierstore import _door
from tierstore.budget import Budget
from tierstore.errors import ClosedError, InternalError

pytest.importorskip("_testcapi")

ACTS = {
    "write": 37, "read": 53, "lease": 71, "rollback": 31, "close": 31, "prefetch": 7,
    "open_again": 211, "commit": 211, "commit_async": 211, "fold": 211, "verify": 499,
    "create_table": 211, "save": 997, "create": 997,
}  # fmt: skip
"""Every how many-th allocation fails, so that each takes a few seconds."""


def strike(act: str, first: int, step: int, *how: str) -> None:
    command = [sys.executable, "-m", "tests.durability.little_memory", act, str(first), str(step)]
    command += how
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *wrong, struck = done.stdout.strip().splitlines()
    assert wrong == [], done.stdout
    assert int(struck.split()[1]) > step


LONG = ("create", "create_table", "fold", "lease", "open_again", "read", "save", "verify", "write")
"""Acts of so many lines and allocations that they are struck each night."""


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.fault(33)
@pytest.mark.slow
@pytest.mark.nightly(*LONG)
def test_a_failed_allocation_leaves_the_store_right_or_closed(act: str) -> None:
    strike(act, 3, ACTS[act])


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.fault(33)
@pytest.mark.slow
@pytest.mark.nightly(*LONG)
def test_an_error_at_any_line_leaves_the_store_right_or_closed(act: str) -> None:
    """Such as what a signal handler raises."""
    strike(act, 3, max(3, ACTS[act] // 6), "lines")


@pytest.mark.parametrize("protected", [True, False])
def test_without_closing_half_a_write_would_be_seen(
    protected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: NumPy fails in the middle of a write with what is no MemoryError."""

    def fail(*_: object) -> None:
        raise SystemError("error return without exception set")

    ids, rows = np.arange(20), np.random.default_rng(2).standard_normal((20, 4), np.float32)
    with scratch() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = tierstore.TableSpec(50, 4)
        with tierstore.create(root / "s", {"t": spec}, budget=Budget(host_rows=8)) as store:
            store["t"].read(ids[:5])
            with monkeypatch.context() as patch, pytest.raises((InternalError, SystemError)):
                patch.setattr(inside.space(store["t"]).host.map, "bind", fail)
                if not protected:
                    patch.setattr(_door, "_SAFE_ERRORS", (Exception,))
                store["t"].write(ids, rows)
            assert inside.door(store).closed == protected
            if protected:
                with pytest.raises(ClosedError, match="open it again"):
                    store.commit()
            else:
                found = store["t"].read(ids)
                assert not np.array_equal(found, rows) and found.any()
                assert store.commit() == 2
        with tierstore.open(root / "s") as reader:
            assert reader["t"].read(ids).any() != protected


@pytest.mark.torture
@pytest.mark.parametrize("act", ACTS)
def test_every_failed_allocation_leaves_the_store_right_or_closed(act: str) -> None:
    strike(act, 1, 1)
    strike(act, 1, 1, "lines")
