"""Removing keys from the command line, and the bytes that are left on the disk."""

import json
import shutil

import numpy as np
import pytest

import tierstore

KEYS = {"int64": [7, -5, 2**40, 11], "text": ["ann", "7", "a b", "über"]}
ROWS = np.random.default_rng(4).normal(size=(4, 4)).astype(np.float32)


@pytest.fixture(params=[("int64", 0), ("text", 0), ("text", 3)], ids=str)
def made(request, tmp_path):
    kind, partitions = request.param
    specs = {"user": tierstore.TableSpec(dim=4, keys=kind)}
    path = tmp_path / "s.tier"
    if partitions:
        store = tierstore.distributed.create(path, specs, partitions=partitions)
    else:
        store = tierstore.create(path, specs)
    with store:
        store["user"].write(KEYS[kind], ROWS)
        store.commit()
    return path, KEYS[kind]


@pytest.mark.variants(2)
def test_keys_are_removed_in_a_commit_of_their_own(run, run_json, made):
    path, keys = made
    with tierstore.open(path) as store:
        version = store.version
    dry = run_json("remove", path, "--key", keys[0], "--dry-run")
    assert (dry["removed"], dry["rows"], dry["version"]) == (1, 3, version)
    done = run_json("remove", path, "--key", keys[0], "--key", keys[2], "--key", keys[0])
    assert (done["removed"], done["missing"], done["rows"]) == (2, 0, 2)
    assert done["version"] == version + 1
    with tierstore.open(path) as store:
        table = store["user"]
        assert table.contains(keys).tolist() == [False, True, False, True]
        assert np.array_equal(table.read([keys[1], keys[3]]), ROWS[[1, 3]])
    run("get", path, "--key", keys[0], code=1)


@pytest.mark.variants(2)
def test_a_key_without_a_row_is_an_error_unless_that_is_allowed(run, run_json, made, tmp_path):
    path, keys = made
    other = 12 if isinstance(keys[0], int) else "twelve"
    message = run("remove", path, "--key", keys[0], "--key", other, code=1).stderr
    assert f"no row has the key {other!r}" in message
    (tmp_path / "left.txt").write_text(f"{keys[0]}\n{other}\n{keys[1]}\n")
    run("remove", path, "--keys-from", tmp_path / "left.txt", code=1)
    with tierstore.open(path) as store:
        assert store["user"].rows == 4, "nothing was removed"
    done = run("remove", path, "--keys-from", tmp_path / "left.txt", "--missing-ok").stdout
    assert "removed 2 keys of table user, 1 key had no row: 2 are left" in done
    again = run_json("remove", path, "--key", keys[0], "--key", keys[0], "--missing-ok")
    assert (again["removed"], again["missing"]) == (0, 1)
    (tmp_path / "none.txt").write_text("")
    run("remove", path, code=2)


def test_a_table_without_keys_of_its_own_is_refused(run, tmp_path):
    run("init", tmp_path / "s", "--rows", 10, "--dim", 4)
    assert "is not by key" in run("remove", tmp_path / "s", "--key", 3, code=2).stderr
    assert json.loads(run("inspect", tmp_path / "s", "--json").stdout)["version"] == 1


def holding(root, *wanted):
    """Return the files below a directory that hold any of some bytes."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return [path for path in files if any(each in path.read_bytes() for each in wanted)]


@pytest.mark.variants(1, 3)
@pytest.mark.parametrize("partitions", [0, 2])
@pytest.mark.parametrize("kind", ["int64", "text"])
def test_no_byte_of_a_person_is_left_where_the_page_says_so(run, tmp_path, kind, partitions):
    """As docs/how-to/erase-a-person.md: remove, commit, fold, and what else holds rows."""
    path = tmp_path / "s.tier"
    person = 0x1234_5678_9ABC_DEF1 if kind == "int64" else "ann.of.green.gables"
    others = list(range(500)) if kind == "int64" else [f"user {each}" for each in range(500)]
    row = np.random.default_rng(9).normal(size=(1, 8)).astype(np.float32)
    create, more = tierstore.create, {}
    if partitions:
        create, more = tierstore.distributed.create, {"partitions": partitions}
    specs = {"user": tierstore.TableSpec(dim=8, keys=kind, init=tierstore.normal(seed=1))}
    with create(path, specs, **more) as store:
        rows = np.random.default_rng(8).normal(size=(500, 8)).astype(np.float32)
        store["user"].write(others, rows)
        store["user"].write([person], row)
        store.commit()
        store["user"].write([person], row + 1)
        store.commit(keep="good")
    key = person.encode() if isinstance(person, str) else person.to_bytes(8, "little")
    wanted = [key, row.tobytes(), (row + 1).tobytes()]
    shutil.copytree(path, tmp_path / "copy.tier")
    assert holding(path, row.tobytes()) and holding(path, key)
    run("remove", path, "--key", person)
    assert holding(path, *wanted), "a removal and its commit leave the files of older versions"
    run("fold", path, code=1)  # a version that is kept under a name has the row
    run("release", path, "good")
    run("fold", path)
    left = holding(path, *wanted)
    assert all(each.name == "rows.npy" for each in left), "at most an unused place of the base"
    clean = tmp_path / "clean.tier"
    run("save", path, clean)
    assert holding(clean, *wanted) == []
    with tierstore.open(clean) as store:
        with pytest.raises(KeyError):
            store["user"].read([person])
        assert np.array_equal(store["user"].read(others), rows)
    assert holding(tmp_path / "copy.tier", *wanted), "a copy is of its own"
    run("verify", clean)
