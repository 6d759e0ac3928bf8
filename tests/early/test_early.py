"""Stores, states and pickles of the first version that must open, read and led on by this one.

`make.py` wrote them, and says of each what it holds. A store that is only read stays as it was, to
the byte; one that is written goes on beside a dict.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.early.make import MAKERS, NONE, contents
from tierstore.errors import TierStoreError, VersionError

STORES = Path(__file__).with_name("stores")

pytestmark = pytest.mark.fault(42)


@pytest.fixture
def unpack(tmp_path: Path) -> Any:
    """A function that unpacks the archive of a name and returns its directory."""

    def unpacked(name: str) -> Path:
        with tarfile.open(STORES / f"{name}.tar.xz") as packed:
            packed.extractall(tmp_path, filter="data")
        return tmp_path / name

    return unpacked


def digests(root: Path) -> dict[str, str]:
    """Return a digest of every file below a directory."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_every_maker_has_its_archive() -> None:
    assert {path.name.removesuffix(".tar.xz") for path in STORES.iterdir()} == set(MAKERS)


@pytest.mark.parametrize("name", MAKERS)
def test_every_kept_version_reads_as_it_was_and_stays_so(name: str, unpack: Any) -> None:
    root = unpack(name)
    before = digests(root)
    kept = json.loads((root / "contents.json").read_text())
    with tierstore.open(root / "store", budget=NONE) as store:
        assert [str(each.version) for each in store.versions()] == list(kept)
        assert store.verify().ok
    for version, expected in kept.items():
        for budget in (NONE, tierstore.Budget(host_rows=2)):
            with tierstore.open(root / "store", version=int(version), budget=budget) as store:
                assert contents(store) == expected
    assert digests(root) == before


@pytest.mark.parametrize(("slots", "fold"), [(0, True), (1, False), (None, True)])
@pytest.mark.parametrize("name", MAKERS)
def test_a_writer_goes_on(name: str, slots: int | None, fold: bool, unpack: Any) -> None:
    root = unpack(name)
    newest = list(json.loads((root / "contents.json").read_text()).values())[-1]
    budget = NONE if slots == 0 else tierstore.Budget(host_rows=slots)
    opened = tierstore.distributed.open if "partitions" in name else tierstore.open
    rng = np.random.default_rng(5)
    with opened(root / "store", "r+", budget=budget) as store:
        assert contents(store) == newest
        if fold:
            for each in store.versions():
                for kept_as in each.names:
                    store.release(kept_as)
            store.fold()
        expected = {table: _rows(newest, table) for table in store}
        for table in store:
            _write(store[table], expected[table], rng)
        assert store.commit(step=77) == newest["version"] + 1
        assert {table: _rows(contents(store), table) for table in store} == expected
        _write(store[next(iter(store))], {}, rng)
        store.rollback()
    with tierstore.open(root / "store", budget=budget) as store:
        assert {table: _rows(contents(store), table) for table in store} == expected
        assert store.step == 77
        assert store.verify().ok


def _rows(state: dict[str, Any], table: str) -> dict[str, dict[str, str]]:
    """Return rows by key or id, each the bytes of its fields."""
    read = state["tables"][table]
    count = len(next(iter(read["fields"].values()), []))
    names = read["keys"] or [str(row) for row in range(count)]
    return {
        key: {field: values[row] for field, values in read["fields"].items()}
        for row, key in enumerate(names)
    }


def _write(table: Any, expected: dict[str, dict[str, str]], rng: np.random.Generator) -> None:
    """Write some rows of a table, new keys among them, and enter what it must hold."""
    by_key = table.spec.keys is not None
    names: Any = list(table.keys[:]) if table.keys is not None else range(table.rows)
    chosen = sorted(rng.choice(len(names), min(3, len(names)), replace=False))
    given: Any = [names[row] for row in chosen] if by_key else chosen
    if by_key:
        new = "new ✓" if table.spec.keys == "text" else -(2**40)
        given = [*(key for key in given if key != new), new]
    before = table.read(given)
    field = next(iter(table.fields))
    values = before[field] if isinstance(before, dict) else before
    values = values[rng.permutation(len(values))]
    table.write(given, {field: values})
    after = table.read(given, list(table.fields))
    if not table.fields[field].scale:  # what is written with a scale may read as a value beside it
        assert np.array_equal(after[field], values, equal_nan=values.dtype.kind == "f")
    for row, name in enumerate(given):
        key = str(name if by_key else names[name])
        expected[key] = {
            column: np.ascontiguousarray(read[row]).tobytes().hex()
            for column, read in after.items()
        }


def test_a_patch_leads_a_copy_on(unpack: Any) -> None:
    root = unpack("patched")
    after = json.loads((root / "after.json").read_text())
    with tierstore.open(root / "store", "r+", budget=NONE) as store:
        store.apply_patch(root / "3.patch")
        assert contents(store)["tables"] == after["tables"]
        assert (store.step, store.payload["of"].read()) == (3, b"\x03")
        with pytest.raises(VersionError):
            store.apply_patch(root / "3.patch")


def test_a_version_with_a_name_is_gone_back_to(unpack: Any) -> None:
    root = unpack("named_versions")
    kept = json.loads((root / "contents.json").read_text())
    with tierstore.open(root / "store", "r+", budget=NONE) as store:
        names = {name: each.version for each in store.versions() for name in each.names}
        assert set(names) == {"first", "best"}
        store.restore("best")
        assert contents(store)["tables"] == kept[str(names["best"])]["tables"]


@pytest.mark.parametrize("name", ["trained", "narrow_state"])
def test_states_of_torch_point_into_the_store(name: str, unpack: Any) -> None:
    torch = pytest.importorskip("torch")
    root = unpack(name)
    kept = json.loads((root / "contents.json").read_text())
    options = {"state_dtype": "bfloat16"} if name == "narrow_state" else {}
    with tierstore.open(root / "store", "r+", budget=NONE) as store:
        best = next(each.version for each in store.versions() if "best" in each.names)
        rows = {each: tierstore.nn.TieredEmbedding(store[each]) for each in store}
        model, head = torch.nn.ModuleDict(rows), torch.nn.Linear(4, 1)
        adam = tierstore.optim.TieredOptimizer(
            torch.optim.Adam, [*model.parameters(), *head.parameters()], lr=0.5, **options
        )
        newest = store.payload["model"].state_dict()
        model.load_state_dict(newest)  # where the store is
        state = torch.load(root / "best.pt")
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        head.load_state_dict(state["head"])
        assert contents(store)["tables"] == kept[str(best)]["tables"]
        assert adam.param_groups[0]["lr"] == 0.05
        before = store["item"].read([3])
        head(rows["item"](torch.tensor([3])) * rows["user"](torch.tensor([21]))).sum().backward()
        adam.step()
        assert not np.array_equal(store["item"].read([3]), before)
        store.commit()


class _Elsewhere(pickle.Unpickler):
    """Unpickles with every path turned into another."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        return (lambda *_: self.path) if name == "PosixPath" else super().find_class(module, name)


def test_pickles_that_name_the_classes_load(unpack: Any) -> None:
    torch = pytest.importorskip("torch")
    root = unpack("pickled")
    kept = json.loads((root / "contents.json").read_text())

    def loaded(name: str) -> Any:
        with (root / f"{name}.pickle").open("rb") as file:
            return _Elsewhere(file, root / "store").load()

    with loaded("store") as store:
        assert contents(store) == kept[str(store.version)]
    for name, table in (("table", "t"), ("keyed", "k")):
        read = loaded(name)
        with read.store:
            assert (read.name, read.rows) == (table, {"t": 8, "k": 1}[table])
    normal = tierstore.normal(std=0.5, seed=11)
    spec = tierstore.TableSpec(8, 2, init=normal)
    scaled = tierstore.Field(4, "int8", scale=tierstore.Scale("float32"))
    assert loaded("spec") == spec
    assert loaded("spec").init == normal
    assert loaded("fields") == tierstore.TableSpec(8, fields={"q": scaled})
    assert loaded("budget") == tierstore.Budget(host="1MiB", gpu_rows=5)
    assert loaded("initializers") == [
        normal,
        tierstore.zeros(),
        tierstore.uniform(-1, 1, seed=3),
    ]
    error = loaded("error")
    assert isinstance(error, IndexError)
    assert isinstance(error, TierStoreError)
    assert "row 9" in str(error)
    config = torch.load(root / "config.pt", weights_only=False)
    assert config["config"] == spec
