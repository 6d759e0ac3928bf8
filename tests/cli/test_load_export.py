"""tierstore load and tierstore export."""

import os

import numpy as np
import pytest

import tierstore
from tests.pairs import pairs

EXPORT_KEYS = [
    "store",
    "version",
    "table",
    "fields",
    "out",
    "rows",
    "dim",
    "dtype",
    "bytes",
    "overflowed",
    "notes",
]
LOAD_KEYS = [
    "store",
    "source",
    "table",
    "field",
    "rows",
    "dim",
    "dtype",
    "created",
    "keys",
    "overflowed",
    "version",
    "read_as",
    "notes",
    "added",
]
NEEDS = {".parquet": "pyarrow", ".safetensors": "safetensors"}
FORMATS = [
    ".npy", ".npz", ".safetensors", ".parquet", ".vec", ".txt", ".bin", ".zarr", ".tsv", ".csv",
]  # fmt: skip


def rows_of(path, name, field="weight", version=None):
    with tierstore.open(path, version=version) as store:
        table = store[name]
        return table.read(np.arange(table.rows), field=field)


def partial_files(path):
    return [name for name in os.listdir(path) if name.endswith(".partial")]


@pytest.mark.variants(2, 9)
@pairs(together=1, suffix=FORMATS, table=["item", "user"])
@pytest.mark.fault(69)
def test_what_is_exported_and_loaded_again_is_the_same(run_json, pair, tmp_path, suffix, table):
    if suffix in NEEDS:
        pytest.importorskip(NEEDS[suffix])
    file = tmp_path / f"rows{suffix}"
    data = run_json("export", pair, file, "--table", table)
    assert sorted(data) == sorted(EXPORT_KEYS)
    assert data["out"] == str(file) and data["table"] == table and data["version"] == 3
    assert data["rows"] == (300 if table == "item" else 20) and data["bytes"] > 0

    again = tmp_path / "again.tier"
    loaded = run_json("load", again, file)
    assert sorted(loaded) == sorted(LOAD_KEYS)
    assert loaded["created"] and loaded["table"] == "embeddings" and loaded["rows"] == data["rows"]
    assert loaded["store"] == str(again) and loaded["dtype"] == data["dtype"]
    assert np.array_equal(rows_of(again, "embeddings"), rows_of(pair, table))
    has_keys = table == "user" and suffix != ".npy"
    assert loaded["keys"] == has_keys
    with tierstore.open(again) as store:
        keys = store["embeddings"].keys
        assert list(keys[:]) == [f"name_{n}" for n in range(20)] if has_keys else keys is None


@pytest.mark.fault(69)
def test_npy_opens_as_a_map_without_pickle(run, pair, tmp_path):
    run("export", pair, tmp_path / "a.npy", "--table", "item")
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r", allow_pickle=False)
    assert np.array_equal(mapped, rows_of(pair, "item"))


def test_export_options(run, run_json, pair, tmp_path):
    options = ["--table", "item", "--field", "exp_avg", "--range", "1:93", "--dtype", "float16"]
    data = run_json("export", pair, tmp_path / "a.npy", *options)
    assert (data["rows"], data["fields"], data["dtype"]) == (92, ["exp_avg"], "float16")
    expected = rows_of(pair, "item", "exp_avg")[1:93].astype("f2")
    assert np.array_equal(np.load(tmp_path / "a.npy"), expected)

    run("export", pair, tmp_path / "a.npy", "--table", "item", code=1)
    assert np.array_equal(np.load(tmp_path / "a.npy"), expected)
    run("export", pair, tmp_path / "a.npy", "--table", "item", "--force", "--version", 2)
    assert np.array_equal(np.load(tmp_path / "a.npy"), rows_of(pair, "item", version=2))
    said = run("export", pair, tmp_path / "b.npy", "--table", "item", "--version", 99, code=1)
    assert "2, 3" in said.stderr


def test_export_with_keys_from_a_file(run, pair, tmp_path):
    names = [f"é{n}" for n in range(300)]
    (tmp_path / "keys.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    options = ["--table", "item", "--keys", tmp_path / "keys.txt", "--range", "10:13"]
    run("export", pair, tmp_path / "a.vec", *options)
    lines = (tmp_path / "a.vec").read_text(encoding="utf-8").splitlines()
    assert [line.split()[0] for line in lines[1:]] == names[10:13]
    run("export", pair, tmp_path / "b.vec", "--table", "item", "--keys", "no.txt", code=3)
    (tmp_path / "few.txt").write_text("a\nb\n")
    few = ["--table", "item", "--keys", tmp_path / "few.txt"]
    assert "300" in run("export", pair, tmp_path / "b.vec", *few, code=1).stderr
    assert not (tmp_path / "b.vec").exists()


def test_load_counts_what_overflows(run, run_json, tmp_path):
    run("init", tmp_path / "s.tier", "--rows", 3, "--dim", 4, "--dtype", "float16")
    np.save(tmp_path / "large.npy", np.full((3, 4), 1e6, "f4"))
    assert run_json("load", tmp_path / "s.tier", tmp_path / "large.npy")["overflowed"] == 12
    said = run("load", tmp_path / "s.tier", tmp_path / "large.npy").stderr
    assert "12 values are too large" in said


def test_export_counts_what_overflows(run, run_json, single, tmp_path):
    with tierstore.open(single, "r+") as store:
        store["embeddings"].write([7], np.full((1, 16), 1e6, "f4"))
        store.commit()
    assert run_json("export", single, tmp_path / "a.npy", "--dtype", "float16")["overflowed"] == 16
    said = run("export", single, tmp_path / "b.npy", "--dtype", "float16").stderr
    assert ": 16 values are too large" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("rows", ["290:301", "300:", "1000:2000"])
@pytest.mark.fault(68)
def test_export_of_rows_out_of_range(run, pair, tmp_path, rows):
    run("export", pair, tmp_path / "a.npy", "--table", "item", "--rows", rows, code=1)
    assert not (tmp_path / "a.npy").exists()


@pytest.mark.fault(68)
def test_export_refuses_targets_it_must_not_touch(run, pair, tmp_path, files):
    (tmp_path / "dir.npy").mkdir()
    (tmp_path / "mine.npy").write_bytes(b"mine")
    (tmp_path / "link.npy").symlink_to("mine.npy")
    before = files(tmp_path)
    for name in ("dir.npy", "pair.tier/a.npy", "pair.tier/item/a.npy", "no/a.npy"):
        run("export", pair, tmp_path / name, "--table", "item", "--force", code=1)
    for name in ("mine.npy", "link.npy"):
        run("export", pair, tmp_path / name, "--table", "item", code=1)
    run("export", pair, tmp_path / "mine.xyz", "--table", "item", code=1)
    run(
        "export", pair, tmp_path / "mine.vec", "--table", "item", "--dtype", "no-such-thing", code=2
    )
    assert files(tmp_path) == before
    run("export", pair, tmp_path / "link.npy", "--table", "item", "--force")  # the link itself
    assert (tmp_path / "mine.npy").read_bytes() == b"mine"
    assert np.load(tmp_path / "link.npy").shape == (300, 8)
    run("export", pair, tmp_path / "mine.npy", "--table", "item", "--force")


def test_export_asks_which_table(run, pair, tmp_path):
    assert "item, user" in run("export", pair, tmp_path / "a.npy", code=2).stderr


def test_load_into_a_table_that_exists(run, run_json, pair, tmp_path):
    random = np.random.default_rng(9)
    rows = random.normal(size=(300, 8)).astype("f4")
    np.save(tmp_path / "a.npy", rows)
    moments = rows_of(pair, "item", "exp_avg")
    data = run_json("load", pair, tmp_path / "a.npy", "--table", "item")
    assert not data["created"] and data["version"] == 4
    assert np.array_equal(rows_of(pair, "item"), rows)
    assert np.array_equal(rows_of(pair, "item", "exp_avg"), moments)
    run("load", pair, tmp_path / "a.npy", "--table", "item", "--field", "exp_avg")
    assert np.array_equal(rows_of(pair, "item", "exp_avg"), rows)


def test_load_picks_an_array_and_keys(run, single, tmp_path):
    random = np.random.default_rng(9)
    arrays = {name: random.normal(size=(6, 4)) for name in ("left", "right")}
    np.savez(tmp_path / "both.npz", **arrays)
    np.save(tmp_path / "ids.npy", np.array([10, 20, 30, 40, 50, 60]))
    keys = ["--keys", tmp_path / "ids.npy"]
    run("load", single, f"{tmp_path / 'both.npz'}:right", "--table", "new", *keys)
    with tierstore.open(single) as store:
        new = store["new"]
        assert new.dtype == "float64" and list(new.keys[:]) == [10, 20, 30, 40, 50, 60]
        assert np.array_equal(new.read(new.lookup([60, 10])), arrays["right"][[5, 0]])
    said = run("load", single, tmp_path / "both.npz", "--table", "other", code=3).stderr
    assert "left" in said and "right" in said


def test_load_refuses_and_changes_nothing(run, pair, tmp_path, files):
    random = np.random.default_rng(9)
    np.save(tmp_path / "short.npy", random.normal(size=(299, 8)).astype("f4"))
    np.save(tmp_path / "pickled.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("not an array")
    (tmp_path / "short.xyz").write_text("not a format")
    os.mkfifo(tmp_path / "fifo.npy")
    before = files(pair)
    for name, code in {
        "short.npy": 1,
        "pickled.npy": 3,
        "text.npy": 3,
        "fifo.npy": 3,
        "missing.npy": 3,
        "missing.xyz": 3,
        "short.xyz": 1,
    }.items():
        run("load", pair, tmp_path / name, "--table", "item", code=code)
        run("load", tmp_path / "new.tier", tmp_path / "missing.npy", code=3)
    field = ["--table", "item", "--field", "nothing"]
    run("load", pair, tmp_path / "short.npy", *field, code=1)
    assert files(pair) == before
    assert not (tmp_path / "new.tier").exists() and not partial_files(tmp_path)


def test_load_of_a_store_that_is_no_store_or_locked(run, pair, tmp_path):
    np.save(tmp_path / "a.npy", np.random.default_rng(1).normal(size=(3, 4)))
    (tmp_path / "empty").mkdir()
    run("load", tmp_path / "empty", tmp_path / "a.npy", code=3)
    with tierstore.open(pair, "r+"):
        run("load", pair, tmp_path / "a.npy", "--table", "new", code=5)


@pytest.mark.variants(4)
@pytest.mark.parametrize("other", ["other.tier", "other.tier:item", "other.tier/item"])
@pytest.mark.parametrize("do", ["load", "load --dry-run", "keys set"])
def test_a_store_is_no_file_of_rows(run, pair, tmp_path, other, do):
    run("save", pair, tmp_path / "other.tier")
    command = [*do.split(), pair, f"{tmp_path}/{other}", "--table", "item"]
    said = run(*command, code=3).stderr
    assert "store" in said and "not a file of rows or keys: export a table" in said
    assert "tierstore save copies a whole store" in said


def test_a_store_with_a_suffix_of_files_is_no_file_either(run, pair, tmp_path):
    run("save", pair, tmp_path / "other.zarr")
    said = run("load", pair, tmp_path / "other.zarr", "--table", "item", code=3).stderr
    assert "is a store, not a file" in said


def test_a_table_is_no_part_of_the_name_of_a_store(run, pair):
    said = run("inspect", f"{pair}:item", code=3).stderr
    assert f"{pair} is a store, of which a table is chosen by its name: store['item']" in said


def test_load_says_how_it_read_a_text(run, run_json, tmp_path):
    rows = np.random.default_rng(4).normal(size=(5, 3)).astype("f4")
    lines = [f"{n + 10};" + ";".join(map(repr, row)) for n, row in enumerate(rows.tolist())]
    (tmp_path / "f.csv").write_text("item;a;b;c\n" + "\n".join(lines).replace(".", ",") + "\n")
    said = 'header yes, keys from "item", 3 numbers, separator ";", decimal ","'
    found = run("load", tmp_path / "s.tier", tmp_path / "f.csv", "--dry-run")
    assert found.stderr == f"read as: {said}\n"
    assert found.stdout.splitlines()[0] == "5 rows of 3 float32; nothing was loaded"
    assert [line.split()[0] for line in found.stdout.splitlines()[1:]] == ["10", "11", "12"]
    assert not (tmp_path / "s.tier").exists()
    shown = run_json("load", tmp_path / "s.tier", tmp_path / "f.csv", "--dry-run")
    assert np.array_equal(np.array(shown["first"], "f4"), rows[:3])
    assert shown["keys"] == [10, 11, 12] and shown["read_as"] == said

    assert run_json("load", tmp_path / "s.tier", tmp_path / "f.csv")["read_as"] == said
    assert np.array_equal(rows_of(tmp_path / "s.tier", "embeddings"), rows)
    options = ["--sep", ";", "--decimal", ",", "--header", "--key-column", "none"]
    loaded = run_json(
        "load", tmp_path / "t.tier", tmp_path / "f.csv", *options, "--dtype", "float64"
    )
    assert (loaded["dim"], loaded["dtype"], loaded["keys"]) == (4, "float64", False)


def test_load_asks_what_a_text_is(run, tmp_path):
    (tmp_path / "f.csv").write_text("0,1\n0.5,\n")
    said = run("load", tmp_path / "s.tier", tmp_path / "f.csv", code=2).stderr
    assert "--header" in said and "--no-header" in said
    run("load", tmp_path / "s.tier", tmp_path / "f.csv", "--header", code=3)
    run("load", tmp_path / "s.tier", tmp_path / "f.csv", "--header", "--null", "")
    assert np.isnan(rows_of(tmp_path / "s.tier", "embeddings")[0, 1])
    run("load", tmp_path / "s.tier", tmp_path / "f.csv", "--sep", "ab", code=2)


def test_what_is_left_out_is_a_line_on_stderr_and_a_field_of_json(run, run_json, pair, tmp_path):
    said = run("export", pair, tmp_path / "a.npy", "--table", "user", "--dtype", "float16")
    assert (
        said.stderr.startswith("Note: the keys are in a.keys.npy")
        and len(said.stderr.splitlines()) == 1
    )
    options = ["--table", "user", "--dtype", "float32"]
    assert len(run_json("export", pair, tmp_path / "b.npy", *options)["notes"]) == 1
    assert "kept the 20 keys" in run("load", pair, tmp_path / "b.npy", "--table", "user").stderr
    (tmp_path / "f.vec").write_text("a 1.5 2\nb 2.5 3\na 3.5 4\n")
    options = [tmp_path / "new.tier", tmp_path / "f.vec"]
    assert "'a' in rows 0 and 2" in run("load", *options, code=1).stderr
    assert run_json("load", *options, "--duplicates", "last")["rows"] == 2


def test_load_by_key(run, run_json, tmp_path):
    rng = np.random.default_rng(4)
    weight, some = (rng.standard_normal((n, 3)).astype("f4") for n in (5, 2))
    np.savez(tmp_path / "all.npz", weight=weight, keys=np.array(list("abcde")))
    np.savez(tmp_path / "some.npz", weight=some, keys=np.array(["x", "b"]))
    run("load", tmp_path / "s.tier", tmp_path / "all.npz")
    done = run_json("load", tmp_path / "s.tier", tmp_path / "some.npz", "--upsert")
    assert (done["rows"], done["added"]) == (2, 1)
    assert (
        "1 of them new"
        not in run("load", tmp_path / "s.tier", tmp_path / "some.npz", "--upsert").output
    )
    with tierstore.open(tmp_path / "s.tier") as store:
        table = store["embeddings"]
        assert list(table.keys[:]) == list("abcdex")
        expected = np.concatenate([weight, some[:1]])
        expected[1] = some[1]
        assert table.read(np.arange(6)).tobytes() == expected.tobytes()


def test_export_of_several_fields(pair, run, run_json, tmp_path):
    pytest.importorskip("pyarrow")
    out = tmp_path / "both.parquet"
    names = ["weight", "exp_avg"]
    data = run_json("export", pair, out, "--table", "item", "--field", ",".join(names))
    assert data["fields"] == names
    with tierstore.open(pair) as store:
        expected = store["item"].read(np.arange(300), names)
    for name in names:
        run("load", tmp_path / "again.tier", f"{out}:{name}", "--table", name)
        assert np.array_equal(rows_of(tmp_path / "again.tier", name), expected[name])
    run("export", pair, out, "--field", "weight", "--field", "weight", code=2)
    data = run_json("load", tmp_path / "back.tier", out, "--field", ",".join(names))
    assert data["field"] == ",".join(names)
    for name in names:
        again = rows_of(tmp_path / "back.tier", "embeddings", name)
        assert np.array_equal(again, rows_of(pair, "item", name))
    shown = run_json("load", pair, out, "--field", ",".join(names), "--dry-run")
    assert shown["dim"] == data["dim"]


def test_a_load_says_in_words_what_it_did(run, tmp_path):
    np.save(tmp_path / "rows.npy", np.ones((3, 2), np.float32))
    store = tmp_path / "s.tier"
    said = run("load", store, tmp_path / "rows.npy", "--table", "person").stdout
    assert said.startswith("made table person, field weight: 3 rows of 2 float32; ")
    said = run("load", store, tmp_path / "rows.npy").stdout
    assert said.startswith("loaded table person, field weight: 3 rows of 2 float32; ")
    run("init", store, "--rows", 1, "--dim", 1, "--table", "other")
    assert "--table" in run("load", store, tmp_path / "rows.npy", code=1).stderr


@pytest.mark.parametrize("how", [("--key-column", "sku"), ("--keys", "{}:sku")])
def test_the_keys_are_a_column_of_parquet(run, tmp_path, how):
    pa = pytest.importorskip("pyarrow")
    rows = np.random.default_rng(4).random((3, 4), np.float32)
    table = pa.table({"sku": ["a", "b", "c"], "vector": pa.array(list(rows))})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "items.parquet")
    options = [each.format(tmp_path / "items.parquet") for each in how]
    done = run("load", tmp_path / "s.tier", tmp_path / "items.parquet", *options)
    assert "Note" not in done.stderr
    with tierstore.open(tmp_path / "s.tier") as store:
        table = store["embeddings"]
        assert table.read(table.lookup(["b", "c", "a"])).tobytes() == rows[[1, 2, 0]].tobytes()


def test_names_of_columns(run, pair, tmp_path):
    names = ["--rename", "key=who", "--rename", "weight=f{}"]
    run("export", pair, tmp_path / "f.csv", "--table", "user", *names)
    assert (tmp_path / "f.csv").read_text().startswith("who,f0,f1,f2\n")
    run("export", pair, tmp_path / "g.csv", "--table", "user", "--rename", "weight", code=2)


def test_files_of_ranges_of_rows_are_loaded_as_one(run, run_json, tmp_path):
    rows = np.random.default_rng(3).standard_normal((7, 4)).astype("f4")
    files = [tmp_path / f"rows-{n}.npy" for n in range(3)]
    for file, part in zip(files, np.split(rows, [2, 3]), strict=True):
        np.save(file, part)
    assert "7 rows of 4 float32" in run("load", tmp_path / "s.tier", *files, "--dry-run").output
    done = run_json("load", tmp_path / "s.tier", *files)
    assert (done["rows"], done["source"]) == (7, list(map(str, files)))
    assert np.array_equal(rows_of(tmp_path / "s.tier", "embeddings"), rows)


@pytest.mark.parametrize("order", ["C", "letters", "numbers", "given"])
def test_files_as_a_shell_lists_them_are_read_by_their_numbers(run, tmp_path, monkeypatch, order):
    """Row ids of several files follow their numbers; an order that someone chose stays."""
    monkeypatch.chdir(tmp_path)
    names = [f"part-{number}.npy" for number in range(12)]
    for number, name in enumerate(names):
        np.save(name, np.full((2, 1), number, "f4"))
    last_first = [*names[6:], *names[:6]]
    listed = {
        "C": sorted(names),
        "letters": sorted(names, key=lambda name: name.replace(".", "")),  # digits before letters
        "numbers": names,
        "given": last_first,
    }[order]
    said = run("load", "s.tier", *listed).stderr
    wanted = last_first if order == "given" else names
    assert ("in the order of the numbers" in said) == (listed != wanted)
    with tierstore.open("s.tier") as store:
        rows = store["embeddings"].read(np.arange(24))[:, 0]
    assert [f"part-{int(each)}.npy" for each in rows[::2]] == wanted
