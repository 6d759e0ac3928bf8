"""What a repair says of rows that it could not copy: counts, keys, the exit code and messages."""

from __future__ import annotations

import csv
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tierstore import TableSpec, errors

RNG = np.random.default_rng(11)
KEYS = {
    "int64": [int(each) for each in RNG.choice(2**40, 62, replace=False) - 2**39],
    "text": [f'user,{number} "x"' for number in range(62)],
}


def rows_of(count: int) -> Any:
    return RNG.standard_normal((count, 4)).astype(np.float32)


def listed(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(params=["int64", "text"])
def by_key(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[Any]]:
    path, keys = tmp_path / "s.tier", KEYS[request.param]
    with tierstore.create(path, {"ki": TableSpec(dim=4, keys=request.param)}) as store:
        store["ki"].write(keys, rows_of(62))
        store.commit()
        store.fold()
    return path, keys


def test_a_table_by_key_lists_keys_and_counts_only_them(
    by_key: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """Its empty places are no rows that were lost."""
    path, keys = by_key
    (base,) = (path / "ki").glob("*/rows.npy")
    base.unlink()
    with pytest.warns(errors.FilledRowsWarning, match="62 rows of .* became zero"):
        report = tierstore.repair(path, tmp_path / "fixed")
    assert vars(report.tables["ki"]) == {"rows": 62, "older": 0, "filled": 62, "unknown": 0}
    found = listed(report.listed)
    assert {each["first"] for each in found} == set(map(str, keys))
    assert all(each["first"] == each["last"] and each["rows"] == "1" for each in found)
    assert {each["outcome"] for each in found} == {"filled"}


def test_a_damaged_row_of_a_table_by_key_is_named_by_its_key(
    by_key: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    path, keys = by_key
    (base,) = (path / "ki").glob("*/rows.npy")
    data = bytearray(base.read_bytes())
    data[4096 + 16 * 40] ^= 1
    base.write_bytes(data)
    report = tierstore.repair(path, tmp_path / "fixed", fill="nan")
    assert vars(report.tables["ki"]) == {"rows": 62, "older": 0, "filled": 1, "unknown": 0}
    assert [each["first"] for each in listed(report.listed)] == [str(keys[40])]
    with tierstore.open(tmp_path / "fixed") as store:
        assert np.isnan(store["ki"].read([keys[40]])).all()
        assert not np.isnan(store["ki"].read(keys[:40])).any()


@pytest.mark.parametrize("partitions", [3])
def test_partitions_list_keys_too(tmp_path: Path, partitions: int) -> None:
    pytest.importorskip("torch")
    path, keys = tmp_path / "s.tier", KEYS["int64"]
    spec = {"ki": TableSpec(dim=4, keys="int64")}
    with tierstore.distributed.create(path, spec, partitions=partitions) as store:
        store["ki"].write(keys, rows_of(62))
        store.commit()
        store.fold()
    with tierstore.open(path) as store:
        before = {key: store["ki"].read([key]).tobytes() for key in keys}
    (base,) = (path / "partitions" / "00001" / "ki").glob("*/rows.npy")
    base.unlink()
    report = tierstore.repair(path, tmp_path / "fixed", fill="nan")
    found = [int(each["first"]) for each in listed(report.listed)]
    assert 0 < len(found) < 62
    counted = vars(report.tables["ki"])
    assert counted == {"rows": 62, "older": 0, "filled": len(found), "unknown": 0}
    with tierstore.open(tmp_path / "fixed") as store:
        for key in keys:
            read = store["ki"].read([key])
            assert np.isnan(read).all() if key in found else read.tobytes() == before[key]


def test_places_of_partitions_beyond_the_table_are_no_rows_that_were_lost(tmp_path: Path) -> None:
    """10 rows in 4 partitions leave places empty, which is no loss to report."""
    pytest.importorskip("torch")
    path, rows = tmp_path / "s.tier", rows_of(10)
    spec = {"t": TableSpec(10, 4, init=tierstore.from_array(rows))}
    tierstore.distributed.create(path, spec, partitions=4).close()
    bases = sorted((path / "partitions").glob("*/t/*/rows.npy"))
    assert len(bases) == 4
    for base in bases:
        base.unlink()
    report = tierstore.repair(path, tmp_path / "fixed", fill="nan")
    assert vars(report.tables["t"]) == {"rows": 10, "older": 0, "filled": 10, "unknown": 0}
    told = [
        row
        for each in listed(report.listed)
        for row in range(int(each["first"]), int(each["last"]) + 1)
    ]
    assert sorted(told) == list(range(10))


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    path = tmp_path / "d.tier"
    with tierstore.create(path, {"t": TableSpec(100, 4)}) as store:
        store["t"].write(range(100), rows_of(100))
        store.commit()
        store.set_keys("t", [f"k{number}" for number in range(100)])
        store.fold()
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_filled_rows_are_exit_4_unless_a_fill_was_given(
    run: Any, run_json: Any, damaged: Path, tmp_path: Path
) -> None:
    """`repair a b && mv b a` must not replace rows by zeros that nobody asked for."""
    (base,) = (damaged / "t").glob("*/rows.npy")
    flip(base, 4096 + 16 * 7)
    failed = run("repair", damaged, tmp_path / "a.tier", code=4)
    assert "1 row has no intact value, and became zeros" in failed.stderr
    assert "of the rows 1 filled; " in failed.stderr
    data = run_json("repair", damaged, tmp_path / "b.tier", code=4)
    assert (data["complete"], data["filled"]) == (False, 1)
    with tierstore.open(tmp_path / "b.tier") as store:  # it is there, and whole
        assert store["t"].rows == 100
    asked = run("repair", damaged, tmp_path / "c.tier", "--fill", "version", "--fill", "zeros")
    assert "of the rows 1 filled; " in asked.stderr
    initializer = ["--fill", "normal(0,1)", "--seed", 5]
    run("repair", damaged, tmp_path / "f.tier", *initializer)
    tierstore.repair(damaged, tmp_path / "g.tier", fill=tierstore.normal(seed=5))
    rows = []
    for name in ("f.tier", "g.tier"):
        with tierstore.open(tmp_path / name) as store:
            rows.append(store["t"].read([7]))
    assert rows[0].any() and np.array_equal(*rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tierstore.repair(damaged, tmp_path / "d2.tier", fill="zeros").filled == 1
    with pytest.warns(errors.FilledRowsWarning, match="1 row of .*give fill="):
        assert tierstore.repair(damaged, tmp_path / "e.tier").filled == 1


def test_lost_keys_are_not_called_older_rows(run: Any, damaged: Path, tmp_path: Path) -> None:
    next((damaged / "t").glob("*/keys.*.utf8")).unlink()
    done = run("repair", damaged, tmp_path / "a.tier")
    assert "omitted: keys of table t" in done.stderr
    assert "older" not in done.stderr and "filled" not in done.stderr


@pytest.mark.slow
def test_doctor_finds_what_verify_finds_without_store_json(
    run: Any, run_json: Any, damaged: Path, tmp_path: Path
) -> None:
    """A store is one without its STORE.json, too: a damaged one."""
    (damaged / "STORE.json").unlink()
    run("verify", damaged, code=4)
    assert run_json("doctor", damaged, code=4)["store"]["damage"] is True
    assert tierstore.is_store(damaged)
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(__file__, plain)
    assert not tierstore.is_store(plain)
    assert run_json("doctor", plain)["store"] is None
