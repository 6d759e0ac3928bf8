"""tierstore inspect."""

import io
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import tierstore

STORE_KEYS = [
    *("store", "format", "uuid", "version", "step", "folded", "tables", "spaces"),
    *("keep", "names", "payload", "writer", "allocated_bytes"),
]
TABLE_KEYS = [
    "name",
    "rows",
    "dim",
    "dtype",
    "fields",
    "backend",
    "record_bytes",
    "disk_bytes",
    "delta_rows",
    "delta_bytes",
    "allocated_bytes",
    "keys",
    "sparse",
    "compression",
    "capacity",
    "added",
]
STATS_KEYS = ["field", "rows_read", "zero_rows", "nan_rows", "inf_rows", "norm", "histogram"]


def test_json_is_what_the_contract_says(run_json, pair):
    data = run_json("inspect", pair)
    assert list(data) == STORE_KEYS
    assert data["store"] == str(pair) and data["version"] == 3 and data["step"] == 7
    assert data["format"] == 2 and data["folded"] is False
    assert re.fullmatch("[0-9a-f]{32}", data["uuid"])
    item, user = data["tables"]
    assert list(item) == list(user) == TABLE_KEYS
    init = tierstore.normal(std=1.0, seed=1).bound("item", (300, 8)).text
    assert item["fields"] == [
        {"name": "weight", "dim": 8, "dtype": "float32", "init": init},
        {"name": "exp_avg", "dim": 8, "dtype": "float32", "init": None},
    ]
    assert (item["name"], item["rows"], item["dim"], item["dtype"]) == ("item", 300, 8, "float32")
    assert item["record_bytes"] == 64 and item["delta_rows"] == 5
    assert type(item["disk_bytes"]) is int and item["disk_bytes"] >= 300 * 64
    assert item["delta_bytes"] >= 5 * 64
    assert (user["backend"], user["dtype"], user["delta_rows"]) == ("zarr", "bfloat16", 0)


def test_tables_that_share_tiers_are_named_together(run, run_json, tmp_path):
    names = [f"column_{number}" for number in range(15)]
    specs = {name: tierstore.TableSpec(3 + number, 4) for number, name in enumerate(names)}
    tierstore.create(tmp_path / "s", specs | {"wide": tierstore.TableSpec(5, 64)}).close()
    shared, alone = run_json("inspect", tmp_path / "s")["spaces"]
    assert shared["tables"] == names and alone["tables"] == ["wide"]
    assert (shared["rows"], shared["record_bytes"], alone["record_bytes"]) == (150, 16, 256)
    assert shared["disk_bytes"] >= 150 * 20 and shared["delta_rows"] == shared["delta_bytes"] == 0
    text = run("inspect", tmp_path / "s").stdout
    listed = text[text.index("tiers are shared by") : text.index("open it without")]
    assert listed.replace("\n ", "").split("shared by ")[1].strip() == ", ".join(names)
    assert max(map(len, listed.splitlines())) <= 80
    (only,) = run_json("inspect", tmp_path / "s", "--table", "wide")["spaces"]
    assert only == alone


def test_a_thousand_tables_are_readable(run, run_json, tmp_path):
    specs = {f"a_long_name_of_column_{n}": tierstore.TableSpec(2, 4) for n in range(60)}
    specs |= {f"wide_{n}": tierstore.TableSpec(70_000, 64, sparse=True) for n in range(2)}
    with tierstore.create(tmp_path / "s", specs) as store:
        store["wide_1"].write([3, 5], np.ones((2, 64), np.float32))
        store.commit()
        assert len(str(store.info()).splitlines()) == 5
    lines = run("inspect", tmp_path / "s").stdout.splitlines()
    assert len(lines) < 10
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    assert re.search(r"a_long_name… … a_long_name… +60 +120 +16 B ", lines[2])
    assert re.search(r"wide_0 … wide_1 +2 +140,000 +256 B .* 2$", lines[3])
    data = run_json("inspect", tmp_path / "s")
    assert [table["name"] for table in data["tables"]] == list(specs)
    assert [len(space["tables"]) for space in data["spaces"]] == [60, 2]


def test_text(run, pair):
    text = run("inspect", pair).stdout
    assert "version 3" in text and "step 7" in text and "not folded" in text
    assert re.search(r"item +300 +8 +float32 +exp_avg .* 5 +64 B +memmap\n", text)
    assert f"tierstore fold {pair}" in text


def test_one_table(run_json, pair):
    data = run_json("inspect", pair, "--table", "user")
    assert [table["name"] for table in data["tables"]] == ["user"]


def test_an_unknown_table_or_field(run, pair):
    assert "item, user" in run("inspect", pair, "--table", "elsewhere", code=1).stderr
    said = run("inspect", pair, "--table", "item", "--range", "0:2", "--field", "nothing", code=1)
    assert "exp_avg" in said.stderr


def test_versions(run, run_json, pair):
    versions = run_json("inspect", pair, "--versions")["versions"]
    assert [each["version"] for each in versions] == [2, 3]
    assert set(versions[0]) == {
        "version", "step", "seq", "delta_rows", "delta_bytes", "names", "payload",
            "time", "written_rows", "written_bytes", "tables",
    }  # fmt: skip
    assert versions[1]["step"] == 7 and versions[1]["delta_rows"] == 5
    assert re.search(
        r"^ +3  [-0-9]+ [:0-9]+ +7 +5 ", run("inspect", pair, "--versions").stdout, re.MULTILINE
    )


def test_a_version_is_shown_as_it_was(run, run_json, pair):
    with tierstore.open(pair, version=2) as store:
        rows = store["item"].read(range(2, 6)).tolist()
    shown = run_json("inspect", pair, "--version", 2, "--table", "item", "--range", "2:6")
    assert shown["version"] == 2
    assert [row["values"] for row in shown["rows"]["rows"]] == rows
    assert "are: 2, 3" in run("inspect", pair, "--version", 9, code=1).output


def test_rows(run, run_json, pair):
    with tierstore.open(pair) as store:
        weights = store["item"].read(range(2, 6))
        moments = store["item"].read([299], field="exp_avg")
    shown = run_json("inspect", pair, "--table", "item", "--range", "2:6")["rows"]
    assert (shown["table"], shown["field"]) == ("item", "weight")
    assert [row["id"] for row in shown["rows"]] == [2, 3, 4, 5]
    assert [row["key"] for row in shown["rows"]] == [None] * 4
    assert np.array_equal(np.array([row["values"] for row in shown["rows"]], "f4"), weights)
    last = run_json("inspect", pair, "--table", "item", "--range", "299:", "--field", "exp_avg")
    assert np.array_equal(np.array([last["rows"]["rows"][0]["values"]], "f4"), moments)
    text = run("inspect", pair, "--table", "item", "--range", "3:4").stdout
    assert f"{weights[1, 0]:.6g}" in text


def test_rows_with_keys_and_of_many_elements(run, run_json, pair, single):
    shown = run_json("inspect", pair, "--table", "user", "--range", "5:7")["rows"]["rows"]
    assert [row["key"] for row in shown] == ["name_5", "name_6"]
    assert "name_5" in run("inspect", pair, "--table", "user", "--range", "5:7").stdout
    assert "… 16" in run("inspect", single, "--range", ":2").stdout


def test_more_rows_than_are_read_at_once(run, tmp_path):
    spec = tierstore.TableSpec(1100, 2, init=tierstore.normal(seed=5))
    tierstore.create(tmp_path / "s.tier", {"t": spec}).close()
    lines = run("inspect", tmp_path / "s.tier", "--range", "10:").stdout.splitlines()
    ids = [int(line.split()[0]) for line in lines if line.split() and line.split()[0].isdecimal()]
    assert ids == list(range(10, 1100))


def test_rows_that_are_not_finite(run, run_json, single):
    with tierstore.open(single, "r+") as store:
        row = np.full((1, 16), 0.5, "f4")
        row[0, :3] = np.nan, np.inf, -np.inf
        store["embeddings"].write([1], row)
        store.commit()
    (shown,) = run_json("inspect", single, "--range", "1:2")["rows"]["rows"]
    assert shown["values"][:4] == [None, None, None, 0.5]
    assert "nan" in run("inspect", single, "--range", "1:2").stdout


@pytest.mark.parametrize("rows", ["0:301", "300:", "400:500"])
def test_rows_out_of_range(run, pair, rows):
    assert "0:300" in run("inspect", pair, "--table", "item", "--rows", rows, code=1).stderr


def test_which_table_must_be_said_where_it_matters(run, pair):
    assert "item, user" in run("inspect", pair, "--range", "0:1", code=2).stderr


def write_odd_rows(path):
    """Make a store whose rows are known: 1,000 of norm 5, then zero, NaN and infinite ones."""
    rows = np.tile(np.array([3, 0, 4, 0], "f4"), (1006, 1))
    rows[1000:1003] = 0
    rows[1003:1005, 2] = np.nan
    rows[1004, 1] = rows[1005, 1] = -np.inf  # a row with a NaN, too, counts once
    with tierstore.create(path, {"t": tierstore.TableSpec(1006, 4)}) as store:
        store["t"].write(np.arange(1006), rows)
        store.commit()


@pytest.mark.parametrize("options", [[], ["--full"]])
def test_stats(run, run_json, tmp_path, options):
    write_odd_rows(tmp_path / "odd.tier")
    (table,) = run_json("inspect", tmp_path / "odd.tier", "--stats", *options)["tables"]
    stats = table["stats"]
    assert list(stats) == STATS_KEYS
    assert stats["rows_read"] == 1006
    assert (stats["zero_rows"], stats["nan_rows"], stats["inf_rows"]) == (3, 2, 1)
    assert stats["norm"] == {"min": 0, "p1": 5, "p50": 5, "p99": 5, "max": 5}
    assert sum(stats["histogram"]) == 1003
    text = run("inspect", tmp_path / "odd.tier", "--stats", *options).stdout
    assert "zero 3  nan 2  inf 1" in text and "p50 5" in text and "█" in text


def test_stats_against_numpy(run_json, pair):
    with tierstore.open(pair) as store:
        for name, field in (("item", "exp_avg"), ("user", "weight")):
            table = store[name]
            norms = np.linalg.norm(
                table.read(np.arange(table.rows), field=field).astype("f8"), axis=1
            )
            data = run_json("inspect", pair, "--table", name, "--field", field, "--stats")
            stats = data["tables"][0]["stats"]
            expected = np.percentile(norms, [0, 1, 50, 99, 100])
            assert np.allclose(list(stats["norm"].values()), expected)
            assert stats["zero_rows"] == int((norms == 0).sum())


def test_stats_of_rows_none_of_which_is_finite(run, run_json, tmp_path):
    spec = tierstore.TableSpec(2, 4, init=tierstore.from_array(np.full((2, 4), np.nan, "f4")))
    tierstore.create(tmp_path / "nan.tier", {"t": spec}).close()
    (table,) = run_json("inspect", tmp_path / "nan.tier", "--stats")["tables"]
    assert table["stats"]["norm"]["p50"] is None
    assert "p50 –" in run("inspect", tmp_path / "nan.tier", "--stats").stdout


def test_stats_sample_many_rows(run, run_json, tmp_path):
    path = tmp_path / "many.tier"
    run("init", path, "--rows", 150_000, "--dim", 4, "--init", "normal(0,1)")
    (table,) = run_json("inspect", path, "--stats")["tables"]
    assert table["stats"]["rows_read"] == 100_000
    (full,) = run_json("inspect", path, "--stats", "--full")["tables"]
    assert full["stats"]["rows_read"] == 150_000
    assert abs(full["stats"]["norm"]["p50"] - table["stats"]["norm"]["p50"]) < 0.05
    assert "100,000 of 150,000 rows" in run("inspect", path, "--stats").stdout


def opened_by_the_printed_lines(lines):
    """Run the lines in a process that has only NumPy and zarr; return their rows."""
    code = f"""
import sys
sys.modules["tierstore"] = None
import numpy as np
if "zarr." in {"".join(lines)!r}:
    import zarr
found = []
"""
    code += "".join(f"rows = {line}\nfound.append(np.array(rows))\n" for line in lines)
    code += "np.savez(sys.stdout.buffer, *found)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    with np.load(io.BytesIO(done.stdout)) as found:
        return [found[f"arr_{number}"] for number in range(len(lines))]


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_the_printed_line_opens_the_table(run, tmp_path, backend):
    weight = tierstore.Field(8, init=tierstore.normal(seed=4))
    tables = {
        "one field": {"weight": weight},
        "padded": {"weight": tierstore.Field(3, init=tierstore.normal(seed=4))},
        "state": {"weight": weight, "sum": tierstore.Field(2)},
        "mixed": {"weight": weight, "sum": tierstore.Field(2, "float16")},
        "bfloat16": {"weight": tierstore.Field(8, "bfloat16", init=tierstore.normal(seed=4))},
    }
    lines, expected = [], []
    for kind, fields in tables.items():
        path = tmp_path / f"it's {kind}.tier"
        spec = tierstore.TableSpec(40, fields=fields, backend=backend)
        with tierstore.create(path, {"t": spec}) as store:
            expected.append(store["t"].read(np.arange(40)))
        printed = run("inspect", path).stdout
        lines += re.findall(r"^  ((?:np|zarr)\.\S.*)$", printed, re.MULTILINE)
    for kind, line, rows, true in zip(
        tables, lines, opened_by_the_printed_lines(lines), expected, strict=True
    ):
        if kind == "bfloat16":
            assert "bits" in line
            rows = (rows.astype("u4") << 16).view("f4")
        assert np.array_equal(rows, true), kind


@pytest.mark.fault(71)
def test_names_from_files_are_escaped(run, pair):
    with tierstore.open(pair, "r+") as store:
        store.set_keys("user", ["\x1b[31mred\n", *(f"{n}" for n in range(19))])
    result = run("inspect", pair, "--table", "user", "--range", "0:1")
    assert "\\x1b[31mred\\n" in result.stdout and "\x1b" not in result.stdout


@pytest.mark.parametrize("command", ["inspect", "verify", "fold"])
@pytest.mark.fault(66)
def test_what_is_not_a_store(run, tmp_path, single, command):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    half = tmp_path / "half.tier"
    half.mkdir()
    (half / "STORE.json").write_bytes((single / "STORE.json").read_bytes())
    for name in ("empty", "file", "half.tier", "missing"):
        assert name in run(command, tmp_path / name, code=3).stderr
    assert "remove it" in run(command, half, code=3).stderr


@pytest.mark.parametrize("options", [["--full"], ["--field", "weight"], ["--field", "nope"]])
def test_options_that_say_nothing_are_refused(run, single, options):
    assert "--stats" in run("inspect", single, *options, code=2).stderr


def test_sizes_are_apparent_and_real_and_keys_are_named(run, run_json, tmp_path):
    spec = tierstore.TableSpec(200_000, 64, sparse=True)
    with tierstore.create(tmp_path / "s.tier", {"t": spec}) as store:
        store.set_keys("t", range(200_000))
    (table,) = run_json("inspect", tmp_path / "s.tier")["tables"]
    assert table["disk_bytes"] == 200_000 * (64 * 4 + 4)
    assert 0 < table["allocated_bytes"] < table["disk_bytes"] // 4
    assert (table["keys"], table["sparse"], table["compression"]) == ("int64", True, None)
    text = run("inspect", tmp_path / "s.tier").stdout
    assert ", real " in text and "int64" in text


def test_versions_have_times(run, run_json, pair):
    versions = run_json("inspect", pair, "--versions")["versions"]
    assert all(each["time"] > 1e9 for each in versions)
    assert "TIME (UTC)" in run("inspect", pair, "--versions").stdout


def test_what_is_around_a_version(run, run_json, pair):
    """Its payload, the versions that are kept by name, and who writes."""
    with tierstore.open(pair, "r+", keep=5) as store:
        store.commit(step=8, payload={"model": b"abc", "notes": {"loss": 0.25}})
        store.keep(store.version, "best")
        data, text = run_json("inspect", pair), run("inspect", pair).stdout
        assert (data["keep"], data["names"], data["payload"]) == (5, ["best"], ["model", "notes"])
        assert data["writer"] == f"this very process, pid {os.getpid()}"
        assert "payload: model, notes\nkept by name: best\nopen for writing by this very" in text
        assert store.info().writer == data["writer"]
    assert run_json("inspect", pair)["writer"] is None
    assert "open for writing" not in run("inspect", pair).stdout


def test_who_writes_is_read_without_taking_the_lock(pair, monkeypatch):
    from tierstore._io import system

    def refused(*_):
        raise AssertionError

    with tierstore.open(pair) as reader, monkeypatch.context() as patch:
        patch.setattr(system.calls, "flock", refused)
        assert reader.info().writer is None


def test_rows_in_json_are_written_as_they_are_read(single, monkeypatch):
    """The least that is read is a block; a reader that has seen enough ends the rest."""
    from tierstore_cli.shown_rows import rows_data

    with tierstore.open(single, "r+") as store:
        store.grow("embeddings", 5000)
        read, table = [], store["embeddings"]
        monkeypatch.setattr(type(table), "read", spied(type(table).read, read))
        rows = rows_data(table, ["weight"], range(5000))["rows"]
        assert sum(read) <= 1024 + 2
        values = [row["values"] for row in rows]
        assert sum(read) >= 5000
        assert np.array_equal(np.array(values, "f4"), table[:])


def spied(read, seen):
    def spy(table, ids, *given, **options):
        seen.append(len(ids))
        return read(table, ids, *given, **options)

    return spy


def test_what_delta_counts_is_said(run):
    assert "DELTA counts row writes" in " ".join(run("inspect", "--help").stdout.split())


def du(path):
    return sum(each.lstat().st_blocks * 512 for each in [path, *path.rglob("*")])


def test_what_a_store_takes_beside_its_data_and_how_to_get_it_back(run, run_json, tmp_path):
    path = tmp_path / "a store.tier"
    with tierstore.create(path, {"t": tierstore.TableSpec(8_000, 64)}, keep=3) as store:
        for step in range(4):
            store["t"].write(np.arange(4_000), np.full((4_000, 64), step, "f4"))
            store.commit(step=step, keep="best" if step == 1 else None)
    data = run_json("inspect", path)
    (table,) = data["tables"]
    assert data["allocated_bytes"] == du(path) > table["disk_bytes"] + 3 * 4_000 * 64 * 4
    text = run("inspect", path).stdout
    assert re.search(r" of data, [\d.]+ MiB on disk\n", text)
    assert re.search(r"beside the data: [\d.]+ \w+ of commits not yet folded", text)
    assert f"`tierstore release '{path}' best`, then `tierstore fold '{path}'` gives it" in text
    assert "beside the data" not in run("inspect", path, "--version", "best").stdout

    run("release", path, "best")
    run("fold", path)
    assert run_json("inspect", path)["allocated_bytes"] == du(path) < 1.1 * table["disk_bytes"]
    assert "beside the data" not in run("inspect", path).stdout


def test_older_versions_take_space_of_a_folded_table(run, run_json, tmp_path):
    """A table that was loaded again is folded, and the rows before it are those of a version."""
    np.save(tmp_path / "rows.npy", np.ones((20_000, 16), "f4"))
    path = tmp_path / "s.tier"
    for _ in range(2):
        run("load", path, tmp_path / "rows.npy", "--table", "t")
    text = run("inspect", path).stdout
    assert " · folded · " in text
    assert re.search(r"beside the data: 1\.\d MiB of \d older versions?\n`tierstore fold ", text)
    run("fold", path)
    assert "beside the data" not in run("inspect", path).stdout
    assert run_json("inspect", path)["allocated_bytes"] < 1.6e6
