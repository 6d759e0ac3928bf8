"""Ranks that do something else with a batch than others: all are told, and no rows are mixed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.distributed.ranks import run, values
from tierstore import distributed
from tierstore.distributed.messages import Message
from tierstore.errors import (
    InvalidInputError,
    RanksError,
    RowIndexError,
    TierStoreError,
    UnknownNameError,
)
from tierstore.nn import TieredEmbedding, TieredEmbeddingCollection

ROWS, DIM = 40, 4
IDS = torch.arange(ROWS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store whose tables have two fields of one width, 0 and 7, and a wider one."""
    fields = {
        name: tierstore.Field(DIM, "float32", tierstore.constant(value))
        for name, value in (("weight", 0.0), ("other", 7.0))
    }
    fields["wide"] = tierstore.Field(3 * DIM, "float32", tierstore.constant(5.0))
    specs = {name: tierstore.TableSpec(ROWS, fields=fields) for name in ("item", "user")}
    specs["key"] = tierstore.TableSpec(dim=DIM, keys="int64")
    distributed.create(tmp_path / "parts", specs, partitions=4).close()
    return tmp_path / "parts"


def error_of(call: Callable[[], Any]) -> TierStoreError | None:
    try:
        call()
    except TierStoreError as error:
        return error
    return None


def other_fields(rank: int, path: Path, names: tuple[str, str]) -> list[Any]:
    """Return what is raised where each rank calls for another field, or calls another way."""
    errors = []
    with distributed.open(path) as store:
        item, name = store["item"], names[rank]
        sources = {"item": ("item", name), "user": ("user", name)}
        coming = {"item": IDS, "user": IDS[:3]}
        own: list[Any] = [
            (TieredEmbedding(item, name), IDS),
            (TieredEmbedding(item, name).requires_grad_(False), IDS),
            (TieredEmbeddingCollection(store, sources), coming),
            (TieredEmbeddingCollection(store, sources).requires_grad_(False), coming),
            (lambda ids: item.read(ids, name), IDS),
            ((TieredEmbedding(item, name), lambda ids: item.read(ids, name))[rank], IDS),
        ]
        for ahead in (False, True):
            for layer, ids in own:
                if ahead:
                    (layer if hasattr(layer, "prefetch") else item).prefetch(ids)
                errors.append(error_of(lambda layer=layer, ids=ids: layer(ids)))
                assert (item.read(IDS, "other") == 7).all()  # and the ranks go on
    return errors


@pytest.mark.parametrize("names", [("weight", "other"), ("other", "wide"), ("wide", "weight")])
def test_ranks_that_call_for_different_fields_are_told(path: Path, names: tuple[str, str]) -> None:
    for errors in values(run(2, other_fields, path, names)):
        assert len(errors) == 12
        for error in errors:
            assert isinstance(error, InvalidInputError), error
            assert "with the same features and fields" in str(error)


def one_alone(rank: int, path: Path) -> list[Any]:
    """Return what is raised where rank 1 cannot read what was announced."""
    with distributed.open(path) as store:
        item, errors = store["item"], []
        for ids, name in ((torch.tensor([1000]), None), (IDS, "unknown")):
            item.prefetch(IDS)
            given = (ids, name) if rank else (IDS, None)
            errors.append(error_of(lambda given=given: item.read(*given)))
            assert (item.read(IDS) == 0).all()
        return errors


def test_one_rank_cannot_read_what_was_announced(path: Path) -> None:
    others, own = values(run(2, one_alone, path))
    assert [type(each) for each in others] == [RanksError] * 2
    assert [type(each) for each in own] == [RowIndexError, UnknownNameError]


def without_window(rank: int, path: Path) -> None:
    with distributed.open(path) as store:
        for _ in range(2):
            store["item"].prefetch(IDS, window=0)
        assert (store["item"].read(IDS) == 0).all()


def test_a_batch_is_announced_with_a_window_of_none(path: Path) -> None:
    values(run(2, without_window, path))


def breaks_off(rank: int, path: Path) -> int:
    """Interrupt what rank 1 receives, once; return how many sent messages are kept in the end."""
    with distributed.open(path) as store:
        receive = Message._receive

        def interrupted(*_: object) -> None:
            Message._receive = receive  # type: ignore[method-assign]
            raise KeyboardInterrupt

        if rank:
            Message._receive = interrupted  # type: ignore[method-assign]
        if rank:
            with pytest.raises(KeyboardInterrupt):
                store.rollback()
        with pytest.raises(InvalidInputError, match="does something else"):  # the first of rank 0
            store.rollback()
        store.rollback()
        for _ in range(30):
            assert (store["item"].read(IDS, "other") == 7).all()
        return len(store._ranks._messages._sent)


def test_an_interrupted_message_is_no_other(path: Path) -> None:
    """Ranks go on with the next call, and no memory grows."""
    assert all(kept < 5 for kept in values(run(2, breaks_off, path)))


CALLS = ("backward", "forward", "announce", "keys", "write", "commit")
"""Each of them beside each other call; pairs of them once in each order."""
MANY = {str(number): "item" for number in range(70)}
"""Features that take more than one word of a message."""


def calls_of(store: Any) -> dict[str, Callable[[], Any]]:
    """Return what a rank may do while another does something else."""
    item, emb = store["item"], TieredEmbedding(store["item"])
    both = TieredEmbeddingCollection(store, ["item", "user"])
    many = TieredEmbeddingCollection(store, MANY)
    found = emb(IDS)
    return {
        "backward": lambda: found.sum().backward(),
        "forward": lambda: emb(IDS),
        "announce": lambda: emb.prefetch(IDS),
        "another layer": lambda: both({"item": IDS, "user": IDS[:3]}),
        "more features": lambda: many(dict.fromkeys(MANY, IDS)),
        "read": lambda: item.read(IDS, "wide"),
        "write": lambda: item.write(IDS, torch.zeros(ROWS, DIM)),
        "keys": lambda: store["key"].read(IDS),
        "write by key": lambda: store["key"].write(IDS, torch.zeros(ROWS, DIM)),
        "commit": lambda: store.commit(1),
        "rollback": store.rollback,
        "grow": lambda: store.grow("user", 2 * ROWS),
        "keep": lambda: store.keep(1, "first"),
    }


def unlike(rank: int, path: Path, name: str) -> list[tuple[str, Any]]:
    """Return what is raised where the last rank calls something else than the others, and back."""
    errors = []
    with distributed.open(path) as store:
        own = calls_of(store)
        for other in own:
            for of_last, of_others in ((name, other), (other, name)):
                if other not in CALLS[: CALLS.index(name) + 1]:
                    call = of_last if rank == store.ranks - 1 else of_others
                    errors.append((f"{of_last}, {of_others}", error_of(own[call])))
                    if "announce" in (name, other):  # a rank that only announces learns it later
                        errors[-1] = (errors[-1][0], errors[-1][1] or error_of(own["forward"]))
                    store.rollback()
                    own = calls_of(store)
                    assert (store["item"].read(IDS, "other") == 7).all()
        for _ in range(2):
            own["announce"]()
            assert (own["forward"]() == 0).all()
        store.commit(2)
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_ranks_that_do_something_else_are_all_told_at_once(path: Path, name: str) -> None:
    """One of three does something else; all go on together, with right values."""
    for errors in values(run(3, unlike, path, name)):
        for what, error in errors:
            assert isinstance(error, InvalidInputError), (what, error)
            assert "every rank" in str(error), (what, error)
