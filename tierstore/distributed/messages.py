"""Messages between ranks on hosts: each rank sends one to each other, in the order of the program.

The head of a message tells what it is for and how long it is, and takes a word along. Where one
rank sends something else than the others, all ranks see that from the heads: none waits in vain,
and none takes a message for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_KINDS = 1 << 8
"""Kinds that tags distinguish."""
_NUMBERS = 1 << 22
"""Messages after which tags repeat."""


class Unlike(Exception):
    """A rank sent something else.

    Attributes:
        rank: the first one that did.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class Messages:
    """Sends messages through a gloo group.

    Attributes:
        group: that group.
        rank, count: which of how many this is.
        others: all ranks but this one.
        taken: the number up to which this rank took all messages.
    """

    def __init__(self, group: Any, rank: int, count: int) -> None:
        """Send from `rank` to all of `count` ranks, which are numbered alike in all groups."""
        self.group: Any = group
        self.rank: int = rank
        self.count: int = count
        self.taken: int = 0
        self.others: list[int] = [each for each in range(count) if each != rank]
        self._number = 0
        self._nothing = [torch.empty(0, dtype=torch.uint8)] * count
        self._open: deque[Message] = deque()
        self._words: deque[Message] = deque()
        self._sent: deque[Message] = deque()
        self._left: list[Message] = []

    def send(
        self,
        kind: int,
        parts: Sequence[Tensor],
        into: Sequence[Tensor] | None = None,
        word: int = 0,
    ) -> Message:
        """Send bytes, uint8 `(n,)`, to each rank, this one among them; all send the same `kind`.

        `word` goes to all of them, with the head.

        Returns at once; the parts must never change. Where a rank knows how much comes, it gives
        memory to put it `into`, and does not wait for the heads first: then the parts may change
        after `wait`.
        """
        self._number += 1
        while self._open and self._open[0].number <= self._number - _NUMBERS // 2:
            self._open[0].take()  # before its tag comes again
        message = Message(self, self._number, kind, parts, into, word)
        self._open.append(message)
        if into is None:
            self._sent.append(message)
        return message

    def say(self, kind: int, word: int) -> Message:
        """Send a number alone to each rank; no rank has to wait for it."""
        self._number += 1
        message = Message(self, self._number, kind, self._nothing, self._nothing, word)
        self._words.append(message)
        return message

    def heard(self, number: int) -> None:
        """Take the words before a message that all ranks sent; they have come, as it has."""
        while self._words and self._words[0].number < number:
            self._words.popleft().take()

    def took(self, message: Message, taken: int) -> None:
        """Note that a message is taken, and that all ranks took those up to the number `taken`."""
        if message.is_left:
            self._left.append(message)  # its memory must stay: what it sent may yet be taken
        while self._open and self._open[0].is_taken:
            self.taken = self._open.popleft().number
        while self._sent and self._sent[0].number <= taken:
            self._sent.popleft()


class Message:
    """One that is under way.

    Heads and contents have tags of their own, so that no content arrives where another is awaited.

    Attributes:
        number: from 1 on, equal on all ranks.
        is_taken: whether it is received, or left.
        is_left: whether a rank sent something else with this number, or receiving was broken off.
        words: that of each rank, once it is taken.
    """

    words: list[int]

    def __init__(
        self,
        messages: Messages,
        number: int,
        kind: int,
        parts: Sequence[Tensor],
        into: Sequence[Tensor] | None,
        word: int,
    ) -> None:
        """Begin to send."""
        self.number: int = number
        self.is_taken: bool = False
        self.is_left: bool = False
        self._messages, self._kind, self._parts, self._into = messages, kind, parts, into
        group, tag = messages.group, number % _NUMBERS * 2 * _KINDS
        self._content_tag = tag + _KINDS + kind % _KINDS
        heads = torch.tensor([[kind, len(part), messages.taken, word] for part in parts])
        self._heads, self._told = heads, heads.clone()
        self._sending: list[Any] = []
        self._coming: list[Any] = []
        for rank in messages.others:
            self._sending.append(dist.isend(heads[rank], rank, group=group, tag=tag))
            self._coming.append(dist.irecv(self._told[rank], rank, group=group, tag=tag))
        for rank in messages.others:
            if len(parts[rank]):
                tag = self._content_tag
                self._sending.append(dist.isend(parts[rank], rank, group=group, tag=tag))
        self._taking: list[Any] = []
        if into is not None:
            self._begin(into)

    def _begin(self, into: Sequence[Tensor]) -> None:
        """Begin to receive from the other ranks."""
        group, tag = self._messages.group, self._content_tag
        for rank in self._messages.others:
            if len(into[rank]):
                self._taking.append(dist.irecv(into[rank], rank, group=group, tag=tag))

    def wait(self) -> Sequence[Tensor]:
        """Return what each rank sent to this one; raises Unlike, on all ranks."""
        self.take()
        if self._into is None or self.is_left:
            kinds = self._told[:, 0].tolist()
            raise Unlike(next(rank for rank, kind in enumerate(kinds) if kind != self._kind))
        return self._into

    def take(self) -> None:
        """Wait for what each rank sends, once; where that fails, no later one waits for it."""
        if self.is_taken:
            return
        self.is_taken, self.is_left, last = True, True, 0
        try:
            for each in self._coming:
                each.wait()
            kinds, sizes, taken, self.words = self._told.T.tolist()
            last = min(taken)
            if kinds.count(self._kind) == len(kinds):
                self._receive(sizes)
                self.is_left = False
        finally:
            self._messages.took(self, last)
        self._messages.heard(self.number)

    def _receive(self, sizes: list[int]) -> None:
        own, into, sending = self._messages.rank, self._into, self._sending
        if into is None:
            into = self._into = [torch.empty(size, dtype=torch.uint8) for size in sizes]
            sending = []  # others may take it later
            self._begin(into)
        elif list(map(len, into)) != sizes:
            raise RuntimeError(f"messages of {sizes} bytes, not {[len(each) for each in into]}")
        into[own].copy_(self._parts[own])
        for each in (*self._taking, *sending):
            each.wait()
