"""A store in a lower layer of an overlay: its files are copied up when a writer opens them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.durability.test_environment import need_root, tmpfs
from tests.durability.test_power import run
from tierstore.budget import Budget

NONE = Budget(host=0)
ROWS, WIDTH = 500, 8
ZSTD = {"backend": "zarr", "compression": "zstd"}


@contextmanager
def overlay(over: Path, lower: Path, tmp_path: Path) -> Iterator[None]:
    """Mount an overlay whose upper layer is in memory."""
    with tmpfs(tmp_path / "upper", "100m") as upper:
        for name in ("files", "work"):
            (upper / name).mkdir()
        layers = f"lowerdir={lower},upperdir={upper}/files,workdir={upper}/work"
        try:
            run("mount", "-t", "overlay", "-o", layers, "overlay", over)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no overlay here: {error.stderr.decode()[:200]}")
        try:
            yield
        finally:
            run("umount", over)


@pytest.mark.variants(1)
@pytest.mark.parametrize("options", [{}, {"backend": "zarr"}, ZSTD], ids=str)
def test_folds_show_in_writers_and_readers(tmp_path: Path, options: dict[str, str]) -> None:
    need_root("mount")
    lower, over = tmp_path / "lower", tmp_path / "over"
    lower.mkdir()
    over.mkdir()
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((ROWS, WIDTH)).astype("f4")
    spec = tierstore.TableSpec(ROWS, WIDTH, init=tierstore.from_array(rows), **options)
    tierstore.create(lower / "s", {"t": spec}).close()
    with (
        overlay(over, lower, tmp_path),
        tierstore.open(over / "s", budget=NONE) as reader,
        tierstore.open(over / "s", "r+", budget=NONE) as writer,
    ):
        for _ in range(3):
            ids = rng.choice(ROWS, 40, replace=False)
            rows[ids] = rng.standard_normal((40, WIDTH)).astype("f4")
            writer["t"].write(ids, rows[ids])
            writer.commit()
            reader.refresh()
            writer.fold()
            assert np.array_equal(writer["t"].read(np.arange(ROWS)), rows)
            reader.refresh()
            assert np.array_equal(reader["t"].read(np.arange(ROWS)), rows)
            assert writer.verify().ok
            assert reader.verify().ok
