"""Commands that read a store, on files of other programs."""

import numpy as np
import pytest

ROWS, DIM = 300, 6


@pytest.fixture
def given():
    return np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float32)


@pytest.fixture(params=["npy", "safetensors", "safetensors:", "index", "zarr"])
def place(request, tmp_path, given):
    kind = request.param
    if kind == "npy":
        np.save(tmp_path / "m.npy", given)
        return tmp_path / "m.npy"
    if kind == "zarr":
        zarr = pytest.importorskip("zarr")
        zarr.create_array(tmp_path / "m.zarr", data=given)
        return tmp_path / "m.zarr"
    save = pytest.importorskip("safetensors.numpy").save_file
    save({"ple.weight": given, "other": given[:4]}, tmp_path / "m.safetensors")
    if kind == "index":
        text = '{"weight_map": {"ple.weight": "m.safetensors"}}'
        (tmp_path / "m.safetensors.index.json").write_text(text)
        return f"{tmp_path}/m.safetensors.index.json::ple.weight"
    return f"{tmp_path}/m.safetensors:{':' * (kind == 'safetensors')}ple.weight"


def test_inspect(run, run_json, place):
    assert "300 rows of 6 float32" in run("inspect", place).stdout
    data = run_json("inspect", place, "--stats", "--range", "3:5")
    assert data["table"]["rows"] == ROWS and data["table"]["stats"]["rows_read"] == ROWS
    assert [row["id"] for row in data["rows"]["rows"]] == [3, 4]
    run("inspect", place, "--versions", code=2)


def test_get(run, place, given):
    lines = run("get", place, 3, 299, 3).stdout.splitlines()
    found = np.array([line.split("\t")[1:] for line in lines], np.float32)
    assert found.tobytes() == given[[3, 299, 3]].tobytes()
    run("get", place, 300, code=1)
    run("get", place, 3, "--version", 4, code=2)


def test_near(run_json, place, given):
    data = run_json("near", place, "--id", 7, "-k", 3, "--by", "dot")
    scores = given @ given[7]
    scores[7] = -np.inf
    assert [each["id"] for each in data["near"]] == np.argsort(-scores)[:3].tolist()
    assert data["version"] is None


@pytest.mark.variants(2)
def test_simulate(run, run_json, place, tmp_path):
    ids = np.random.default_rng(3).integers(0, ROWS - 50, 900)
    np.save(tmp_path / "ids.npy", ids)
    given = ["simulate", tmp_path / "ids.npy", "--batch", 30, "--slots", "10%"]
    data = run_json(*given, "--of", place)
    assert data["of"]["rows"] == data["rows"] == ROWS and data["of"]["record_bytes"] == 32
    assert data["points"] == run_json(*given, "--rows", ROWS)["points"]
    text = run(*given, "--of", place).stdout
    assert "RECORDS" in text and "960 B" in text and "RECORDS" not in run(*given).stdout
    np.save(tmp_path / "ids.npy", ids + 100)
    assert f"of {ROWS} rows" in run(*given, "--of", place, code=1).stderr
    run(*given, "--of", place, "--rows", 3, code=2)
    run(*given, "--table", "m", code=2)


def test_export(run, run_json, tmp_path, place, given):
    run("export", place, tmp_path / "out.npy", "--range", "10:50", "--dtype", "float16")
    assert np.array_equal(np.load(tmp_path / "out.npy"), given[10:50].astype(np.float16))
    assert run_json("export", place, tmp_path / "all.npy")["rows"] == ROWS
    assert np.load(tmp_path / "all.npy").tobytes() == given.tobytes()
    run("export", place, tmp_path / "no.npy", "--since", 3, code=2)


def test_a_file_of_several_matrices_says_which(run, tmp_path, given):
    save = pytest.importorskip("safetensors.numpy").save_file
    save({"one": given, "two": given}, tmp_path / "m.safetensors")
    error = run("inspect", tmp_path / "m.safetensors", code=3).stderr
    assert "m.safetensors:one" in error


def test_what_cannot_be_read_in_place_says_so(run, tmp_path, given):
    np.savez(tmp_path / "m.npz", weight=given)
    assert "import it" in run("get", tmp_path / "m.npz", 0, code=3).stderr
    (tmp_path / "text").write_text("x")
    run("inspect", tmp_path / "text", code=3)
