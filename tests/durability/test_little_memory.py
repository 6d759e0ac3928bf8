"""Memory that runs out at any allocation of any call: the store is right, or it is closed.

Row 33 of docs/faults.md. What a call raises is ours, MemoryError, or Python's own argument error.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("_testcapi")

ACTS = {
    "write": 37, "read": 53, "lease": 71, "rollback": 31, "close": 31, "prefetch": 7,
    "open_again": 211, "commit": 211, "commit_async": 211, "fold": 211, "verify": 499,
    "create_table": 211, "save": 997, "create": 997,
}  # fmt: skip
"""Every how many-th allocation fails, so that each takes a few seconds."""


def strike(act: str, first: int, step: int) -> None:
    command = [sys.executable, "-m", "tests.durability.little_memory", act, str(first), str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *wrong, struck = done.stdout.strip().splitlines()
    assert wrong == [], done.stdout
    assert int(struck.split()[1]) > step


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.fault(33)
def test_a_failed_allocation_leaves_the_store_right_or_closed(act: str) -> None:
    strike(act, 3, ACTS[act])


@pytest.mark.torture
@pytest.mark.parametrize("act", ACTS)
def test_every_failed_allocation_leaves_the_store_right_or_closed(act: str) -> None:
    strike(act, 1, 1)
