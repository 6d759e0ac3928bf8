"""A store of one small table whose rows follow from its version (see `writer`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tests.durability.writer import DIM, ROWS, changes, content
from tierstore.budget import Budget

__all__ = ["EVERY", "NONE", "check", "commit", "make", "script"]

NONE = Budget(host=0)
EVERY = np.arange(ROWS)


def make(path: Path) -> Path:
    """Make the store at version 1 and return its path."""
    tierstore.create(path, {"t": tierstore.TableSpec(ROWS, DIM)}).close()
    return path


def commit(store: tierstore.Store) -> int:
    """Make the next version."""
    store["t"].write(*changes(store.version + 1))
    return store.commit(step=store.version + 1)


def check(path: Path, version: int) -> None:
    """Fail unless the store is at this version, whole."""
    with tierstore.open(path, "r+", budget=NONE) as store:
        assert store.version == version
        assert np.array_equal(store["t"].read(EVERY), content(version))
        assert store.verify().ok


def script(code: str, *given: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own; `given` are its arguments."""
    command = [sys.executable, "-c", code, *map(str, given)]
    return subprocess.run(command, capture_output=True, text=True, **options)
