"""Layers of torch that a layer over a table takes over: whole, or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.nn import TieredEmbedding, TieredEmbeddingBag
from tierstore.optim import TieredOptimizer

ROWS, DIM = 12, 4


@pytest.fixture
def store() -> Iterator[tierstore.Store]:
    with tierstore.create(None, {}) as made:
        yield made


def step(layer: Any, optimizer: Any, *inputs: Tensor | None) -> Tensor:
    """Train on a batch; return what the layer gave for it."""
    found: Tensor = layer(*inputs)
    optimizer.zero_grad()
    found.sin().sum().backward()
    optimizer.step()
    return found.detach()


EMBEDDINGS = [
    dict(zip(("padding_idx", "sparse"), values, strict=True))
    for values in itertools.product((None, 0, 3, -2), (False, True))
]


@pytest.mark.parametrize("options", EMBEDDINGS, ids=str)
def test_an_embedding_is_taken_over_with_its_options(
    store: tierstore.Store, options: dict[str, Any]
) -> None:
    plain = torch.nn.Embedding(ROWS, DIM, **options)
    layer = TieredEmbedding.from_pretrained(plain, store, "t", freeze=False)
    pairs = [
        (plain, torch.optim.SGD(plain.parameters(), lr=0.3)),
        (layer, TieredOptimizer(torch.optim.SGD, [layer], lr=0.3)),
    ]
    for _ in range(3):
        ids = torch.randint(ROWS, (20,))
        one, other = (step(each, optimizer, ids) for each, optimizer in pairs)
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(layer(torch.arange(ROWS)), plain.weight)


BAGS = [
    dict(zip(("mode", "include_last_offset", "padding_idx"), values, strict=True))
    for values in itertools.product(("sum", "mean", "max"), (False, True), (None, 5))
]


@pytest.mark.parametrize("options", BAGS, ids=str)
def test_a_bag_is_taken_over_with_its_options(
    store: tierstore.Store, options: dict[str, Any]
) -> None:
    plain = torch.nn.EmbeddingBag(ROWS, DIM, **options)
    layer = TieredEmbeddingBag.from_pretrained(plain, store, "t", freeze=False)
    pairs = [
        (plain, torch.optim.SGD(plain.parameters(), lr=0.3)),
        (layer, TieredOptimizer(torch.optim.SGD, [layer], lr=0.3)),
    ]
    offsets = torch.tensor([0, 4, 9, 20] if options["include_last_offset"] else [0, 4, 9])
    for _ in range(3):
        ids = torch.randint(ROWS, (20,))
        one, other = (step(each, optimizer, ids, offsets) for each, optimizer in pairs)
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(TieredEmbedding(store["t"])(torch.arange(ROWS)), plain.weight)


def test_options_that_are_given_win(store: tierstore.Store) -> None:
    plain = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=1).eval()
    layer = TieredEmbeddingBag.from_pretrained(plain, store, "t", mode="max", padding_idx=None)
    assert (layer.mode, layer.padding_idx, layer.training) == ("max", None, False)


class Scaled(torch.nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 8


class Named(torch.nn.Embedding):
    """A subclass that does nothing of its own."""


def hooked() -> torch.nn.Embedding:
    layer = torch.nn.Embedding(ROWS, DIM)
    layer.register_forward_hook(lambda module, ids, rows: rows * 2)
    return layer


def parametrized() -> torch.nn.Embedding:
    layer = torch.nn.Embedding(ROWS, DIM)
    torch.nn.utils.parametrizations.weight_norm(layer)
    return layer


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "max_norm": (
        TieredEmbedding,
        lambda: torch.nn.Embedding(ROWS, DIM, max_norm=1.0),
        "max_norm=1.0 would write rows",
    ),
    "max_norm of bags": (
        TieredEmbeddingBag,
        lambda: torch.nn.EmbeddingBag(ROWS, DIM, max_norm=1.0),
        "max_norm=1.0 would write rows",
    ),
    "scale_grad_by_freq": (
        TieredEmbedding,
        lambda: torch.nn.Embedding(ROWS, DIM, scale_grad_by_freq=True),
        "scale_grad_by_freq=True is not supported",
    ),
    "bags as rows": (
        TieredEmbedding,
        lambda: torch.nn.EmbeddingBag(ROWS, DIM),
        "pools bags, which a TieredEmbedding would drop",
    ),
    "rows as bags": (
        TieredEmbeddingBag,
        lambda: torch.nn.Embedding(ROWS, DIM),
        "does not pool",
    ),
    "forward": (TieredEmbedding, lambda: Scaled(ROWS, DIM), "has a forward of its own"),
    "hooks": (TieredEmbedding, hooked, "has hooks"),
    "parametrization": (TieredEmbedding, parametrized, "has a parametrization of its weight"),
}


@pytest.mark.parametrize(("kind", "make", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(
    store: tierstore.Store, kind: Any, make: Any, said: str
) -> None:
    version = store.version
    with pytest.raises(InvalidInputError, match=said):
        kind.from_pretrained(make(), store, "t")
    assert list(store) == [] and store.version == version


WRONG: dict[str, tuple[Any, Any, type[Exception]]] = {
    "no layer": (torch.nn.Linear(2, 2), {}, InvalidTypeError),
    "one dimension": (torch.ones(3), {}, InvalidTypeError),
    "a mode that there is not": (torch.rand(3, 2), {"mode": "min"}, InvalidInputError),
    "padding behind the rows": (torch.rand(3, 2), {"padding_idx": 3}, InvalidInputError),
    "a typing mistake": (torch.rand(3, 2), {"paddingidx": 1}, TypeError),
}


@pytest.mark.parametrize(("given", "options", "error"), WRONG.values(), ids=WRONG)
def test_mistakes_leave_no_table(
    store: tierstore.Store, given: Any, options: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        TieredEmbeddingBag.from_pretrained(given, store, "t", **options)
    assert list(store) == []


def test_a_subclass_that_does_nothing_of_its_own_is_taken(store: tierstore.Store) -> None:
    plain = Named(ROWS, DIM, padding_idx=2)
    layer = TieredEmbedding.from_pretrained(plain, store, "t")
    assert layer.padding_idx == 2
    assert torch.equal(layer(torch.arange(ROWS)), plain.weight)


@pytest.mark.parametrize("kind", [TieredEmbedding, TieredEmbeddingBag])
def test_a_weight_can_be_neither_set_nor_read(store: tierstore.Store, kind: Any) -> None:
    layer = kind(store.create_table("t", tierstore.TableSpec(ROWS, DIM, init=tierstore.normal())))
    linear = torch.nn.Linear(DIM, ROWS, bias=False)
    for weight in (linear.weight, torch.nn.Parameter(torch.rand(ROWS, DIM)), torch.rand(2), None):
        with pytest.raises(AttributeError, match=r"F.linear\(x, emb\(torch.arange"):
            layer.weight = weight
        register = layer.register_buffer if type(weight) is Tensor else layer.register_parameter
        with pytest.raises(AttributeError, match="a weight that is set would not be used"):
            register("weight", weight)
    layer.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    layer.register_buffer("shift", torch.ones(1))
    with pytest.raises(AttributeError, match=rf"a {kind.__name__} are not one .*torch.arange"):
        layer.weight  # noqa: B018
    assert [name for name, _ in layer.named_parameters()] == ["rows", "scale"]
    assert [name for name, _ in layer.named_buffers()] == ["shift"]


def test_a_head_tied_by_a_lookup_of_all_rows_trains_as_one_tied_by_its_weight(
    store: tierstore.Store,
) -> None:
    plain = torch.nn.Embedding(ROWS, DIM)
    layer = TieredEmbedding.from_pretrained(plain, store, "t", freeze=False)
    optimizers = [
        torch.optim.AdamW(plain.parameters(), lr=0.1),
        TieredOptimizer(torch.optim.AdamW, [layer], lr=0.1),
    ]
    for _ in range(3):
        ids, targets = torch.randint(ROWS, (2, 9))
        for lookup, optimizer in zip((plain, layer), optimizers, strict=True):
            every = plain.weight if lookup is plain else layer(torch.arange(ROWS))
            logits = torch.nn.functional.linear(lookup(ids), every)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, targets).backward()
            optimizer.step()
    torch.testing.assert_close(layer(torch.arange(ROWS)), plain.weight)


@pytest.mark.parametrize("kind", [TieredEmbedding, TieredEmbeddingBag])
def test_resetting_parameters_raises(store: tierstore.Store, kind: Any) -> None:
    layer = kind(store.create_table("r", tierstore.TableSpec(ROWS, DIM, init=1.0)))
    with pytest.raises(InvalidInputError, match=r"table\.write"):
        layer.reset_parameters()
    assert layer.table.read([0]).sum() == DIM


def test_the_page_says_which_options_are_refused(store: tierstore.Store) -> None:
    """It has a line for each option of torch's layer, which says so where the layer refuses it."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "replace-an-embedding.md"
    lines = page.read_text().splitlines()
    layer = TieredEmbedding.from_pretrained(torch.randn(ROWS, DIM), store, "word")
    for option, value in (("padding_idx", 1), ("max_norm", 1.0), ("scale_grad_by_freq", True)):
        (line,) = (each for each in lines if f"`{option}`" in each.partition(" | ")[0])
        if "refused" in line:
            with pytest.raises(InvalidInputError, match=option):
                TieredEmbedding(layer.table, **{option: value})
        else:
            assert getattr(TieredEmbedding(layer.table, **{option: value}), option) == value
