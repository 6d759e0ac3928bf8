"""Errors as the builtins they also are, and warnings by their classes."""

import errno
import gc
import pickle
import threading
import warnings

import numpy as np
import pytest

import tierstore
from tierstore import errors

SPEC = {"t": tierstore.TableSpec(20, 4, init=tierstore.normal(seed=1))}
CLASSES = [getattr(errors, name) for name in errors.__all__]
OF_SYSTEM = [each for each in CLASSES if issubclass(each, OSError)]


@pytest.mark.parametrize("kind", OF_SYSTEM)
def test_errors_of_the_system_say_what_went_wrong(kind):
    error = kind("what happened", filename="/some/where")
    assert str(error) == error.strerror == "what happened"
    assert error.filename == "/some/where"
    assert error.errno
    plain = OSError(error.errno, "")
    builtins = [each for each in kind.__mro__ if each.__module__ == "builtins"]
    assert isinstance(plain, builtins[0])  # the errno is one of the builtin's
    error.errno = errno.EDQUOT
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.errno) == (kind, str(error), errno.EDQUOT)
    assert (again.filename, again.strerror) == (error.filename, error.strerror)


def test_a_damaged_row_keeps_its_numbers_where_it_is_pickled():
    error = errors.CorruptRowError("two rows", rows=[3, 5], file="t/base")
    again = pickle.loads(pickle.dumps(error))
    assert (again.rows, again.file, again.errno) == ([3, 5], "t/base", errno.EIO)


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "emb.tier"
    with pytest.raises(FileNotFoundError) as found:
        tierstore.open(path)
    assert (found.value.errno, found.value.filename) == (errno.ENOENT, str(path))
    with tierstore.create(path, SPEC):
        with pytest.raises(FileExistsError) as found:
            tierstore.create(path, SPEC)
        assert (found.value.errno, found.value.filename) == (errno.EEXIST, str(path))
        with pytest.raises(BlockingIOError) as found:
            tierstore.open(path, "r+")
        assert (found.value.errno, found.value.filename) == (errno.EAGAIN, str(path))
    with tierstore.open(path) as store, pytest.raises(PermissionError) as found:
        store["t"].write([1], np.ones((1, 4), np.float32))
    assert (found.value.errno, found.value.filename) == (errno.EACCES, str(path))


def test_errors_name_a_store_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as missing:
        tierstore.open("emb.tier")
    tierstore.create("emb.tier", SPEC).close()
    with pytest.raises(FileExistsError) as existing:
        tierstore.create("emb.tier", SPEC)
    with tierstore.open("emb.tier", "r+"), pytest.raises(BlockingIOError) as locked:
        tierstore.open("emb.tier", "r+")
    for found in (missing, existing, locked):
        assert found.value.filename == str(tmp_path / "emb.tier")


@pytest.mark.parametrize(
    "call",
    [
        lambda store, path: tierstore.export_table(store, path / "rows.npy"),
        lambda store, path: tierstore.export_table("emb.tier", path / "rows.npy"),
        lambda store, path: tierstore.stats.History(store),
    ],
)
def test_a_store_is_no_table(tmp_path, call):
    with (
        tierstore.create(None, SPEC) as store,
        pytest.raises(errors.InvalidTypeError, match=r"needs a table such as store\['item'\]"),
    ):
        call(store, tmp_path)


@pytest.mark.parametrize(
    "call",
    [
        lambda table, path: tierstore.import_table(table, path / "rows.npy"),
        lambda table, path: tierstore.Checkpoint(table),
        lambda table, path: tierstore.stats.write_prometheus(table, path / "page.prom"),
    ],
)
def test_a_table_is_no_store(tmp_path, call):
    with (
        tierstore.create(None, SPEC) as store,
        pytest.raises(errors.InvalidTypeError, match=r"needs a store such as tierstore\.open"),
    ):
        call(store["t"], tmp_path)
    assert not list(tmp_path.iterdir())


def test_arrays_are_no_files():
    rows = np.ones((3, 4), np.float32)
    with (
        tierstore.create(None, SPEC) as store,
        pytest.raises(errors.InvalidTypeError, match=r"not ndarray; .*from_array\(rows\)"),
    ):
        tierstore.import_table(store, rows)


def test_a_file_of_first_values_that_is_not_there(tmp_path):
    with pytest.raises(errors.MissingFileError, match=r"rows\.npy: no such file") as found:
        tierstore.from_file(tmp_path / "rows.npy")
    assert found.value.filename == str(tmp_path / "rows.npy")


def test_a_lookahead_says_how_ids_are_given():
    with tierstore.create(None, SPEC) as store:
        for wrong in ([store["t"]], store["t"]):
            with pytest.raises(errors.InvalidTypeError, match=r"\{emb: 'item'\}"):
                tierstore.lookahead([], wrong)


def test_a_store_in_memory_is_closed_without_a_warning():
    """There is nothing that a commit would have kept."""
    with warnings.catch_warnings(), tierstore.create(None, SPEC) as store:
        warnings.simplefilter("error")
        store["t"].write([1, 2], np.ones((2, 4), np.float32))


def test_warnings_can_be_told_apart(tmp_path):
    store = tierstore.create(tmp_path / "emb.tier", SPEC)
    store["t"].write([1, 2], np.ones((2, 4), np.float32))
    with pytest.warns(errors.UncommittedRowsWarning, match="2 uncommitted rows"):
        store.close()
    opened = tierstore.open(tmp_path / "emb.tier")
    assert opened.version == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del opened
        gc.collect()
    assert [each.category for each in caught] == [errors.UnclosedStoreWarning]
    for each in CLASSES:
        if issubclass(each, Warning):
            assert issubclass(each, errors.TierStoreWarning)
            assert issubclass(each, UserWarning)


def test_a_warning_points_to_the_line_of_the_user(tmp_path):
    with pytest.warns(errors.UncommittedRowsWarning) as caught:
        with tierstore.create(tmp_path / "with.tier", SPEC) as store:
            store["t"].write([3], np.ones((1, 4), np.float32))
        store = tierstore.create(tmp_path / "close.tier", SPEC)
        store["t"].write([3, 5], np.ones((2, 4), np.float32))
        store.close()
    first, second = caught
    assert (first.filename, second.filename) == (__file__, __file__)
    assert "with 1 uncommitted row," in str(first.message)
    assert "with 2 uncommitted rows," in str(second.message)
    assert first.lineno < second.lineno


def test_a_warning_of_a_thread_of_the_library_is_issued():
    with pytest.warns(errors.UpkeepWarning, match="later") as caught:
        thread = threading.Thread(target=errors.warn, args=("later", errors.UpkeepWarning))
        thread.start()
        thread.join()
    assert caught[0].filename.endswith("threading.py")
