"""Tables by key on the command line."""

import numpy as np
import pytest

import tierstore


@pytest.mark.parametrize(("kind", "keys"), [("int64", [7, -5, 2**40]), ("text", ["a", "🙂", "c"])])
def test_a_table_by_key(run, run_json, tmp_path, kind, keys):
    path = tmp_path / "s"
    run("init", path, "--table", "user", "--rows", 1000, "--dim", 4, "--keys", kind)
    run("get", path, "--key", keys[0], code=1)
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    with tierstore.open(path, "r+") as store:
        store["user"].write(keys, rows)
        store.commit()
    assert run("get", path, "--key", keys[1]).stdout.split("\t")[:3] == ["1", str(keys[1]), "4"]
    assert run("get", path, 2).stdout.split("\t")[:3] == ["2", str(keys[2]), "8"]
    run("get", path, 3, code=1)
    run("export", path, tmp_path / "user.npz")
    run("load", path, tmp_path / "user.npz", "--table", "user", code=1)
    run("load", tmp_path / "other", tmp_path / "user.npz", "--table", "user")
    with tierstore.open(tmp_path / "other") as other:
        assert other["user"].lookup(keys).tolist() == [0, 1, 2]
        assert np.array_equal(other["user"].read([0, 1, 2]), rows)
    run("put", path, "--key", keys[0], "9 9 9 9")
    assert run("get", path, "--key", keys[0]).stdout.split("\t")[2:] == ["9", "9", "9", "9\n"]
    run("put", path, "--key", 12, "1 2 3 4")
    assert run("get", path, "--key", 12).stdout == "3\t12\t1\t2\t3\t4\n"
    run("put", path, "--key", 13, "1 2 3 1e39", code=2)
    run("get", path, "--key", 13, code=1)
    assert "uncommitted" not in run("put", path, "--key", 14, "1 2", code=2).stderr
    run("get", path, "--key", 14, code=1)
    assert run_json("near", path, "--key", keys[1], "-k", 1)
    run("keys", "forget", path, code=1)
    new = -1 if kind == "int64" else "new"
    with tierstore.open(path, "r+") as store:
        before = store.version
        store["user"].write([new, keys[0]], rows[:2])
        store.commit()
    found = run_json("diff", path, before, "--ids")
    assert found["rows"]["user"] == {"ids": [0, 4], "keys": [keys[0], new]}
    assert run_json("grow", path, "--table", "user", "--rows", 3000)["added"] == 2000
    run("verify", path)
    run("repair", path, tmp_path / "repaired")
    with tierstore.open(tmp_path / "repaired") as repaired:
        assert np.array_equal(repaired["user"].read([new, keys[2]]), rows[[0, 2]])
        assert repaired["user"].capacity == 3000
