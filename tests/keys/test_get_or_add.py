"""Keys that get a row when they are asked for: names of rows, and tables by key."""

import numpy as np
import pytest

import tierstore
from tierstore.errors import InvalidInputError, ReadOnlyError

DIM = 4


@pytest.fixture
def store(tmp_path):
    spec = tierstore.TableSpec(3, DIM, init=tierstore.normal(seed=3))
    with tierstore.create(tmp_path / "s", {"item": spec}) as made:
        yield made


@pytest.mark.parametrize(
    ("own", "asked"),
    [
        (["a", "b", "c"], ["d", "b", "e", "d"]),
        ([5, -7, 2**62], [9, -7, -1, 9]),
        ([5, 2**64 - 1, 6], [9, 2**64 - 1, 2**63, 9]),
    ],
)
def test_names_that_no_row_has_get_new_rows(store, own, asked):
    store.set_keys("item", own)
    item, before = store["item"], store["item"].read(range(3))
    version = store.version
    found = item.get_or_add(np.array(asked, object).reshape(2, 2))
    assert found.tolist() == [[3, 1], [4, 3]]
    assert item.rows == 5 and store.version == version + 1
    assert item.keys[:].tolist() == [*own, asked[0], asked[2]]
    assert np.array_equal(item.read(range(3)), before)
    assert item.read([3, 4]).any(1).all()  # by the initializer of the table
    assert item.get_or_add(asked).tolist() == [3, 1, 4, 3]
    assert store.version == version + 1
    with tierstore.open(store.path) as reader:
        assert reader["item"].get_or_add(own).tolist() == [0, 1, 2]  # adds nothing
        with pytest.raises(ReadOnlyError):
            reader["item"].get_or_add(own[:1] * 2 + [type(own[0])(77)])


def test_names_are_added_where_a_table_can_grow(store):
    with pytest.raises(InvalidInputError, match="has no keys"):
        store["item"].get_or_add(["a"])
    store.set_keys("item", ["a", "b", "c"])
    store["item"].write([0], np.ones((1, DIM), np.float32))
    assert store["item"].get_or_add("c").tolist() == 2
    with pytest.raises(InvalidInputError, match="commit"):  # as growing commits separately
        store["item"].get_or_add(["d"])
    assert store["item"].rows == 3 and store["item"].read([0]).tolist() == [[1] * DIM]
    store.rollback()


@pytest.mark.parametrize("kind", ["int64", "text"])
def test_a_table_by_key_adds_them_to_the_next_commit(tmp_path, kind):
    keys = np.array([[7, -5], [9, 7]]) if kind == "int64" else np.array([["a", ""], ["🙂", "a"]])
    spec = tierstore.TableSpec(dim=DIM, keys=kind, init=tierstore.normal(seed=4))
    with tierstore.create(tmp_path / "s", {"user": spec}) as store:
        user = store["user"]
        first = user.read(keys)
        assert user.get_or_add(keys).tolist() == [[0, 1], [2, 0]] and user.rows == 3
        assert np.array_equal(user.by_row.read([0, 1, 2]), first.reshape(-1, DIM)[:3])
        store.rollback()
        assert user.rows == 0 and not user.contains(keys).any()
        assert user.get_or_add(keys[0, 1]).tolist() == 0
        store.commit()
        user.get_or_add(keys)
        store.rollback()
        assert user.contains(keys).tolist() == [[False, True], [False, False]]
    with tierstore.open(tmp_path / "s") as reader:
        assert reader["user"].get_or_add(keys[0, 1:]).tolist() == [0]
        with pytest.raises(ReadOnlyError):
            reader["user"].get_or_add(keys)
