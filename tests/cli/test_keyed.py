"""Tables by key on the command line."""

import numpy as np
import pytest

import tierstore
from tests.every import every


@pytest.mark.variants(1)
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
    run("put", path, "--key", keys[0], "9 9 9 9")
    done = run_json("load", path, tmp_path / "user.npz", "--table", "user")
    assert (done["rows"], done["added"]) == (3, 0)
    with tierstore.open(path) as store:
        assert np.array_equal(store["user"].read(keys), rows)
    np.save(tmp_path / "bare.npy", rows)
    run("load", path, tmp_path / "bare.npy", "--table", "user", code=1)
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
    found = run_json("diff", path, before, "--changed")
    assert found["rows"]["user"] == {"ids": [0, 4], "keys": [keys[0], new]}
    assert run_json("grow", path, "--table", "user", "--rows", 3000)["added"] == 2000
    run("verify", path)
    run("repair", path, tmp_path / "repaired")
    with tierstore.open(tmp_path / "repaired") as repaired:
        assert np.array_equal(repaired["user"].read([new, keys[2]]), rows[[0, 2]])
        assert repaired["user"].capacity == 3000


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("kind", ["int64", "text"])
def test_growth_and_expiry(run, run_json, tmp_path, kind):
    path, first, more = tmp_path / "s", tmp_path / "first.npz", tmp_path / "more.npz"
    run("init", path, "--dim", 2, code=2)
    run("init", path, "--dim", 2, "--admit-after", 2, code=2)
    made = run_json("init", path, "--dim", 2, "--keys", kind, "--track-uses", "--admit-after", 2)
    assert (made["rows"], made["grows"]) == (65536, True)
    numbers = np.arange(70_000) * 3 - 7
    keys = numbers if kind == "int64" else np.array([f"k{each}" for each in numbers])
    rows = np.random.default_rng(0).standard_normal((70_000, 2), np.float32)
    np.savez(first, embeddings=rows, keys=keys)
    np.savez(more, embeddings=rows[:5], keys=keys[:5])
    for source, added in ((first, 70_000), (more, 0)):
        done = run_json("load", path, source)
        assert done["added"] == added
        entry = run_json("inspect", path)["tables"][0]
        assert [entry[name] for name in ("rows", "capacity", "added")] == [70_000, 131_072, added]
    assert "70,000 of 131,072, +0" in run("inspect", path).stdout
    run("expire", path, code=2)
    for dry in (["--dry-run"], []):
        done = run_json("expire", path, "--fewer-than", 2, *dry)
        assert (done["removed"], done["rows"]) == (69_995, 5)
    assert "removed 0" in run("expire", path, "--keep-at-most", 5).stdout
    assert run_json("expire", path, "--keep-at-most", 0, "--dry-run")["removed"] == 5
    for wrong in (["--keep-at-most", -1], ["--keep-at-most", "none"], ["--fewer-than", 0]):
        run("expire", path, *wrong, code=2)
    run("verify", path)
    run("repair", path, tmp_path / "repaired")
    run("save", path, tmp_path / "saved")
    for place in (path, tmp_path / "repaired", tmp_path / "saved"):
        with tierstore.open(place) as store:
            table = store["embeddings"]
            assert (table.rows, table.capacity, table.spec.grows) == (5, 131_072, True)
            assert table.spec.admit_after == 2
            assert np.array_equal(table.read(keys[:5].tolist()), rows[:5])
    run("init", path, "--dim", 2, "--rows", 5, "--table", "plain")
    run("expire", path, "--table", "plain", "--keep-at-most", 5, code=2)
    assert run_json("expire", path, "--table", "embeddings", "--keep-at-most", 0)["rows"] == 0


@every(case=[(["c"], 10), (["a"], 0)])
def test_keys_that_were_removed_are_a_change(run, run_json, tmp_path, case):
    gone, since = case
    path, out = tmp_path / f"s {since}", tmp_path / f"user {since}.npz"
    with tierstore.create(path, {"user": tierstore.TableSpec(dim=4, keys="text")}) as store:
        store["user"].write(["a", "b", "c"], np.ones((3, 4), np.float32))
        store.commit(keep="night")
    run("export", path, out)
    run("export", path, out, "--force", "--if-changed", "night", code=10)
    with tierstore.open(path, "r+") as store:
        store["user"].remove(gone)
        store.commit()
    assert run_json("diff", path, "night")["tables"] == {"user": len(gone) - (gone == ["c"])}
    run("export", path, out, "--force", "--if-changed", "night")
    with np.load(out, allow_pickle=False) as file:
        assert sorted(file["keys"]) == sorted({"a", "b", "c"} - set(gone))
    run("export", path, tmp_path / f"since {since}.npz", "--since", "night", code=since)


def test_keys_expire_in_a_commit_and_a_dry_run_commits_none(run, run_json, tmp_path):
    path, spec = tmp_path / "s", tierstore.TableSpec(dim=2, keys="text", track_uses=True)
    with tierstore.create(path, {"user": spec}) as store:
        store["user"].write([f"k{n}" for n in range(9)], np.ones((9, 2), np.float32))
        version = store.commit()
    assert "9 of 65,536, +9" in run("inspect", path).stdout
    for kept in (0, 4):
        done = run_json("expire", path, "--keep-at-most", kept, "--dry-run")
        assert (done["removed"], done["rows"], done["version"]) == (9 - kept, kept, version)
    assert run_json("expire", path, "--keep-at-most", 9)["version"] == version
    done = run_json("expire", path, "--keep-at-most", 4)
    assert (done["removed"], done["rows"], done["version"]) == (5, 4, version + 1)
    assert "4 of 65,536, -5" in run("inspect", path).stdout


@pytest.mark.variants(1)
@pytest.mark.parametrize("kind", ["int64", "text"])
def test_a_table_without_keys_is_read_as_one_without_rows(run, run_json, tmp_path, kind):
    path = tmp_path / "s"
    spec = tierstore.TableSpec(dim=3, keys=kind)
    tierstore.create(path, {"user": spec}).close()
    data = run_json("inspect", path, "--stats", "--range", ":")
    (table,) = data["tables"]
    assert (table["rows"], table["keys"]) == (0, "int64" if kind == "int64" else "str")
    assert (table["stats"]["rows_read"], table["stats"]["norm"]["max"]) == (0, None)
    assert data["rows"]["rows"] == []
    assert "all 0 rows" in run("inspect", path, "--stats").stdout
    assert run("inspect", path, "--range", ":").stdout.splitlines()[-1].split()[:2] == [
        "ROW",
        "KEY",
    ]
    run("inspect", path, "--range", "0:1", code=1)
    for given in (["--id", 0], ["--key", "7"]):
        assert "table 'user' has no rows" in run("near", path, *given, code=1).stderr
    for suffix in ("npy", "npz", "csv", "tsv", "vec", "txt", "bin", "fbin", "zarr"):
        done = run_json("export", path, tmp_path / f"{suffix}.{suffix}")
        assert (done["rows"], done["dim"]) == (0, 3), suffix
    assert np.load(tmp_path / "npy.npy").shape == (0, 3)
    for part in ("0/2", "1/2"):
        assert run_json("export", path, tmp_path / "parts.npy", "--part", part)["rows"] == 0
    run("export", path, tmp_path / "parts.npy", "--finish")
    assert (tmp_path / "parts.npy").read_bytes() == (tmp_path / "npy.npy").read_bytes()
    assert run_json("load", path, tmp_path / "npz.npz", "--table", "user")["rows"] == 0
