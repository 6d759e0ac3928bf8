"""Samples of a table's counters, and what an exporter makes of them."""

import re

import numpy as np
import pytest

import tierstore
from tierstore.errors import InvalidInputError, StoreIOError
from tierstore.stats import History, Occupancy, write_prometheus


@pytest.fixture
def store(tmp_path):
    """A store of 500 rows, 100 of which find room in memory, with a name that needs escapes."""
    spec = tierstore.TableSpec(500, 8, init=tierstore.uniform(-1, 1, seed=0))
    path = tmp_path / 'a "b"\\c\nd.tier'
    budget = tierstore.Budget(host_rows=100)
    with tierstore.create(path, {"item": spec}, budget=budget) as made:
        yield made
        made.rollback()


def test_how_full_a_tier_is(store):
    table = store["item"]
    rng = np.random.default_rng(1)
    assert table.occupancy()["host"] == Occupancy(100, 0, 0)
    table.read(np.arange(30))
    assert table.occupancy()["host"].used == 30
    table.write(np.arange(20, 40), rng.standard_normal((20, 8)).astype(np.float32))
    full = table.occupancy()["host"]
    assert (full.used, full.dirty) == (40, 20)
    table.read(np.arange(100, 200))
    full = table.occupancy()["host"]
    assert (full.used, full.dirty) == (100, 0)
    table.write(np.arange(100, 105), np.ones((5, 8), np.float32))
    assert table.occupancy()["host"].dirty == 5
    store.rollback()
    full = table.occupancy()["host"]
    assert (full.used, full.dirty) == (95, 0)


def test_a_table_that_fits_whole(tmp_path):
    spec = tierstore.TableSpec(50, 8)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=tierstore.Budget(host_rows=50)) as s:
        s["t"].write([3, 4], np.ones((2, 8), np.float32))
        full = s["t"].occupancy()["host"]
        assert (full.slots, full.used, full.dirty) == (50, 2, 2)
        s.commit()
        assert s["t"].occupancy()["host"].dirty == 0
    with tierstore.open(tmp_path / "s", budget=tierstore.Budget(host=0)) as s:
        assert s["t"].occupancy() == {}


def test_rates_are_those_between_samples(store):
    table = store["item"]
    history = History(table)
    table.read(np.arange(50))
    history.sample(10)
    history.sample(15)  # nothing was asked for meanwhile
    table.read(np.arange(25, 75))
    history.sample(20)
    assert history.tiers == ["host"]
    assert history.hit_rates("host") == [(10, 0.0), (20, 0.5)]
    samples = history.to_dict()["samples"]
    assert [each["step"] for each in samples] == [0, 10, 15, 20]
    assert samples[-1]["occupancy"]["host"] == {"slots": 100, "used": 75, "dirty": 0}
    assert samples[-1]["stats"]["host"]["requested"] == 100
    with pytest.raises(InvalidInputError, match="step 19 is before the last sample, of step 20"):
        history.sample(19)


LINE = re.compile(r'tierstore_(\w+)\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\d+)')


def parsed(text: str) -> dict[tuple[str, str], int]:
    """Read the text form strictly: (metric, tier) to value, for the only table."""
    assert text.endswith("\n")
    typed, values = set(), {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind == ("counter" if name.endswith("_total") else "gauge")
            typed.add(name.removeprefix("tierstore_"))
        elif not line.startswith("# HELP "):
            name, labels, value = LINE.fullmatch(line).groups()
            assert name in typed
            assert "\\n" in labels
            tier = re.search(r'tier="(\w+)"', labels)
            values[name, tier[1] if tier else ""] = int(value)
    return values


def test_every_counter_is_exported(store, tmp_path):
    table = store["item"]
    table.read(np.arange(50))
    table.write([1, 2, 499], np.ones((3, 8), np.float32))
    store.commit()
    target = tmp_path / "tierstore.prom"
    for _ in range(2):
        write_prometheus(store, target)
    values = parsed(target.read_text(encoding="utf-8"))
    stats = table.stats()
    assert values["requested_total", "host"] == stats["host"].requested == 53
    assert values["hits_total", "host"] == stats["host"].hits == 2
    assert values["bytes_out_total", "disk"] == stats["disk"].bytes_out
    assert values["version", ""] == store.version
    assert values["delta_rows", ""] == 3
    assert (values["slots", "host"], values["used", "host"], values["dirty", "host"]) == (
        100,
        51,
        0,
    )
    assert values["rows", ""] == 500
    assert [entry.name for entry in tmp_path.iterdir() if "partial" in entry.name] == []


def test_a_file_that_cannot_be_written(store, tmp_path):
    with pytest.raises((StoreIOError, InvalidInputError)):
        write_prometheus(store, tmp_path / "nowhere" / "x.prom")


def test_the_difference_of_counters_is_what_happened_between(tmp_path):
    rng = np.random.default_rng(1)
    spec = tierstore.TableSpec(200, 4, init=tierstore.normal(seed=1))
    with tierstore.create(
        tmp_path / "s", {"t": spec}, budget=tierstore.Budget(host_rows=50)
    ) as store:
        table = store["t"]
        table.read(rng.integers(0, 200, 300))
        before = table.stats()["host"]
        table.read([3, 3, 7])
        table.read([7, 3, 7])
        since = table.stats()["host"] - before
        assert since.requested == 6
        assert since.hits + before.hits == table.stats()["host"].hits
        assert since.hit_rate == since.hits / 6
        assert (before - before).requested == 0
        with pytest.raises(TypeError):
            before - 1
