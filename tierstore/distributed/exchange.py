"""Rows and gradients between the ranks that use them and the ranks that own them.

A batch requests the row of each distinct id from its owner. Requests reach an owner in the order of
ranks, and so do the gradients later: their sum repeats to the bit.

All collectives are in the order of the program, which is the same on every rank. A rank that cannot
do its part still takes part, and reports that: an error is raised on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from tierstore.distributed.owners import Owners
from tierstore.distributed.ranks import Ranks
from tierstore.distributed.request import WORD_BITS, Request, Wanted
from tierstore.distributed.wire import FAILED, OTHER, Wire, fine_for


class Answer(NamedTuple):
    """What an owner has for a request.

    Attributes:
        rows: `(asked, dim)`.
        lease: on them, to be released where the answer is not used.
    """

    rows: Tensor
    lease: Any = None


Serve = Callable[[Request], Answer]
"""Returns the rows that are requested from this rank."""


class Exchange:
    """Sends rows of a table, or of tables that are looked up as one, between the ranks.

    Attributes:
        owners: returns who has the rows now.
        announced: requests of coming batches, oldest first, as on every rank.
    """

    def __init__(self, ranks: Ranks, name: str, owners: Callable[[], Owners]) -> None:
        """Serve what messages call `name`."""
        self.ranks = ranks
        self.owners = owners
        self.announced: deque[Request] = deque()
        self._wire = Wire(ranks, name)
        self._announces = False
        self._in_order = True
        self._unlike = ranks.unlike

    def look_up(self, wanted: Wanted, like: Tensor, serve: Serve) -> tuple[Request, Tensor]:
        """Return the request for some ids with its rows, `(size, dim)`. Collective.

        This is the announced request of these ids, if there is one. It is the oldest one as a rule,
        whose rows are sent at once; each rank adds a word on whether it looks that up, and how.

        Args:
            wanted: the ids.
            like: `(0, dim)`, of the type of the rows.
            serve: what this rank has for a request; not called on ranks that look up other ids.

        An error in the ids of a rank, or of its `serve`, is raised there, and RanksError on the
        others. Raises InvalidInputError on all ranks where they look up different tables or fields.
        """
        self._forget_unlike()
        answer: tuple[Request, Tensor] | None = None
        if self.announced and self._in_order:
            request = self.announced.popleft()
            answer = self._answered(request, wanted, like, serve, chosen=False)
            if answer is None:
                self.announced.appendleft(request)
                self._in_order = False
        if answer is None:
            answer = self._answered(self._chosen(wanted), wanted, like, serve, chosen=True)
        if answer is None:
            raise RuntimeError("a request that all ranks made is not that of some")
        return answer

    def ask(self, wanted: Wanted) -> Request:
        """Request rows, whatever was announced; raises what `look_up` does. Collective."""
        request = self._asked(wanted)
        request.settle()
        return request

    def _forget_unlike(self) -> None:
        """Forget what was announced before a rank did something else than others."""
        if self._unlike != self.ranks.unlike:
            self._unlike = self.ranks.unlike
            self.announced.clear()
            self._announces, self._in_order = False, True

    def _asked(self, wanted: Wanted, *, announced: bool = False) -> Request:
        if wanted.error is None:
            wanted = replace(wanted, error=self.ranks.fault_error())
        return Request(self._wire, self.owners, wanted, announced=announced)

    def _chosen(self, wanted: Wanted) -> Request:
        """Return the oldest request that was announced by all ranks for this, or a new one."""
        if self.announced:
            own = [each.is_for(wanted) for each in self.announced]
            common = self.ranks.common(sum(yes << place for place, yes in enumerate(own)))
            self._in_order = common != 0
            if common:
                for _ in range((common & -common).bit_length() - 1):  # of batches left out
                    self.announced.popleft()
                return self.announced.popleft()
        return self.ask(wanted)

    def _answered(
        self, request: Request, wanted: Wanted, like: Tensor, serve: Serve, *, chosen: bool
    ) -> tuple[Request, Tensor] | None:
        """Return a request with its rows; None if it is not for what some rank wants.

        All ranks want one that they have `chosen`.
        """
        if not request.settled:
            request.settle()
        answer, error = None, request.failure
        word = fine = fine_for(wanted.call)
        with self.ranks.midway(f"look up rows of table {self._wire.name!r}"):
            try:
                error = error or self.ranks.fault_error() or wanted.error
                if error is not None:
                    raise error
                if chosen or request.is_for(wanted):
                    request.find()
                    answer = serve(request)
                else:
                    word = OTHER
            except Exception as failure:
                word, error = FAILED, failure
            rows = like.new_zeros(request.taken, like.shape[1]) if answer is None else answer.rows
        is_fine = False
        try:
            arrived, words = request.answer(rows, word)
            is_fine = all(each == fine for each in words)
        finally:
            if not is_fine and answer is not None and answer.lease is not None:
                answer.lease.release()
        if is_fine:
            return request, arrived
        if FAILED in words:
            self.ranks.failed(f"look up rows of table {self._wire.name!r}", error)
        if OTHER not in words:
            own = words[self.ranks.rank]
            raise request.differs(next(rank for rank, each in enumerate(words) if each != own))
        return None

    def known(self, wanted: Wanted) -> Request | None:
        """Return the oldest request of these ids that was announced, or None."""
        return next((each for each in self.announced if each.is_for(wanted)), None)

    def announce(self, wanted: Wanted, window: int, fetch: Callable[[Tensor], object]) -> None:
        """Request the rows of a coming batch without waiting. Collective.

        This completes the request of the batch announced before; `fetch` is called with the rows
        that it requests from this rank. The last `window` batches, at least one, are
        remembered. Raises what `look_up` does, for the batch before.
        """
        self._forget_unlike()
        self._settle(fetch)
        while len(self.announced) >= min(max(window, 1), WORD_BITS):
            self.announced.popleft()
        self.announced.append(self._asked(wanted, announced=True))
        if not self._announces:  # so that ranks that do not announce raise at once
            self._announces = True
            self._settle(fetch)

    def _settle(self, fetch: Callable[[Tensor], object]) -> None:
        """Complete what was announced."""
        for each in list(self.announced):
            if each.settled:
                continue
            try:
                each.settle()
            except Exception:
                self.announced.remove(each)
                raise
            try:
                each.find()
                if len(each.asked):
                    fetch(each.asked)
            except Exception as error:
                each.failure = error  # the answer reports it
