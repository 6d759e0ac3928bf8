"""Rows between the ranks, each part with a word on the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tierstore.distributed.known import on_host
from tierstore.distributed.owners import Found
from tierstore.distributed.ranks import Ranks

__all__ = [
    "FAILED",
    "FINE",
    "OTHER",
    "Asked",
    "Wire",
    "fetched",
    "fine_for",
    "with_words",
    "without_words",
    "words_of",
]

FINE, FAILED, OTHER = range(3)
"""Words: the rows are as they should be, they failed, or others are wanted."""


_LEAST = 8 * 4
"""Bytes of the words that a request has at least: these tell whether ranks request the same."""


def fine_for(call: int) -> int:
    """Return the word that rows are as they should be for a call: one byte, as all words."""
    first = OTHER + 1
    return first + call % (256 - first)


class Asked(Protocol):
    """What is requested from each rank, under way.

    Attributes:
        positions: for each id the place of its row among those that come.
    """

    positions: Tensor

    def told(self) -> list[list[list[int]]]:
        """Wait; return the message to each rank and that of each, as `Found.told` has them.

        More words may follow on those of others, where these say that they look something else up.
        """
        ...

    def numbers(self) -> Tensor:
        """Return the numbers that all ranks request from this one. Collective."""
        ...


class Wire:
    """Sends rows of a table, or of tables that are looked up as one, between the ranks."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        """Send what messages call `name`."""
        self.ranks = ranks
        self.name = name

    @property
    def what(self) -> str:
        """What errors call a lookup."""
        return f"look up rows of table {self.name!r}"

    def ask(self, found: Found) -> Asked:
        """Send how many rows are requested, and which. Every rank does so at the same time."""
        return (_AskedOnHost if on_host(found.told) else _AskedOnDevice)(self, found)

    def swap(self, values: Tensor, given: list[int], taken: list[int], what: str) -> Tensor:
        """Send rows `(n, dim)` to the ranks, so many to each, and return what comes from each.

        `what` they are is equal on all ranks.
        """
        what = f"exchange {what} of table {self.name!r}"
        sent = values.contiguous()
        wide = sent.view(torch.uint8)
        out = wide.new_empty(sum(taken), wide.shape[1])
        if not on_host(wide):
            with self.ranks.explained(what):
                group = self.ranks.data_group
                dist.all_to_all_single(out, wide, taken, given, group=group)
            return out.view(sent.dtype)
        width = wide.shape[1]
        parts, into = (
            each.view(-1).split([count * width for count in counts])
            for each, counts in ((wide, given), (out, taken))
        )
        message = self.ranks.send(what, f"{what} {width}", parts, into)
        self.ranks.receive(what, message)
        return out.view(sent.dtype)


class _AskedOnHost:
    """Counts and numbers in one message."""

    def __init__(self, wire: Wire, found: Found) -> None:
        self._wire, self._own = wire, found.told[0]
        numbers, self.positions = found.placed()
        self._kind = numbers.dtype
        counts = self._own[:, 0].tolist()
        parts = [
            torch.cat([words.view(torch.uint8), part.view(torch.uint8)])
            for words, part in zip(self._own, numbers[: sum(counts)].split(counts), strict=True)
        ]
        self._message = wire.ranks.send(wire.what, "ask", parts)
        self._numbers: list[Tensor] = []

    def told(self) -> list[list[list[int]]]:
        size = self._kind.itemsize
        told = []
        for part in self._wire.ranks.receive(self._wire.what, self._message):
            words = max(_LEAST, len(part) - size * int(part[:8].view(torch.int64)))
            told.append(part[: words - words % 8].view(torch.int64).tolist())
            self._numbers.append(part[words:])
        return [self._own.tolist(), told]

    def numbers(self) -> Tensor:
        return torch.cat([part.view(self._kind) for part in self._numbers])


class _AskedOnDevice:
    """Counts, which the host waits for, then numbers."""

    def __init__(self, wire: Wire, found: Found) -> None:
        self._wire = wire
        with wire.ranks.explained(wire.what):
            group = wire.ranks.data_group
            dist.all_to_all_single(found.told[1], found.told[0], group=group)
        self._told = fetched(found.told)  # all runs in order, and the host goes on
        self._arrival = torch.cuda.current_stream(found.told.device).record_event()
        self._numbers, self.positions = found.placed()

    def told(self) -> list[list[list[int]]]:
        with self._wire.ranks.explained(self._wire.what):
            self._arrival.synchronize()
        told: list[list[list[int]]] = self._told.tolist()
        return told

    def numbers(self) -> Tensor:
        given, taken = ([each[0] for each in side] for side in self._told.tolist())
        own = self._numbers[: sum(given)].view(-1, 1)
        return self._wire.swap(own, given, taken, "numbers").view(-1)


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
