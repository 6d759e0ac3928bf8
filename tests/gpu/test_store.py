"""A store with a GPU tier, through the public API, against NumPy oracles on both devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.gpu.conftest import Place
from tests.pairs import pairs
from tierstore import Budget, Field, TableSpec
from tierstore.errors import InvalidTypeError, RowIndexError

torch = pytest.importorskip("torch")

ROWS = 100
FIELDS = {
    "weight": Field(33, "float32", tierstore.normal(mean=0, std=1, seed=3)),
    "m": Field(5, "bfloat16"),
    "s": Field(1, "float64", tierstore.uniform(-1, 1, seed=5)),
}
BUDGETS = [(1, 1), (7, 3), (40, 12), (ROWS, 1), (ROWS, ROWS)]


class Oracle:
    """What the table must show: plain arrays, one for now and one for the last commit."""

    def __init__(self, table: Any) -> None:
        self.now = {name: table.read(np.arange(ROWS), name).copy() for name in table.fields}
        self.commit()

    def commit(self) -> None:
        self.committed = {name: array.copy() for name, array in self.now.items()}

    def rollback(self) -> None:
        self.now = {name: array.copy() for name, array in self.committed.items()}


@pytest.fixture(params=["memmap", "zarr"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tensor(place: Place, array: np.ndarray) -> Any:
    return torch.from_numpy(np.ascontiguousarray(array)).to(place.device.torch_name)


def plain(rows: Any) -> np.ndarray:
    rows = rows.cpu()
    return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()


@pytest.mark.variants(1, 1)
@pairs(together=1, slots=BUDGETS, backend=["memmap", "zarr"])
def test_random_work_shows_what_the_oracle_shows(
    tmp_path: Path, place: Place, backend: str, slots: tuple[int, int]
) -> None:
    host, gpu = slots
    rng = np.random.default_rng(host * 1000 + gpu)
    spec = TableSpec(rows=ROWS, fields=FIELDS, backend=backend)
    budget = Budget(host_rows=host, gpu_rows=gpu)
    path = tmp_path / "s.tier"
    with tierstore.create(path, {"t": spec}, budget=budget, device=place.device) as store:
        table = store["t"]
        oracle = Oracle(table)
        for step in range(20):
            ids = rng.integers(0, ROWS, (3, int(rng.integers(0, 16))))
            match int(rng.integers(0, 9)):
                case 0 | 1:
                    for name in FIELDS:
                        np.testing.assert_array_equal(
                            plain(table.read(tensor(place, ids), name)), oracle.now[name][ids]
                        )
                case 2:
                    found = table.read(ids, ["weight", "m"], cache=not step % 2)
                    np.testing.assert_array_equal(found["weight"], oracle.now["weight"][ids])
                    np.testing.assert_array_equal(found["m"], oracle.now["m"][ids])
                case 3:
                    rows = rng.normal(size=(*ids.shape, 33)).astype(np.float32)
                    table.write(tensor(place, ids), tensor(place, rows))
                    oracle.now["weight"][ids.ravel()] = rows.reshape(-1, 33)
                case 4:
                    rows = rng.integers(-9, 9, (*ids.shape, 5)).astype(np.float32)
                    table.write(ids, rows, field="m")
                    oracle.now["m"][ids.ravel()] = rows.reshape(-1, 5)
                case 5:
                    given = {
                        name: rng.integers(-9, 9, (*ids.shape, item.dim)).astype(
                            np.float64 if item.dtype == "float64" else np.float32
                        )
                        for name, item in FIELDS.items()
                    }
                    table.write(ids, given)
                    for name, rows in given.items():
                        oracle.now[name][ids.ravel()] = rows.reshape(-1, rows.shape[-1])
                case 6:
                    table.prefetch(tensor(place, ids))
                case 7:
                    with table.lease(tensor(place, ids)) as lease:
                        compact = lease.read("weight")
                        seen = plain(compact)[plain(lease.positions)]
                        np.testing.assert_array_equal(seen, oracle.now["weight"][ids])
                        lease.write("weight", compact * 2)
                    oracle.now["weight"][np.unique(ids)] *= 2
                case 8:
                    if rng.random() < 0.6:
                        store.commit(step=step)
                        oracle.commit()
                    else:
                        store.rollback()
                        oracle.rollback()
        store.commit(step=99)
        assert store.verify().ok
        scanned = np.concatenate(list(table.scan("weight")))
        np.testing.assert_array_equal(scanned, oracle.now["weight"])
    with tierstore.open(path) as store:
        for name in FIELDS:
            np.testing.assert_array_equal(store["t"].read(np.arange(ROWS), name), oracle.now[name])


def test_bad_ids_on_the_device_raise_at_the_commit_and_are_gone_after_a_rollback(
    tmp_path: Path, place: Place
) -> None:
    spec = {"t": TableSpec(rows=ROWS, dim=4, init=tierstore.normal(seed=1))}
    budget = Budget(gpu_rows=20)
    with tierstore.create(tmp_path / "s", spec, budget=budget, device=place.device) as store:
        table = store["t"]
        before = table.read(np.arange(ROWS))
        rows = table.read(tensor(place, np.array([5, -1, ROWS, 7])))
        found = plain(rows)
        np.testing.assert_array_equal(found[[0, 3]], before[[5, 7]])
        assert np.isnan(found[[1, 2]]).all()
        with pytest.raises(RowIndexError, match="row -1 at position 1"):
            store.commit()
        store.rollback()
        store.commit()
        np.testing.assert_array_equal(table.read(np.arange(ROWS)), before)


def test_ids_of_the_host_are_checked_before_they_go(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, if there are more than slots: what a bad id leaves behind is nothing."""
    monkeypatch.setattr("tierstore._tiers.gpu.link._HEAD", 20)
    rng = np.random.default_rng(3)
    spec = {"t": TableSpec(rows=300, dim=4, init=tierstore.normal(seed=1))}
    budget = Budget(host_rows=300, gpu_rows=10)
    with tierstore.create(tmp_path / "s", spec, budget=budget, device=place.device) as store:
        table = store["t"]
        before = table.read(np.arange(300))
        for n in (0, 1, 19, 39, 40, 41, 250):
            ids = rng.integers(0, 300, n)
            np.testing.assert_array_equal(table.read(ids), before[ids])
            for position in {0, n // 2, n - 1} if n else ():
                bad = ids.copy()
                bad[position] = rng.choice([-1, 300, -(2**62)])
                for given in (bad, bad.astype(np.int32) if abs(bad[position]) < 999 else bad):
                    with pytest.raises(RowIndexError, match=f"at position {position} "):
                        table.read(given)
                    with pytest.raises(RowIndexError, match=f"at position {position} "):
                        table.write(given, np.ones((n, 4), np.float32))
        store.commit()  # would raise if the device had seen one
        np.testing.assert_array_equal(table.read(np.arange(300)), before)


def test_numpy_ids_give_tensors_that_nobody_waits_for(tmp_path: Path, place: Place) -> None:
    spec = {"t": TableSpec(rows=ROWS, fields=FIELDS)}
    budget = Budget(gpu_rows=20)
    with tierstore.create(tmp_path / "s", spec, budget=budget, device=place.device) as store:
        table = store["t"]
        ids = np.array([[3, 99], [3, 0]])
        found = table.read(ids, as_tensor=True)
        assert str(found.device) == table.device
        np.testing.assert_array_equal(plain(found), table.read(ids))
        both = table.read(ids, ["m", "s"], as_tensor=True)
        assert [each.dtype for each in both.values()] == [torch.bfloat16, torch.float64]
        for name, rows in both.items():
            np.testing.assert_array_equal(plain(rows), table.read(ids, name))


@pytest.mark.parametrize("there", [["weight"], ["m", "s"]])
def test_some_fields_of_a_write_may_come_from_the_host(
    tmp_path: Path, place: Place, there: list[str]
) -> None:
    rng, ids = np.random.default_rng(3), np.arange(0, ROWS, 3)
    given: dict[str, Any] = {
        name: rng.integers(0, 9, (ids.size, field.dim)).astype(
            "float64" if name == "s" else "float32"
        )
        for name, field in FIELDS.items()
    }
    mixed = {name: tensor(place, each) if name in there else each for name, each in given.items()}
    if "m" in there:
        mixed["m"] = mixed["m"].to(torch.bfloat16)
    spec, budget = TableSpec(ROWS, fields=FIELDS), Budget(host_rows=40, gpu_rows=7)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=budget, device=place.device) as store:
        for which in (ids, tensor(place, ids)):
            store["t"].write(which, mixed)
            found = store["t"].read(ids, list(FIELDS))
            assert all(np.array_equal(found[name], given[name]) for name in FIELDS)
            store.rollback()


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["ids", "rows"])
def test_work_goes_into_torchs_stream_if_ids_or_rows_are_torchs(tmp_path: Path, what: str) -> None:
    """The other is NumPy's; another stream sees what was there before."""
    spec = {"t": TableSpec(rows=ROWS, dim=4)}
    budget = Budget(gpu_rows=ROWS)
    ids, rows = np.arange(7), np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)
    with tierstore.create(tmp_path / "s", spec, budget=budget, device="cuda") as store:
        table = store["t"]
        table.read(ids)
        given = torch.from_numpy(rows).cuda()
        torch.cuda.synchronize()
        busy, side = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(busy if what == "rows" else torch.cuda.default_stream()):
            torch.cuda._sleep(200_000_000)
            late = given * 1  # behind the sleep
            if what == "rows":
                table.write(ids, late)
        if what == "ids":
            with torch.cuda.stream(side):
                table.write(torch.from_numpy(ids), rows)
                found = table.read(torch.from_numpy(ids).cuda())
                side.synchronize()
                np.testing.assert_array_equal(plain(found), rows)
        torch.cuda.synchronize()
        np.testing.assert_array_equal(table.read(ids), rows)
        store.commit()


def test_synchronous_checks_raise_at_once(tmp_path: Path, place: Place) -> None:
    spec = {"t": TableSpec(rows=ROWS, dim=4)}
    tierstore.create(tmp_path / "s", spec).close()
    with tierstore.open(
        tmp_path / "s", "r+", device=place.device, check_ids="sync", budget=Budget(gpu_rows=20)
    ) as store:
        with pytest.raises(RowIndexError):
            store["t"].read(tensor(place, np.array([0, ROWS])))
        with pytest.raises(RowIndexError):
            store["t"].read([0, ROWS])
        with pytest.raises(InvalidTypeError):
            store["t"].read(tensor(place, np.array([0.5])))
        with pytest.raises(InvalidTypeError):
            store["t"].read(tensor(place, np.array([True])))
        store.rollback()


def test_stats_and_info_name_every_tier(tmp_path: Path, place: Place) -> None:
    spec = {"t": TableSpec(rows=ROWS, dim=4)}
    budget = Budget(host_rows=60, gpu_rows=20)
    with tierstore.create(tmp_path / "s", spec, budget=budget, device=place.device) as store:
        store["t"].read(np.arange(50))
        stats = store["t"].stats()
        assert list(stats) == ["gpu", "host", "disk"]
        assert stats["gpu"].requested == 50
        tiers = store.info().tables[0].tiers
        assert [(tier.tier, tier.slots) for tier in tiers] == [("gpu", 20), ("host", 60)]


def test_two_tables_share_a_budget_in_proportion(tmp_path: Path, place: Place) -> None:
    spec = {"a": TableSpec(rows=90_000, dim=4), "b": TableSpec(rows=90_000, dim=12)}
    budget = Budget(gpu=4_000_000)
    with tierstore.create(tmp_path / "s", spec, budget=budget, device=place.device) as store:
        taken = {table.name: table.tiers[0].nbytes for table in store.info().tables}
        assert taken["a"] <= 1_000_000
        assert taken["b"] <= 3_000_000


@pytest.mark.variants(2)
@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("queries", [1, 7])
def test_topk_is_what_the_host_finds(
    tmp_path: Path, place: Place, metric: Any, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal rows, zeros, NaN and exclusions; the newest rows are on the device only."""
    monkeypatch.setattr("tierstore._table.topk._MOST_SCORES", 90)
    rng = np.random.default_rng(queries)
    rows = rng.integers(-3, 4, (ROWS, 8)).astype("f4")  # so that products are exact, and equal
    rows[[5, 17]] = 0
    rows[30] = np.nan
    wanted = rng.integers(-3, 4, (queries, 8)).astype("f4")
    exclude = [rng.integers(-1, ROWS, 9) for _ in range(queries)]
    with tierstore.create(
        tmp_path / "emb.tier",
        {"a": TableSpec(rows=ROWS, dim=8)},
        budget=Budget(host_rows=40, gpu_rows=ROWS),
        device=place.device,
    ) as store:
        store["a"].write(np.arange(ROWS), rows)
        for k, without in [(1, None), (12, exclude), (ROWS + 3, exclude)]:
            found = store["a"].topk(wanted, k, exclude=without, metric=metric)
            with tierstore.create(None, {"a": TableSpec(rows=ROWS, dim=8)}) as host:
                host["a"].write(np.arange(ROWS), rows)
                expected = host["a"].topk(wanted, k, exclude=without, metric=metric)
                host.rollback()
            np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
            if metric == "dot":  # cosines are rounded
                np.testing.assert_array_equal(found[1], expected[1])
        store.rollback()
