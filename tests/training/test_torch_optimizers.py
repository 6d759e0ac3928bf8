"""What training rows equals, and where it differs: the table of docs/trainers.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import Place, rows_of
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

ROWS, BATCH, STEPS, DIM = 100, 16, 20, 6


def difference(
    place: Place, tiered: tuple[str, dict[str, Any]], plain: tuple[str, dict[str, Any]], **how: Any
) -> float:
    """Train a table and an ordinary embedding alike; return how far apart a weight is in the end.

    `every` row in each batch, or a few; `sparse` gradients of the ordinary embedding.
    """
    torch.manual_seed(3)
    weights = torch.randn(ROWS, DIM)
    table = place.table(weights, host_rows=ROWS)
    emb = TieredEmbedding(table)
    embedding = torch.nn.Embedding(
        ROWS, DIM, _weight=weights.clone(), sparse=how.get("sparse", False)
    )
    opt = TieredOptimizer(getattr(torch.optim, tiered[0]), [emb], **tiered[1])
    opts: list[Any] = [opt, getattr(torch.optim, plain[0])(embedding.parameters(), **plain[1])]
    for _ in range(STEPS):
        ids = torch.randperm(ROWS)[: ROWS if how.get("every") else BATCH]
        factors = torch.randn(len(ids), DIM)
        for layer, each in zip((emb, embedding), opts, strict=True):
            each.zero_grad()
            (layer(ids) * factors).sum().backward()
            each.step()
    return float((rows_of(table) - embedding.weight.detach()).abs().max())


@pytest.fixture
def place(tmp_path: Any) -> Any:
    place = Place(tmp_path)
    yield place
    place.close()


EQUAL = [
    ("SGD", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
]
RESTING = [
    ("Adam", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("RMSprop", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.1, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), EQUAL)
def test_equal_whatever_rows_are_in_a_batch(place: Place, name: str, options: Any) -> None:
    assert difference(place, (name, options), (name, options)) == 0


@pytest.mark.parametrize("name", ["SparseAdam", "Adam"])
def test_adam_is_torchs_sparse_adam(place: Place, name: str) -> None:
    found = difference(place, (name, {"lr": 0.01}), ("SparseAdam", {"lr": 0.01}), sparse=True)
    assert found == 0 if name == "SparseAdam" else found < 1e-5


@pytest.mark.variants(1, 5)
@pytest.mark.parametrize(("name", "options"), RESTING)
def test_rows_that_are_not_in_a_batch_rest(place: Place, name: str, options: Any) -> None:
    one = (name, options)
    assert difference(place, one, one) > 1e-3
    assert difference(place, one, one, every=True) == 0


PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
WORDS = {"decay": "weight_decay", "momentum": "momentum", "rate": "lr"}


def quoted() -> dict[str, tuple[Any, Any, dict[str, Any], str]]:
    """Return the lines of the page's table: what is compared with what, and the difference."""
    _, _, text = PAGE.read_text(encoding="utf-8").partition("### What equals what")
    found = {}
    for line in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE):
        ours, theirs, number = [*map(str.strip, line.split("|")), ""][:3]
        names = re.findall(r"`(\w+)`", f"{ours} {theirs}")
        if not re.fullmatch(r"[\d.]+", number):
            continue  # of another table, or the head of this one
        words = dict(re.findall(r"(\w+) ([\d.]+)", ours))
        options = {"lr": 0.1} | {WORDS[word]: float(value) for word, value in words.items()}
        how = {"sparse": "sparse=True" in theirs}
        found[line] = (names[0], options), (names[1], options), how, number
    return found


@pytest.mark.variants(2)
@pytest.mark.parametrize("line", quoted(), ids=lambda line: line.split(" | ")[0])
def test_the_page_has_the_differences_that_there_are(place: Place, line: str) -> None:
    ours, theirs, how, number = quoted()[line]
    decimals = len(number.partition(".")[2])
    assert difference(place, ours, theirs, **how) == pytest.approx(
        float(number), rel=0, abs=0.51 * 10**-decimals if decimals else 0
    )


def test_the_table_of_the_page_is_read_whole() -> None:
    names = " ".join(ours[0] for ours, *_ in quoted().values())
    assert names == "SGD Adagrad SparseAdam Adam Adam AdamW SGD SGD RMSprop"


def test_one_count_of_steps_is_for_all_rows(place: Place) -> None:
    """A row first seen late gets the bias correction of the table, not one of its own."""
    weights = torch.randn(ROWS, DIM)
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
    for ids in ([1], [1], [1], [2]):
        emb(torch.tensor(ids)).sum().backward()
        opt.step()
    first, late = (rows_of(emb.table)[1:3] - weights[1:3]).abs().unbind()
    corrected = 0.1 * (0.1 / (1 - 0.9**4)) / (0.001 / (1 - 0.999**4)) ** 0.5
    torch.testing.assert_close(late, torch.full((DIM,), corrected), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(first, torch.full((DIM,), 0.3), rtol=1e-4, atol=1e-6)
