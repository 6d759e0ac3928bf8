"""tierstore top: what a trainer does to a store."""

import json
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest

import tierstore
from tierstore.errors import FormatError
from tierstore.stats import read_prometheus, write_prometheus


def test_a_screen_of_the_store_alone(run, run_json, pair):
    data = run_json("top", pair, "--count", 1)
    assert (data["version"], data["step"], data["tiers"]) == (3, 7, [])
    assert 0 <= data["age_seconds"] < 3600
    assert [each["name"] for each in data["tables"]] == ["item", "user"]
    text = run("top", pair, "--count", 1).stdout
    assert "version 3" in text and "NOT FOLDED" in text


def test_rates_between_two_screens(run, single, tmp_path, monkeypatch):
    metrics, table = tmp_path / "t.prom", "embeddings"
    with tierstore.open(single, "r+", budget=tierstore.Budget(host_rows=20)) as store:
        store[table].read(np.arange(10))
        write_prometheus(store, metrics)
        found = read_prometheus(metrics)
        assert found["requested_total", table, "host"] == store[table].stats()["host"].requested
        assert found["version", "", ""] == 1

        clock = [0.0]

        def train(seconds):  # between the screens, in the time that they are apart
            assert seconds == 5
            clock[0] += 5
            if clock[0] > 5:  # a new trainer, which counts from 0
                text = metrics.read_text(encoding="utf-8")
                metrics.write_text(
                    re.sub(r"^(tierstore_\w+_total\{.*\}) .*", r"\1 1", text, flags=re.M)
                )
                return
            store[table].read(np.arange(10))  # 11 rows with the one that is written
            store[table].write([1], np.ones((1, 16), "f4"))
            store.commit(step=2)
            write_prometheus(store, metrics)

        fake = SimpleNamespace(sleep=train, monotonic=lambda: clock[0], time=time.time)
        monkeypatch.setattr("tierstore_cli.commands.top.time", fake)
        options = ["--metrics", metrics, "--every", 5, "--count", 3]
        lines = run("top", single, *options, "--json").stdout.splitlines()
    first, second, third = map(json.loads, lines)
    assert (first["version"], second["version"], second["step"]) == (1, 2, 2)
    host = [
        next(each for each in data["tiers"] if each["tier"] == "host")
        for data in (first, second, third)
    ]
    assert host[0]["rows_per_second"] is None and host[0]["hit_rate"] is None
    assert host[1]["rows_per_second"] == 11 / 5 and host[1]["hit_rate"] == 1.0
    assert host[2]["rows_per_second"] is None and host[2]["hit_rate"] is None


def test_files_without_figures_are_refused(run, single, tmp_path):
    (tmp_path / "x.prom").write_text("node_load1 3\n")
    with pytest.raises(FormatError):
        read_prometheus(tmp_path / "x.prom")
    run("top", single, "--metrics", tmp_path / "x.prom", "--count", 1, code=3)
    run("top", single, "--metrics", tmp_path / "none.prom", "--count", 1, code=6)
