"""tierstore diff, patch and log: what changed between versions, and what brings it to a copy."""

import time
from datetime import UTC, datetime

import numpy as np
import pytest

import tierstore


@pytest.fixture
def changed(pair):
    """The pair, with rows of both tables changed at version 4, which is kept as "later"."""
    random = np.random.default_rng(5)
    with tierstore.open(pair, "r+", keep=9) as store:
        store["item"].write([299, 7], random.normal(size=(2, 8)).astype("f4"))
        store["user"].write([2], random.normal(size=(1, 3)).astype("f4"))
        store.commit(step=8, keep="later", payload={"note": b"x"})
    return pair


def test_rows_that_differ_by_table(run, run_json, changed):
    data = run_json("diff", changed, 3, 4)
    assert (data["from"], data["to"], data["tables"]) == (3, 4, {"item": 2, "user": 1})
    assert run_json("diff", changed, 3, "later")["tables"] == {"item": 2, "user": 1}
    text = run("diff", changed, 3).stdout
    assert "item" in text and "2" in text
    assert "no row differs" in run("diff", changed, 4, 4).stdout
    run("diff", changed, 99, code=1)
    run("diff", changed, "yesterday", code=1)


def test_ids_and_keys_of_rows_that_differ(run, run_json, changed):
    lines = run("diff", changed, 3, "--changed").stdout.splitlines()
    assert lines == ["item\t7", "item\t299", "user\t2\tname_2"]
    lines = run("diff", changed, 3, "--changed", "--table", "user").stdout.splitlines()
    assert lines == ["user\t2\tname_2"]
    rows = run_json("diff", changed, 3, "--changed")["rows"]
    assert rows == {
        "item": {"ids": [7, 299], "keys": None},
        "user": {"ids": [2], "keys": ["name_2"]},
    }
    run("diff", changed, 3, "--table", "nope", code=1)


def test_options_that_contradict_each_other(run, changed, tmp_path):
    run("diff", changed, 3, "--out", tmp_path / "x", "--changed", code=2)
    run("diff", changed, 3, "--force", code=2)


def test_a_patch_over_several_versions_says_which_the_copy_has(run, run_json, changed, tmp_path):
    copy, file = tmp_path / "copy.tier", tmp_path / "x.patch"
    with tierstore.open(changed, "r+") as store:
        store.keep(3, "third")
        for value in (1, 2):
            store["item"].write([value], np.full((1, store["item"].dim), value, np.float32))
            newest = store.commit()
    run("save", changed, copy, "--version", "third")
    run("diff", changed, "third", "--out", file)
    assert f"{copy} is now at version 4" in run("patch", copy, file).stdout
    assert newest > 4
    with tierstore.open(copy) as reader:
        assert reader.version == 4


def test_a_patch_brings_a_copy_up_to_date(run, run_json, changed, tmp_path):
    copy, file = tmp_path / "copy.tier", tmp_path / "x.patch"
    run("save", changed, copy, "--version", 3)
    made = run_json("diff", changed, 3, "--out", file)
    assert made["bytes"] == file.stat().st_size
    done = run_json("patch", copy, file)
    assert done["tables"] == made["tables"] == {"item": 2, "user": 1}
    with tierstore.open(changed) as one, tierstore.open(copy) as other:
        assert other.step == 8 and other.payload["note"].read() == b"x"
        for name in one:
            every = np.arange(one[name].rows)
            assert one[name].read(every).tobytes() == other[name].read(every).tobytes()
    failed = run_json("patch", copy, file, code=1)
    assert failed["error"]["type"] == "VersionError"
    assert "already" in failed["error"]["message"]
    run("diff", changed, 3, "--out", file, code=1)
    run("diff", changed, 4, "--out", tmp_path / "none", code=10)
    run("diff", changed, "later", "--out", tmp_path / "none", code=10)
    assert not (tmp_path / "none").exists()
    run("diff", changed, 3, "--out", file, "--force")
    file.write_bytes(file.read_bytes()[:-1])
    run("patch", copy, file, code=3)
    run("patch", copy, tmp_path / "missing.patch", code=3)


def test_a_patch_with_a_damaged_payload_changes_nothing(run, changed, tmp_path, files):
    copy, file = tmp_path / "copy.tier", tmp_path / "x.patch"
    run("save", changed, copy, "--version", 3)
    run("diff", changed, 3, "--out", file)
    before = files(copy)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # of the payload, which comes last
    file.write_bytes(data)
    assert "note does not match its checksum" in run("patch", copy, file, code=3).stderr
    assert files(copy) == before


def test_versions_with_what_they_wrote(run, run_json, changed):
    versions = run_json("log", changed)["versions"]
    assert [each["version"] for each in versions] == sorted(
        (each["version"] for each in versions), reverse=True
    )
    first = versions[0]
    assert (first["step"], first["written_rows"]) == (8, 3)
    assert (first["names"], first["payload"]) == (["later"], ["note"])
    made = datetime.fromtimestamp(first["time"], UTC)
    assert -2 <= (datetime.now(UTC) - made).total_seconds() <= 3600
    text = run("log", changed).stdout
    assert "later" in text and f"{made:%Y-%m-%d %H:%M:%S}" in text


def test_log_names_the_tables_of_a_version(run, run_json, tmp_path):
    path, spec = tmp_path / "s.tier", tierstore.TableSpec(4000, 2)
    np.save(tmp_path / "rows.npy", np.ones((30, 2), np.float32))
    with tierstore.create(path, dict.fromkeys("abcde", spec), keep=9) as store:
        for name in "abcde":
            store[name].write(np.arange(1500), np.ones((1500, 2), np.float32))
        store.commit()
    run("load", path, tmp_path / "rows.npy", "--table", "loaded")
    run("put", path, "--table", "loaded", "--id", 3, "1 2")
    run("rename", path, "a", "z")
    run("restore", path, 2)
    tables = [each["tables"] for each in run_json("log", path)["versions"]]
    every = dict.fromkeys("abcde", 1500)
    assert tables == [
        {},
        {"a": None, "z": 0},
        {"loaded": 1},
        {"loaded": 30},
        every,
        dict.fromkeys("abcde", 4000),
    ]
    lines = run("log", path).stdout.splitlines()
    assert [line.partition("B  ")[2] for line in lines[1:]] == [
        "",
        "a dropped, z 0",
        "loaded",
        "loaded",
        "a 1,500, b 1,500, c 1,500, 2 more",
        "a 4,000, b 4,000, c 4,000, 2 more",
    ]


def test_times_are_utc_wherever_the_machine_is(run, run_json, changed, monkeypatch):
    made = datetime.fromtimestamp(run_json("log", changed)["versions"][0]["time"], UTC)
    try:
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            for command in (["log"], ["inspect", "--versions"]):
                assert f"{made:%Y-%m-%d %H:%M:%S}" in run(*command, changed).stdout
    finally:
        time.tzset()


def test_what_is_no_patch_is_named(run, single, tmp_path):
    np.save(tmp_path / "rows.npy", np.zeros(3))
    (tmp_path / "one").write_text("line of text\n")
    for other in (single, tmp_path / "rows.npy", tmp_path / "one"):
        said = run("patch", single, other, code=3).stderr
        assert "a patch is a file that write_patch or 'tierstore diff --out' made" in said


@pytest.mark.parametrize("keys", ["int64", "text"])
def test_keys_that_went_are_listed(run, run_json, tmp_path, keys):
    path, spec = tmp_path / "s.tier", tierstore.TableSpec(8, 2, keys=keys)
    given = [f"w{n}" for n in range(6)] if keys == "text" else list(range(90, 96))
    with tierstore.create(path, {"by_key": spec, "old": spec}, keep=9) as store:
        for name in ("by_key", "old"):
            store[name].write(given, np.ones((6, 2), np.float32))
        first = store.commit()
        store["by_key"].remove(given[1:3])
        store["by_key"].write(given[3:4], np.zeros((1, 2), np.float32))
        second = store.commit()
        store.drop("old")
        third = store.commit()
    lines = run("diff", path, first, second, "--removed").stdout.splitlines()
    assert sorted(lines) == [f"by_key\t{key}" for key in given[1:3]]
    data = run_json("diff", path, first, third, "--removed", "--changed")
    assert {name: sorted(each) for name, each in data["removed"].items()} == {
        "by_key": given[1:3],
        "old": given,
    }
    assert run("diff", path, second, second, "--removed").stdout == ""
    assert run("diff", path, first, "--removed", "--table", "by_key").stdout.count("\n") == 2
    run("diff", path, first, "--removed", "--changed", code=2)
    run("diff", path, first, "--removed", "--out", tmp_path / "x", code=2)
