"""tierstore rename, drop and grow: the tables of a store."""

import numpy as np

import tierstore


def test_rename(run, run_json, pair):
    with tierstore.open(pair) as store:
        before = store["item"].read(np.arange(300))
    data = run_json("rename", pair, "item", "thing")
    assert (data["table"], data["was"], data["version"]) == ("thing", "item", 4)
    with tierstore.open(pair) as store:
        assert sorted(store) == ["thing", "user"]
        assert np.array_equal(store["thing"].read(np.arange(300)), before)
    run("rename", pair, "item", "other", code=1)
    assert "user" in run("rename", pair, "thing", "user", code=1).stderr


def test_drop(run, run_json, pair):
    assert run_json("drop", pair, "item")["version"] == 4
    with tierstore.open(pair) as store:
        assert list(store) == ["user"]
    assert "user" in run("drop", pair, "item", code=1).stderr


def test_grow(run, run_json, pair, single, tmp_path):
    data = run_json("grow", single, "--rows", "0.06k", "--init", "constant(0.5)")
    assert (data["rows"], data["added"]) == (60, 10)
    with tierstore.open(single) as store:
        rows = store["embeddings"].read(np.arange(60))
    assert rows[:50].std() > 0.1 and (rows[50:] == 0.5).all()
    (tmp_path / "new.txt").write_text("x\ny\n")
    options = ["--table", "user", "--rows", 22]
    run("grow", pair, *options, code=1)
    run("grow", pair, *options, "--keys", tmp_path / "new.txt")
    with tierstore.open(pair) as store:
        assert list(store["user"].keys[19:]) == ["name_19", "x", "y"]
    run("grow", single, "--rows", 50, code=1)
    run("grow", single, "--rows", 70, "--seed", 3, code=2)


def test_a_store_that_is_being_written_is_locked(run, pair):
    with tierstore.open(pair, "r+"):
        run("rename", pair, "item", "thing", code=5)
        run("drop", pair, "item", code=5)
        run("grow", pair, "--table", "item", "--rows", 400, code=5)
