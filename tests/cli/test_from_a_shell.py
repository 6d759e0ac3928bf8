"""What people met who ran a nightly job from a shell."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.cli.conftest import Run
from tests.formats.matrices import write_file

ROWS, DIM = 6, 4


def frame(path: Path) -> None:
    """A frame as pandas writes it: ids, numbers of a stem, and a label that repeats."""
    pd = pytest.importorskip("pandas")
    columns: dict[str, Any] = {"item_id": np.arange(ROWS) * 2 + 5}
    columns |= {f"dim_{at}": np.arange(ROWS, dtype="f4") + at / 8 for at in range(DIM)}
    columns["label"] = np.arange(ROWS) % 2
    made = pd.DataFrame(columns)
    if path.suffix == ".parquet":
        made.to_parquet(path, index=False)
    elif path.suffix == ".feather":
        made.to_feather(path)
    else:
        made.to_csv(path, index=False, sep="\t" if ".tsv" in path.name else ",")


@pytest.mark.parametrize("name", ["f.parquet", "f.feather", "f.csv", "f.csv.gz", "f.tsv.bz2"])
def test_one_frame_has_one_width_in_every_format(run_json: Any, tmp_path: Path, name: str) -> None:
    """A label of whole numbers was an element in text, and none in Parquet."""
    frame(tmp_path / name)
    found = run_json("load", tmp_path / "s.tier", tmp_path / name, "--dry-run")
    assert (found["dim"], found["keys"]) == (DIM, [5, 7, 9])
    assert found["first"] == [[row + at / 8 for at in range(DIM)] for row in range(3)]
    assert "label" in " ".join(found["notes"])


def test_a_null_in_a_list_names_its_row(run: Run, tmp_path: Path) -> None:
    pa, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    lists = [[1.0, 2.0]] * 5 + [[3.0, None], None]
    for at, broken in ((5, lists), (2, [*lists[:2], None, *lists[:2]])):
        parquet.write_table(pa.table({"v": pa.array(broken)}), tmp_path / "n.parquet")
        done = run("load", tmp_path / "s.tier", tmp_path / "n.parquet", code=3)
        assert f"row {at} of 'v' is not 2 numbers without nulls" in done.output
        assert not (tmp_path / "s.tier").exists()


def test_the_rows_that_an_upsert_brings_are_counted(
    run: Run, run_json: Any, tmp_path: Path
) -> None:
    store, rows = tmp_path / "s.tier", np.ones((ROWS, DIM), "f4")
    write_file(tmp_path / "a.safetensors", rows, "float32", keys=list("abcdef"))
    write_file(tmp_path / "b.safetensors", rows[:3] * 2, "float32", keys=["c", "new", "a"])
    run("load", store, tmp_path / "a.safetensors")
    done = run_json("load", store, tmp_path / "b.safetensors", "--upsert")
    assert (done["rows"], done["added"]) == (3, 1)
    newest = run_json("log", store)["versions"][0]
    assert newest["written_rows"] == 3 and newest["written_bytes"] > 0


def test_rows_in_another_order_say_the_way(run: Run, tmp_path: Path) -> None:
    store, rows = tmp_path / "s.tier", np.ones((2, DIM), "f4")
    for name, keys in (("a", ["x", "y"]), ("b", ["y", "x"])):
        write_file(tmp_path / f"{name}.safetensors", rows, "float32", keys=keys)
    run("load", store, tmp_path / "a.safetensors")
    run("add-field", store, "adam")
    done = run("load", store, tmp_path / "b.safetensors", code=1)
    assert "other fields" in done.output and "--upsert" in done.output


def test_what_is_no_store_any_more_is_damaged(run: Run, single: Path) -> None:
    (single / "STORE.json").unlink()
    assert "damaged" in run("doctor", single, code=4).output
    assert "no STORE.json" in run("verify", single, code=4).output


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from tierstore_cli.main import cli
cli()
"""


@pytest.mark.slow
def test_one_process_writes_partitions_without_torch(run: Run, single: Path) -> None:
    """Importing it takes longer than any of these commands."""
    place = single.with_name("parts.tier")
    np.save(single.with_name("w.npy"), np.ones((50, 16), "f4"))
    lines = (
        f"save {single} parts.tier --partitions 2",
        "put parts.tier --id 3" + 16 * " 2",
        "fold parts.tier",
        "keep parts.tier best",
        "load parts.tier w.npy",
    )
    for line in lines:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *line.split()],
            capture_output=True,
            text=True,
            cwd=single.parent,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    with tierstore.open(place) as store:
        (table,) = store.values()
        assert (table.read(np.arange(50)) == 1).all()
        assert next(each.names for each in store.versions()) == ("best",)


@pytest.mark.slow
def test_what_a_copy_by_key_lacks_is_found_without_reading_each_key(
    run: Run, run_json: Any, tmp_path: Path
) -> None:
    store, copy, keys = tmp_path / "s.tier", tmp_path / "c.tier", 200_000
    spec = tierstore.TableSpec(keys + 10, 2, keys="text")
    with tierstore.create(store, {"t": spec}) as made:
        made["t"].write([f"key {n}" for n in range(keys)], np.ones((keys, 2), "f4"))
        made.commit()
    run("save", store, copy, "--incremental")
    with tierstore.open(store, "r+") as opened:
        opened["t"].write(["key 7", "new"], np.zeros((2, 2), "f4"))
        opened.commit()
    start = time.process_time()
    for _ in opened_keys(store):
        pass
    each = time.process_time() - start
    start = time.process_time()
    done = run_json("save", store, copy, "--incremental")
    assert time.process_time() - start < each / 2
    assert done["rows"] == {"t": 2}


def opened_keys(store: Path) -> list[str]:
    """All keys of a store as objects of Python, twice, as for the store and its copy."""
    with tierstore.open(store) as opened:
        return [*opened["t"].keys, *opened["t"].keys]
