"""Rows between the ranks, each part with a word on the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tierstore.distributed.known import on_host
from tierstore.distributed.ranks import Ranks

__all__ = ["FAILED", "FINE", "OTHER", "Wire", "fetched", "with_words", "without_words", "words_of"]

FINE, FAILED, OTHER = range(3)
"""Words: the rows are as they should be, they failed, or others are wanted."""


class Wire:
    """Sends rows of a table, or of tables that are looked up as one, between the ranks."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        """Send what messages call `name`."""
        self.ranks = ranks
        self.name = name

    def begin(self, message: Tensor, told: Tensor) -> Any:
        """Send a row of a message to each rank; return what waits until theirs are in `told`."""
        host = on_host(message)
        with self.ranks.explained(f"exchange rows of table {self.name!r}"):
            sending = dist.all_to_all_single(
                told, message, group=self.ranks.data_group, async_op=host
            )
        return sending if host else None

    def swap(
        self, values: Tensor, given: list[int], taken: list[int], *, back: bool = False
    ) -> Tensor:
        """Send rows `(n, …)` to the ranks, so many to each, and return what comes from each.

        `back` is for gradients.
        """
        sent = values.contiguous()
        wide = sent.view(torch.uint8) if sent.element_size() == 2 else sent  # gloo lacks those
        out = wide.new_empty(sum(taken), *wide.shape[1:])
        with self.ranks.explained(f"exchange rows of table {self.name!r}"):
            group = self.ranks.group_of_rows(on_host=on_host(wide), back=back)
            dist.all_to_all_single(out, wide, taken, given, group=group)
        return out.view(sent.dtype)


def with_words(rows: Tensor, counts: Sequence[int], word: int) -> Tensor:
    """Return rows `(n, dim)` with one more, the word, after those of each rank."""
    own = torch.full_like(rows.new_empty(1, rows.shape[1]).view(torch.uint8), word)
    last = own.view(rows.dtype)
    return torch.cat([part for each in rows.split(list(counts)) for part in (each, last)])


def without_words(rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return rows without the last row of each rank, and these last rows."""
    parts = _parted(rows, counts)
    return torch.cat(parts[::2]), torch.cat(parts[1::2])


def words_of(rows: Tensor, counts: Sequence[int]) -> list[int]:
    """Return the word after the rows of each rank, once they are there."""
    words = torch.cat(_parted(rows, counts)[1::2]).view(torch.uint8)[:, 0]
    if not on_host(words):
        words = fetched(words)
        torch.cuda.current_stream(rows.device).synchronize()
    found: list[int] = words.tolist()
    return found


def _parted(rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the rows of each rank, and after each part its word."""
    found: tuple[Tensor, ...] = rows.split([size for count in counts for size in (count, 1)])
    return found


def fetched(values: Tensor) -> Tensor:
    """Return values of a device on the host; they are there once the device has copied them."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
