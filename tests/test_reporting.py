"""Reports: one file that says what the store holds, and loads nothing."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import tierstore
from tierstore import _svg
from tierstore.errors import ExistsError, UnknownNameError
from tierstore.reporting import write_report
from tierstore.sizing import simulate, stream_of


@pytest.fixture
def store(tmp_path):
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(300, 6)).astype("f4")
    rows[17] = 2 * rows[3]  # the nearest of row 3
    rows[5, 2] = np.nan
    specs = {
        "word": tierstore.TableSpec(300, 6, init=tierstore.from_array(rows)),
        "thin": tierstore.TableSpec(4, 1, "bfloat16", init=tierstore.normal(seed=2)),
        "zero": tierstore.TableSpec(1, 3),
    }
    with tierstore.create(tmp_path / "s.tier", specs) as store:
        store.set_keys("word", [f"<b>&{n}" for n in range(300)])
        store["word"].write([1], np.ones((1, 6), "f4"))
        store.commit(step=4, keep="best")
        yield store


def page_of(store, path, **options):
    write_report(store, path, **options)
    text = path.read_text()
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(picture)
    assert "http" not in text and "<script" not in text and "<b>" not in text
    return text


def test_a_report_says_what_the_store_holds(store, tmp_path):
    text = page_of(store, tmp_path / "r.html")
    for expected in ("word", "thin", "zero", "best", "weight:6:float32", "version 3, step 4"):
        assert expected in text
    assert "A store of tierstore: 3 tables, 305 rows, as of version 3, step 4;" in text
    assert text.count("<svg") == 2 * 3
    assert text.count("<circle class=") == 299 + 4 + 1  # the row with a NaN is left out


def test_a_report_says_what_older_versions_take(tmp_path):
    """And draws what versions wrote, where these are more than the table shows at a glance."""
    spec = tierstore.TableSpec(20_000, 8)
    with tierstore.create(tmp_path / "s.tier", {"t": spec}, keep=4) as store:
        assert "tierstore fold" not in page_of(store, tmp_path / "one.html")
        for step in range(3):
            store["t"].write(range(20_000), np.full((20_000, 8), step, "f4"))
            store.commit(step=step)
        text = page_of(store, tmp_path / "more.html")
        assert text.count("<svg") == 3 and "rows written by the versions" in text
        assert "<code>tierstore fold</code> gives it back" in text
        store.fold()
        assert "tierstore fold" not in page_of(store, tmp_path / "folded.html")


def test_neighbours_are_listed_and_marked(store, tmp_path):
    text = page_of(store, tmp_path / "r.html", near=("word", 3), k=5)
    assert text.count('class="mark"') == 6
    listed = re.findall(r"<td>&lt;b&gt;&amp;(\d+)</td>", text)
    assert listed[:2] == ["3", "17"] and len(listed) == 6
    assert page_of(store, tmp_path / "k.html", near=("word", "<b>&3"), k=5) == text
    with pytest.raises(UnknownNameError):
        write_report(store, tmp_path / "x.html", near=("word", "nothing"))
    with pytest.raises(UnknownNameError):
        write_report(store, tmp_path / "x.html", near=("nothing", 3))
    assert not (tmp_path / "x.html").exists()


def test_miss_ratios_of_a_trace(store, tmp_path):
    ids = (np.random.default_rng(3).random(3000) ** 3 * 300).astype(np.int64)
    simulation = simulate(stream_of(np.split(ids, 30)))
    text = page_of(store, tmp_path / "r.html", simulation=simulation)
    assert text.count("<polyline") == len(simulation.policies)


def test_a_report_appears_once_and_complete(store, tmp_path):
    write_report(store, tmp_path / "r.html")
    with pytest.raises(ExistsError):
        write_report(store, tmp_path / "r.html")
    write_report(store, tmp_path / "r.html", force=True)


def test_a_store_without_tables(tmp_path):
    with tierstore.create(tmp_path / "empty.tier", {"t": tierstore.TableSpec(2, 2)}) as store:
        store.drop("t")
        assert "none" in page_of(store, tmp_path / "r.html")


def test_marked_points_are_drawn_where_they_are_with_their_titles():
    """Others may be drawn on the edge; those were to be looked at."""
    rng = np.random.default_rng(3)
    far = [[0, -50], [1, -50], [1.05, -50]]
    places = np.concatenate([rng.normal(size=(500, 2)), far])
    titles = [f"row {number}" for number in range(len(places))]
    picture, far = _svg.points(places, titles, [500, 501, 502], "rows")
    assert picture.count('class="far"') == far > 0
    assert picture.count('class="dot"') == 503 - far
    found = re.findall(r'class="mark" cx="([\d.]+)" cy="([\d.]+)"', picture)
    across, down = np.array(found, float).T
    assert across[0] < across[1] < across[2]
    assert len(set(down)) == 1
    assert float(down[0]) > 200  # at the lower edge, to which others were brought
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>row (\d+)<', picture)
    assert [name for _, _, name in texts] == ["500", "501", "502"]
    assert all(0 < float(y) < 420 for _, y, _ in texts)
    boxes = [(float(x), float(y)) for x, y, _ in texts]
    pairs = [(boxes[0], boxes[1]), (boxes[0], boxes[2]), (boxes[1], boxes[2])]
    assert all(abs(a - c) > 45 or abs(b - d) > 13 for (a, b), (c, d) in pairs)


def test_names_of_marks_cover_neither_each_other_nor_a_mark():
    rng = np.random.default_rng(4)
    places = rng.normal(size=(300, 2))
    places[:11] = [0.1, 0.2] + rng.normal(size=(11, 2)) * 0.02  # all in one place
    titles = [f"a name of some length {number}" for number in range(300)]
    picture, _ = _svg.points(places, titles, range(11), "rows")
    marks = re.findall(r'class="mark" cx="([\d.]+)" cy="([\d.]+)"', picture)
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)<', picture)
    assert len(texts) == 11
    boxes = [(float(x), float(x) + 6.6 * len(name), float(y) - 11) for x, y, name in texts]
    for number, (left, right, top) in enumerate(boxes):
        assert left >= 0 and right <= 640 and 0 <= top <= 420 - 14
        for other, up, high in boxes[:number]:
            assert right <= other or up <= left or abs(top - high) >= 13.9
        for x, y in marks:
            assert not (left < float(x) < right and top < float(y) < top + 14)
    assert picture.index('class="mark"') > picture.rindex('class="dot"')  # above the others
