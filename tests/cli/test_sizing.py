"""simulate, plan and bench."""

import dataclasses

import numpy as np
import pytest

import tierstore
from tierstore import policy
from tierstore.budget import format_bytes
from tierstore.machine import examine_storage, speeds
from tierstore.sizing import host_for_hits, load_stream, plan, plan_budgets, simulate
from tierstore_cli.printing import sparkline


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def trace(tmp_path):
    """A recorded trace of 30 skewed batches of a table of 2,000 rows."""
    rng = np.random.default_rng(0)
    path = tmp_path / "run.trace"
    specs = {"t": tierstore.TableSpec(rows=2000, dim=4)}
    with tierstore.create(tmp_path / "s.tier", specs) as store, store["t"].record(path):
        for _ in range(30):
            store["t"].read((rng.random(100) ** 3 * 2000).astype(np.int64))
    return path


def test_simulate_shows_every_policy_at_every_size(run, run_json, trace):
    text = run("simulate", trace, "--slots", "5%", "--slots", "500").stdout
    assert "2,000 rows, 30 batches of 100 ids" in text
    assert "OPTIMUM" in text
    assert "missed by lru" in text
    data = run_json("simulate", trace, "--slots", "5%", "--slots", "500", "--policy", "lookahead")
    points = [(point["policy"], point["slots"]) for point in data["points"]]
    assert points == [
        ("lookahead", 100), ("lookahead", 500), ("optimum", 100), ("optimum", 500)
    ]  # fmt: skip
    assert (data["rows"], data["batches"], data["measured_batches"]) == (2000, 30, 15)
    assert all(0 <= point["unique_hit_rate"] <= 1 for point in data["points"])
    assert "optimum" not in run("simulate", trace, "--no-optimum").stdout.lower()


def test_a_single_size_makes_no_curve(run, trace):
    text = run("simulate", trace, "--slots", "5%").stdout
    assert "missed by" not in text and "LRU" in text


def test_simulate_reads_ids_from_files(run_json, tmp_path):
    ids = np.random.default_rng(1).integers(0, 300, 1000)
    np.savez(tmp_path / "a.npz", item=ids, user=ids)
    data = run_json(
        "simulate", tmp_path / "a.npz", "--column", "item", "--batch", 100, "--epochs", 2,
        "--shuffle", "--rows", 400, "--training", "--measured", 1,
    )  # fmt: skip
    assert (data["rows"], data["batches"], data["measured_batches"]) == (400, 20, 20)


def test_simulate_says_what_is_wrong(run, tmp_path):
    assert "not a file" in run("simulate", tmp_path / "none", code=3).output
    np.savez(tmp_path / "a.npz", a=np.arange(3), b=np.arange(3))
    assert "name the one with the ids" in run("simulate", tmp_path / "a.npz", code=1).output
    for size in ("0", "x", "0%", "101%", "-3"):
        assert "Usage" in run("simulate", tmp_path / "a.npz", f"--slots={size}", code=2).output


def test_plan_without_a_trace_says_what_fits(run, run_json):
    options = ["--rows", 100_000, "--dim", 16, "--state", "adam", "--host", "2MB"]
    data = run_json("plan", *options)
    (host,) = data["tiers"]
    assert data["record_bytes"] == 16 * 4 * 3
    assert host["tier"] == "host"
    assert 0 < host["slots"] < 100_000
    assert host["nbytes"] <= 2_000_000
    assert host["hit_rate"] is None
    assert "--trace" in run("plan", *options).stdout


def test_plan_with_a_trace_predicts_rates_and_with_speeds_times(run, run_json, trace, tmp_path):
    options = [
        "--rows", 2000, "--dim", 4, "--host", "30KB", "--trace", trace, "--on", tmp_path,
        "--policy", "lfu",
    ]  # fmt: skip
    data = run_json("plan", *options)
    (host,) = data["tiers"]
    assert 0 < host["unique_hit_rate"] <= 1
    assert data["seconds"] == {}
    assert "tierstore bench" in run("plan", *options).stdout
    run("bench", tmp_path, "--size", "2MiB", "--seconds", 0.01)
    data = run_json("plan", *options, "--gpu", "125KB")
    assert [tier["tier"] for tier in data["tiers"]] == ["gpu", "host"]
    assert data["step_seconds"] == pytest.approx(sum(data["seconds"].values()))
    assert data["seconds"]["disk_reads"] > 0
    text = run("plan", *options).stdout
    assert "ms" in text and "FIRST TOUCH" in text
    faster, slower = (
        run_json("plan", *options, "--gpu", "125KB", "--link", link)["seconds"]["link"]
        for link in ("10GB/s", "1 GB / s")
    )
    assert slower == pytest.approx(10 * faster)


def test_plan_divides_memory_among_the_tables_of_a_store(run, run_json, tmp_path):
    """As opening the store does."""
    path, budget = tmp_path / "s", tierstore.Budget(host="20KiB")
    specs = {f"t{n}": tierstore.TableSpec(100 + n, 16) for n in range(12)}
    specs["wide"] = tierstore.TableSpec(5, 64)
    tierstore.create(path, specs).close()
    data = run_json("plan", path, "--host", "20KiB")
    with tierstore.open(path, budget=budget) as store:
        spaces = store.info().spaces
    assert [space["tables"] for space in data["spaces"]] == [list(each.tables) for each in spaces]
    for space, opened in zip(data["spaces"], spaces, strict=True):
        assert [(each["tier"], each["slots"], each["nbytes"]) for each in space["tiers"]] == [
            (each.tier, each.slots, each.nbytes) for each in opened.tiers
        ]
    assert [space["disk_bytes"] for space in data["spaces"]] == [each.disk_bytes for each in spaces]
    assert sum(each.nbytes for space in spaces for each in space.tiers) <= 20 << 10
    text = run("plan", path, "--host", "20KiB", "--gpu", "1MiB").stdout
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "t0 … t11" in text and " gpu " in text and "100.0 %" in text
    assert "'t0', 't1' and 10 more" in run("plan", path, "--host", "200", code=1).output
    for wrong in ([path, "--rows", 3, "--dtype", "int8"], ["--rows", 3], [], ["--table", "wide"]):
        assert "STORE" in run("plan", *wrong, code=2).output
    assert "no --rows, --dtype" in run("plan", path, "--rows", 3, "--dtype", "int8", code=2).output


def test_plan_knows_the_sizes_of_a_table_of_a_store(run, run_json, tmp_path):
    path, trace = tmp_path / "s", tmp_path / "ids.npy"
    np.save(trace, np.random.default_rng(0).zipf(1.3, 5_000) % 1_000)
    tierstore.create(path, {"item": tierstore.TableSpec(1_000, 16, dtype="float16")}).close()
    sizes = ["--rows", 1_000, "--dim", 16, "--dtype", "float16"]
    ids = ["--trace", trace, "--batch", 100]
    for more in (["--host", "20KB"], ["--hits", "60%"], []):
        told = run_json("plan", *sizes, *ids, *more)
        assert run_json("plan", path, *ids, *more) == told
        assert told["record_bytes"] == 32
    alone = run_json("plan", path, "--table", "item", "--host", "20KB")
    assert alone == run_json("plan", *sizes, "--host", "20KB")
    with tierstore.open(path, "r+") as store:
        store.create_table("user", tierstore.TableSpec(1_000, 4))
    assert "choose one with --table" in run("plan", path, "--trace", trace, code=2).output


def test_plan_refuses_what_cannot_be(run, tmp_path):
    output = run("plan", "--rows", 10**6, "--dim", 4, "--host", "50B", code=1).output
    assert "cannot hold one record" in output
    assert "Usage" in run("plan", "--rows", 10, "--dim", 4, "--host", "lots", code=2).output
    run("plan", "--rows", 10, "--dim", 4, "--on", tmp_path / "none", code=2)


def test_plan_says_what_the_maps_of_a_large_table_take(run):
    sizes = ["--rows", "100_000_000_000", "--dim", 2]
    said = run("plan", *sizes, "--host", "1TB").output
    assert "of the host budget are maps" in said
    assert "maps" not in run("plan", "--rows", 10**6, "--dim", 128, "--host", "500MB").output


def test_bench_says_where_it_cannot_keep_the_figures(run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said = run("bench", tmp_path, "--size", "2MiB", "--seconds", 0.01).stderr
    assert "XDG_CACHE_HOME" in said


def test_bench_measures_the_machine_and_keeps_the_figures(run, run_json, tmp_path):
    data = run_json("bench", tmp_path, "--size", "2MiB", "--seconds", 0.01)
    batches = ("warm", "hot", "leased", "hot_leased", "cached", "missed", "cold")
    for name, value in data["speeds"].items():
        if name in batches:
            assert len(value["counts"]) == len(value["seconds"]) > 1
            assert value["counts"] == sorted(set(value["counts"]))
            assert min(value["counts"] + value["seconds"]) > 0
        else:
            assert value is None or value > 0
    assert {*batches, "committed_rows"} <= set(data["speeds"])
    assert [each["name"] for each in data["tierstore"]] == [
        "rows from memory", "rows from the page cache",
            "cold rows from the disk", "changed rows committed",
    ]  # fmt: skip
    assert all(each["ratio"] > 0 for each in data["tierstore"])
    assert all(0 < each["slow"] <= each["reached"] <= each["fast"] for each in data["tierstore"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    assert (
        "random reads of 4 KiB"
        in run("bench", tmp_path, "--size", "2MiB", "--seconds", 0.01).stdout
    )
    assert "at least" in run("bench", tmp_path, "--size", "10", code=1).output


def test_a_sparkline_has_a_block_for_each_value():
    assert sparkline([0, 0.01, 0.5, 1]) == " ▁▄█"
    assert sparkline([5, 10], top=10) == "▄█"


def test_simulate_and_plan_draw_what_they_print(run, trace, tmp_path):
    run("simulate", trace, "--slots", "5%", "--plot", tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text(encoding="utf-8").startswith("<svg ")
    table = ("--rows", 2000, "--dim", 4, "--host", "20kB", "--trace", trace)
    assert "no times" in run("plan", *table, "--plot", tmp_path / "t.svg", code=1).output
    speeds.measure(".", file_bytes=1 << 20, seconds=0.01)
    run("plan", *table, "--plot", tmp_path / "t.svg")
    assert "reading from disk" in (tmp_path / "t.svg").read_text(encoding="utf-8")
    said = run("simulate", trace, "--plot", tmp_path / "x.png", code=1).output
    assert "a plot is an .svg file" in said and not (tmp_path / "x.png").exists()


def test_plan_shows_what_several_sizes_would_do(run, run_json, trace):
    options = ["--rows", 2000, "--dim", 4, "--trace", trace]
    found = run_json("plan", *options)["budgets"]
    said = run("plan", *options).output
    assert [each["tiers"][0]["slots"] for each in found][:5] == [20, 40, 100, 200, 400]
    for each in found:
        host = each["tiers"][0]["nbytes"] + each["index_bytes"]
        assert run_json("plan", *options, "--host", host)["tiers"] == each["tiers"]
        assert f"{each['tiers'][0]['slots']:,}" in said
    assert "budgets" not in run_json("plan", *options, "--hits", "40%")


def test_plan_shows_the_budget_of_each_size(run, run_json, trace):
    """The memory to give to open, the index of changed rows included."""
    options = ["--rows", 2000, "--dim", 4, "--trace", trace]
    lines = run("plan", *options).stdout.splitlines()
    (head,) = (at for at, line in enumerate(lines) if line.split()[:1] == ["HOST"])
    for each, line in zip(run_json("plan", *options)["budgets"], lines[head + 1 :], strict=False):
        host = each["tiers"][0]["nbytes"] + each["index_bytes"]
        assert each["index_bytes"] > 0 and format_bytes(host) in line, line


def test_plan_for_reading_finds_the_memory_for_a_hit_rate_of_reads(run_json, trace):
    """Reads keep fewer rows than leases, so that they need another budget."""
    options = ["--rows", 2000, "--dim", 4, "--trace", trace, "--hits", "40%"]
    options += ["--policy", "lookahead"]
    found = run_json("plan", *options, "--reading")
    stream = load_stream(trace, rows=2000)
    asked = [
        host_for_hits(2000, 16, stream, 0.4, policy=policy.lookahead(), training=training)
        for training in (False, True)
    ]
    assert asked[0] != asked[1]
    assert found["tiers"][0]["nbytes"] + found["index_bytes"] == asked[0]


def test_a_link_that_is_given_replaces_what_was_measured_of_one(run_json, trace, tmp_path):
    took = speeds.BatchTimes((1, 1000), (1e-3, 2e-3))
    limits = speeds.Speeds(1e9, 1e7, 1e9, 1e5, 1e9, 1e3, 1e10)
    measured = dataclasses.replace(
        limits, gpu_warm=took, gpu_leased=took, gpu_missed=took, gpu_lease_missed=took
    )
    speeds.save_speeds(tmp_path, measured)
    options = ["--rows", 2000, "--dim", 4, "--host", "30KB", "--gpu", "125KB", "--trace", trace]
    for mode in ([], ["--reading"]):
        faster, slower = (
            run_json("plan", *options, *mode, "--on", tmp_path, "--link", link)["seconds"]["link"]
            for link in ("10GB/s", "1GB/s")
        )
        assert slower == pytest.approx(10 * faster) and faster > 0, mode


def test_bench_takes_no_more_of_the_disk_than_there_is(run, tmp_path, monkeypatch):
    """A file and a store, of the size each."""
    disk = examine_storage(tmp_path)
    monkeypatch.setattr(
        "tierstore_cli.commands.bench.examine_storage",
        lambda _: dataclasses.replace(disk, free_bytes=3 << 20),
    )
    assert "takes twice as much" in run("bench", tmp_path, "--size", "2MiB", code=2).stderr
    assert [each.name for each in tmp_path.iterdir()] == []


def test_plan_names_the_disk_that_is_not_measured(run, trace, tmp_path):
    options = ["--rows", 2000, "--dim", 4, "--trace", trace]
    assert f"tierstore bench {tmp_path}\n" in run("plan", *options, "--on", tmp_path).output
    assert "tierstore bench\n" in run("plan", *options).output


def test_what_no_tier_can_hit_is_said(run, run_json, trace):
    data = run_json("simulate", trace)
    best = max(point["unique_hit_rate"] for point in data["points"])
    assert 0 < data["first_touch_rate"] <= 1 - best + 1e-9
    said = f"{100 * data['first_touch_rate']:.1f} % of the distinct rows are asked for the first"
    assert said in run("simulate", trace).output


def test_progress_is_told_of_every_batch(trace, monkeypatch):
    stream, seen = load_stream(trace), []
    batches = len(stream.batches)
    plan(2000, 16, host=30_000, stream=stream, progress=lambda *done: seen.append(done))
    assert seen == [(number + 1, batches) for number in range(batches)]
    seen.clear()
    simulate(stream, sizes=(0.1, 0.2), progress=lambda *done: seen.append(done))
    assert seen == [(number + 1, 6 * batches) for number in range(6 * batches)]
    seen.clear()
    plan_budgets(2000, 16, stream, shares=(0.1, 0.2), progress=lambda *done: seen.append(done))
    assert seen == [(number + 1, 2 * batches) for number in range(2 * batches)]


def test_plan_finds_the_memory_for_a_hit_rate(run, run_json, trace):
    options = ["--rows", 2000, "--dim", 4, "--trace", trace]
    (host,) = run_json("plan", *options, "--hits", "40%")["tiers"]
    assert 0.4 <= host["hit_rate"] < 0.6
    assert (host,) == tuple(run_json("plan", *options, "--hits", "0.4")["tiers"])
    run("plan", *options, "--hits", "99.9%", code=1)
    for wrong in ("0", "101%", "many"):
        run("plan", *options, "--hits", wrong, code=2)
    run("plan", *options, "--hits", "40%", "--host", "1MB", code=2)
    run("plan", "--rows", 2000, "--dim", 4, "--hits", "40%", code=2)


@pytest.mark.parametrize("sizing", [("--hits", "40%"), ("--host", "31000")])
def test_a_plan_prints_the_budget_that_gives_its_slots(run, run_json, trace, sizing):
    options = ["--rows", 2000, "--dim", 4, "--trace", trace, *sizing]
    found = run_json("plan", *options)
    assert f'budget="{found["budget"]["host"]}"' in run("plan", *options).output
    with tierstore.open(trace.parent / "s.tier", budget=found["budget"]["host"]) as store:
        (host,) = (each for each in store.info().tables[0].tiers if each.tier == "host")
    planned = found["tiers"][0]["slots"]
    assert planned <= host.slots <= 1.05 * planned


def test_numbers_are_written_as_people_write_them(run_json, trace):
    sizes = ["--rows", "2k", "--batch", "1e2"]
    assert run_json("plan", "--dim", 4, "--trace", trace, *sizes)["rows"] == 2000
    found = run_json("simulate", trace, *sizes, "--slots", "1k")
    assert (found["rows"], found["points"][0]["slots"]) == (2000, 1000)
