"""What keys without a row read as, in whatever opens, reads and looks them up."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tierstore import Field, TableSpec
from tierstore.errors import InvalidInputError, InvalidTypeError, UnknownNameError

torch = pytest.importorskip("torch")

DIM = 5
INIT = tierstore.normal(std=1, seed=8)
KEYS: dict[str, list[Any]] = {
    "int64": [7, -5, 2**40, 11, -(2**62)],
    "text": ["ann", "", "über", "bob", "a b"],
}
HERE, GONE, NEVER = [0, 1], 2, [3, 4]
"""Of those keys some have rows, one was removed, and some were never there."""


def made(path: Path, kind: str, partitions: int = 0) -> Path:
    fields = {"weight": Field(DIM, "float32", INIT), "age": Field(1, "float64", INIT)}
    specs = {"t": TableSpec(fields=fields, keys=kind)}
    create: Callable[..., Any] = tierstore.create
    if partitions:
        create = tierstore.distributed.create
    more = {"partitions": partitions} if partitions else {}
    with create(path, specs, **more) as store:
        keys = KEYS[kind]
        given = [keys[at] for at in [*HERE, GONE]]
        store["t"].write(given, np.random.default_rng(3).normal(size=(3, DIM)).astype(np.float32))
        store["t"].remove([keys[GONE]])
        store.commit()
    return path


@pytest.fixture(params=["plain", "partitions"])
def layout(request: pytest.FixtureRequest) -> int:
    return 3 if request.param == "partitions" else 0


@pytest.fixture(params=["int64", "text"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path, kind: str, layout: int) -> Path:
    return made(tmp_path / "s.tier", kind, layout)


def first_rows(path: Path, kind: str, at: list[int]) -> Any:
    """Return the first rows of keys, as a trainer gets them."""
    with tierstore.create(
        None, {"t": TableSpec(keys=kind, fields={"weight": Field(DIM, init=INIT)})}
    ) as store:
        return store["t"].read([KEYS[kind][each] for each in at])


def test_a_reader_refuses_keys_without_a_row(path: Path, kind: str) -> None:
    """A server that answers for a person who left, or was never there, answers wrongly."""
    keys = KEYS[kind]
    with tierstore.open(path) as store:
        table = store["t"]
        rows = table.read([keys[at] for at in HERE])
        for at in (GONE, *NEVER):
            with pytest.raises(KeyError, match=r"no row has the key .*missing='init'") as raised:
                table.read([keys[at]])
            assert repr(keys[at]) in str(raised.value)
            assert isinstance(raised.value, UnknownNameError)
        out = np.full((5, DIM), 9, np.float32)
        with pytest.raises(KeyError, match=r"no row has these 3 keys"):
            table.read(keys, out=out)
        assert (out == 9).all()
        with pytest.raises(KeyError):
            table[keys[NEVER[0]]]
        with pytest.raises(KeyError):
            table.read(keys[GONE], ["weight", "age"])
        if kind == "int64":
            with pytest.raises(KeyError, match=str(keys[NEVER[0]])):
                table.read(torch.tensor([[keys[0], keys[NEVER[0]]]]))
        assert np.array_equal(table.read([keys[at] for at in HERE]), rows)
        assert table.read([]).shape == (0, DIM)
        assert not inside.door(store).closed


def test_a_reader_that_says_so_reads_first_rows_or_a_value(path: Path, kind: str) -> None:
    keys, unknown = KEYS[kind], [GONE, *NEVER]
    first = first_rows(path, kind, unknown)
    with tierstore.open(path) as store:
        table = store["t"]
        known = table.read([keys[at] for at in HERE])
        found = table.read(keys, missing="init")
        assert np.array_equal(found[unknown], first)
        assert np.array_equal(found[HERE], known)
        assert np.array_equal(table.read(keys, missing="init", raw=True).view(np.float32), found)
        for value in (0, -1.5, np.float32(0.25), float("nan")):
            found = table.read(keys, missing=value)
            assert np.array_equal(
                found[unknown], np.full((3, DIM), value, np.float32), equal_nan=True
            )
            assert np.array_equal(found[HERE], known)
            tensors = table.read(keys, missing=value, as_tensor=True, dtype=torch.float16)
            expected = torch.tensor(known).half()
            assert torch.equal(tensors[HERE], expected)
            assert tensors[unknown].isnan().all() or (tensors[unknown] == float(value)).all()
            both = table.read(keys, ["weight", "age"], missing=value)
            assert np.array_equal(both["weight"], found, equal_nan=True)
            assert np.array_equal(both["age"][unknown], np.full((3, 1), value), equal_nan=True)
        with pytest.raises(InvalidInputError, match="raw rows are bits"):
            table.read(keys, missing=0.0, raw=True)


def test_the_way_a_store_is_opened_is_what_its_reads_and_layers_do(path: Path, kind: str) -> None:
    keys, unknown = KEYS[kind], [GONE, *NEVER]
    first = first_rows(path, kind, unknown)
    for missing, expected in {"init": first, 0.5: np.full((3, DIM), 0.5, np.float32)}.items():
        with tierstore.open(path, missing=missing) as store:
            assert np.array_equal(store["t"].read(keys)[unknown], expected)
            with pytest.raises(KeyError):
                store["t"].read(keys, missing="raise")
            again = pickle.loads(pickle.dumps(store))
            assert np.array_equal(again["t"].read(keys)[unknown], expected)
            again.close()


LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "embedding": lambda table, keys: tierstore.nn.TieredEmbedding(table).eval()(keys),
    "bag": lambda table, keys: tierstore.nn.TieredEmbeddingBag(table, mode="sum").eval()(
        keys[:, None]
    ),
    "collection": lambda table, keys: tierstore.nn.TieredEmbeddingCollection(
        table.store, {"f": "t"}
    ).eval()({"f": keys})["f"],
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_do_not_train_do_as_reads_do(tmp_path: Path, name: str) -> None:
    path, keys = made(tmp_path / "s.tier", "int64"), torch.tensor(KEYS["int64"])
    unknown = [GONE, *NEVER]
    first = first_rows(path, "int64", unknown)
    with torch.no_grad():
        with tierstore.open(path) as store, pytest.raises(KeyError, match="these 3 keys"):
            LAYERS[name](store["t"], keys)
        with tierstore.open(path, missing="init") as store:
            assert np.array_equal(LAYERS[name](store["t"], keys)[unknown].numpy(), first)
        with tierstore.open(path, missing=-2.0) as store:
            assert (LAYERS[name](store["t"], keys)[unknown] == -2).all()
        with tierstore.open(path, "r+") as store:  # as a trainer that validates
            assert np.array_equal(LAYERS[name](store["t"], keys)[unknown].numpy(), first)
        with tierstore.open(path, "r+", missing="raise") as store, pytest.raises(KeyError):
            LAYERS[name](store["t"], keys)


def test_training_goes_on_as_before_and_adds_keys(tmp_path: Path) -> None:
    path, keys = made(tmp_path / "s.tier", "int64"), KEYS["int64"]
    for missing in (None, "raise"):
        with tierstore.open(path, "r+", missing=missing) as store:
            layer = tierstore.nn.TieredEmbedding(store["t"])
            opt = tierstore.optim.TieredOptimizer(torch.optim.SGD, [layer], lr=0.0)
            layer(torch.tensor(keys)).sum().backward()
            opt.step()
            assert store["t"].contains(keys).all()
            assert np.array_equal(store["t"].read(keys[3:]), first_rows(path, "int64", NEVER))
            store.rollback()


@pytest.mark.parametrize("wrong", ["zero", "", True, [0.0], 10**400, np.zeros(DIM), 1j])
def test_what_is_no_choice_is_refused_at_once(tmp_path: Path, wrong: Any) -> None:
    path = made(tmp_path / "s.tier", "int64")
    expected = pytest.raises((InvalidInputError, InvalidTypeError), match="'raise', 'init' or")
    for mode in ("r", "r+"):
        with expected:
            tierstore.open(path, mode, missing=wrong)
    with tierstore.open(path) as store, expected:
        store["t"].read(KEYS["int64"][:2], missing=wrong)  # though all are there


def test_a_field_of_whole_numbers_has_no_other_value(tmp_path: Path) -> None:
    fields = {"weight": Field(DIM), "code": Field(3, "uint8")}
    with tierstore.create(tmp_path / "s", {"t": TableSpec(fields=fields, keys="int64")}) as store:
        table = store["t"]
        assert (table.read([4], "code", missing=255) == 255).all()
        for value in (0.5, -1, 256, float("nan")):
            with pytest.raises(InvalidInputError, match="uint8 holds whole numbers from 0 to 255"):
                table.read([4], ["weight", "code"], missing=value)
            assert table.read([4], missing=value).shape == (1, DIM)


def test_ranks_choose_each_for_its_keys(tmp_path: Path) -> None:
    path = made(tmp_path / "s.tier", "int64", 3)
    keys, unknown = KEYS["int64"], [GONE, *NEVER]
    first = first_rows(path, "int64", unknown)
    with tierstore.distributed.open(path) as store:
        table = store["t"]
        assert np.array_equal(table.read(keys)[unknown], first)
        with pytest.raises(KeyError, match="these 3 keys"):
            table.read(keys, missing="raise")
        assert (table.read(keys, missing=4)[unknown] == 4).all()
        with pytest.raises(InvalidInputError, match="'raise', 'init' or a number"):
            table.read(keys, missing="none")
        assert np.array_equal(table.read(keys[:2], missing="raise"), table.read(keys[:2]))
