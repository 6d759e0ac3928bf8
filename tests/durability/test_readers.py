"""Long-lived readers: their version stays readable, even if a writer removes its files.

Rows 22 and 72 of the list of faults.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tierstore._disk.base import Base
from tierstore.budget import Budget

NONE = Budget(host=0)
WORDS = [f"word {row}" for row in range(40)]


def values(seed: int, rows: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 4)).astype(np.float32)


@pytest.fixture(params=["memmap", "zarr", "zstd"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    backend = "memmap" if request.param == "memmap" else "zarr"
    packed = {"compression": "zstd", "chunk_rows": 8} if request.param == "zstd" else {}
    initializer = tierstore.from_array(values(1))
    spec = tierstore.TableSpec(40, 4, init=initializer, backend=backend, **packed)
    with tierstore.create(tmp_path / "s", {"t": spec}, keep=1, budget=NONE) as store:
        store.set_keys("t", WORDS)
        store.commit(payload={"model": b"first", "tree": {"w": values(2)}})
    return tmp_path / "s"


def leave_behind(path: Path) -> None:
    """Commit until nothing of the version before is named any more."""
    with tierstore.open(path, "r+", keep=1, budget=NONE) as writer:
        writer.set_keys("t", [f"other {row}" for row in range(40)])
        initializer = tierstore.from_array(values(3))
        writer.replace_table("t", tierstore.TableSpec(40, 4, init=initializer), reinitialize=True)
        for step in range(3):
            writer["t"].write([step], values(step, 1))
            writer.commit(payload={"model": b"later", "tree": {"w": values(4)}})


@pytest.mark.fault(22)
def test_a_reader_keeps_rows_keys_and_payload(path: Path) -> None:
    with tierstore.open(path, budget=NONE) as reader:
        leave_behind(path)
        assert np.array_equal(reader["t"].read(np.arange(40)), values(1))
        assert list(reader["t"].keys[:]) == WORDS
        assert reader.payload["model"].read() == b"first"
        assert np.array_equal(reader.payload["tree"].tree()["w"], values(2))
        assert reader.verify().ok
        reader.refresh()
        assert reader.payload["model"].read() == b"later"
        assert reader["t"].keys[7] == "other 7"


def test_what_readers_used_goes_with_them(path: Path) -> None:
    def generations() -> int:
        return len(list((path / "t").glob("g*")))

    with tierstore.open(path, budget=NONE):
        leave_behind(path)
    with tierstore.open(path, "r+", keep=1, budget=NONE) as writer:
        assert generations() == 1
        writer.commit()
        assert writer.verify().ok


def test_a_reader_follows_a_writer_that_goes_back(path: Path) -> None:
    with tierstore.open(path, "r+", keep=3, budget=NONE) as writer:
        writer.create_table("later", tierstore.TableSpec(3, 4))
    with tierstore.open(path, budget=NONE) as reader:
        before = reader.version - 1
        with tierstore.open(path, "r+", version=before, discard_newer=True, budget=NONE):
            pass
        assert reader.refresh()
        assert (reader.version, list(reader)) == (before, ["t"])


def test_a_reader_copies_its_version(path: Path, tmp_path: Path) -> None:
    with tierstore.open(path, budget=NONE) as reader:
        leave_behind(path)
        reader.save(tmp_path / "copy")
    with tierstore.open(tmp_path / "copy") as copy:
        assert np.array_equal(copy["t"].read(np.arange(40)), values(1))
        assert list(copy["t"].keys[:]) == WORDS
        assert copy.payload["model"].read() == b"first"


def test_saving_copies_the_store_that_is_open_whatever_lies_at_the_path(
    path: Path, tmp_path: Path
) -> None:
    with tierstore.open(path, "r+", budget=NONE) as writer:
        path.rename(tmp_path / "moved")
        writer.save(tmp_path / "of nothing")
        tierstore.create(path, {"t": tierstore.TableSpec(3, 4)}).close()
        writer.save(tmp_path / "of another")
        uuid = writer.uuid
    for name in ("of nothing", "of another"):
        with tierstore.open(tmp_path / name) as copy:
            assert copy.parent == (uuid, copy.version)
            assert np.array_equal(copy["t"].read(np.arange(40)), values(1))


@pytest.mark.variants(1, 1)
@pytest.mark.fault(67, 72)
def test_verifying_beside_a_writer_finds_nothing(path: Path) -> None:
    done = threading.Event()

    def write() -> None:
        step = 0
        while not done.is_set():
            writer["t"].write([step % 40], values(step, 1))
            writer.commit(payload={"model": b"x" * step})
            step += 1

    with tierstore.open(path, "r+", keep=2, budget=NONE) as writer:
        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(20):
                with tierstore.open(path, budget=NONE) as reader:
                    report = reader.verify()
                    assert report.ok, report
        finally:
            done.set()
            thread.join()


def test_a_fold_that_begins_within_a_verification_is_no_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces rows of the base that the reader finds in deltas."""
    with tierstore.open(path, "r+", keep=1, budget=NONE) as writer:
        for step in range(3):
            writer["t"].write(np.arange(20), values(step, 20))
            writer.commit()
        with tierstore.open(path, budget=NONE) as reader:
            read, begun = Base._read, []

            def fold_before_checksums(base: Base, rows: Any, out: Any) -> Any:
                if not begun:
                    begun.append(base)
                    base._records.read(rows, out)  # compressed chunks stay decoded
                    writer.fold()
                return read(base, rows, out)

            monkeypatch.setattr(Base, "_read", fold_before_checksums)
            report = reader.verify()
            assert begun
            assert report.ok, report
            assert np.array_equal(reader["t"].read(np.arange(20)), values(2, 20))
