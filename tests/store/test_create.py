"""What `create` refuses leaves nothing, and a store that is made is one that can be opened."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tierstore import _io, errors
from tierstore._store import opening
from tierstore._store.store import Store
from tierstore.budget import Budget
from tierstore.errors import (
    CapacityError,
    DeviceError,
    ExistsError,
    InvalidInputError,
    InvalidTypeError,
    LockedError,
    MissingExtraError,
    StoreIOError,
    UnknownNameError,
)
from tierstore.policy import lookahead, static

SPEC = tierstore.TableSpec(5000, 16, init=tierstore.normal(seed=3))

WRONG: dict[str, tuple[dict[str, Any], Any]] = {
    "a budget too small": ({"budget": Budget(host="100B")}, CapacityError),
    "a budget too small for one table": ({"budget": Budget(host={"t": 100})}, CapacityError),
    "a budget that is none": ({"budget": 1.5}, InvalidTypeError),
    "an empty dict as a budget": ({"budget": {}}, InvalidTypeError),
    "a budget of another table": ({"policy": {"other": "lru"}}, UnknownNameError),
    "an unknown policy": ({"policy": "nonsense"}, InvalidInputError),
    "a policy that is none": ({"policy": {"t": 3}}, InvalidTypeError),
    "too few counts": (
        {"policy": static(np.ones(7)), "budget": Budget(host_rows=9)},
        InvalidInputError,
    ),
    "too few counts under lookahead": (
        {"policy": lookahead(static(np.ones(7))), "budget": Budget(host_rows=9)},
        InvalidInputError,
    ),
    "no versions to keep": ({"keep": 0}, InvalidInputError),
    "a number of versions that is none": ({"keep": "two"}, InvalidTypeError),
    "an unknown device": ({"device": "tpu"}, InvalidInputError),
    "a device that is none": ({"device": 3}, InvalidTypeError),
    "a device that is missing": ({"device": "cuda:99"}, (DeviceError, MissingExtraError)),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.fault(17)
def test_wrong_options_leave_nothing(what: str, tmp_path: Path) -> None:
    options, error = WRONG[what]
    path = tmp_path / "s"
    written: list[int] = []

    def progress(done: int, total: int) -> None:
        written.append(done)

    with pytest.raises(error):
        tierstore.create(path, {"t": SPEC}, progress=progress, **options)
    assert (os.listdir(tmp_path), written) == ([], [])
    with tierstore.create(path, {"t": SPEC}) as store:
        assert store["t"].rows == 5000


@pytest.mark.parametrize("tables", [{"t": 5}, {"../t": SPEC}, [SPEC], {"t": None}])
@pytest.mark.fault(17)
def test_wrong_tables_leave_nothing(tables: Any, tmp_path: Path) -> None:
    with pytest.raises((InvalidTypeError, InvalidInputError)):
        tierstore.create(tmp_path / "s", tables)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("add", ["create_table", "grow", "add_fields", "replace_table"])
@pytest.mark.fault(17)
def test_a_table_that_cannot_be_opened_is_not_made(add: str, tmp_path: Path) -> None:
    """A table is to become too large for its budget, by rows since `lfu` counts for each."""
    small = tierstore.TableSpec(10, 4)
    budget = Budget(host=400)
    with tierstore.create(tmp_path / "s", {"t": small}, budget=budget, policy="lfu") as store:
        acts: dict[str, Callable[[], object]] = {
            "create_table": lambda: store.create_table("new", SPEC),
            "grow": lambda: store.grow("t", 5000),
            "add_fields": lambda: store.add_fields("t", {"more": tierstore.Field(4000)}),
            "replace_table": lambda: store.replace_table("t", SPEC, reinitialize=True),
        }
        with pytest.raises(CapacityError, match="host budget of"):
            acts[add]()
        assert not inside.door(store).closed and store.version == 1
        assert store["t"].read([3]).shape == (1, 4)
        assert {path.name for path in store.path.iterdir() if path.is_dir()} == {"t"}
        assert len(list((store.path / "t").iterdir())) == 1


ERRORS = [StoreIOError("cannot map"), MemoryError(), KeyboardInterrupt(), RuntimeError("oh")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.fault(17, 33, 43)
def test_a_store_that_its_maker_cannot_open_is_removed(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        assert (tmp_path / "s").is_dir()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(opening, "Store", fail)
        with pytest.raises(type(error)):
            tierstore.create(tmp_path / "s", {"t": SPEC})
    assert os.listdir(tmp_path) == []
    with monkeypatch.context() as patch:  # the protection taken away
        patch.setattr(opening, "Store", fail)
        patch.setattr(opening, "discard_store", lambda *_: None)
        with pytest.raises(type(error)):
            tierstore.create(tmp_path / "s", {"t": SPEC})
    assert os.listdir(tmp_path) == ["s"]


def test_one_that_another_process_writes_to_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = []

    def come_late(options: Any, lock: Any) -> None:
        lock.close()
        others.append(Store(options))
        raise LockedError("another process has it")

    monkeypatch.setattr(opening, "Store", come_late)
    with pytest.raises(LockedError) as caught:
        tierstore.create(tmp_path / "s", {"t": SPEC})
    (note,) = caught.value.__notes__
    assert "still exists" in note and "open for writing" in note
    with others[0] as other:
        other["t"].write([1], np.ones((1, 16), np.float32))
        assert other.commit() == 2


def test_one_that_cannot_be_removed_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreIOError("the disk is gone")

    monkeypatch.setattr(opening, "Store", fail)
    monkeypatch.setattr(_io, "withdraw", fail)
    with pytest.raises(StoreIOError) as caught:
        tierstore.create(tmp_path / "s", {"t": SPEC})
    assert "the disk is gone" in caught.value.__notes__[0]


def test_a_folder_of_other_files_is_no_store_to_be_removed(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "thesis.txt").write_text("data")
    for call in (
        tierstore.open,
        tierstore.verify,
        lambda path: tierstore.repair(path, tmp_path / "c"),
    ):
        with pytest.raises(errors.NotAStoreError, match=r"it has no STORE\.json") as found:
            call(folder)
        assert "remove" not in str(found.value)
    with tierstore.create(tmp_path / "s.tier", {"t": tierstore.TableSpec(3, 4)}):
        pass
    for manifest in (tmp_path / "s.tier").glob("manifest-*"):
        manifest.unlink()
    for call in (tierstore.open, tierstore.verify):
        with pytest.raises(errors.NotAStoreError, match="never completed"):
            call(tmp_path / "s.tier")
    (tmp_path / "s.tier" / "STORE.json").write_text("{}")
    with pytest.raises(errors.FormatError):
        tierstore.verify(tmp_path / "s.tier")


def test_whether_a_path_is_a_store(tmp_path, monkeypatch):
    path = tmp_path / "s.tier"
    tierstore.create(path, {"t": tierstore.TableSpec(3, 2)}).close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.txt").write_text("a")
    assert tierstore.is_store(path) and tierstore.is_store(str(path))
    for other in ("other", "other/a.txt", "none", "s.tier/STORE.json", "s.tier/t"):
        assert not tierstore.is_store(tmp_path / other), other
    (path / "STORE.json").write_text("damaged")
    assert tierstore.is_store(path)
    with pytest.raises(InvalidInputError):
        tierstore.is_store(3)
    with tierstore.create(None, {"t": tierstore.TableSpec(3, 2)}) as store:
        assert tierstore.is_store(store.path)


def test_a_store_that_lost_its_identity_is_one(tmp_path):
    path = tmp_path / "s.tier"
    tierstore.create(path, {"t": tierstore.TableSpec(3, 2)}).close()
    (path / "STORE.json").unlink()
    assert tierstore.is_store(path), "a damaged one, which can be repaired"


def test_a_link_that_leads_nowhere_is_not_free(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ExistsError, match="link exists and is a symbolic link"):
        tierstore.create(tmp_path / "link", {"t": tierstore.TableSpec(3, 2)})
    assert not (tmp_path / "nowhere").exists()


def test_a_store_that_is_not_opened_is_not_left_locked(tmp_path):
    path = tmp_path / "s.tier"
    tierstore.create(path, {"t": tierstore.TableSpec(3, 2)}).close()
    with pytest.raises(UnknownNameError) as held:  # with its frames
        tierstore.open(path, "r+", budget=Budget(host={"other": "1MiB"}))
    tierstore.open(path, "r+").close()
    assert held.value


def test_a_store_in_memory_leaves_those_that_are_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "_MEMORY", str(tmp_path))
    spec = {"t": tierstore.TableSpec(3, 2)}
    with tierstore.create(None, spec) as first, tierstore.create(None, spec) as second:
        assert Path(first.path).is_relative_to(tmp_path) and Path(first.path).exists()
        first["t"].write([1], np.ones((1, 2), np.float32))
        first.commit()
        child = os.fork()
        if child == 0:  # which closes what is not its own
            with contextlib.suppress(errors.TierStoreError):
                second.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert Path(second.path).exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of others")
def test_what_other_users_left_in_memory_is_theirs(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "_MEMORY", str(tmp_path))
    theirs, mine = tmp_path / "tierstore-temporary-a", tmp_path / "tierstore-temporary-b"
    for each in (theirs, mine):
        each.mkdir()
        (each / "file").touch()
    os.chown(theirs, 12345, 12345)
    tierstore.create(None, {"t": tierstore.TableSpec(3, 2)}).close()
    assert [each.name for each in tmp_path.iterdir()] == [theirs.name]


def test_whether_a_path_of_objects_is_a_store(tmp_path):
    pytest.importorskip("fsspec")
    with tierstore.create(tmp_path / "s.tier", {"t": tierstore.TableSpec(3, 2)}) as store:
        store.save("memory://copy.tier")
    assert tierstore.is_store("memory://copy.tier")
    assert not tierstore.is_store("memory://none.tier")


MADE = """
import sys, tierstore
store = tierstore.create(None, {"t": tierstore.TableSpec(3, 2)})
print(store.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_killed_process_left_in_memory_is_removed():
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", MADE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        places = [Path(each.stdout.readline().strip()).parent for each in makers]
        makers[0].kill()
        makers[0].wait()
        assert all(each.exists() for each in places)
        with tierstore.create(None, {"t": tierstore.TableSpec(3, 2)}):
            assert [each.exists() for each in places] == [False, True]
        makers[1].communicate("")
        assert not places[1].exists()
    finally:
        for each in makers:
            if each.poll() is None:
                each.kill()
            each.wait()
            for pipe in (each.stdin, each.stdout):
                pipe.close()
