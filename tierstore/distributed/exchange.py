"""Rows and gradients between the ranks that use them and the ranks that own them.

A batch asks the owner of each of its distinct ids for the row; what the owners are asked for comes
to them in the order of ranks, and so do the gradients later: their sum repeats to the bit.

A request has two halves. The first sends how many rows each owner is asked for, the second waits
for these numbers and sends which. Between them nothing waits, so the first half of a batch that is
announced runs beside the batches before it. All collectives are those of one group, in the order of
the program, which is the same on every rank.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tierstore.distributed.owners import Owners
from tierstore.distributed.ranks import Ranks
from tierstore.errors import InvalidInputError, RanksError, TierStoreError

__all__ = ["Exchange", "Known", "Request", "Wanted"]

_BITS = 62
"""Features, or batches that are announced, that one number of a message tells of."""
_ANNOUNCED = 1 << 32
"""Added to the tag of a request that is announced, and not made by a lookup."""
_CALL = 1 << 33
"""What the number of a call is multiplied by beside the tag."""


class Exchange:
    """Sends rows of a table, or of tables that are looked up as one, between the ranks.

    Attributes:
        owners: returns who has the rows now.
        announced: requests of coming batches, oldest first, as on every rank.
    """

    def __init__(self, ranks: Ranks, name: str, owners: Callable[[], Owners]) -> None:
        """Serve what messages call `name`."""
        self.ranks = ranks
        self.name = name
        self.owners = owners
        self.announced: deque[Request] = deque()
        self._announces = False

    def request(self, wanted: Wanted) -> Request:
        """Ask for rows, or return the request of these ids that was announced. Collective.

        What is wrong with the ids of a rank is raised there once the others know, and RanksError on
        the others. Raises InvalidInputError on all ranks where they look up different tables.
        """
        if self.announced:
            own = [each.is_for(wanted.given, wanted.tag, wanted.lengths) for each in self.announced]
            common = self.ranks.common(sum(yes << place for place, yes in enumerate(own)))
            if common:
                for _ in range((common & -common).bit_length() - 1):  # of batches left out
                    self.announced.popleft()
                request = self.announced.popleft()
                if request.settled:
                    request.follow()
                else:
                    request.settle()
                return request
        request = Request(self, wanted)
        request.settle()
        return request

    def known(self, given: Tensor, tag: int, lengths: Sequence[int]) -> Request | None:
        """Return the oldest request of these ids that was announced, or None."""
        return next((each for each in self.announced if each.is_for(given, tag, lengths)), None)

    def announce(self, wanted: Wanted, window: int, fetch: Callable[[Tensor], object]) -> None:
        """Ask for the rows of a coming batch without waiting. Collective.

        Those of the batch announced before are asked for in full by now; `fetch` is called with the
        rows of this rank among them. The last `window` batches are remembered. Raises what
        `request` does, of the batch before.
        """
        self._settle(fetch)
        while len(self.announced) >= min(window, _BITS):
            self.announced.popleft()
        self.announced.append(Request(self, wanted, announced=True))
        if not self._announces:  # ranks that do not announce are told at once
            self._announces = True
            self._settle(fetch)

    def _settle(self, fetch: Callable[[Tensor], object]) -> None:
        """Complete what was announced."""
        for each in list(self.announced):
            if not each.settled:
                try:
                    each.settle()
                except TierStoreError:
                    self.announced.remove(each)
                    raise
                if len(each.asked):
                    fetch(each.asked)

    def swap(self, values: Tensor, given: list[int] | None, taken: list[int] | None) -> Tensor:
        """Send rows `(n, …)` to the ranks, so many to each, and return what comes from each."""
        count = len(values) if taken is None else sum(taken)
        sent = values.contiguous()
        wide = sent.view(torch.uint8) if sent.element_size() == 2 else sent  # gloo lacks those
        out = wide.new_empty(count, *wide.shape[1:])
        with self.ranks.explained(f"exchange rows of table {self.name!r}"):
            dist.all_to_all_single(out, wide, taken, given, group=self.ranks.data_group)
        return out.view(sent.dtype)


@dataclass(frozen=True)
class Wanted:
    """The ids that one rank asks for.

    Attributes:
        ids: int64 `(n,)`, on the device of the table, those of each feature behind another's.
        given: these ids as the caller has them.
        tag: a number that is equal on ranks that look up the same.
        tables: the number of the table of each feature.
        lengths: how many of the ids each feature has.
        refuse: raises the error for an id of no row.
        error: what is wrong with the ids, or with what is to be done, already.
        call: a number below 2 ** 29 that is equal on ranks that do the same with the rows.
    """

    ids: Tensor
    given: Tensor
    tag: int
    tables: Sequence[int] = (0,)
    lengths: Sequence[int] = (1,)
    refuse: Callable[[], object] | None = None
    error: TierStoreError | None = None
    call: int = 0

    def used(self) -> list[int]:
        """Return which features have ids, as the bits of some numbers."""
        words = [0] * -(-len(self.lengths) // _BITS)
        for number, length in enumerate(self.lengths):
            if length:
                words[number // _BITS] |= 1 << number % _BITS
        return words


class Request:
    """The distinct rows that a batch asks for, and those that are asked of this rank.

    All but `positions` are there when it is settled.

    Attributes:
        wanted: what this rank asks for.
        settled: whether the ranks know what they are asked for.
        positions: for each id the index of its row among those that come back.
        size: the number of distinct ids.
        total: the number of ids of all ranks.
        asked: the rows of this rank that each rank asks for, in the order of ranks; distinct for
            each rank, and perhaps not among them.
        counts: for each feature 1 if any rank has ids of it, else 0.
        touched: the numbers of the tables of these features.
    """

    positions: Tensor
    size: int
    total: int
    asked: Tensor
    counts: list[int]
    touched: frozenset[int]

    def __init__(self, exchange: Exchange, wanted: Wanted, *, announced: bool = False) -> None:
        """Send how many rows are asked for. Every rank does so at the same time."""
        self._exchange = exchange
        self.wanted: Wanted = wanted
        self.settled: bool = False
        self._tag = wanted.tag + announced * _ANNOUNCED + wanted.call * _CALL
        self._known = Known(wanted.given) if announced else None
        self._owners = exchange.owners()
        told = [self._tag, len(wanted.ids), *wanted.used()]
        found = self._owners.find(wanted, told, failed=wanted.error is not None)
        self._told, on_device = found.told, not on_host(found.told)
        with exchange.ranks.explained(f"exchange rows of table {exchange.name!r}"):
            self._sending: Any = dist.all_to_all_single(
                self._told[1],
                self._told[0],
                group=exchange.ranks.data_group,
                async_op=not on_device,
            )
        if on_device:  # where all goes on in order, and the host with it
            self._told = _fetched(self._told)
            self._sending = torch.cuda.current_stream(wanted.ids.device).record_event()
        self._numbers, self.positions = found.placed()

    def is_for(self, given: Tensor, tag: int, lengths: Sequence[int]) -> bool:
        """Tell whether this request, which was announced, is for these ids."""
        own = self.wanted
        alike = own.tag == tag and list(own.lengths) == list(lengths)
        return alike and self._known is not None and self._known.is_as(given)

    def settle(self) -> None:
        """Wait for what all ranks ask for, and send which rows this one asks for. Collective."""
        self.settled, exchange, wanted = True, self._exchange, self.wanted
        with exchange.ranks.explained(f"exchange rows of table {exchange.name!r}"):
            if isinstance(self._sending, dist.Work):
                self._sending.wait()
            else:
                self._sending.synchronize()
        given, taken = self._told.tolist()
        self._given: list[int] = [each[0] for each in given]
        self._taken: list[int] = [each[0] for each in taken]
        self._check(wanted, taken)
        self.size = sum(self._given)
        self.total = sum(each[3] for each in taken)
        used = [functools.reduce(operator.or_, words) for words in zip(*taken, strict=True)][4:]
        self.counts = [
            used[number // _BITS] >> number % _BITS & 1 for number in range(len(wanted.lengths))
        ]
        self.touched = frozenset(compress(wanted.tables, self.counts))
        self._arrived = exchange.swap(self._numbers[: self.size], self._given, self._taken)
        self._find()
        del self._numbers, self._told, self._sending

    def follow(self) -> None:
        """Find the rows of this rank again where its tables have moved since it was settled."""
        if self._exchange.owners() is not self._owners:
            self._find()

    def _find(self) -> None:
        self._owners = self._exchange.owners()
        self.asked = self._owners.rows_of(self._arrived)

    def _check(self, wanted: Wanted, told: list[list[int]]) -> None:
        """Raise what is wrong with the ids of this rank, or of another."""
        if wanted.error is not None:
            raise wanted.error
        own, name = self._exchange.ranks.rank, self._exchange.name
        if told[own][1] and wanted.refuse is not None:
            wanted.refuse()
        for rank, (_, failed, *_) in enumerate(told):
            if failed:
                raise RanksError(
                    f"rank {rank} of {len(told)} gave table {name!r} ids or rows that it does not "
                    "take, and nothing was done; that rank says which"
                )
        for rank, (_, _, tag, *_) in enumerate(told):
            if tag != self._tag:
                raise InvalidInputError(
                    f"rank {rank} of {len(told)} looks up something else than {name!r} on rank "
                    f"{own}: every rank calls the same layers and tables in the same order, with "
                    "the same features and fields, and announces the same batches (lookahead, "
                    "prefetch)"
                )

    def answer(self, rows: Tensor) -> Tensor:
        """Give the rows `(asked, dim)` to those who asked; return this rank's `(size, dim)`."""
        return self._exchange.swap(rows, self._taken, self._given)

    def deliver(self, values: Tensor) -> Tensor:
        """Give values `(size, dim)` of the distinct rows to their owners; return `(asked, dim)`."""
        return self._exchange.swap(values, self._given, self._taken)


class Known:
    """Ids that are known again, flat: on a host by their values, on a device by where they are.

    There a comparison of values would wait. Their memory is kept, so that no others come to it, and
    torch counts what it writes to it.
    """

    def __init__(self, *ids: Tensor) -> None:
        """Remember ids, which may be in several tensors."""
        self._ids = [each.clone() if on_host(each) else each.detach() for each in ids]
        self._where = [_where(each) for each in ids]

    def is_as(self, *ids: Tensor) -> bool:
        """Tell whether ids are these, and not known to be written since."""
        if len(ids) != len(self._ids):
            return False
        return all(map(self._is_same, self._ids, self._where, ids))

    @staticmethod
    def _is_same(own: Tensor, where: object, ids: Tensor) -> bool:
        if ids.device != own.device or ids.dtype != own.dtype or ids.numel() != own.numel():
            return False
        if on_host(ids):
            same: bool = torch.equal(ids.reshape(-1), own.reshape(-1))
            return same
        return where == _where(ids)


def on_host(ids: Tensor) -> bool:
    """Tell whether ids are on the host, where they can be compared."""
    kind: str = ids.device.type
    return kind == "cpu"


def _where(ids: Tensor) -> object:
    """Return where ids are in memory, in whatever shape, and how often that was written.

    Of tensors whose writes torch does not count, something that is equal to nothing.
    """
    if ids.is_inference():
        return object()
    layout = None if ids.is_contiguous() else (ids.shape, ids.stride())
    return ids.data_ptr(), ids._version, layout


def _fetched(values: Tensor) -> Tensor:
    """Return values of a device on the host, where they are when it has come so far."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
