"""Files loaded into a store with partitions: the rows of a plain store that was given the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tierstore
from tests import inside
from tests.distributed.test_ranks import assert_same, contents
from tierstore import distributed
from tierstore.errors import ExistsError, FormatError, InvalidInputError
from tierstore_cli.main import cli

ROWS, DIM = 77, 5
SPECS = {
    "item": tierstore.TableSpec(
        ROWS,
        fields={
            "weight": tierstore.Field(DIM, init=tierstore.normal(seed=1)),
            "moment": tierstore.Field(2, init=tierstore.normal(seed=2)),
        },
    ),
    "user": tierstore.TableSpec(dim=3, keys="int64", init=tierstore.normal(seed=3)),
}
KEYS = [f"key {each * 8 % ROWS}" for each in range(ROWS)]


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Path, Path]:
    """A plain store and one with partitions, of equal tables."""
    tierstore.create(tmp_path / "plain", SPECS).close()
    distributed.create(tmp_path / "parts", SPECS, partitions=6).close()
    return tmp_path / "plain", tmp_path / "parts"


def rows(seed: int, count: int = ROWS, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def same(stores: tuple[Path, Path], *tables: str) -> None:
    """Check that both stores hold the same, keys included, and that the files are whole."""
    plain, parts = stores
    if "user" not in tables:
        assert_same(contents(plain), contents(parts), exact=True)
    with tierstore.open(plain) as one, tierstore.open(parts) as other:
        assert list(one) == list(other)
        for name in {"item", *tables} - {"user"}:
            own, others = one[name].keys, other[name].keys
            assert (own is None) == (others is None)
            if own is not None and others is not None:
                assert list(own[:]) == list(others[:])
        if "user" in tables:
            keys = np.sort(np.asarray(one["user"].keys[:]))
            assert np.array_equal(keys, np.sort(np.asarray(other["user"].keys[:])))
            assert np.array_equal(one["user"].read(keys), other["user"].read(keys))
    assert tierstore.verify(parts).ok


def test_rows_of_a_table_are_replaced(stores: tuple[Path, Path], tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", rows(1))
    seen: list[tuple[int, int]] = []
    for path in stores:
        done = tierstore.import_table(
            path, tmp_path / "rows.npy", table="item", progress=lambda *at: seen.append(at)
        )
        assert (done.rows, done.dim, done.created, done.version) == (ROWS, DIM, False, 2)
    assert seen[-1] == (ROWS, ROWS)
    same(stores)
    for path in stores:
        options = ["--table", "item", "--keys", keys(tmp_path)]
        done = CliRunner().invoke(cli, ["load", str(path), str(tmp_path / "rows.npy"), *options])
        assert done.exit_code == 0, done.output
    for path in stores:  # the keys stay
        tierstore.import_table(path, rows_file(tmp_path, rows(2)), table="item")
    same(stores)


def keys(tmp_path: Path) -> str:
    (tmp_path / "keys.txt").write_text("".join(f"{each}\n" for each in KEYS))
    return str(tmp_path / "keys.txt")


def rows_file(tmp_path: Path, values: np.ndarray) -> Path:
    np.save(tmp_path / "some.npy", values)
    return tmp_path / "some.npy"


def test_a_new_table_is_made(stores: tuple[Path, Path], tmp_path: Path) -> None:
    file = rows_file(tmp_path, rows(3, 1001, 4))
    for path in stores:
        done = tierstore.import_table(path, file, table="more", keys=range(5, 1006))
        assert done.created and done.keys and done.version == 2
    same(stores, "more")
    with distributed.open(stores[1]) as store:  # and is one to write, as the others
        assert store["more"].lookup(17) == 12
        store["more"].write([3], rows(4, 1, 4))
        store["more"].scalars["lr"] = 2
        store.commit(7)
        with pytest.raises(ExistsError):
            store.create_table("more", store["more"].spec, blocks=iter(()))
        with pytest.raises(InvalidInputError, match="hold 0 rows, the table 1001"):
            store.replace_table("more", store["more"].spec, blocks=iter(()))
    for path in stores:  # of rows that are drawn, too
        with tierstore.open(path, "r+") if path == stores[0] else distributed.open(path) as store:
            store.create_table("drawn", SPECS["item"], keys=KEYS)
            assert store["drawn"].lookup(KEYS[5]) == 5
            store.drop("drawn")
    tierstore.import_table(stores[1], file, table="more")
    with tierstore.open(stores[1]) as reader:
        assert reader["more"].scalars["lr"] == 2 and reader.step == 7
        assert np.array_equal(reader["more"][:], rows(3, 1001, 4))


def test_rows_are_added_and_replaced_by_key(stores: tuple[Path, Path], tmp_path: Path) -> None:
    some = rows_file(tmp_path, rows(5, 30))
    for path in stores:
        with tierstore.open(path, "r+") if path == stores[0] else distributed.open(path) as store:
            store.set_keys("item", KEYS)
        new = [*KEYS[40:60], *(f"new {each}" for each in range(10))]
        done = tierstore.import_table(path, some, table="item", keys=new, upsert=True)
        assert done.added == 10
    same(stores)
    users = rows_file(tmp_path, rows(6, 40, 3))
    for start in (0, 25):
        for path in stores:
            some_keys = range(start - 9, start + 31)
            done = tierstore.import_table(path, users, table="user", keys=some_keys)
            assert done.added == (25 if start else 40)
    same(stores, "user")


class Broken:
    """Records that end with an error."""

    def __init__(self, spec: tierstore.TableSpec, good: int) -> None:
        self._records = np.ones((good, spec.layout.record_bytes), np.uint8)

    def __iter__(self) -> Iterator[np.ndarray]:
        yield self._records
        raise FormatError("the file is damaged")


@pytest.mark.variants(1)
@pytest.mark.parametrize("table", ["item", "new"])
def test_a_load_that_fails_changes_nothing(stores: tuple[Path, Path], table: str) -> None:
    spec = SPECS["item"]
    with distributed.open(stores[1]) as store:
        version = store.version
        write = store.replace_table if table == "item" else store.create_table
        for keys in (None, KEYS):
            with pytest.raises(FormatError, match="damaged"):
                write(table, spec, blocks=Broken(spec, 20), keys=keys)
        assert store.version == version and list(store) == ["item", "user"]
        for bad in ("key", ["a"] * ROWS):
            with pytest.raises(InvalidInputError):
                write(table, spec, blocks=iter([]), keys=bad)
        store["item"].write([2], np.zeros((1, DIM), np.float32))
        with pytest.raises(InvalidInputError, match="not committed"):
            write(table, spec, blocks=iter([]))
        store.rollback()
        with pytest.raises(InvalidInputError, match="by key"):
            store.replace_table("user", spec, blocks=iter([]))
    same(stores)
    files = {each.name for each in (stores[1] / "partitions").glob("*/*/g*")}
    with distributed.open(stores[1]) as store:  # what was left is swept
        store["item"].write([2], np.zeros((1, DIM), np.float32))
        store.commit(1)
    assert {each.name for each in (stores[1] / "partitions").glob("*/*/g*")} <= files
    assert not list((stores[1] / "partitions").glob("*/new/*"))


def test_a_partition_that_fails_takes_the_others_back(
    stores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS["item"]
    records = np.ones((ROWS, spec.layout.record_bytes), np.uint8)

    def failing(*_: Any, **__: Any) -> None:
        raise tierstore.errors.StoreFullError("no space")

    with distributed.open(stores[1]) as store:
        monkeypatch.setattr(inside.parts(store).own[3], "rewrite", failing)
        with pytest.raises(tierstore.errors.StoreFullError, match="no space"):
            store.replace_table("item", spec, blocks=[records], keys=KEYS)
        monkeypatch.undo()
        assert store["item"].keys is None
        store["item"].write([2], np.zeros((1, DIM), np.float32))
        store.rollback()
        store.commit(1)
    with tierstore.open(stores[0], "r+") as plain:
        plain.commit(1)
    same(stores)


def test_rows_with_keys_grow(stores: tuple[Path, Path]) -> None:
    more = [f"more {each}" for each in range(13)]
    for path in stores:
        with tierstore.open(path, "r+") if path == stores[0] else distributed.open(path) as store:
            store.set_keys("item", KEYS)
            for wrong in (None, more[:3]):
                with pytest.raises(InvalidInputError, match="have keys"):
                    store.grow("item", ROWS + 10, keys=wrong)
            with pytest.raises(InvalidInputError, match="more than once"):
                store.grow("item", ROWS + 1, keys=KEYS[:1])
            store.grow("item", ROWS + 10, keys=more[:10])
            assert store["item"].lookup("more 9") == ROWS + 9
            ids = store.append("item", {"weight": rows(8, 3)}, keys=more[10:])
            assert ids == range(ROWS + 10, ROWS + 13)
            assert store["item"].lookup("more 12") == ROWS + 12
    same(stores)


def told(store: tierstore.Store, path: Path) -> dict[str, Any]:
    """Change a store, and return what it tells of that and of itself."""
    ids = np.arange(0, ROWS, 3)
    store["item"].write(ids, rows(9, len(ids)))
    store.commit(1, keep="one")
    store.alter_table("item", dtype={"moment": "float16"})
    store["item"].write(ids + 1, rows(10, len(ids)))
    store.commit(2)
    store.write_patch(path / "patch", 3)
    store.save(path / "copy")
    with tierstore.open(path / "copy") as copy:
        saved = {name: copy["item"].read(np.arange(ROWS), name) for name in copy["item"].fields}
    found = {
        "saved": {name: values.tolist() for name, values in saved.items()},
        "changed": {name: ids.tolist() for name, ids in store.changed("one").items()},
        "patched": store.changed(3)["item"].tolist(),
        "verified": store.verify().ok,
        "damaged": dict(store.damaged),
        "versions": [(each.version, each.step, each.names) for each in store.versions()],
        "refreshed": store.refresh(),
    }
    store.replace_table("item", store["item"].spec, reinitialize=True)
    assert store.update_copy(path / "copy").whole == [] and (path / "patch").stat().st_size
    return found


def test_a_store_in_partitions_tells_what_any_store_does(
    stores: tuple[Path, Path], tmp_path: Path
) -> None:
    found = []
    for path in stores:
        (tmp_path / f"of {path.name}").mkdir()
        is_plain = path == stores[0]
        with (
            tierstore.open(path, "r+", keep=9) if is_plain else distributed.open(path, keep=9) as s
        ):
            found.append(told(s, tmp_path / f"of {path.name}"))
    assert found[0] == found[1] and found[0]["changed"]["item"]
    with distributed.open(stores[1]) as store:
        for call in (
            lambda: store.commit_async(step=3),
            lambda: store.confirm(store.version),
            lambda: store.set_keys("item", KEYS, commit=False),
        ):
            with pytest.raises(InvalidInputError, match=r"call commit\(\)|leave c"):
                call()
