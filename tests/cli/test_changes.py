"""Commands on stores of four shapes against NumPy: near, get, keep, alter, copies, mending."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import tierstore

SHAPES = ("plain", "state", "keyed", "parts")


def rows_of(path, field="weight", name="item", version=None):
    with tierstore.open(path, version=version) as store:
        table = store[name]
        order = np.argsort([int(key[1:]) for key in table.keys[:]]) if table.keys else ...
        return np.concatenate(list(table.scan(field)))[order]


def nearest(rows, queries, count, by, left_out=None):
    """Return the rows with the largest products or cosines, in float64."""
    a, b = rows.astype("f8"), queries.astype("f8")
    if by == "cosine":
        a = a / np.linalg.norm(a, axis=1, keepdims=True)
        b = b / np.linalg.norm(b, axis=1, keepdims=True)
    scores = b @ a.T
    if left_out is not None:
        scores[np.arange(len(b)), left_out] = -np.inf
    order = np.argsort(-scores, axis=1)[:, :count]
    return order, np.take_along_axis(scores, order, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by", ["cosine", "dot"])
def test_near_rows_vectors_and_files_of_them(run_json, run, shapes, tmp_path, shape, by):
    path, rows = shapes[shape], rows_of(shapes[shape])
    queries = np.random.default_rng(2).normal(size=(7, 6)).astype("f4")
    np.save(tmp_path / "q.npy", queries)
    (tmp_path / "ids.txt").write_text("3\n8\n")
    names = ["--table", "item", "--by", by, "-k", 4]
    written = " ".join(map(repr, queries[0].tolist()))
    found = run_json(
        "near", path, *names, "--id", 5, "--ids-from", tmp_path / "ids.txt",
        "--values", written, "--values-from", tmp_path / "q.npy",
    )["queries"]  # fmt: skip
    assert [each["id"] for each in found] == [5, 3, 8, *[None] * 8]
    asked = np.concatenate([rows[[5, 3, 8]], queries[:1], queries])
    order, scores = nearest(rows[:, :], asked[3:], 4, by)
    own, own_scores = nearest(rows, asked[:3], 4, by, [5, 3, 8])
    assert [[row["id"] for row in each["near"]] for each in found] == [
        *own.tolist(),
        *order.tolist(),
    ]
    told = np.array([[row["score"] for row in each["near"]] for each in found])
    assert np.allclose(told, np.concatenate([own_scores, scores]), atol=1e-5)
    if shape in ("state", "keyed"):
        by_key = run_json("near", path, *names, "--key", "k5")
        assert by_key["near"] == found[0]["near"] and by_key["id"] == 5
        assert by_key["queries"][0]["key"] == "k5" and by_key["near"][0]["key"][0] == "k"
    text = run("near", path, *names, "--id", 5, "--id", 3).stdout.splitlines()
    assert text[0].split()[:2] == ["NEAR", "ROW"] and len(text) == 9
    run("near", path, *names, code=2)
    run("near", path, *names, "--values", "1 2", code=2)
    run("near", path, *names, "--values", "1 2 x 4 5 6", code=2)


def test_nothing_is_near_zeros_and_a_note_says_so(run, run_json, shapes):
    said = run("near", shapes["plain"], "--values", "0 0 0 0 0 0").stderr
    assert said == "Note: nothing is near 1 vector of zeros, or with a NaN\n"
    assert run("near", shapes["plain"], "--values", "1 0 0 0 0 0").stderr == ""


def test_get_several_fields(run, run_json, shapes, tmp_path):
    path = shapes["state"]
    rows, state = rows_of(path), rows_of(path, "exp_avg")
    data = run_json("get", path, "--table", "item", 3, "--key", "k9", "--field", "weight,exp_avg")
    assert data["fields"] == ["weight", "exp_avg"] and data["version"] == 3
    assert data["store"] == str(path)
    for at, row in enumerate((3, 9)):
        assert data["rows"][at]["id"] == row and data["rows"][at]["key"] == f"k{row}"
        assert np.array_equal(np.array(data["rows"][at]["values"]["weight"], "f4"), rows[row])
        assert np.array_equal(np.array(data["rows"][at]["values"]["exp_avg"], "f4"), state[row])
    (tmp_path / "keys.txt").write_text("k9\nk3\n")
    text = run(
        "get", path, "--table", "item", "--keys-from", tmp_path / "keys.txt", "--field",
        "exp_avg,weight",
    ).stdout.splitlines()  # fmt: skip
    cells = [line.split("\t") for line in text]
    assert [each[:2] for each in cells] == [["9", "k9"], ["3", "k3"]]
    numbers = np.array([each[2:] for each in cells], "f4")
    assert np.array_equal(numbers, np.concatenate([state, rows], axis=1)[[9, 3]])
    run("get", path, "--table", "item", 1, "--field", "weight,nothing", code=1)


def test_nights_are_kept_by_date(run, run_json, shapes, monkeypatch):
    """The day is that of the commit; the newest days stay, and what is no day."""
    path = shapes["plain"]
    run("keep", path, "best", "--version", 2)
    days = []
    for night in range(4):
        moment = 1_795_000_000 + night * 86_400
        run("put", path, "--id", night, *[night] * 6)
        newest = max(path.glob("manifest-*"), key=lambda file: file.name)
        os.utime(newest, (moment, moment))
        data = run_json("keep", path, "--by-date", "--last", 2)
        days.append(data["name"])
        assert data["released"] == (days[:-2][-1:] if night >= 2 else [])
    assert days == ["2026-11-18", "2026-11-19", "2026-11-20", "2026-11-21"]
    names = {name for each in run_json("log", path)["versions"] for name in each["names"]}
    assert names == {"best", *days[-2:]}
    with tierstore.open(path, version="2026-11-20") as store:
        assert store["item"].read([2]).tolist() == [[2] * 6]
    assert run_json("get", path, 3, "--version", "2026-11-20")["rows"][0]["values"] != [3] * 6
    run("keep", path, code=2)
    run("keep", path, "name", "--by-date", code=2)
    run("keep", path, "name", "--last", 3, code=2)
    run("keep", path, "--by-date", "--version", 99, code=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_element_types_change(run, run_json, shapes, shape):
    path, rows = shapes[shape], rows_of(shapes[shape])
    data = run_json("alter", path, "--table", "item", "--dtype", "weight=float16")
    assert data["fields"]["weight"] == "float16"
    assert np.array_equal(rows_of(path), rows.astype("f2").astype("f4"))
    if shape == "state":
        state = rows_of(path, "exp_avg")
        assert data["fields"]["exp_avg"] == "bfloat16"
        run("alter", path, "--table", "item", "--dtype", "float64")
        with tierstore.open(path) as store:
            assert {each.dtype for each in store["item"].fields.values()} == {"float64"}
        assert np.array_equal(rows_of(path, "exp_avg").astype("f4"), state)
        assert rows_of(path, name="user").dtype == np.float16
    if shape == "plain":
        done = run_json("alter", path, "--backend", "zarr", "--compression", "zstd")
        assert (done["backend"], done["compression"]) == ("zarr", "zstd")
        assert run_json("alter", path, "--compression", "none")["compression"] is None
    run("alter", path, "--table", "item", code=2)
    for wrong in ("float17", "weight=x", "=float16="):
        run("alter", path, "--table", "item", "--dtype", wrong, code=2)
    run("alter", path, "--table", "item", "--dtype", "nothing=float16", code=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_table_is_copied_between_stores(run, run_json, shapes, single, shape):
    path = shapes[shape]
    data = run_json("copy-table", path, single, "--table", "item", "--as", "other")
    assert data["table"] == "other" and data["rows"] == 40
    with tierstore.open(path) as source, tierstore.open(single) as store:
        one, other = source["item"], store["other"]
        assert one.fields.keys() == other.fields.keys() and one.spec.keys == other.spec.keys
        keys = [f"k{n}" for n in range(40)] if one.keys else None
        for field in one.fields:
            for each in (one, other):
                ids = each.lookup(keys) if keys else np.arange(40)
                raw = [each.by_row.read(ids, field) for each in (one, other)]
            assert np.array_equal(*raw)
        assert "embeddings" in store
    assert tierstore.verify(single).ok
    said = run("copy-table", path, single, "--table", "item", "--as", "other", code=1).stderr
    assert "--as" in said
    run("copy-table", single, path, "--table", "embeddings")
    assert np.array_equal(rows_of(path, name="embeddings"), rows_of(single, name="embeddings"))


def damage(path, rows, name="item"):
    """Change bytes of the first element of rows in the base file of a table."""
    with tierstore.open(path) as store:
        base = Path({each.name: each.base for each in store.info().tables}[name])
        bytes_ = store[name].spec.layout.record_bytes
    offset = base.stat().st_size - bytes_ * 40
    with base.open("r+b") as file:
        for row in rows:
            file.seek(offset + row * bytes_)
            file.write(b"\xff\xfe\xfd\xfc")


@pytest.mark.parametrize("shape", ["plain", "state"])
def test_damaged_rows_are_mended_from_a_copy(run, run_json, shapes, tmp_path, shape):
    path, copy = shapes[shape], tmp_path / "copy.tier"
    run("fold", path)
    run("save", path, copy)
    true = {
        field: rows_of(path, field) for field in ("weight", "exp_avg")[: 1 + (shape == "state")]
    }
    damage(path, [4, 17])
    run("verify", path, code=4)
    assert run_json("mend", path, code=4)["bad_rows"] == {"item": [4, 17]}
    done = run_json("mend", path, "--from", copy)
    assert done["copied"] == {"item": [4, 17]} and done["bad_rows"] == {}
    run("fold", path)
    run("verify", path)
    for field, rows in true.items():
        assert np.array_equal(rows_of(path, field), rows)


def test_rows_that_changed_since_the_copy_are_left_unless_they_are_wanted(
    run, run_json, shapes, tmp_path
):
    path, copy = shapes["plain"], tmp_path / "copy.tier"
    run("keep", path, "copied")
    run("save", path, copy)
    true = rows_of(path)
    run("put", path, "--id", 4, *[1] * 6)
    run("release", path, "copied")
    run("fold", path)
    damage(path, [4, 17])
    left = run_json("mend", path, "--from", copy, code=4)  # the version of the copy is gone
    assert left["bad_rows"] == {"item": [4, 17]} and left["copied"] == {}
    assert run_json("mend", path, "--from", copy, "--older")["copied"] == {"item": [4, 17]}
    assert np.array_equal(rows_of(path), true)
    run("mend", path, "--older", code=2)
    run("mend", path, "--version", 2, code=2)


@pytest.mark.parametrize("kind", [None, "text"])
def test_rows_of_partitions_are_mended_from_a_copy(run, run_json, tmp_path, kind):
    pytest.importorskip("torch")
    path, copy = tmp_path / "parts.tier", tmp_path / "copy.tier"
    spec = tierstore.TableSpec(rows=None if kind else 40, dim=6, keys=kind)
    named = [f"k{n}" for n in range(40)] if kind else np.arange(40)
    rows = np.random.default_rng(4).normal(size=(40, 6)).astype("f4")
    with tierstore.distributed.create(path, {"item": spec}, partitions=3) as store:
        store["item"].write(named, rows)
        store.commit()
    run("save", path, copy)
    for file in sorted(path.glob("partitions/*/item/g*/delta-*"))[:2]:
        data = bytearray(file.read_bytes())
        data[24 * 3 + 1] ^= 0xFF
        file.write_bytes(data)
    bad = json.loads(run("verify", path, "--json", code=4).stdout)["bad_rows"]["item"]
    assert "--from" in run("mend", path, code=2).stderr
    done = run_json("mend", path, "--from", copy, code=4)  # files of the version before are damaged
    assert len(bad) == 2 and done["copied"] == {"item": bad} and done["bad_rows"] == {}
    run("fold", path)
    run("verify", path)
    with tierstore.open(path) as store:
        assert np.array_equal(store["item"].read(named), rows)


def test_rows_of_another_store_do_not_mend(run, run_json, shapes, single):
    path = shapes["plain"]
    run("fold", path)
    damage(path, [3])
    assert run_json("mend", path, "--from", single, code=4)["copied"] == {}
    assert json.loads(run("mend", path, "--from", shapes["state"], "--json", code=4).stdout)
