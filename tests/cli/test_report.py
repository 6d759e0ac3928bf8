"""tierstore report."""

import numpy as np


def test_a_page_of_a_store(run, run_json, pair, tmp_path):
    page = tmp_path / "r.html"
    data = run_json("report", pair, page, "--table", "user", "--key", "name_7")
    assert data["bytes"] == page.stat().st_size
    assert "name_7" in page.read_text()
    run("report", pair, page, code=1)
    run("report", pair, page, "--force")
    run("report", pair, page, "--force", "--table", "item", "--id", 300, code=1)
    run("report", pair, page, "--force", "--table", "item", code=2)
    run("report", pair, page, "--force", "--id", 3, "--key", "x", code=2)


def test_a_page_with_miss_ratios(run, pair, tmp_path):
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(0, 300, 100_000))
    run("report", pair, tmp_path / "r.html", "--trace", tmp_path / "ids.npy")
    assert "polyline" in (tmp_path / "r.html").read_text()
