"""A table that lies in several files, a range of rows in each."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import tierstore
from tierstore._formats import SINK_SUFFIXES
from tierstore.errors import CorruptStoreError, FormatError, InvalidInputError
from tierstore.importing import preview

ROWS, DIM = 300, 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, npt.NDArray[np.float32]]:
    rows = np.random.default_rng(9).standard_normal((ROWS, DIM)).astype("f4")
    path = tmp_path_factory.mktemp("ranges") / "s.tier"
    init = tierstore.from_array(rows)
    spec = tierstore.TableSpec(ROWS, DIM, init=init)
    with tierstore.create(path, {"plain": spec, "named": spec, "numbered": spec}) as store:
        store.set_keys("named", [f"k{row}" for row in range(ROWS)])
        store.set_keys("numbered", list(range(1000, 1000 + ROWS)))
    return path, rows


def parts(made: Path, table: str, suffix: str, directory: Path, seed: int) -> list[str]:
    """Export ranges of a table, of random lengths, one each to a file."""
    cuts = sorted(random.Random(seed).sample(range(1, ROWS), 3))
    found = []
    with tierstore.open(made) as store:
        for start, stop in zip([0, *cuts], [*cuts, ROWS], strict=True):
            out = directory / f"{table}-{start}{suffix}"
            tierstore.export_table(store[table], out, rows=(start, stop))
            found.append(str(out))
    return found


@pytest.mark.parametrize("suffix", sorted({*SINK_SUFFIXES} - {".npy", ".fvecs", ".fbin"}))
def test_ranges_are_loaded_as_one(
    made: tuple[Path, npt.NDArray[np.float32]], suffix: str, tmp_path: Path
) -> None:
    path, rows = made
    for table in ("plain", "named", "numbered"):
        files = parts(path, table, suffix, tmp_path, len(suffix))
        done = tierstore.import_table(tmp_path / f"{table}.tier", files)
        assert done.rows == ROWS
        with tierstore.open(tmp_path / f"{table}.tier") as store:
            (found,) = store.values()
            assert np.array_equal(found.read(range(ROWS)), rows), table
            keys = None if found.keys is None else list(found.keys)
        first = {"named": [f"k{row}" for row in range(ROWS)]}
        numbered = {"numbered": list(range(1000, 1000 + ROWS))}
        assert keys == (first | numbered).get(table), table
        assert preview(files).rows == ROWS


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".fbin", ".zarr"])
def test_ranges_are_attached_as_one(
    made: tuple[Path, npt.NDArray[np.float32]], suffix: str, tmp_path: Path
) -> None:
    path, rows = made
    files = parts(path, "plain", suffix, tmp_path, 4)
    for budget in ("3KiB", "1MiB"):
        with tierstore.attach({"t": list(files)}, budget=budget) as attached:
            table = attached["t"]
            assert table.rows == ROWS
            ids = np.random.default_rng(1).integers(0, ROWS, 500)
            assert np.array_equal(table.read(ids), rows[ids])
            assert np.array_equal(np.concatenate(list(table.scan())), rows)
    if suffix != ".zarr":
        with tierstore.attach({"t": list(files)}, budget="3KiB") as attached:
            last = Path(files[-1])
            last.write_bytes(last.read_bytes()[:-4])
            with pytest.raises(CorruptStoreError, match=last.name):
                attached["t"].read([ROWS - 1])
            assert np.array_equal(attached["t"].read([0])[0], rows[0])


def test_files_of_other_rows_are_refused(tmp_path: Path) -> None:
    one, two, three = (tmp_path / f"{name}.npz" for name in ("one", "two", "three"))
    np.savez(one, weight=np.ones((3, 2), "f4"), keys=np.array(["a", "b", "c"]))
    np.savez(two, weight=np.ones((3, 4), "f4"))
    np.savez(three, weight=np.ones((3, 2), "f4"))
    four = tmp_path / "four.npz"
    np.savez(four, weight=np.ones((3, 2), "f4"), keys=np.arange(7, 10))
    store = tmp_path / "s.tier"
    cases: list[tuple[list[Path], type[Exception], str]] = [
        ([one, two], FormatError, "rows of one kind"),
        ([one, three], FormatError, "three.npz has no keys"),
        ([one, four], FormatError, "whole numbers in some files"),
        ([one, one], InvalidInputError, "distinct"),
        ([], InvalidInputError, "no file"),
    ]
    for files, kind, why in cases:
        with pytest.raises(kind, match=why):
            tierstore.import_table(store, files)
    assert not store.exists()


def test_whole_numbers_that_no_type_holds_together_are_refused(tmp_path: Path) -> None:
    """Negative ones in one file, and ones beyond int64 in another; both alone are keys."""
    for name, keys in (("a", [-1, 2]), ("b", [2**63, 5]), ("c", [7, 2**63 + 1])):
        kind = "i8" if min(keys) < 0 else "u8"
        np.savez(tmp_path / f"{name}.npz", rows=np.ones((2, 3), "f4"), keys=np.array(keys, kind))
    with pytest.raises(InvalidInputError, match="int64"):
        preview([f"{tmp_path}/a.npz", f"{tmp_path}/b.npz"], rows=4)
    found = preview([f"{tmp_path}/b.npz", f"{tmp_path}/c.npz"], rows=4)
    assert found.keys == [2**63, 5, 7, 2**63 + 1]
