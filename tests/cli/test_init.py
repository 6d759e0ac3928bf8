"""tierstore init."""

import os

import numpy as np
import pytest

import tierstore
from tierstore.spec import Field

KEYS = [
    "store",
    "created",
    "dry_run",
    "version",
    "table",
    "rows",
    "grows",
    "dim",
    "dtype",
    "fields",
    "backend",
    "record_bytes",
    "disk_bytes",
    "free_bytes",
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "emb.tier"


def table_of(path, name="embeddings"):
    with tierstore.open(path) as store:
        table = store[name]
        return table.spec, table.read(np.arange(table.rows))


def test_a_new_store(run_json, path):
    data = run_json("init", path, "--rows", 100, "--dim", 8)
    assert list(data) == KEYS
    assert data["store"] == str(path) and data["created"] and not data["dry_run"]
    assert data["table"] == "embeddings" and data["record_bytes"] == 32
    assert data["disk_bytes"] == 100 * (32 + 4)
    assert data["fields"] == [{"name": "weight", "dim": 8, "dtype": "float32"}]
    spec, rows = table_of(path)
    assert (spec.rows, spec.dim, spec.dtype, spec.backend) == (100, 8, "float32", "memmap")
    assert not rows.any()


def test_every_option(run, path):
    options = ["--table", "item", "--dtype", "float16", "--init", "normal(1,0.5)", "--seed", 7]
    options += ["--state", "adam:float32", "--state", "note:bfloat16:2", "--backend", "zarr"]
    run("init", path, "--rows", 5000, "--dim", 4, *options)
    spec, rows = table_of(path, "item")
    assert spec.backend == "zarr"
    assert dict(spec.fields) == {
        "weight": Field(4, "float16"),
        "exp_avg": Field(4),
        "exp_avg_sq": Field(4),
        "note": Field(2, "bfloat16"),
    }
    other = path.with_name("same.tier")
    twin = tierstore.TableSpec(5000, 4, "float16", init=tierstore.normal(mean=1, std=0.5, seed=7))
    tierstore.create(other, {"item": twin}).close()
    assert np.array_equal(rows, table_of(other, "item")[1])
    assert abs(float(rows.mean(dtype="f8")) - 1) < 0.02


def test_sparse_takes_no_space(run, path):
    run("init", path, "--rows", 10**9, "--dim", 64, "--sparse")
    used = sum(file.stat().st_blocks * 512 for file in path.rglob("*"))
    assert used < 10**6
    with tierstore.open(path, budget=tierstore.Budget(host=0)) as store:
        assert not store["embeddings"].read([0, 10**9 - 1]).any()


def test_dry_run_makes_nothing(run, run_json, path, tmp_path):
    data = run_json("init", path, "--rows", 100, "--dim", 8, "--dry-run")
    assert data["dry_run"] and data["version"] is None and data["disk_bytes"] == 3600
    assert "would make" in run("init", path, "--rows", 100, "--dim", 8, "--dry-run").stdout
    assert not list(tmp_path.iterdir())
    result = run("init", path, "--rows", 2**38, "--dim", 64, "--dry-run", code=6)
    assert "TiB" in result.stdout and "would not fit: it takes" in result.stderr


def test_an_existing_store_gets_one_more_table(run, run_json, single, files):
    data = run_json("init", single, "--rows", 9, "--dim", 4, "--table", "user")
    assert not data["created"] and data["version"] == 2
    with tierstore.open(single) as store:
        assert list(store) == ["embeddings", "user"]
    before = files(single)
    data = run_json("init", single, "--rows", 9, "--dim", 4, "--table", "more", "--dry-run")
    assert (data["created"], data["dry_run"], data["version"]) == (False, True, None)
    for dry in ([], ["--dry-run"]):
        result = run("init", single, "--rows", 9, "--dim", 4, "--table", "user", *dry, code=1)
        assert "user" in result.stderr
    assert files(single) == before


@pytest.mark.fault(65)
def test_what_is_not_a_store_is_refused(run, tmp_path, files):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = files(tmp_path)
    for name in ("full", "file", "dangling"):
        run("init", tmp_path / name, "--rows", 9, "--dim", 4, code=3)
    run("init", tmp_path / "no" / "parent", "--rows", 9, "--dim", 4, code=1)
    assert files(tmp_path) == before
    assert os.path.islink(tmp_path / "dangling")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.fault(65)
def test_no_permission(run, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    run("init", locked / "emb.tier", "--rows", 9, "--dim", 4, code=6)
    assert not list(locked.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        ["--rows", 0, "--dim", 4],
        ["--rows", 10**18, "--dim", 4],
        ["--rows", 4, "--dim", 0],
        ["--rows", 4, "--dim", 2**40],
        ["--rows", 4],
        ["--rows", 4, "--dim", 4, "--table", "../up"],
        ["--rows", 4, "--dim", 4, "--table", ""],
        ["--rows", 4, "--dim", 4, "--dtype", "no-such-thing"],
        ["--rows", 4, "--dim", 4, "--init", "normal(0)"],
        ["--rows", 4, "--dim", 4, "--seed", -1],
        ["--rows", 4, "--dim", 4, "--seed", 2**64],
        ["--rows", 4, "--dim", 4, "--seed", 7],
        ["--rows", 4, "--dim", 4, "--seed", 7, "--init", "constant(1)"],
        ["--rows", 4, "--dim", 4, "--state", "adam", "--state", "exp_avg"],
        ["--rows", 4, "--dim", 4, "--state", "weight"],
        ["--rows", 4, "--dim", 4, "--backend", "no-such-thing"],
        ["--rows", 4, "--dim", 4, "--sparse", "--init", "normal(0,1)"],
    ],
)
@pytest.mark.fault(17, 64)
def test_bad_values_are_usage_errors_and_make_nothing(run, path, tmp_path, options):
    run("init", path, *options, code=2)
    assert not list(tmp_path.iterdir())


def test_a_table_that_cannot_fit_is_refused_before_it_is_begun(run, path, tmp_path):
    said = run("init", path, "--rows", "1000G", "--dim", 128, code=6).output
    assert "469.3 TiB" in said and "are free" in said and "partial" not in said
    assert not list(tmp_path.iterdir())
    run("init", path, "--rows", "100G", "--dim", 128, "--dry-run", code=6)


@pytest.mark.fault(19)
def test_a_store_that_is_being_written_is_locked(run, single):
    with tierstore.open(single, "r+"):
        run("init", single, "--rows", 9, "--dim", 4, "--table", "user", code=5)


def test_an_empty_directory_becomes_a_store_of_the_same_mode(run, run_json, tmp_path):
    (tmp_path / "empty").mkdir(mode=0o700)
    size = ["--rows", 9, "--dim", 4]
    run("init", tmp_path / "empty", *size, "--dry-run")
    assert list((tmp_path / "empty").iterdir()) == []
    assert run_json("init", tmp_path / "empty", *size)["created"]
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o700
    run("verify", tmp_path / "empty")


def test_a_store_that_is_not_made_leaves_the_empty_directory(run, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir(mode=0o700)

    def failing(*_, **__):
        raise OSError(28, "injected")

    monkeypatch.setattr(tierstore, "create", failing)
    run("init", tmp_path / "empty", "--rows", 9, "--dim", 4, code=6)
    assert list(tmp_path.iterdir()) == [tmp_path / "empty"]
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("text", "rows"),
    [("2k", 2000), ("1e3", 1000), ("1_500", 1500), ("0.5k", 500), ("1,000", 1000), ("2K", 2000)],
)
def test_numbers_of_rows_as_people_write_them(run_json, path, text, rows):
    assert run_json("init", path, "--rows", text, "--dim", 2)["rows"] == rows


def test_large_numbers_of_rows_are_of_thousands(run_json, path):
    for text, rows in [("3M", 3 * 10**6), ("0.5G", 5 * 10**8), ("2B", 2 * 10**9)]:
        assert run_json("init", path, "--rows", text, "--dim", 2, "--dry-run")["rows"] == rows


def test_a_link_that_leads_nowhere_is_named_as_such(run, tmp_path):
    (tmp_path / "s.tier").symlink_to("nowhere")
    said = run("init", tmp_path / "s.tier", "--rows", 3, "--dim", 2, code=3).stderr
    assert "s.tier is a link that leads nowhere" in said
    assert os.listdir(tmp_path) == ["s.tier"]
