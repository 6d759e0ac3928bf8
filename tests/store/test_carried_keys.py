"""Keys that a change of the table carries over: as the files have them, however many there are."""

import numpy as np
import pytest

import tierstore
from tierstore._disk.keys import Keys
from tierstore.errors import InvalidTypeError

CHANGES = {
    "append": lambda s, new: s.append("item", np.ones((len(new), 4), "f4"), keys=new),
    "grow": lambda s, new: s.grow("item", 3 + len(new), keys=new),
}
OTHERS = {
    "rename": lambda s, to: s.rename("item", "item-2"),
    "alter": lambda s, to: s.alter_table("item", dtype="float16"),
    "replace": lambda s, to: s.replace_table("item", tierstore.TableSpec(3, 8), reinitialize=True),
    "save": lambda s, to: s.save(to),
}
KEYS = {
    "texts": (["a", "", "größer"], ["日本", "x" * 300]),
    "ints": ([3, -1, 7], [2**62, 5]),
    "large ints": ([1, 2, 2**63], [2**64 - 1, 0]),
    "ints and large ones": ([1, 2, 3], [2**63, 9]),
    "large ints and others": ([1, 2, 2**63], [8, 9]),
    "nothing more": (["a", "b", "c"], []),
}


@pytest.fixture
def store(tmp_path):
    with tierstore.create(tmp_path / "a.tier", {"item": tierstore.TableSpec(3, 4)}) as store:
        yield store


def no_objects(keys, index):
    raise AssertionError("a Python object for each key")


@pytest.mark.variants(7)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KEYS)
def test_rows_with_more_keys(store, kind, change):
    own, new = KEYS[kind]
    store.set_keys("item", own)
    CHANGES[change](store, new)
    keys = store["item"].keys
    assert keys[:].tolist() == [*own, *new]
    assert store["item"].lookup([*own, *new]).tolist() == list(range(len(own) + len(new)))
    assert store.verify()


@pytest.mark.parametrize("kind", ["texts", "ints", "large ints"])
def test_more_keys_of_a_column_make_no_objects(store, monkeypatch, kind):
    own, new = KEYS[kind]
    store.set_keys("item", own)
    monkeypatch.setattr(Keys, "__getitem__", no_objects)
    store.append("item", np.ones((2, 4), "f4"), keys=new)
    assert store["item"].lookup(new).tolist() == [3, 4]


@pytest.mark.parametrize("change", OTHERS)
def test_the_same_keys_make_no_objects(store, tmp_path, monkeypatch, change):
    store.set_keys("item", ["a", "b", "c"])
    monkeypatch.setattr(Keys, "__getitem__", no_objects)
    OTHERS[change](store, tmp_path / "b.tier")
    if change == "save":
        with tierstore.open(tmp_path / "b.tier") as copy:
            assert copy["item"].lookup(["c"]).tolist() == [2]
    (name,) = store
    assert store[name].lookup(["b"]).tolist() == [1]


@pytest.mark.parametrize(("own", "new"), [(["a", "b", "c"], [4]), ([1, 2, 3], ["d"])])
def test_more_keys_are_of_the_same_kind(store, own, new):
    store.set_keys("item", own)
    with pytest.raises(InvalidTypeError, match="all ints or all strings"):
        store.append("item", np.ones((1, 4), "f4"), keys=new)
    assert store["item"].rows == 3


def test_a_new_key_is_none_of_the_others(store):
    store.set_keys("item", ["a", "b", "c"])
    with pytest.raises(tierstore.errors.InvalidInputError, match="rows 1 and 3"):
        store.append("item", np.ones((1, 4), "f4"), keys=["b"])
