"""Commands on stores that are in an object store."""

import uuid

import numpy as np
import pytest

import tierstore

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}/emb.tier"


def test_a_store_goes_there_and_comes_back(run, run_json, tmp_path, url):
    path, back = tmp_path / "emb.tier", tmp_path / "back.tier"
    run("init", path, "--table", "item", "--rows", 500, "--dim", 4, "--init", "normal(0,1)")
    data = {"store": str(path), "dest": url, "version": 1, "backends": {"item": "zarr"}}
    assert run_json("save", path, url) == data
    assert run_json("verify", url)["rows_checked"] == 500
    data = run_json("inspect", url)
    assert data["store"] == url and data["tables"][0]["backend"] == "zarr"
    assert url in run("inspect", url, "--stats").stdout
    assert run_json("export", url, tmp_path / "item.npy")["store"] == url
    run("save", url, back)
    with tierstore.open(path) as one:
        expected = one["item"].read(np.arange(500))
    assert np.array_equal(np.load(tmp_path / "item.npy"), expected)
    with tierstore.open(back) as two:
        assert np.array_equal(two["item"].read(np.arange(500)), expected)
    assert "is not empty" in run("save", path, url, code=1).stderr


def test_how_tables_are_stored_is_said_and_comes_back(run, run_json, tmp_path, url):
    path = tmp_path / "emb.tier"
    run("init", path, "--table", "item", "--rows", 50, "--dim", 4, "--init", "normal(0,1)")
    said = run("save", path, url).stderr
    assert "stored as zarr at a URL: item" in said and "--backend memmap makes" in said
    assert "Note" not in run("save", url, tmp_path / "zarr.tier").stderr
    data = run_json("save", url, tmp_path / "back.tier", "--backend", "memmap")
    assert data["backends"] == {"item": "memmap"}
    found = {}
    for name in ("emb", "zarr", "back"):
        with tierstore.open(tmp_path / f"{name}.tier") as store:
            found[name] = store["item"].spec.backend, store["item"][:].tobytes()
    assert [each for each, _ in found.values()] == ["memmap", "zarr", "memmap"]
    assert len({rows for _, rows in found.values()}) == 1
    assert run_json("verify", tmp_path / "back.tier")["rows_checked"] == 50
    packed = tierstore.TableSpec(50, 4, backend="zarr", compression="zstd", chunk_rows=7)
    with tierstore.create(tmp_path / "p.tier", {"item": packed}):
        pass
    run("save", tmp_path / "p.tier", tmp_path / "q.tier", "--backend", "memmap")
    with tierstore.open(tmp_path / "q.tier") as store:
        spec = store["item"].spec
        assert (spec.backend, spec.compression) == ("memmap", None)
    assert (
        "stored as zarr there" in run("save", path, f"{url}2", "--backend", "memmap", code=1).stderr
    )
    run("save", path, tmp_path / "x.tier", "--backend", "zarr", "--incremental", code=2)


def test_a_store_goes_to_a_file_url_and_comes_back(run, tmp_path):
    """Whose directories are made as the names of objects need them."""
    path, url = tmp_path / "emb.tier", f"file://{tmp_path}/not/there/emb.tier"
    run("init", path, "--table", "item", "--rows", 50, "--dim", 4, "--init", "normal(0,1)")
    run("save", path, url)
    run("verify", url)
    run("save", url, tmp_path / "back.tier")
    with tierstore.open(path) as one, tierstore.open(tmp_path / "back.tier") as two:
        assert one["item"][:].tobytes() == two["item"][:].tobytes()
    run("export", path, f"file://{tmp_path}/not/yet/items.zarr")
    assert (tmp_path / "not/yet/items.zarr/zarr.json").exists()
    assert "is not empty" in run("save", path, url, code=1).stderr


@pytest.mark.parametrize("command", ["init", "load", "fold"])
def test_what_writes_wants_a_disk(run, url, tmp_path, command):
    given = {"load": [tmp_path / "a.npy"], "init": ["--rows", 1, "--dim", 1]}.get(command, [])
    assert "is not on a disk" in run(command, url, *given, code=2).stderr


def test_rows_go_to_a_url_and_come_back(run, run_json, tmp_path):
    path, there = tmp_path / "emb.tier", f"memory://{uuid.uuid4().hex}/items.zarr"
    run("init", path, "--table", "item", "--rows", 500, "--dim", 4, "--init", "normal(0,1)")
    assert run_json("export", path, there)["out"] == there
    assert run_json("load", path, there, "--table", "back")["source"] == there
    with tierstore.open(path) as store:
        ids = np.arange(500)
        assert np.array_equal(store["back"].read(ids), store["item"].read(ids))
    run("export", path, there, "--table", "item", code=1)
    run("export", path, there, "--table", "item", "--force")


def test_files_of_other_formats_go_to_a_url_and_come_back(run, run_json, tmp_path):
    path, there = tmp_path / "emb.tier", f"memory://{uuid.uuid4().hex}/items.npy"
    run("init", path, "--table", "item", "--rows", 5, "--dim", 4, "--init", "normal(0,1)")
    run("export", path, there)
    with fsspec.open(there, "rb") as file, tierstore.open(path) as store:
        assert np.array_equal(np.load(file), store["item"][:])
    assert run_json("load", path, there, "--table", "back")["source"] == there
    with tierstore.open(path) as store:
        assert np.array_equal(store["back"][:], store["item"][:])
    assert "no such file" in run("load", path, f"{there}.npy", "--table", "x", code=3).stderr
    assert "cannot be read" in run("load", path, f"{there}.xyz", "--table", "x", code=1).stderr
