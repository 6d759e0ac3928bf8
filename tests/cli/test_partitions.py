"""Parts of an export, and copies with partitions."""

import numpy as np
import pytest

import tierstore
from tests.cli.test_save_verify_fold import rows_of


def test_parts_of_an_export_are_all_rows(run, run_json, pair, tmp_path):
    rows = []
    for number in range(3):
        out = tmp_path / f"{number}.npy"
        data = run_json("export", pair, out, "--table", "item", "--part", f"{number}/3")
        rows.append(np.load(out))
        assert data["rows"] == len(rows[-1])
    assert np.array_equal(np.concatenate(rows), rows_of(pair, "item"))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1
    some = tmp_path / "some.npy"
    run_json("export", pair, some, "--table", "item", "--rows", "2:6", "--part", "1/2")
    assert np.array_equal(np.load(some), rows_of(pair, "item")[4:6])
    for part in ("3/3", "1", "-1/2", "0/0"):
        run("export", pair, tmp_path / "no.npy", "--table", "item", "--part", part, code=2)
    out = run("export", pair, tmp_path / "no.npy", "--table", "item", "--part", "0/999999", code=1)
    assert "too few" in out.stderr


def test_save_with_partitions_and_back(run, run_json, pair, tmp_path):
    pytest.importorskip("torch")
    plain, wide, other, back = (tmp_path / f"{name}.tier" for name in "pwob")
    specs = {
        name: tierstore.TableSpec(rows, 4, init=tierstore.normal(seed=rows))
        for name, rows in (("item", 100), ("user", 7))
    }
    tierstore.create(plain, specs).close()
    data = run_json("save", plain, wide, "--partitions", 5)
    assert data == {"store": str(plain), "dest": str(wide), "version": 1, "partitions": 5}
    run_json("save", wide, other, "--partitions", 3)
    run_json("save", other, back)
    for table in specs:
        for path in (wide, other, back):
            assert np.array_equal(rows_of(path, table), rows_of(plain, table))
    assert len(list((wide / "partitions").iterdir())) == 5
    assert len(list((other / "partitions").iterdir())) == 3
    run("verify", wide)
    run("save", plain, tmp_path / "no.tier", "--partitions", 2, "--skip-damaged", code=2)
    run("save", plain, tmp_path / "no.tier", "--partitions", 0, code=2)
    run("save", plain, wide, "--partitions", 2, code=1)
    assert not (tmp_path / "no.tier").exists()


def test_keys_go_into_partitions(run_json, pair, tmp_path):
    run_json("save", pair, tmp_path / "wide.tier", "--partitions", 2)
    with tierstore.open(pair) as one, tierstore.open(tmp_path / "wide.tier") as other:
        assert any(table.keys is not None for table in one.values())
        for name, table in one.items():
            keys = other[name].keys
            assert (keys is None) == (table.keys is None)
            if keys is not None:
                assert list(keys[:]) == list(table.keys[:])
            every = np.arange(table.rows)
            assert np.array_equal(other[name].read(every), table.read(every))
