"""Wrong arguments of every public call: a typed error, before anything has changed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tierstore.budget import Budget
from tierstore.errors import ClosedError, TierStoreError
from tierstore.exporting import export_table
from tierstore.importing import import_table

ROWS, DIM, FEW = 40, 4, Budget(host_rows=5)
OWN = np.random.default_rng(3).standard_normal((ROWS, DIM)).astype(np.float32)


class Odd:
    """Raises on any operation."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __iter__(self) -> Any:
        raise ZeroDivisionError("odd")

    def __len__(self) -> int:
        raise OverflowError("odd")

    def __array__(self, *_: object, **__: object) -> Any:
        raise BufferError("odd")


WRONG: list[Any] = [
    None, True, -1, 2**70, 1.5, float("nan"), "", "x\0y", "\udcff", b"\xff", [], {}, (1, "a"),
    {"weight": 3}, {3: 4}, [[1], [2, 3]], np.array(["a"]), np.zeros((3, 3, 3)), object(), Odd(),
    lambda: None, np.datetime64("2020"), 1j, range(0), Path("/nonexistent/there"),
]  # fmt: skip

Call = Callable[[tierstore.Store, Any], object]

CALLS: dict[str, Call] = {
    "read": lambda s, x: s["t"].read(x),
    "read field": lambda s, x: s["t"].read([1], field=x),
    "read fields": lambda s, x: s["t"].read([1], [x]),
    "read out": lambda s, x: s["t"].read([1], out=x),
    "table slice": lambda s, x: s["t"][x:3],
    "write ids": lambda s, x: s["t"].write(x, OWN[:1]),
    "write rows": lambda s, x: s["t"].write([1], x),
    "write field": lambda s, x: s["t"].write([1], OWN[:1], field=x),
    "lease": lambda s, x: s["t"].lease(x).release(),
    "prefetch": lambda s, x: s["t"].prefetch(x),
    "warm": lambda s, x: s["t"].warm(x),
    "warm counts": lambda s, x: s["t"].warm(counts=x),
    "scan": lambda s, x: list(s["t"].scan(start=x)),
    "scan to": lambda s, x: list(s["t"].scan(stop=x)),
    "scan field": lambda s, x: list(s["t"].scan(field=x)),
    "lookup": lambda s, x: s["t"].lookup(x),
    "set_keys": lambda s, x: s.set_keys("t", x),
    "grow": lambda s, x: s.grow("t", x),
    "add_fields": lambda s, x: s.add_fields("t", x),
    "add_fields to": lambda s, x: s.add_fields(x, {"more": tierstore.Field(2)}),
    "create_table": lambda s, x: s.create_table("new", x),
    "create_table name": lambda s, x: s.create_table(x, tierstore.TableSpec(3, 2)),
    "replace_table": lambda s, x: s.replace_table("t", x, reinitialize=True),
    "replace_table blocks": lambda s, x: s.replace_table("t", s["t"].spec, blocks=x),
    "getitem": lambda s, x: s[x],
    "commit step": lambda s, x: s.commit(step=x),
    "commit payload": lambda s, x: s.commit(payload=x),
    "commit value": lambda s, x: s.commit(payload={"v": x}),
    "commit_async step": lambda s, x: s.commit_async(step=x).result(),
    "commit_async value": lambda s, x: s.commit_async(payload={"v": x}).result(),
    "confirm": lambda s, x: s.confirm(x),
    "save version": lambda s, x: s.save(Path(s.path).parent / "copy", version=x),
    "verify": lambda s, x: s.verify(sample=x),
    "load_state_dict": lambda s, x: s.load_state_dict(x),
    "open path": lambda s, x: tierstore.open(x).close(),
    "open mode": lambda s, x: tierstore.open(s.path, x).close(),
    "open budget": lambda s, x: tierstore.open(s.path, budget=x).close(),
    "open policy": lambda s, x: tierstore.open(s.path, policy=x, budget=FEW).close(),
    "open version": lambda s, x: tierstore.open(s.path, version=x).close(),
    "open discard_newer": lambda s, x: tierstore.open(s.path, discard_newer=x).close(),
    "open keep": lambda s, x: tierstore.open(s.path, keep=x).close(),
    "open allow_untested": lambda s, x: tierstore.open(s.path, allow_untested=x).close(),
    "open device": lambda s, x: tierstore.open(s.path, device=x).close(),
    "open missing": lambda s, x: tierstore.open(s.path, missing=x).close(),
    "open check_ids": lambda s, x: tierstore.open(s.path, check_ids=x).close(),
    "create": lambda s, x: tierstore.create(Path(s.path).parent / "new", x).close(),
    "spec rows": lambda s, x: tierstore.TableSpec(x, 4),
    "spec dim": lambda s, x: tierstore.TableSpec(4, x),
    "field dtype": lambda s, x: tierstore.Field(4, x),
    "budget": lambda s, x: Budget(host=x),
    "budget rows": lambda s, x: Budget(host_rows=x),
    "load": lambda s, x: import_table(s, x),
    "export": lambda s, x: export_table(s["t"], Path(s.path).parent / "o.npy", rows=x),
    "export field": lambda s, x: export_table(s["t"], Path(s.path).parent / "o.npy", field=x),
}  # fmt: skip

ARGUMENT_ERRORS = (TypeError, ValueError, LookupError)
"""Python's own, where the interpreter is the first to look."""

WHOLE = {"read", "lease", "prefetch", "warm"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tierstore.Store]:
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.from_array(OWN))
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=FEW) as store:
        yield store
        store.rollback()


def test_every_option_is_tried() -> None:
    options = inspect.signature(tierstore.open).parameters
    assert {f"open {name}" for name in options} <= CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.fault(4, 12, 17)
def test_wrong_arguments(name: str, store: tierstore.Store) -> None:
    wrong = []
    for value in WRONG:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                CALLS[name](store, value)
        except ClosedError as error:
            wrong.append(f"{value!r} closed the store: {error}")
            break
        except (TierStoreError, *ARGUMENT_ERRORS):
            pass
        except Exception as error:
            if not isinstance(value, Odd) or not isinstance(
                error, ZeroDivisionError | OverflowError | BufferError
            ):  # an error of the caller's own code passes
                wrong.append(f"{value!r}: {error!r}")
        if inside.door(store).closed:
            wrong.append(f"{value!r} closed the store")
            break
    assert wrong == []
    assert store["t"].read(np.arange(3)).shape[0] == 3
    assert store.verify().ok
