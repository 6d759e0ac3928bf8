"""Whatever a call has to do, its `progress` ends with done equal to the total, which is never 0."""

import numpy as np
import pytest

import tierstore
from tierstore import Field, TableSpec

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
