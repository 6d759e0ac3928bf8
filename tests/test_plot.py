"""Plots: they show the measured values, and are written completely or not at all."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

import tierstore
from tierstore import plot
from tierstore.errors import InvalidInputError, StoreFullError
from tierstore.machine.speeds import Speeds
from tierstore.sizing import plan, simulate, stream_of
from tierstore.stats import History

SPEEDS = Speeds(1e10, 1e6, 1e9, 1e5, 5e8, 100, None)
LEFT, RIGHT, TOP, BASE = 56, 620, 12, 212
"""Where curves begin and end."""
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def stream():
    rng = np.random.default_rng(0)
    return stream_of([(rng.random(100) ** 3 * 900).astype(np.int64) for _ in range(40)], 1000)


@pytest.fixture
def history(tmp_path):
    spec = tierstore.TableSpec(300, 8, init=tierstore.uniform(-1, 1, seed=0))
    budget = tierstore.Budget(host_rows=100)
    with tierstore.create(tmp_path / "s.tier", {"t": spec}, budget=budget) as store:
        history = History(store["t"])
        rng = np.random.default_rng(1)
        for step in range(1, 8):
            ids = rng.integers(0, 300, 60)
            store["t"].read(ids)
            store["t"].write(ids[:9], rng.standard_normal((9, 8)).astype(np.float32))
            history.sample(step)
        store.rollback()
        return history


def texts(path) -> list[str]:
    return [each.text for each in ElementTree.parse(path).iter(f"{SVG}text")]


def curves(path) -> dict[str, list[tuple[float, float]]]:
    """The curves of a chart by name, from 0 to 1 on both axes."""
    root = ElementTree.parse(path).getroot()
    names = [each for each in root.iter(f"{SVG}text") if "fill:" in each.get("style", "")]
    found = {}
    for name, line in zip(names, root.iter(f"{SVG}polyline"), strict=True):
        assert line.get("stroke") in name.get("style")
        dots = [map(float, dot.split(",")) for dot in line.get("points").split()]
        found[name.text] = [
            ((x - LEFT) / (RIGHT - LEFT), (BASE - y) / (BASE - TOP)) for x, y in dots
        ]
    return found


def test_miss_ratios(stream, tmp_path):
    found = simulate(stream, sizes=(0.5, 20, 0.1))
    plot.miss_ratios(found, tmp_path / "curve.svg")
    shown = curves(tmp_path / "curve.svg")
    assert list(shown) == ["lru", "lfu", "optimum", "first touches"]
    for _, y in shown.pop("first touches"):
        assert y == pytest.approx(found.first_touch_rate, abs=1e-3)
    places = [math.log(share / 0.02) / math.log(0.5 / 0.02) for share in (0.02, 0.1, 0.5)]
    for policy, points in shown.items():
        by_size = sorted(found.curve(policy), key=lambda point: point.slots)
        expected = [(x, 1 - p.unique_hit_rate) for x, p in zip(places, by_size, strict=True)]
        assert np.allclose(points, expected, atol=1e-3), policy
    assert {"2 %", "50 % of 1,000 rows"} <= set(texts(tmp_path / "curve.svg"))
    plot.miss_ratios(simulate(stream, sizes=[20]), tmp_path / "one.svg")


def test_hit_rates_and_occupancy(history, tmp_path):
    plot.hit_rates(history, tmp_path / "hits.svg")
    plot.occupancy(history, tmp_path / "full.svg")
    expected = [((step - 1) / 6, rate) for step, rate in history.hit_rates("host")]
    assert np.allclose(curves(tmp_path / "hits.svg")["host"], expected, atol=1e-3)
    shown = curves(tmp_path / "full.svg")
    for name, of in (("used", lambda o: o.used), ("changed", lambda o: o.dirty)):
        full = [(each.step / 7, of(each.occupancy["host"]) / 100) for each in history.samples]
        assert np.allclose(shown[f"host: {name}"], full, atol=1e-3)
        assert max(y for _, y in full) > 0
    del history.samples[1:]
    with pytest.raises(InvalidInputError, match="no requests"):
        plot.hit_rates(history, tmp_path / "none.svg")


def test_row_heat(stream, tmp_path):
    plot.heat(stream, tmp_path / "heat.svg")
    counts = np.zeros(1000)
    for batch in stream.batches:
        counts[batch.rows] += batch.counts
    plot.heat(counts, tmp_path / "heat2.svg")
    assert (tmp_path / "heat.svg").read_text() == (tmp_path / "heat2.svg").read_text()
    ranked = np.sort(counts[counts > 0])[::-1]
    of_row, share = curves(tmp_path / "heat.svg").values()
    assert of_row[0] == pytest.approx((0, 1)) and of_row[-1] == pytest.approx((1, 0))
    assert share[0] == pytest.approx((0, ranked[0] / ranked.sum()), abs=1e-3)
    assert share[-1] == pytest.approx((1, 1))
    assert f"requests of the row, 1 to {ranked[0]:,.4g}" in texts(tmp_path / "heat.svg")
    plot.heat([3, 3], tmp_path / "even.svg")
    with pytest.raises(InvalidInputError, match="no row"):
        plot.heat(np.zeros(5), tmp_path / "none.svg")
    with pytest.raises(InvalidInputError):
        plot.heat([1, -1], tmp_path / "none.svg")


def bars(path) -> dict[str, float]:
    """The widths of the parts of bars by their titles."""
    root = ElementTree.parse(path).getroot()
    return {
        each.find(f"{SVG}title").text: float(each.get("width")) for each in root.iter(f"{SVG}rect")
    }


def test_step_times(stream, tmp_path):
    planned = plan(1000, 64, host=40_000, stream=stream, speeds=SPEEDS)
    plot.step_times(planned, tmp_path / "times.svg")
    widths = bars(tmp_path / "times.svg")
    expected = {plot.WAYS[part]: 1000 * took for part, took in planned.seconds.items()}
    assert list(widths) == [f"{part}: {took:,.4g} ms" for part, took in expected.items()]
    shares = np.array([*expected.values()]) / sum(expected.values())
    assert np.allclose(np.array([*widths.values()]) / sum(widths.values()), shares, atol=1e-3)
    label = ElementTree.parse(tmp_path / "times.svg").getroot().get("aria-label")
    assert "1,000 rows of 64 B, host" in label
    assert set(expected) <= set(texts(tmp_path / "times.svg"))
    measured = {"before": {"disk": 0.02}, "after <b>": {"disk": 0.01, "memory": 0.005}}
    plot.step_times(measured, tmp_path / "times.svg")
    widths = bars(tmp_path / "times.svg")
    whole = widths["disk: 20 ms"]
    assert widths == {
        "disk: 20 ms": whole,
        "disk: 10 ms": pytest.approx(whole / 2, abs=0.1),
        "memory: 5 ms": pytest.approx(whole / 4, abs=0.1),
    }
    assert {"before", "after <b>", "20 ms"} <= set(texts(tmp_path / "times.svg"))
    with pytest.raises(InvalidInputError, match="no times"):
        plot.step_times(plan(1000, 64, host=40_000), tmp_path / "x.svg")


def test_a_picture_is_light_or_dark_as_wide_as_its_page_and_loads_nothing(history, tmp_path):
    plot.hit_rates(history, tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.get("viewBox") == "0 0 640 240" and "width" not in root.attrib
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]


def test_a_picture_is_whole_or_not_there(history, tmp_path, monkeypatch):
    target = tmp_path / "p.svg"
    plot.hit_rates(history, target)
    before = target.read_bytes()
    for name in ("p.png", "p"):
        with pytest.raises(InvalidInputError, match=r"a plot is an \.svg file"):
            plot.hit_rates(history, tmp_path / name)

    def full(path, text, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(StoreFullError):
        plot.hit_rates(history, target)
    assert target.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["p.svg", "s.tier"]
