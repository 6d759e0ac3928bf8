"""Whatever a call has to do, its `progress` ends with done equal to the total, which is never 0."""

import numpy as np
import pytest

import tierstore
from tierstore import Field, TableSpec, distributed, sharing, sizing
from tierstore._memory_table import MemoryTable
from tierstore.publishing import publish_tables

CALLS = {
    "create_table": lambda s, to, see: s.create_table("new", sparse(), progress=see),
    "replace_table": lambda s, to, see: s.replace_table(
        "sparse", sparse(), reinitialize=True, progress=see
    ),
    "alter_tables": lambda s, to, see: s.alter_tables({}, progress=see),
    "alter_table": lambda s, to, see: s.alter_table("keyed", dtype="float16", progress=see),
    "add_fields": lambda s, to, see: s.add_fields("keyed", {"age": Field(1)}, progress=see),
    "drop_fields": lambda s, to, see: s.drop_fields("item", [], progress=see),
    "grow": lambda s, to, see: s.grow("item", 100, progress=see),
    "append": lambda s, to, see: s.append("item", np.zeros((0, 4), "f4"), progress=see),
    "rename": lambda s, to, see: s.rename("keyed", "other", progress=see),
    "set_keys": lambda s, to, see: s.set_keys("item", range(100), progress=see),
    "set_keys, text": lambda s, to, see: s.set_keys(
        "item", [f"key {n}" for n in range(100)], commit=False, progress=see
    ),
    "remove keys": lambda s, to, see: s.set_keys("item", None, progress=see),
    "fold": lambda s, to, see: s.fold(progress=see),
    "verify": lambda s, to, see: s.verify(progress=see),
    "save": lambda s, to, see: s.save(to, progress=see),
    "warm": lambda s, to, see: s["item"].warm(progress=see),
    "warm nothing": lambda s, to, see: s["item"].warm([], progress=see),
    "merge": lambda s, to, see: s["keyed"].merge(s["keyed-2"], progress=see),
    "export_table": lambda s, to, see: tierstore.export_table(
        s["keyed"], f"{to}.npy", progress=see
    ),
}


def sparse():
    return TableSpec(100, 4, sparse=True)


def tables():
    keyed = TableSpec(dim=4, keys="int64")
    return {"item": TableSpec(100, 4), "sparse": sparse(), "keyed": keyed, "keyed-2": keyed}


class Seen(list):
    def __call__(self, done, total):
        self.append((done, total))

    def check(self):
        assert self
        assert all(0 <= done <= total for done, total in self)
        assert self[-1][0] == self[-1][1] > 0
        assert self.count(self[-1]) == 1


@pytest.mark.variants(9, 30)
@pytest.mark.parametrize("host", ["64MiB", 0])
@pytest.mark.parametrize("call", CALLS)
def test_the_last_report_is_that_of_the_end(tmp_path, call, host):
    seen = Seen()
    with tierstore.create(tmp_path / "a.tier", tables(), budget=tierstore.Budget(host=host)) as s:
        CALLS[call](s, tmp_path / "b.tier", seen)
        s.commit()
    seen.check()


def test_a_copy_that_lacks_nothing(tmp_path):
    with tierstore.create(tmp_path / "a.tier", tables()) as store:
        store.save(tmp_path / "b.tier")
        for dry_run in (False, True):
            seen = Seen()
            store.update_copy(tmp_path / "b.tier", dry_run=dry_run, progress=seen)
            seen.check()


@pytest.mark.parametrize("made", [{}, {"sparse": sparse()}, tables()])
def test_a_store_without_rows_to_write(tmp_path, made):
    seen = Seen()
    tierstore.create(tmp_path / "a.tier", made, progress=seen).close()
    seen.check()


def test_a_store_whose_rows_cannot_be_read(tmp_path):
    tierstore.create(tmp_path / "a.tier", {"item": TableSpec(100, 4)}).close()
    for file in (tmp_path / "a.tier" / "item").rglob("*.npy"):
        file.unlink()
    seen = Seen()
    assert not tierstore.verify(tmp_path / "a.tier", progress=seen)
    seen.check()


@pytest.mark.parametrize("init", [None, tierstore.normal(seed=1)], ids=["zeros", "normal"])
@pytest.mark.parametrize("rows", [1, 5000])
def test_tables_in_memory(init, rows):
    seen, warmed = Seen(), Seen()
    with MemoryTable(TableSpec(rows, 100, init=init), progress=seen) as memory:
        memory.table.warm(progress=warmed)
    seen.check()
    warmed.check()


STREAM = sizing.stream_of([range(50), range(0, 300, 7), range(200, 300)], 300)
SIZING = {
    "simulate": lambda see: sizing.simulate(STREAM, progress=see),
    "simulate nothing": lambda see: sizing.simulate(
        STREAM, policies=[], with_optimum=False, progress=see
    ),
    "plan": lambda see: sizing.plan(300, 64, host=64 << 10, stream=STREAM, progress=see),
    "plan nothing": lambda see: sizing.plan(300, 64, host=64 << 10, progress=see),
    "plan_budgets": lambda see: sizing.plan_budgets(300, 64, STREAM, progress=see),
    "plan_budgets, none": lambda see: sizing.plan_budgets(300, 64, STREAM, shares=[], progress=see),
    "host_for_hits": lambda see: sizing.host_for_hits(300, 64, STREAM, 0.1, progress=see),
}


@pytest.mark.parametrize("call", SIZING)
def test_replays(call):
    seen = Seen()
    SIZING[call](seen)
    seen.check()
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize("names", [["item"], ["keyed"], ["item", "keyed"], ["keyed", "item"]])
def test_publishing(tmp_path, names):
    with tierstore.create(tmp_path / "a.tier", tables()) as store:
        for _ in range(2):
            seen = Seen()
            publish_tables(store, tmp_path / "serving", tables=names, progress=seen)
            seen.check()


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_putting_parts_together(tmp_path, suffix):
    target, seen = tmp_path / f"f{suffix}", Seen()
    about = ("s", 1, "item", ["weight"], "float32", 4, False, [0, 100])
    with tierstore.create(tmp_path / "a.tier", tables()) as store:
        for number, rows in enumerate([(0, 40), (40, 100)]):
            file = sharing.part_file(target, number, 2)
            tierstore.export_table(store["item"], file, rows=range(*rows))
            sharing.write_note(file, sharing.PartNote(*about, list(rows), 0))
    sharing.finish(target, progress=seen)
    seen.check()


@pytest.mark.parametrize("table", ["item", "keyed"])
def test_a_file_without_rows(tmp_path, table):
    np.savez(tmp_path / "f.npz", w=np.zeros((0, 4), "f4"), keys=np.zeros(0, "i8"))
    seen = Seen()
    with tierstore.create(tmp_path / "a.tier", tables()) as store:
        if table == "item":
            store.set_keys("item", range(100))
        tierstore.import_table(store, tmp_path / "f.npz", table=table, upsert=True, progress=seen)
    seen.check()


@pytest.mark.parametrize("made", [{}, {"sparse": sparse()}, {"keyed": tables()["keyed"]}, tables()])
def test_repairing(tmp_path, made):
    seen = Seen()
    tierstore.create(tmp_path / "a.tier", made).close()
    tierstore.repair(tmp_path / "a.tier", tmp_path / "b.tier", progress=seen)
    seen.check()


PARTITIONED = {
    "create_table": lambda s, see: s.create_table("new", TableSpec(7, 4), progress=see),
    "create_table, sparse": lambda s, see: s.create_table("new", sparse(), progress=see),
    "create_table, keyed": lambda s, see: s.create_table("new", tables()["keyed"], progress=see),
    "replace_table": lambda s, see: s.replace_table(
        "item", TableSpec(9, 4), blocks=[np.zeros((9, 16), "u1")], progress=see
    ),
    "add_fields": lambda s, see: s.add_fields("item", {"age": Field(1)}, progress=see),
    "add_fields, keyed": lambda s, see: s.add_fields("keyed", {"age": Field(1)}, progress=see),
    "rename": lambda s, see: s.rename("item", "other", progress=see),
    "rename, keyed": lambda s, see: s.rename("keyed", "other", progress=see),
    "grow": lambda s, see: s.grow("item", 101, progress=see),
    "grow, not": lambda s, see: s.grow("item", 100, progress=see),
    "append": lambda s, see: s.append("item", np.zeros((0, 4), "f4"), progress=see),
    "set_keys": lambda s, see: s.set_keys("item", range(100), progress=see),
    "remove keys": lambda s, see: s.set_keys("item", None, progress=see),
    "fold": lambda s, see: s.fold(progress=see),
    "merge": lambda s, see: s["keyed"].merge(s["keyed-2"], progress=see),
    "verify": lambda s, see: tierstore.verify(s.path, progress=see),
}


@pytest.mark.variants(2, 8)
@pytest.mark.parametrize("call", PARTITIONED)
def test_stores_in_partitions(tmp_path, call):
    seen = Seen()
    with distributed.create(tmp_path / "a.tier", tables(), partitions=3) as store:
        PARTITIONED[call](store, seen)
        store.commit()
    seen.check()


@pytest.mark.variants(1)
@pytest.mark.parametrize("made", [{}, {"keyed": tables()["keyed"]}, tables()])
def test_stores_in_partitions_that_are_made(tmp_path, made):
    created, saved, verified, repaired = Seen(), Seen(), Seen(), Seen()
    distributed.create(tmp_path / "a.tier", made, partitions=3, progress=created).close()
    with tierstore.create(tmp_path / "b.tier", made) as store:
        store.commit()
    distributed.save(tmp_path / "b.tier", tmp_path / "c.tier", partitions=3, progress=saved)
    assert tierstore.verify(tmp_path / "c.tier", progress=verified)
    tierstore.repair(tmp_path / "c.tier", tmp_path / "d.tier", progress=repaired)
    for seen in (created, saved, verified, repaired):
        seen.check()


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("calls", [1, 2])
def test_an_error_of_progress_sets_no_keys(tmp_path, commit, calls):
    class Stop(Exception):
        pass

    seen = Seen()

    def stop(done, total):
        seen(done, total)
        if len(seen) == calls:
            raise Stop

    with tierstore.create(tmp_path / "a.tier", {"item": TableSpec(3, 4)}) as store:
        with pytest.raises(Stop):
            store.set_keys("item", ["a", "b", "c"], commit=commit, progress=stop)
        assert store["item"].keys is None
        assert not list((tmp_path / "a.tier").rglob("keys.*"))
        store.set_keys("item", ["a", "b", "c"])
        assert store["item"].lookup(["b"]).tolist() == [1]
