"""Plots: they show the measured values, and are written completely or not at all."""

import sys

import numpy as np
import pytest

import tierstore
from tierstore import plot
from tierstore.errors import InvalidInputError, MissingExtraError
from tierstore.machine.speeds import Speeds
from tierstore.sizing import plan, simulate, stream_of
from tierstore.stats import History

matplotlib = pytest.importorskip("matplotlib")
SPEEDS = Speeds(1e10, 1e6, 1e9, 1e5, 5e8, 100, None)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self, *given, **more):
        figures.append(self)
        save(self, *given, **more)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


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


def lines(axes) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


@pytest.mark.slow
def test_miss_ratios(stream, tmp_path, drawn):
    found = simulate(stream, sizes=(20, 0.1, 0.5))
    plot.miss_ratios(found, tmp_path / "curve.svg")
    shown = lines(drawn[0].axes[0])
    assert list(shown) == ["lru", "lfu", "optimum", "first touches"]
    floor = {100 * found.first_touch_rate}
    assert {y for _, y in shown.pop("first touches")} == floor
    for policy, points in shown.items():
        expected = [(100 * p.share, 100 * (1 - p.unique_hit_rate)) for p in found.curve(policy)]
        assert np.allclose(points, expected)
    assert (tmp_path / "curve.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_hit_rates_and_occupancy(history, tmp_path, drawn):
    plot.hit_rates(history, tmp_path / "hits.png")
    plot.occupancy(history, tmp_path / "full.png")
    assert (tmp_path / "hits.png").read_bytes().startswith(b"\x89PNG")
    expected = [(step, 100 * rate) for step, rate in history.hit_rates("host")]
    assert np.allclose(lines(drawn[0].axes[0])["host"], expected)
    full = [(each.step, each.occupancy["host"].used) for each in history.samples]
    assert np.allclose(lines(drawn[1].axes[0])["host: used"], full)
    assert max(used for _, used in full) == 100
    (changed,) = drawn[1].axes[0].collections
    top = changed.get_paths()[0].vertices[:, 1].max()
    assert top == max(each.occupancy["host"].dirty for each in history.samples) > 0


@pytest.mark.slow
def test_row_heat(stream, tmp_path, drawn):
    plot.heat(stream, tmp_path / "heat.png")
    counts = np.zeros(1000)
    for batch in stream.batches:
        counts[batch.rows] += batch.counts
    plot.heat(counts, tmp_path / "heat2.pdf")
    ranked = np.sort(counts[counts > 0])[::-1]
    for figure in drawn:
        (requests,) = lines(figure.axes[0]).values()
        (share,) = lines(figure.axes[1]).values()
        assert requests[0] == [1, ranked[0]]
        assert requests[-1] == [ranked.size, ranked[-1]]
        assert share[-1] == [ranked.size, 100]
    with pytest.raises(InvalidInputError, match="no row"):
        plot.heat(np.zeros(5), tmp_path / "none.png")
    with pytest.raises(InvalidInputError):
        plot.heat([1, -1], tmp_path / "none.png")


def test_step_times(stream, tmp_path, drawn):
    planned = plan(1000, 64, host=40_000, stream=stream, speeds=SPEEDS)
    plot.step_times(planned, tmp_path / "times.png")
    widths = [patch.get_width() for patch in drawn[0].axes[0].patches]
    assert np.allclose(widths, [1000 * seconds for seconds in planned.seconds.values()])
    assert "1,000 rows of 64 B, host" in drawn[0].axes[0].get_title(loc="left")
    bar, (legend,) = drawn[0].axes[0].get_window_extent(), drawn[0].legends
    assert not bar.overlaps(legend.get_window_extent())
    measured = {"before": {"disk": 0.02}, "after": {"disk": 0.01, "memory": 0.005}}
    plot.step_times(measured, tmp_path / "times.png")
    widths = [patch.get_width() for patch in drawn[1].axes[0].patches]
    assert np.allclose(widths, [20, 10, 0, 5])
    with pytest.raises(InvalidInputError, match="no times"):
        plot.step_times(plan(1000, 64, host=40_000), tmp_path / "x.png")


def test_a_picture_is_whole_or_not_there(history, tmp_path, monkeypatch):
    target = tmp_path / "p.png"
    plot.hit_rates(history, target)
    before = target.read_bytes()
    with pytest.raises(InvalidInputError, match=r"\.svg"):
        plot.hit_rates(history, tmp_path / "p.bmp")

    def fail(self, path, **more):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(OSError):
        plot.hit_rates(history, target)
    assert target.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["p.png", "s.tier"]


def test_without_matplotlib(history, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"tierstore\[plot\]"):
        plot.hit_rates(history, tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()
