"""tierstore restore, keep and release."""

import numpy as np

import tierstore


def rows_of(path, version=None):
    with tierstore.open(path, version=version) as store:
        return store["item"].read(np.arange(store["item"].rows))


def test_keep_restore_and_release(run, run_json, pair, tmp_path):
    older, newer = rows_of(pair, 2), rows_of(pair, 3)
    assert not np.array_equal(older, newer)
    data = run_json("keep", pair, "best", "--version", 2)
    assert data == {"store": str(pair), "name": "best", "version": 2, "released": []}
    run("keep", pair, "12", code=1)  # it would be taken for a number
    run("keep", pair, "v12")
    versions = run_json("inspect", pair, "--versions")["versions"]
    assert [each["names"] for each in versions] == [["best"], ["v12"]]
    assert "best" in run("inspect", pair, "--versions").stdout
    run("fold", pair, code=1)
    data = run_json("restore", pair, "best")
    assert data == {"store": str(pair), "restored": "best", "version": 4}
    assert np.array_equal(rows_of(pair), older)
    run("save", pair, tmp_path / "copy.tier", "--version", "best")
    assert np.array_equal(rows_of(tmp_path / "copy.tier"), older)
    assert run_json("restore", pair, "--name", "v12")["version"] == 5
    assert np.array_equal(rows_of(pair), newer)
    assert run_json("verify", pair, "--version", "best")["version"] == 2
    assert run_json("release", pair, "best")["kept"] == [3, 4, 5]
    run("release", pair, "best", code=1)
    run("restore", pair, 2, code=1)
    run("restore", pair, code=2)
    assert run_json("restore", pair, "--version", 4)["version"] == 6
    run("restore", pair, 4, "--name", "v12", code=2)
