"""Row numbers of a table by key are never taken for keys."""

from __future__ import annotations

import numpy as np
import pytest

import tierstore
from tierstore.errors import InvalidTypeError


@pytest.fixture
def reader(tmp_path):
    """A reader of keys that are the row numbers of other keys, and the version before."""
    keys = np.array([2, 0, 1, 500])
    with tierstore.create(
        tmp_path / "s", {"user": tierstore.TableSpec(dim=1, keys="int64")}, keep=3
    ) as store:
        store["user"].write(keys, keys[:, None].astype(np.float32) * 10)
        store.commit()
        reader = tierstore.open(tmp_path / "s")
        store["user"].write(keys[1:], keys[1:, None].astype(np.float32) * 10 + 1)
        store.commit()
        with reader:
            yield reader


def test_what_changed_is_refused_in_place_of_keys(reader):
    before = reader.version
    (new,) = reader.follow(timeout=0)
    user = reader["user"]
    for rows in (new.rows["user"], reader.changed(before)["user"], new.rows["user"][:2]):
        for call in (
            user.read,
            user.lookup,
            user.contains,
            lambda rows: user.keys.lookup(rows),
            lambda rows: user.read(rows, missing="init"),
        ):
            with pytest.raises(InvalidTypeError, match="by_row"):
                call(rows)
    rows = new.rows["user"]
    assert user.keys_of(rows).tolist() == [0, 1, 500]
    assert np.array_equal(user.read(user.keys_of(rows)), user.by_row.read(rows))
    assert user.by_row.read(rows).ravel().tolist() == [1, 11, 5001]


def test_what_topk_returns_is_refused_in_place_of_keys(reader):
    user = reader["user"]
    _, rows = user.topk(np.ones((2, 1), np.float32), 6)
    with pytest.raises(InvalidTypeError, match="keys_of"):
        user.read(rows)
    assert user.keys_of(rows[0][rows[0] >= 0]).tolist() == [500, 2, 1, 0]


@pytest.mark.parametrize("kind", ["int64", "text"])
def test_no_call_of_a_writer_takes_them(tmp_path, kind):
    spec = tierstore.TableSpec(dim=1, keys=kind)
    with tierstore.create(tmp_path / "s", {"user": spec}) as store:
        user, given = store["user"], [3, 4] if kind == "int64" else ["a", "b"]
        store.commit()
        user.write(given, np.ones((2, 1), np.float32))
        store.commit()
        rows = store.changed(store.version - 1)["user"]
        for call in (
            lambda: user.write(rows, np.zeros((2, 1), np.float32)),
            lambda: user.remove(rows),
            lambda: user.get_or_add(rows),
            lambda: user.prefetch(rows),
            lambda: user.lease(rows),
        ):
            with pytest.raises(InvalidTypeError, match="row numbers"):
                call()
        assert user.read(given).tolist() == [[1], [1]]
        assert user.rows == 2


def test_rows_of_a_table_by_id_are_plain_integers(tmp_path):
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(3, 1)}) as store:
        store["t"].write([1], np.ones((1, 1), np.float32))
        store.commit()
        rows = store.changed(1)["t"]
        assert type(rows) is np.ndarray
        assert store["t"].read(rows).tolist() == [[1]]
