"""A GPT on words of source text with a memory of their n-grams, for the benchmarks."""

from __future__ import annotations

import itertools
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import torch

DIM, ORDERS, HEADS = 64, (2, 3), 4
"""Of a row, of n-grams, and rows for each of them."""
WIDTH, LAYERS, CONTEXT, WORDS = 512, 7, 512, 1 << 14


def tokens_of_text(most: int) -> Any:
    """Return the words of the source of Python and its packages as numbers below WORDS."""
    found: list[int] = []
    places = dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    for path in (path for place in places for path in sorted(Path(place).rglob("*.py"))):
        found += (zlib.crc32(word) % WORDS for word in path.read_bytes().split())
        if len(found) >= most:
            break
    return torch.tensor(found[:most])


def rows_of(tokens: Any, rows: int) -> Any:
    """Return the rows of the n-grams that end at each token `(n, orders * heads)`."""
    found = []
    for order, head in itertools.product(ORDERS, range(HEADS)):
        mixed = torch.full_like(tokens, 1 + order * 8 + head)
        for back in range(order):
            mixed = (mixed ^ tokens.roll(back)) * 0x5851F42D4C957F2D + 0x14057B7EF767814F
            mixed = mixed ^ (mixed >> 29 & 0x7FFFFFFFF)
        found.append((mixed & 0x7FFFFFFFFFFFFFFF) % rows)
    return torch.stack(found, 1)


class Model(torch.nn.Module):
    """The dense part: a GPT over words, and the layers that read the memory's rows."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, words: int = WORDS) -> None:
        super().__init__()
        self.word = torch.nn.Embedding(words, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, 8, 4 * width, 0.0, batch_first=True, norm_first=True
        )
        self.blocks = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.recall = torch.nn.Linear(len(ORDERS) * HEADS * DIM, width, bias=False)

    def forward(self, tokens: Any, rows: Any) -> Any:
        x = self.word(tokens) + self.recall(rows.flatten(2))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=x.device
        )
        return self.blocks(x, mask=mask, is_causal=True) @ self.word.weight.T
