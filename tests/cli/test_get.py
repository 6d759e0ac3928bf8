"""tierstore get: rows by id and key."""

import numpy as np
import pytest

import tierstore
from tests.every import every


def rows_of(path, name, ids, field="weight"):
    with tierstore.open(path) as store:
        return store[name].read(np.array(ids), field=field)


def test_rows_by_id_with_every_digit(run, pair):
    ids = [3, 299, 3, 0]
    lines = run("get", pair, *ids, "--table", "item").stdout.splitlines()
    cells = [line.split("\t") for line in lines]
    assert [int(each[0]) for each in cells] == ids
    found = np.array([each[1:] for each in cells], np.float32)
    assert found.tobytes() == rows_of(pair, "item", ids).tobytes()
    moments = run("get", pair, 92, "--table", "item", "--field", "exp_avg").stdout
    expected = rows_of(pair, "item", [92], "exp_avg")
    assert np.array(moments.split("\t")[1:], np.float32).tobytes() == expected.tobytes()


@every(dtype=["float64", "float32", "bfloat16"])
def test_what_is_printed_is_the_very_number(run, tmp_path, dtype):
    path = tmp_path / dtype
    run("init", path, "--rows", 9, "--dim", 9, "--dtype", dtype, "--init", "normal(0,1)")
    with tierstore.open(path) as store:
        rows = store["embeddings"].read(np.arange(9))
    lines = run("get", path, *range(9)).stdout.splitlines()
    found = np.array([line.split("\t")[1:] for line in lines], rows.dtype)
    assert found.tobytes() == rows.tobytes()


def test_ids_are_given_as_to_near_and_put(run, pair):
    by_option = run("get", pair, 3, "--id", 299, "--id", 0, "--table", "item").stdout
    assert by_option == run("get", pair, 3, 299, 0, "--table", "item").stdout


def test_rows_by_key(run, run_json, pair):
    lines = run("get", pair, "--table", "user", "--key", "name_7", "--key", "name_2").stdout
    assert [line.split("\t")[:2] for line in lines.splitlines()] == [
        ["7", "name_7"],
        ["2", "name_2"],
    ]
    data = run_json("get", pair, "--table", "user", "--key", "name_7")
    assert [(row["id"], row["key"]) for row in data["rows"]] == [(7, "name_7")]
    assert data["rows"][0]["values"] == rows_of(pair, "user", [7])[0].tolist()
    run("get", pair, "--table", "user", "--key", "unknown", code=1)
    run("get", pair, "--table", "item", "--key", "name_7", code=1)


def test_keys_that_are_whole_numbers(run, single):
    with tierstore.open(single, "r+") as store:
        store.set_keys("embeddings", list(range(100, 150)))
    assert run("get", single, "--key", 107).stdout.split("\t")[:2] == ["7", "107"]
    assert "whole number" in run("get", single, "--key", "x", code=2).stderr


def test_ids_in_a_file(run, pair, tmp_path):
    ids = np.random.default_rng(3).integers(0, 300, 3000)
    np.save(tmp_path / "ids.npy", ids)
    lines = run(
        "get", pair, "--table", "item", "--ids-from", tmp_path / "ids.npy"
    ).stdout.splitlines()
    assert [int(line.split("\t")[0]) for line in lines] == ids.tolist()
    np.save(tmp_path / "hashes.npy", np.array([1, 2**64 - 1], np.uint64))
    run("get", pair, "--table", "item", "--ids-from", tmp_path / "hashes.npy", code=1)
    (tmp_path / "words.txt").write_text("a\nb\n")
    run("get", pair, "--table", "item", "--ids-from", tmp_path / "words.txt", code=1)


@pytest.mark.parametrize(("ids", "code"), [([300], 1), ([-1], 2), (["x"], 2), ([], 2)])
def test_rows_that_are_not_there(run, pair, ids, code):
    run("get", pair, *ids, "--table", "item", code=code)


def test_control_characters_of_keys_do_not_reach_the_terminal(run, single):
    keys = ["\x1b[31m", "tab\there", *map(str, range(48))]
    with tierstore.open(single, "r+") as store:
        store.set_keys("embeddings", keys)
    first, second = run("get", single, 0, 1).stdout.splitlines()
    assert first.split("\t")[1] == "\\x1b[31m"
    assert second.split("\t")[1] == "tab\\there" and len(second.split("\t")) == 18


def test_what_is_no_id_may_be_meant_as_a_key(run, pair):
    assert (
        "'w1' is not the id of a row; a key is named by --key"
        in run("get", pair, "w1", "--table", "item", code=2).stderr
    )
    assert "-1" in run("near", pair, "--id", "-1", "--table", "item", code=2).stderr


def test_messages_name_what_is_wrong_and_the_way_on(run, tmp_path):
    path = tmp_path / "k.tier"
    run("init", path, "--dim", 2, "--by-key", "int64")
    (tmp_path / "words.txt").write_text("1\na\nb\nc\nd\n")
    said = run("get", path, "--keys-from", tmp_path / "words.txt", code=2).stderr
    assert "whole numbers, not 'a', 'b', 'c' and 1 more" in said
    assert "whole numbers, not 'x'" in run("get", path, "--key", "1", "--key", "x", code=2).stderr
    assert "-1 is negative" in run("get", path, "-1", code=2).stderr
    run("init", tmp_path / "p.tier", "--rows", 3, "--dim", 2)
    said = run("get", tmp_path / "p.tier", "--key", 3, code=1).stderr
    assert "tierstore keys set (Store.set_keys)" in said  # the shell's word, then Python's
    run("init", tmp_path / "i.tier", "--rows", 3, "--dim", 1, "--dtype", "int8")
    for value, why in ((300, "cannot hold 300"), (1.5, "whole numbers, not 1.5")):
        said = run("put", tmp_path / "i.tier", "--id", 1, value, code=2).stderr
        assert "int8" in said and why in said
