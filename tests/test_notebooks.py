"""What a notebook shows: tables, short whatever there is, and names to complete."""

import html.parser
import inspect
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import tierstore
from tierstore import exporting, publishing, sizing
from tierstore.errors import InvalidTypeError, MissingExtraError


class Cells(html.parser.HTMLParser):
    """The caption and the cells of a table; raises for tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.caption = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.open[-1] == "caption":
            self.caption += data


def shown(thing):
    cells = Cells(thing._repr_html_())
    assert len({len(row) for row in cells.rows}) == 1
    return cells


@pytest.fixture
def store(tmp_path):
    spec = tierstore.TableSpec(100, 4, init=tierstore.normal(seed=1))
    with tierstore.create(tmp_path / "<b>&.tier", {"item": spec, "user": spec}) as store:
        store["item"].read([1, 1, 2])
        store["item"].write([3], np.ones((1, 4), np.float32))
        store.commit(step=7, keep="<good>")
        yield store


def stream(batches=5):
    rng = np.random.default_rng(0)
    return sizing.stream_of([rng.integers(0, 100, 30) for _ in range(batches)], rows=100)


def test_a_store_and_its_tables(store):
    for thing in (store, store.info()):
        cells = shown(thing)
        assert "<b>&.tier: version 2, step 7" in cells.caption
        assert [row[0] for row in cells.rows] == ["table", "item", "user"]
    cells = shown(store["item"])
    assert cells.caption == "item: 100 rows, 16 B each"
    assert cells.rows[1][:3] == ["weight", "4", "float32"]


def test_statistics(store):
    cells = shown(store["item"].stats())
    host = dict(zip(cells.rows[0], cells.rows[1], strict=True))
    assert (host["tier"], host["ids"]) == ("host", str(store["item"].stats()["host"].requested))
    assert [row[0] for row in shown(store.stats()).rows[1:]] == list(store.stats())
    assert store["item"].stats() == dict(store["item"].stats())


def test_versions(store):
    cells = shown(store.versions())
    assert [row[0] for row in cells.rows[1:]] == ["1", "2"]
    assert [cells.rows[2][at] for at in (2, 5, 6)] == ["7", "item", "<good>"]
    assert store.versions() == list(store.versions())


def test_simulations_and_plans():
    found = sizing.simulate(stream(), policies=("lru",), sizes=(0.1, 0.5))
    cells = shown(found)
    assert len(cells.rows) == 1 + len(found.points)
    assert cells.rows[1][:2] == ["lru", "10"]
    plan = sizing.plan(100, 16, host=2_000, stream=stream())
    assert [row[0] for row in shown(plan).rows[1:]] == [tier.tier for tier in plan.tiers]


def test_what_is_printed_does_not_grow_with_what_there_is(tmp_path):
    assert len(repr(stream(5_000))) < 100
    spec = tierstore.TableSpec(2, 1)
    names = [f"table-{number}" for number in range(200)]
    with tierstore.create(tmp_path / "many.tier", dict.fromkeys(names, spec)) as store:
        for thing in (store, store.info()):
            assert len(repr(thing)) < 500
            assert len(thing._repr_html_()) < 5_000
        for step in range(30):
            store.commit(step=step, keep=f"v{step}")
        assert len(repr(store["table-7"])) < 100
        assert len(store.versions()) == 30 and len(repr(store.versions())) < 2_000
        assert len(repr(store.versions()[-1])) < 500
        for space in store.info().spaces:
            assert len(repr(space)) < 600
        assert len(repr(store.save(tmp_path / "copy.tier"))) < 500
        assert len(repr(store.verify())) < 500
        assert len(repr(store.update_copy(tmp_path / "again.tier"))) < 800
    np.save(tmp_path / "rows.npy", np.ones((2, 1), np.float32))
    with tierstore.attach(dict.fromkeys(names, tmp_path / "rows.npy")) as attached:
        assert len(repr(attached)) < 200


def test_every_object_says_what_it_is(store, tmp_path):
    """Short, whatever it holds, and not by its address."""
    item = store["item"]
    history = tierstore.stats.History(item)
    for step in range(50):
        item.read(range(100))
        history.sample(step)
    shown = {
        "History(51 samples, up to step 49)": history,
        "Checkpoint(Store(": tierstore.Checkpoint(store, numbers=np.random.default_rng()),
    }
    with item.lease(np.arange(90)) as lease, item.record(tmp_path / "run.trace") as recording:
        item.read(range(100))
        shown |= {"HostLease(90 rows)": lease, "Recording(": recording}
        for start, thing in shown.items():
            assert repr(thing).startswith(start) and len(repr(thing)) < 300
    rates = sizing.simulate(stream(), sizes=tuple(np.linspace(0.01, 1, 90)))
    assert len(rates.points) > 90 and len(repr(rates)) < 1_500
    assert repr(rates).startswith("Simulation(rows=100, batches=5")


def test_names_of_tables_complete(store):
    assert store._ipython_key_completions_() == ["item", "user"]


def test_a_closed_store_is_shown(tmp_path):
    store = tierstore.create(tmp_path / "<i>.tier", {"item": tierstore.TableSpec(2, 1)})
    store.close()
    assert "<i>" not in store._repr_html_() and "closed" in store._repr_html_()


class Bar:
    """What is asked of a bar of tqdm."""

    def __init__(self, total=None):
        self.total, self.n, self.closed = total, 0, False

    def update(self, more):
        assert not self.closed
        self.n += more
        assert 0 <= self.n <= self.total

    def close(self):
        self.closed = True


@pytest.fixture
def bars(monkeypatch):
    made = []

    def make(**options):
        made.append(Bar(**options))
        return made[-1]

    monkeypatch.setitem(sys.modules, "tqdm", ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=make))
    return made


def import_rows(store, to):
    np.save(to / "rows.npy", np.ones((500, 4), np.float32))
    tierstore.import_table(to / "new", to / "rows.npy", table="t", progress=True)


LONG_CALLS = {
    "create": lambda store, to: tierstore.create(
        to / "new", {"t": store["item"].spec}, progress=True
    ).close(),
    "open_or_create": lambda store, to: tierstore.open_or_create(
        to / "new", {"t": store["item"].spec}, progress=True
    ).close(),
    "import_table": import_rows,
    "export_table": lambda store, to: exporting.export_table(
        store["item"], to / "rows.npy", progress=True
    ),
    "publish_tables": lambda store, to: publishing.publish_tables(store, to / "out", progress=True),
    "grow": lambda store, to: store.grow("item", 300, progress=True),
    "append": lambda store, to: store.append("item", np.ones((2, 4), np.float32), progress=True),
    "add_fields": lambda store, to: store.add_fields(
        "item", {"more": tierstore.Field(2)}, progress=True
    ),
    "set_keys": lambda store, to: store.set_keys("item", range(100), progress=True),
    "fold": lambda store, to: store.fold(progress=True),
    "save": lambda store, to: store.save(to / "copy", progress=True),
    "verify": lambda store, to: store.verify(progress=True),
    "warm": lambda store, to: store["item"].warm(range(50), progress=True),
    "simulate": lambda store, to: sizing.simulate(stream(), sizes=(0.1,), progress=True),
    "plan": lambda store, to: sizing.plan(100, 16, host=2_000, stream=stream(), progress=True),
}


@pytest.mark.parametrize("name", LONG_CALLS)
def test_a_bar_of_what_takes_long(store, tmp_path, bars, name):
    LONG_CALLS[name](store, tmp_path)
    (bar,) = bars
    assert bar.closed and bar.n == bar.total > 0


def test_every_public_progress_takes_true():
    """As its type says, which what calls it back does not have."""
    owners = [tierstore.Store, tierstore.Table, tierstore.KeyedTable]
    public = [getattr(tierstore, name, None) for name in dir(tierstore)]
    for module in filter(inspect.ismodule, list(public)):
        public += [getattr(module, each) for each in getattr(module, "__all__", ())]
    owners += filter(inspect.isclass, public)
    for owner in owners:
        public += [vars(owner).get("__init__"), *map(partial(getattr, owner), shown_of(owner))]
    seen = 0
    for called in filter(inspect.isfunction, public):
        given = inspect.signature(called).parameters.get("progress")
        assert given is None or given.annotation == "Shown", called
        seen += given is not None
    assert seen > 30


def shown_of(owner):
    return [name for name in dir(owner) if name[0] != "_"]


def test_what_is_no_progress_is_refused(store, monkeypatch):
    store.fold(progress=False)
    with pytest.raises(InvalidTypeError, match="True for a bar"):
        store.fold(progress=[])
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(MissingExtraError, match="pip install tqdm"):
        store.fold(progress=True)
