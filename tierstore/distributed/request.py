"""The requests of a batch to the owners of its rows, and their answers.

A request has two halves. The first sends how many rows are requested from each owner, and on hosts
which; the second waits for that, and on devices sends which. Nothing waits between them, so the
first half of a batch that is announced runs in parallel with the batches before it.

A word on the outcome goes with the rows of an answer. An owner that fails still answers, so every
rank knows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tierstore.distributed.known import Known, on_host
from tierstore.distributed.owners import Owners
from tierstore.distributed.wire import FAILED, FINE, Asked, Wire
from tierstore.errors import InvalidInputError

WORD_BITS = 62
"""Features, or announced batches, that one number of a message describes."""
_ANNOUNCED = 1 << 32
"""Added to the tag of a request that is announced, and not made by a lookup."""
_CALL = 1 << 33
"""The factor of the number of a call, which is added to the tag."""
_CALLS = ("look up", "average", "read", "write")


class Call(NamedTuple):
    """What a rank does with the rows that it requests.

    Attributes:
        what: which call; a layer looks up, or reads averages.
        field: of which field.
    """

    what: Literal["look up", "average", "read", "write"]
    field: str

    def number(self, fields: Iterable[str]) -> int:
        """Return a number from 1 on, another for each call; 0 for a name that no field has."""
        names = list(fields)
        if self.field not in names:
            return 0
        return 1 + _CALLS.index(self.what) + len(_CALLS) * names.index(self.field)


@dataclass(frozen=True)
class Wanted:
    """The ids that one rank requests.

    Attributes:
        ids: int64 `(n,)`, on the device of the table, one feature after another.
        given: these ids as the caller has them.
        tag: a number that is equal on ranks that look up the same.
        tables: the number of the table of each feature.
        lengths: how many of the ids each feature has.
        refuse: raises the error for an id of no row.
        error: the error of the ids, or of what is to be done, that is known already.
        call: the number of a `Call`, equal on ranks that do the same with the rows; 0 where they
            are only announced.
    """

    ids: Tensor
    given: Tensor
    tag: int
    tables: Sequence[int] = (0,)
    lengths: Sequence[int] = (1,)
    refuse: Callable[[], object] | None = None
    error: Exception | None = None
    call: int = 0

    def used(self) -> list[int]:
        """Return which features have ids, as the bits of some numbers."""
        words = [0] * -(-len(self.lengths) // WORD_BITS)
        for number, length in enumerate(self.lengths):
            if length:
                words[number // WORD_BITS] |= 1 << number % WORD_BITS
        return words

    def failed(self, error: Exception) -> Wanted:
        """Return the same with an error, and without ids."""
        none = torch.empty(0, dtype=torch.int64, device=self.ids.device)
        return replace(self, ids=none, lengths=[0] * len(self.lengths), error=error)


class Request:
    """The distinct rows that a batch requests, and those that are requested from this rank.

    All attributes except `positions` are there when it is settled.

    Attributes:
        wanted: what this rank requests.
        settled: whether the ranks know what is requested from them.
        positions: for each id the index of its row among those that come back.
        size: how many rows come back, the distinct ones.
        total: the number of ids of all ranks.
        asked: the rows of this rank that each rank requests, in the order of ranks; distinct for
            each rank, and perhaps not among them.
        counts: for each feature 1 if any rank has ids of it, else 0.
        touched: the numbers of the tables of these features.
        failure: the error on this rank since then; the answer reports it to the others.
    """

    wanted: Wanted
    positions: Tensor
    size: int
    total: int
    asked: Tensor
    counts: list[int]
    touched: frozenset[int]

    def __init__(
        self, wire: Wire, owners: Callable[[], Owners], wanted: Wanted, *, announced: bool = False
    ) -> None:
        """Send how many rows are requested. Every rank does so at the same time."""
        self._wire, self._owners_now = wire, owners
        self.settled: bool = False
        self.failure: Exception | None = None
        self._tag = wanted.tag + announced * _ANNOUNCED + wanted.call * _CALL
        self._known = Known(wanted.given) if announced else None
        self._owners = owners()
        with wire.ranks.midway(wire.what):
            found, self.wanted = self._found(wanted)
            self._asking: Asked = wire.ask(found)
            self.positions = self._asking.positions

    def _found(self, wanted: Wanted) -> tuple[Any, Wanted]:
        """Return the distinct ids by owner, and what is wanted then: nothing if that fails."""
        try:
            told = [self._tag, len(wanted.ids), *wanted.used()]
            return self._owners.find(wanted, told, failed=wanted.error is not None), wanted
        except Exception as error:
            wanted = wanted.failed(error)
            told = [self._tag, 0, *wanted.used()]
            return self._owners.find(wanted, told, failed=True), wanted

    def is_for(self, wanted: Wanted) -> bool:
        """Tell whether this request, which was announced, is for the same ids."""
        own = self.wanted
        alike = own.tag == wanted.tag and list(own.lengths) == list(wanted.lengths)
        return alike and self._known is not None and self._known.is_as(wanted.given)

    def settle(self) -> None:
        """Wait for what all ranks request, and send which rows this one requests. Collective.

        An error in the ids of a rank is raised there, and RanksError on the others.
        """
        self.settled, wanted = True, self.wanted
        given, taken = self._asking.told()
        self._check(taken, given[self._wire.ranks.rank][1])
        self._given: list[int] = [each[0] for each in given]
        self._taken: list[int] = [each[0] for each in taken]
        self.size = sum(self._given)
        self.total = sum(each[3] for each in taken)
        used = [functools.reduce(operator.or_, words) for words in zip(*taken, strict=True)][4:]
        self.counts = [
            used[number // WORD_BITS] >> number % WORD_BITS & 1
            for number in range(len(wanted.lengths))
        ]
        self.touched = frozenset(compress(wanted.tables, self.counts))
        with self._wire.ranks.midway(self._wire.what):
            self._arrived = self._asking.numbers()
        del self._asking

    def find(self) -> None:
        """Find which rows of this rank are requested, again where its tables have moved since."""
        owners = self._owners_now()
        if owners is not self._owners or not hasattr(self, "asked"):
            self._owners = owners
            self.asked = owners.rows_of(self._arrived)

    def _check(self, told: list[list[int]], failed: int) -> None:
        """Raise the error of the ids of this rank, which may have `failed`, or of another."""
        ranks, error = self._wire.ranks, self.wanted.error
        if any(each[1] for each in told):
            if error is None and failed:
                error = self._refused()
            ranks.failed(self._wire.what, error)
        for rank, each in enumerate(told):
            if each[2] != self._tag:
                raise self.differs(rank)

    def differs(self, rank: int) -> Exception:
        """Return the error for a rank that does something else than this one."""
        return self._wire.ranks.differs(rank, self._wire.what)

    def _refused(self) -> Exception:
        """Return the error of an id that a device found in no table."""
        try:
            if self.wanted.refuse is not None:
                self.wanted.refuse()
        except Exception as error:
            return error
        return InvalidInputError(f"an id is of no row of table {self._wire.name!r}")

    @property
    def taken(self) -> int:
        """How many rows are requested from this rank."""
        return sum(self._taken)

    def answer(self, rows: Tensor, word: int) -> tuple[Tensor, list[int]]:
        """Send the rows `(asked, dim)` to those who request them, and a word to all. Collective.

        Return this rank's, `(size, dim)`, and the word of each rank.
        """
        wire = self._wire
        with wire.ranks.midway(wire.what):
            return wire.swap(rows, self._taken, self._given, "rows", word)

    def expand(self, rows: Tensor) -> Tensor:
        """Return the row of each id, `(ids, dim)`, given the rows `(size, dim)` that came."""
        return self._owners.expand(rows, self.positions)

    def deliver(self, values: Tensor, error: Exception | None = None) -> Tensor:
        """Give values `(size, dim)` of the rows to their owners; return `(asked, dim)`. Collective.

        On hosts an `error` of a rank is raised there, and RanksError on the others; with devices
        the ranks would wait for each other, so there it ends the exchange.
        """
        wire, what = self._wire, f"give the gradients of table {self._wire.name!r}"
        given, taken = self._given, self._taken
        with wire.ranks.midway(what):
            if not on_host(values):
                if error is not None:
                    raise error
                return wire.swap_on_device(values, given, taken, "gradients")
            word = FINE if error is None else FAILED
            arrived, words = wire.swap(values, given, taken, "gradients", word)
        if FAILED in words:
            wire.ranks.failed(what, error)
        return arrived
