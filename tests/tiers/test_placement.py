"""What tables get of a budget: enough for each, never more than all of it, or an error before."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.every import every
from tierstore import Budget, TableSpec
from tierstore._tiers import placement
from tierstore._tiers.placement import Part, Placement, divided
from tierstore._tiers.slots import bytes_for
from tierstore.budget import parse_bytes, size_of_at_least
from tierstore.errors import CapacityError
from tierstore.policy import lru
from tierstore.sizing import plan, plan_tables

CRITEO = [
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
]
"""Rows of the categorical features of Criteo's Kaggle data."""
DIM = 6


def parts_of(rng: np.random.Generator, count: int) -> list[Part]:
    rows = (10 ** rng.uniform(0, 7, count)).astype(int).tolist()
    widths = (16 * rng.integers(1, 64, count)).tolist()
    return [Part((f"t{n}",), rows[n], width, lru()) for n, width in enumerate(widths)]


@every(seed=range(40))
def test_a_division_gives_no_more_than_there_is_and_each_what_it_needs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = parts_of(rng, int(rng.integers(1, 30)))
    whole = {part: bytes_for(part.rows, part.record_bytes, part.rows) for part in parts}
    least = {part: min(placement._host_bytes(part, 1), whole[part]) for part in parts}
    for total in (sum(least.values()), int(sum(whole.values()) * rng.random()), 1 << 60):
        shares = divided(total, parts, placement._ON_HOST)
        assert shares.keys() == set(parts)
        if total < sum(least.values()):
            continue
        assert sum(shares.values()) <= max(total, sum(whole.values()))
        for part in parts:
            assert shares[part] >= least[part]
            if whole[part] <= (total - sum(least.values())) // len(parts):
                assert shares[part] == whole[part]
    assert sum(divided(12345, parts, placement._ON_HOST).values()) <= 12345


def test_a_table_of_two_rows_takes_nothing_from_a_budget_that_others_share() -> None:
    """In proportion to bytes it would get less than a record and its maps take."""
    dims = [16, 16, 8, 16]
    specs = {f"t{n}": TableSpec(rows, dims[n]) for n, rows in enumerate([1000, 20000, 2, 50])}
    wide, narrow = Placement(Budget(host="512KiB"), None, None).plan(specs)
    assert narrow.tables == ("t2",) and narrow.host_slots == 2
    assert wide.host_bytes + narrow.host_bytes <= 512 << 10
    assert wide.host_slots > 2500


@pytest.mark.parametrize("made", [False, True])
def test_a_budget_that_cannot_be_names_the_table_before_anything_exists(
    tmp_path: Path, made: bool
) -> None:
    """Also where tables before it could be placed."""
    path = tmp_path / "s"
    specs = {f"t{n}": TableSpec(50, DIM) for n in range(20)} | {"wide": TableSpec(1000, 64)}
    wrong = {
        "'wide' cannot": Budget(host={"wide": 300}),
        r"'t0', 't1' and 18 more, which share tiers, cannot": Budget(host="600B"),
    }
    if made:
        tierstore.create(path, specs).close()
    for message, budget in wrong.items():
        with (
            mock.patch.object(placement, "HostTier", side_effect=AssertionError("memory taken")),
            pytest.raises(CapacityError, match=message),
        ):
            if made:
                tierstore.open(path, budget=budget)
            else:
                tierstore.create(path, specs, budget=budget)
        assert made or not list(tmp_path.iterdir())


def test_the_budget_that_an_error_names_for_all_tables_is_the_least(tmp_path: Path) -> None:
    specs = {"few": TableSpec(10, 64), "many": TableSpec(30_000, 16)}
    with pytest.raises(CapacityError, match="100 bytes cannot hold the maps") as caught:
        tierstore.create(tmp_path / "s", specs, budget=100)
    found = re.search(r"give at least host='(\w+)', or 0", str(caught.value))
    assert found is not None
    for share in (0.2, 0.4, 0.6, 0.99):  # of these, the small table's part is no byte at first
        with pytest.raises(CapacityError, match=f"at least host='{found[1]}'"):
            tierstore.create(tmp_path / "s", specs, budget=int(share * parse_bytes(found[1])))
    tierstore.create(tmp_path / "s", specs, budget=Budget(host=found[1])).close()


def test_a_table_that_grows_leaves_room_for_the_others(tmp_path: Path) -> None:
    """A budget that holds the rows there are suffices, and the least that an error names does."""
    specs = {"item": TableSpec(3_000, 8), "user": TableSpec(dim=4, keys="int64")}
    with pytest.raises(CapacityError) as caught:
        tierstore.create(tmp_path / "s", specs, budget="200B")
    found = re.search(r"give at least host='(\w+)', or 0", str(caught.value))
    assert found is not None and parse_bytes(found[1]) < 1 << 10
    keys, rows = np.arange(100_000) * 7 - 5, np.zeros((100_000, 4), np.float32)
    rows[:] = keys[:, None]
    with tierstore.create(tmp_path / "s", specs, budget=found[1]) as store:
        store["item"].write([7], np.ones((1, 8), np.float32))
        store["user"].write(keys, rows)  # more than there were at first
        store.commit()
        assert store["item"].read([7]).sum() == 8
        assert np.array_equal(store["user"].read(keys), rows)
    least = "2MiB"
    with tierstore.open(tmp_path / "s", budget=least) as store:
        tiers = [tier for space in store.info().spaces for tier in space.tiers]
        assert sum(tier.nbytes for tier in tiers if tier.tier == "host") <= parse_bytes(least)
        assert np.array_equal(store["user"].read(keys), rows)


@pytest.mark.parametrize("budget", [1, "100B", Budget(host="150B"), Budget(host={"t": 160})])
def test_the_budget_that_an_error_names_for_a_table_suffices(
    tmp_path: Path, budget: str | Budget
) -> None:
    with pytest.raises(CapacityError) as caught:
        tierstore.create(tmp_path / "s", {"t": TableSpec(20_000, 8)}, budget=budget)
    found = re.search(r"take (\d+B); give more", str(caught.value))
    assert found is not None
    tierstore.create(tmp_path / "s", {"t": TableSpec(20_000, 8)}, budget=found[1]).close()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_the_index_of_changed_rows_is_inside_the_budget(tmp_path: Path, share: float) -> None:
    """In what is planned, what is opened, and what the error says."""
    rows, path = 4000, tmp_path / "s"
    spec = TableSpec(rows, 16)
    slots = max(1, int(share * rows))
    needed = bytes_for(rows, 64, slots, indexed=True)
    index = needed - bytes_for(rows, 64, slots)
    hashed = 12 * (2 * slots + 2)
    assert index == (hashed if 2 * hashed < 4 * rows else 4 * rows)
    if share == 0.0:
        least = size_of_at_least(needed)
        message = rf"table 't'.*one record of a table of {rows} rows, its maps.*take {least};"
        with pytest.raises(CapacityError, match=message):
            tierstore.create(path, {"t": spec}, budget=needed - 1)
        assert not path.exists()
    (space,) = plan_tables({"t": spec}, needed)
    alone = plan(rows, 64, host=needed)
    with tierstore.create(path, {"t": spec}, budget=needed, device="cpu") as store:
        tier = inside.space(store["t"]).host
        assert tier is not None and tier.slots == slots
        assert tier.nbytes + index == needed
        assert store.info().tables[0].index_bytes == 0
        store["t"].write(np.arange(slots), np.ones((slots, 16), np.float32))
        store.commit()
        assert 0 < store.info().tables[0].index_bytes <= max(index, 4096)  # a page at least
        for planned in (space, alone):
            assert planned.index_bytes == index
            assert (planned.tiers[0].slots, planned.tiers[0].nbytes) == (slots, tier.nbytes)


def test_without_a_budget_a_table_too_large_for_any_host_tier_opens_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_ON_HOST", placement._ON_HOST._replace(free=lambda: 150.0))
    specs = {"t": TableSpec(10_000, 16, init=tierstore.normal(seed=1)), "few": TableSpec(10, 4)}
    with tierstore.create(tmp_path / "s", specs, device="cpu") as store:
        assert inside.space(store["t"]).host is None
        store["t"].write([3], np.ones((1, 16), np.float32))
        assert store["t"].read([3]).all()
        store.rollback()
    with pytest.raises(CapacityError, match="'t' cannot be placed"):
        tierstore.open(tmp_path / "s", budget=150, device="cpu")


def scaled(rows: int) -> int:
    return min(rows, 24 + rows // 1000)


BUDGETS = {
    "a slot a table": Budget(host_rows=1),
    "a thousandth, table by table": Budget(
        host_rows={f"c{n}": max(1, scaled(rows) // 1000) for n, rows in enumerate(CRITEO)}
    ),
    "maps and a thousandth": Budget(
        host=bytes_for(
            sum(map(scaled, CRITEO)),
            32,
            sum(map(scaled, CRITEO)) // 1000,
            indexed=True,
        )
    ),
    "a tenth": Budget(host_rows=150),
}


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_little_host_tier_is_right_and_reads_no_more_than_none(budget: str) -> None:
    """Batches of 26 tables, most of them larger than all the slots there are."""
    rng = np.random.default_rng(7)
    truth = {
        f"c{n}": rng.standard_normal((scaled(rows), DIM)).astype(np.float32)
        for n, rows in enumerate(CRITEO)
    }
    specs = {name: TableSpec(len(rows), DIM) for name, rows in truth.items()}
    stores = {
        name: tierstore.create(None, specs, budget=given)
        for name, given in {"none": Budget(host=0), "little": BUDGETS[budget]}.items()
    }
    given = BUDGETS[budget].host
    if given is not None:
        tiers = {tier for table in stores["little"].info().tables for tier in table.tiers}
        assert sum(tier.nbytes for tier in tiers) <= given
    for store in stores.values():
        for name, rows in truth.items():
            store[name].write(np.arange(len(rows)), rows)
        store.commit()
    for step in range(4):
        for name in truth:
            ids = (len(truth[name]) * rng.power(0.3, 200)).astype(np.int64)
            update = rng.standard_normal((200, DIM)).astype(np.float32)
            before = truth[name][ids]
            truth[name][ids] = update
            for store in stores.values():
                assert np.array_equal(store[name].read(ids), before)
                with store[name].lease(ids) as lease:
                    held = np.asarray(lease.rows)
                    lease.write("weight", truth[name][held])
        for store in stores.values():
            if step % 2:
                store.commit()
    read = {
        kind: sum(store[name].stats()["disk"].requested for name in truth)
        for kind, store in stores.items()
    }
    assert read["little"] <= read["none"]
    for store in stores.values():
        for name, rows in truth.items():
            assert np.array_equal(store[name].read(np.arange(len(rows)), cache=False), rows)
        store.close()
