"""What removing a key leaves on the disk, and when it is gone: docs/how-to/erase-a-person.md."""

from pathlib import Path

import numpy as np
import pytest

import tierstore

LENGTH = 8


def holding(root, *wanted):
    files = [path for path in Path(root).rglob("*") if path.is_file()]
    return {path.name for path in files if any(each in path.read_bytes() for each in wanted)}


def keys_of(kind):
    """A person, others, and the bytes by which the person is found."""
    if kind == "text":
        return "ann@somewhere", [f"other-{number}" for number in range(50)], b"ann@somewhere"
    person = 0x1122334455667788
    return person, list(range(50)), person.to_bytes(8, "little")


@pytest.fixture(params=["text", "int64"])
def people(request, tmp_path):
    person, others, found_as = keys_of(request.param)
    spec = tierstore.TableSpec(dim=LENGTH, keys=request.param, init=tierstore.normal(seed=1))
    with tierstore.create(tmp_path / "users.tier", {"user": spec}, keep=2) as store:
        rows = np.random.default_rng(5).normal(size=(51, LENGTH)).astype("f4")
        store["user"].write([person, *others], rows)
        store.commit()
        yield store, person, others, (found_as, rows[0].tobytes())
        store.rollback()


def remove(store, person):
    store["user"].remove([person])
    store.commit()


def test_a_commit_hides_a_person_and_a_fold_erases_them(people):
    store, person, others, wanted = people
    before = store["user"].read(others)
    remove(store, person)
    with tierstore.open(store.path) as reader, pytest.raises(KeyError):
        reader["user"].read([person])
    for _ in range(3):  # more than are kept: the files stay until a fold
        store["user"].write(others[:1], before[:1])
        store.commit()
    assert holding(store.path, *wanted)
    store.fold()
    assert holding(store.path, *wanted) == set()
    assert np.array_equal(store["user"].read(others), before)


def test_a_version_with_a_name_keeps_them_and_is_released_first(people):
    store, person, _, wanted = people
    store.keep(store.version, "monday")
    remove(store, person)
    with pytest.raises(tierstore.errors.TierStoreError, match="monday"):
        store.fold()
    assert holding(store.path, *wanted)
    store.release("monday")
    store.fold()
    assert holding(store.path, *wanted) == set()


def test_a_reader_of_an_older_version_keeps_them_until_it_refreshes(people):
    store, person, _, wanted = people
    with tierstore.open(store.path) as reader:
        remove(store, person)
        assert len(reader["user"].read([person])) == 1
        with pytest.raises(tierstore.errors.TierStoreError):
            store.fold()
        assert reader.refresh()
        with pytest.raises(KeyError):
            reader["user"].read([person])
        store.fold()
    assert holding(store.path, *wanted) == set()


def test_a_copy_has_them_until_it_takes_the_removal_over_and_is_folded(people, tmp_path):
    store, person, _, wanted = people
    copy = tmp_path / "copy.tier"
    store.save(copy)
    remove(store, person)
    store.fold()
    assert holding(copy, *wanted)
    store.update_copy(copy)
    with tierstore.open(copy, "r+") as other:
        other.fold()
    assert holding(copy, *wanted) == set()


def test_patches_have_rows_as_they_were(people, tmp_path):
    store, person, _, wanted = people
    first = store.version
    rows = np.frombuffer(wanted[1], np.float32)[None] + 1
    store["user"].write([person], rows)
    store.commit()
    store.write_patch(tmp_path / "monday.patch", first)
    remove(store, person)
    store.fold()
    assert holding(store.path, wanted[0], rows.tobytes()) == set()
    assert holding(tmp_path, rows.tobytes()) == {"monday.patch"}
