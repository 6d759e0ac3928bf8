"""Rows between the ranks, with a word of each on the outcome; and norms of their gradients."""

from __future__ import annotations

import copy
import struct
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tierstore.distributed.known import on_host
from tierstore.distributed.owners import Found
from tierstore.distributed.ranks import Ranks

if TYPE_CHECKING:
    from tierstore.distributed.messages import Message

_TELL = "tell the norm of gradients"
FINE, FAILED, OTHER = range(3)
"""Words: the rows are as they should be, they failed, or others are wanted."""


_LEAST = 8 * 4
"""Bytes of the words that a request has at least: these tell whether ranks request the same."""


def fine_for(call: int) -> int:
    """Return the word that rows are as they should be for a call."""
    return OTHER + 1 + call


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

    def swap(
        self, values: Tensor, given: list[int], taken: list[int], what: str, word: int
    ) -> tuple[Tensor, list[int]]:
        """Send rows `(n, dim)` to the ranks, so many to each, and a word to all. Collective.

        Return the rows that come, and the word of each rank. Words go from host to host, so that
        nothing here waits for rows of devices. `what` the rows are is equal on all ranks.
        """
        sent, out = self._buffers(values, taken)
        width = sent.shape[1]
        parts = into = [sent.new_empty(0, device="cpu")] * len(given)
        if on_host(sent):
            parts, into = (
                list(each.view(-1).split([count * width for count in counts]))
                for each, counts in ((sent, given), (out, taken))
            )
        what = self._exchange(what)
        message = self.ranks.send(what, f"{what} {width}", parts, into, word)
        if not on_host(sent):
            self._swap(sent, out, given, taken, what)
        self.ranks.receive(what, message)
        return out.view(values.dtype), message.words

    def swap_on_device(
        self, values: Tensor, given: list[int], taken: list[int], what: str
    ) -> Tensor:
        """Send rows of a device without words; return those that come. Collective."""
        sent, out = self._buffers(values, taken)
        self._swap(sent, out, given, taken, self._exchange(what))
        return out.view(values.dtype)

    def _exchange(self, what: str) -> str:
        return f"exchange {what} of table {self.name!r}"

    @staticmethod
    def _buffers(values: Tensor, taken: list[int]) -> tuple[Tensor, Tensor]:
        """Return rows as bytes, and memory for those that come."""
        sent = values.contiguous().view(torch.uint8)
        return sent, sent.new_empty(sum(taken), sent.shape[1])

    def _swap(
        self, sent: Tensor, out: Tensor, given: list[int], taken: list[int], what: str
    ) -> None:
        with self.ranks.explained(what):
            dist.all_to_all_single(out, sent, taken, given, group=self.ranks.data_group)


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
        return self._wire.swap_on_device(own, given, taken, "numbers").view(-1)


def fetched(values: Tensor) -> Tensor:
    """Return values of a device on the host; they are there once the device has copied them."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class Squares:
    """The sum of squares of a gradient, which each rank tells the others as its backward pass ends.

    No rank waits for it then, and one that asks later need not be joined by the others.

    Attributes:
        factor: by what the gradient was multiplied since, on all ranks; None where something else
            changed it.
        exposed: whether something may have changed it unseen.
    """

    def __init__(self, ranks: Ranks, own: Tensor) -> None:
        """Tell the others the norm of the gradient of this rank, one float64. Collective."""
        self.factor: float | Tensor | None = 1.0
        self.exposed: bool = False
        self._ranks, self._own = ranks, own
        self._message: Message | None = None
        if own.device.type == "cpu":
            (word,) = struct.unpack("<q", struct.pack("<d", own.item() ** 2))
            self._message = ranks.say(_TELL, "squares", word)
        else:
            self._total = own.square()
            group = ranks.data_group
            self._work: Any = dist.all_reduce(self._total, group=group, async_op=True)

    def norm(self, own: Tensor) -> Tensor | None:
        """Return the norm over all ranks, where that of this one is `own` now, or None.

        `own` is of one element and any shape: torch 2.11 gives that of einsum as many dimensions.
        That is where something other than a factor changed the gradient.
        """
        if self.factor is None:
            return None
        scale, near = abs(self.factor), torch.finfo(own.dtype).eps ** 0.5
        if self.exposed and not torch.allclose(
            self._own * scale, own.double().reshape(()), rtol=near, atol=0, equal_nan=True
        ):
            return None
        return self.total().sqrt() * scale

    def times(self, by: float | Tensor) -> Squares:
        """Return the same of another tensor, a multiple of the gradient as it is now."""
        made = copy.copy(self)
        made.factor = None if self.factor is None else self.factor * by
        return made

    def total(self) -> Tensor:
        """Return the sum over all ranks, a number of float64, equal on each."""
        if self._message is None:
            self._work.wait()
            return self._total
        self._ranks.receive(_TELL, self._message)
        words = self._message.words
        squares = struct.unpack(f"<{len(words)}d", struct.pack(f"<{len(words)}q", *words))
        return torch.tensor(sum(squares), dtype=torch.float64)
