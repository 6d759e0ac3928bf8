"""tierstore report."""

import json

import numpy as np
import pytest

import tierstore
from tierstore.stats import History, read_hit_rates


def test_a_page_of_a_store(run, run_json, pair, tmp_path):
    page = tmp_path / "r.html"
    data = run_json("report", pair, page, "--table", "user", "--key", "name_7")
    assert data["bytes"] == page.stat().st_size
    assert "name_7" in page.read_text()
    run("report", pair, page, code=1)
    run("report", pair, page, "--force")
    run("report", pair, page, "--force", "--table", "item", "--id", 300, code=1)
    run("report", pair, page, "--force", "--table", "item")
    assert "item" in page.read_text() and "user" not in page.read_text()
    run("report", pair, page, "--force", "--table", "items", code=1)
    run("report", pair, page, "--force", "--id", 3, "--key", "x", code=2)


def test_a_page_with_miss_ratios(run, pair, tmp_path):
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(0, 300, 100_000))
    run("report", pair, tmp_path / "r.html", "--trace", tmp_path / "ids.npy")
    assert "polyline" in (tmp_path / "r.html").read_text()


def test_a_page_with_the_hits_of_a_run(run, pair, tmp_path):
    """Of a trainer's own history, and of the lines of top beside it."""
    page, hits = tmp_path / "page.html", tmp_path / "hits.jsonl"
    with tierstore.open(pair, budget=tierstore.Budget(host_rows=20)) as store:
        history = History(store["item"])
        for step in range(1, 60):
            store["item"].read(np.random.default_rng(step).integers(0, 30, 10))
            history.sample(step)
        history.save(hits)
    found = read_hit_rates(hits)
    assert (found.unit, list(found.rates)) == ("step", [("item", "host")])
    assert list(zip(found.at, found.rates["item", "host"], strict=True)) == history.hit_rates(
        "host"
    )
    run("report", pair, page, "--history", hits)
    text = page.read_text(encoding="utf-8")
    assert "Hits over the run" in text and "item host" in text and "<circle fill" not in text
    tiers = [{"table": "user", "tier": tier, "hit_rate": 0.5} for tier in ("gpu", "host", "disk")]
    none = [{"table": "user", "tier": "gpu", "hit_rate": None}]
    lines = [{"time": 100 + n, "step": None, "tiers": tiers if n % 2 else none} for n in range(9)]
    hits.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_hit_rates(hits)
    assert (found.unit, found.at) == ("seconds", tuple(range(9)))
    half = (*(None, 0.5) * 4, None)
    assert found.rates == {("user", "gpu"): half, ("user", "host"): half}
    run("report", pair, page, "--history", hits, "--force")
    assert "user gpu" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "{",
        "[1]",
        '{"step": 1, "tiers": []}',
        '{"step": 1}',
        '{"tiers": [{"table": "a", "tier": "host", "hit_rate": 0.5}]}',
        '{"step": 1, "tiers": [{"table": "a", "tier": "host", "hit_rate": 7}]}',
        '{"step": NaN, "tiers": [{"table": "a", "tier": "host", "hit_rate": 0.5}]}',
        (
            '{"step": 1, "tiers": [{"table": "a", "tier": "host", "hit_rate": 0.5}]}\n'
            '{"time": 1, "tiers": []}'
        ),
        "[" * 100_000,
    ],
)
def test_files_without_hits_are_refused(run, pair, tmp_path, text):
    (tmp_path / "hits").write_text(text)
    error = run("report", pair, tmp_path / "x.html", "--history", tmp_path / "hits", code=3).stderr
    assert "hits" in error and not (tmp_path / "x.html").exists()
