"""Stores in notebooks, tests and workers: made again, in memory, and read after a fork."""

import os
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests import inside
from tierstore.budget import Budget
from tierstore.errors import (
    ExistsError,
    ForkedStoreError,
    InvalidInputError,
    LockedError,
    NotAStoreError,
)

ROWS, DIM = 500, 6
SPEC = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=1, seed=3))
EVERY = np.arange(ROWS)


# -- notebooks


def test_a_cell_that_makes_a_store_can_be_run_again(tmp_path):
    def cell():
        return tierstore.open_or_create(tmp_path / "s", {"t": SPEC}, budget=Budget(host_rows=9))

    with cell() as store:
        store["t"].write([3], np.ones((1, DIM), np.float32))
        store.commit(step=4)
        store.add_fields("t", {"exp_avg": tierstore.Field(DIM)})
        store.grow("t", ROWS + 5)
        rows = store["t"].read(EVERY)
    with cell() as store:
        assert store.step == 4
        assert np.array_equal(store["t"].read(EVERY), rows)
        store["t"].write([3], np.full((1, DIM), 7, np.float32))
        assert cell() is store, "run again in the same kernel"
        assert (store["t"].read([3]) == 7).all(), "with what was not committed"
        store.rollback()


OTHERS = {
    r"budget=Budget\(host_rows=9\), not Budget\(host='1MiB'\)": {"budget": "1MiB"},
    r"policy=None, not 'lfu'": {"policy": "lfu"},
    r"keep=None, not 5 and": {"keep": 5, "allow_untested": True},
    r"allow_untested=False, not True": {"allow_untested": True},
}


def test_a_cell_with_other_options_names_them_and_the_way_on(tmp_path):
    arguments = {"budget": Budget(host_rows=9), "policy": None}
    with tierstore.open_or_create(tmp_path / "s", {"t": SPEC}, **arguments) as store:
        for message, other in OTHERS.items():
            message = rf"by this very process with {message}.*; use the Store.* or close it"
            with pytest.raises(LockedError, match=message):
                tierstore.open_or_create(tmp_path / "s", {"t": SPEC}, **arguments | other)
        with pytest.raises(InvalidInputError, match="no table 'u'"):
            tierstore.open_or_create(tmp_path / "s", {"u": SPEC}, **arguments)
        assert not store.closed, "the store of an earlier cell is not that of the one that failed"
        with pytest.raises(LockedError, match="use the Store that was opened before"):
            tierstore.open(tmp_path / "s", "r+", **arguments)


def test_the_store_of_a_cell_is_found_by_any_name_of_its_path(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    first = tierstore.open_or_create("s", {"t": SPEC}, budget="1MiB")
    for name in ("s", tmp_path / "link" / "s", f"{tmp_path}/s/"):
        assert tierstore.open_or_create(name, {"t": SPEC}, budget="1MiB") is first
    other = tierstore.open_or_create("other", {"t": SPEC}, budget="1MiB")
    assert other is not first
    with tierstore.open("s") as reader:
        assert reader is not first, "a reader is its own"
        assert tierstore.open_or_create("s", {"t": SPEC}, budget="1MiB") is first
    first.close()
    second = tierstore.open_or_create("s", {"t": SPEC}, budget="1MiB")
    assert second is not first
    assert not second.closed
    second.close()
    other.close()


def test_cells_of_several_threads_get_one_store(tmp_path):
    def cell(_):
        return tierstore.open_or_create(tmp_path / "s", {"t": SPEC}, budget="1MiB")

    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(cell, range(16)))
    assert len(set(map(id, stores))) == 1
    stores[0].close()


def test_a_forked_child_does_not_get_the_store_of_its_parent(tmp_path):
    with tierstore.open_or_create(tmp_path / "s", {"t": SPEC}) as store:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks beside threads
            child = os.fork()
        if child == 0:
            try:
                tierstore.open_or_create(tmp_path / "s", {"t": SPEC})
            except LockedError as error:
                os._exit(0 if f"by pid {os.getppid()} on" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert tierstore.open_or_create(tmp_path / "s", {"t": SPEC}) is store


def test_another_table_than_the_one_there_is_an_error(tmp_path):
    tierstore.create(tmp_path / "s", {"t": SPEC}).close()
    others = {
        r"no table 'u'.*create_table": {"u": SPEC},
        r"has 500 rows, not 501; store.grow": {"t": tierstore.TableSpec(ROWS + 1, DIM)},
        r"is Field\(dim=6, dtype='float32'.*not Field\(dim=7": {"t": tierstore.TableSpec(ROWS, 7)},
        r"'more' of table 't'.* is missing": {
            "t": tierstore.TableSpec(9, fields={"more": tierstore.Field(2)})
        },
    }
    for message, tables in others.items():
        with pytest.raises(InvalidInputError, match=message):
            tierstore.open_or_create(tmp_path / "s", tables)
    keyed = tierstore.TableSpec(dim=DIM, keys="int64")
    with pytest.raises(InvalidInputError, match="has no keys, not int64"):
        tierstore.open_or_create(tmp_path / "s", {"t": keyed})
    tierstore.create(tmp_path / "keyed", {"t": keyed}).close()
    with pytest.raises(InvalidInputError, match="has int64 keys, not none"):
        tierstore.open_or_create(tmp_path / "keyed", {"t": SPEC})
    more = tierstore.TableSpec(10**6, DIM, keys="int64", grows=True)  # it grows as keys arrive
    tierstore.open_or_create(tmp_path / "keyed", {"t": more}).close()
    (tmp_path / "file").write_text("no store")
    with pytest.raises(NotAStoreError):
        tierstore.open_or_create(tmp_path / "file", {"t": SPEC})
    with pytest.raises(ExistsError):
        tierstore.create(tmp_path / "s", {"t": SPEC})
    tierstore.open(tmp_path / "s", "r+").close()


# -- in memory


def test_a_store_in_memory_does_what_others_do_and_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tierstore.create(None, {"t": SPEC}) as store:
        path = Path(store.path)
        store["t"].write([3], np.ones((1, DIM), np.float32))
        store.commit(keep="best")
        store["t"].write([3], np.zeros((1, DIM), np.float32))
        store.commit()
        store.restore("best")
        assert store["t"].read([3]).all()
        with tierstore.open(path) as reader:
            assert reader["t"].read([3]).all()
        store.save(tmp_path / "copy")
        assert path.exists()
    assert not path.parent.exists()
    assert [each.name for each in tmp_path.iterdir()] == ["copy"]
    with pytest.raises(InvalidInputError):
        tierstore.create(None, {"bad name": SPEC})


@pytest.mark.slow
def test_a_store_in_memory_goes_with_the_program():
    code = """
        import os, tierstore
        store = tierstore.create(None, {"t": tierstore.TableSpec(3, 2)})
        print(store.path.parent, flush=True)
        if os.fork() == 0:
            raise SystemExit  # a child leaves it alone
        os.wait()
        assert store.path.exists()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert not os.path.exists(done.stdout.strip())


# -- readers after a fork


def in_child(work):
    """Run in a forked child; return whether it was true."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks beside threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("host_rows", [0, 50, ROWS])
def test_a_reader_goes_on_in_a_forked_child(tmp_path, host_rows):
    with tierstore.create(tmp_path / "s", {"t": SPEC}) as writer:
        rows = writer["t"].read(EVERY)
        with tierstore.open(tmp_path / "s", budget=Budget(host_rows=host_rows)) as reader:
            table = reader["t"]
            table.read([1, 2, 3])
            writer["t"].write([3], np.zeros((1, DIM), np.float32))
            writer.commit()

            def read():
                found = np.array_equal(table.read(EVERY), rows) and reader["t"] is table
                found &= reader.version == 1 and not inside.door(reader).closed
                reader.refresh()
                found &= not table.read([3]).any()
                reader.close()
                return found

            assert in_child(read)
            assert in_child(read)  # the parent's lock still holds its version
            assert np.array_equal(table.read(EVERY), rows)
            assert in_child(lambda: in_child(lambda: table.read([1]).any()))

            def write():
                try:
                    writer["t"].write([1], np.ones((1, DIM), np.float32))
                except ForkedStoreError:
                    return True
                return False

            assert in_child(write)
            reader.close()
            assert not in_child(lambda: table.read([1]).any())


def test_workers_of_a_data_loader_read_rows(tmp_path):
    torch = pytest.importorskip("torch")

    class Rows(torch.utils.data.Dataset):
        def __init__(self, table):
            self.table = table

        def __len__(self):
            return ROWS // 50

        def __getitem__(self, number):
            return self.table.read(np.arange(50 * number, 50 * (number + 1)))

    tierstore.create(tmp_path / "s", {"t": SPEC}).close()
    with tierstore.open(tmp_path / "s") as reader, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = torch.utils.data.DataLoader(
            Rows(reader["t"]), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        found = np.concatenate([np.asarray(each) for each in loader])
        assert np.array_equal(found, reader["t"].read(EVERY))


# -- the best rows


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_topk_is_what_all_products_say(kind, monkeypatch):
    monkeypatch.setattr("tierstore._table.topk._MOST_SCORES", 700)
    rng = np.random.default_rng(1)
    with tierstore.create(None, {"t": SPEC}, budget=Budget(host_rows=20)) as store:
        queries = rng.standard_normal((7, DIM)).astype(np.float32)
        rows = store["t"].read(EVERY)
        exclude = [rng.integers(-1, ROWS, rng.integers(0, 90)) for _ in range(7)]
        given = queries
        if kind == "torch":
            torch = pytest.importorskip("torch")
            given, exclude = torch.from_numpy(queries), [torch.from_numpy(e) for e in exclude]
        for k in (1, 20, ROWS - 100):
            for without in (None, exclude):
                scores, ids = store["t"].topk(given, k, exclude=without)
                if kind == "torch":
                    assert (scores.dtype, ids.dtype) == (torch.float32, torch.int64)
                    scores, ids = scores.numpy(), ids.numpy()
                expected = queries @ rows.T
                for query, found in enumerate(without or ()):
                    expected[query, np.asarray(found)[np.asarray(found) >= 0]] = -np.inf
                order = np.argsort(-expected, 1, kind="stable")[:, :k]
                assert np.array_equal(ids, order)
                np.testing.assert_allclose(
                    scores, np.take_along_axis(expected, order, 1), rtol=1e-5, atol=1e-6
                )
        store.rollback()


def test_topk_of_equal_few_and_missing_numbers():
    rows = np.ones((6, 2), np.float32)
    rows[4] = np.nan
    rows[2] = 2
    spec = tierstore.TableSpec(6, 2, init=tierstore.from_array(rows))
    with tierstore.create(None, {"t": spec}) as store:
        table = store["t"]
        queries = np.ones((2, 2), np.float32)
        scores, ids = table.topk(queries, 4, exclude=[[2], [[0, 1, 3, 5, -1]]])
        assert ids.tolist() == [[0, 1, 3, 5], [2, -1, -1, -1]]
        assert scores[1].tolist() == [4, -np.inf, -np.inf, -np.inf]
        assert table.topk(queries[:0], 3)[1].shape == (0, 3)
        assert table.topk(queries, 9)[1][0].tolist() == [2, 0, 1, 3, 5, -1, -1, -1, -1]
        for bad, message in (
            (lambda: table.topk(queries[0], 3), r"queries are \(n, 2\)"),
            (lambda: table.topk(queries, 0), "k is at least 1"),
            (lambda: table.topk(queries, 3, exclude=[[1]]), "rows for 1 queries, there are 2"),
            (lambda: table.topk(queries, 3, exclude=[[1], [6]]), r"row 6 of 0\.\.5"),
        ):
            with pytest.raises(InvalidInputError, match=message):
                bad()
