"""Keys between the ranks that use them and the ranks that own them.

An owner answers each key with a number: the rank that owns it, and its row there. Rows and
gradients are exchanged by such numbers as they are by ids. Keys are looked up on the host, and
go through the group of control messages, in parallel with GPUs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tierstore._disk.partitioning import partition_of_key
from tierstore._keys.growing import Asked
from tierstore._keys.text import Texts
from tierstore._table.keyed import KeyedTable
from tierstore.distributed.ranks import Ranks
from tierstore.errors import InvalidInputError

__all__ = ["KeyExchange", "Numbers"]

Rows = npt.NDArray[np.int64]

_ROW_BITS = 36
"""Bits of the row in a number; the bits above them are the rank."""
_NONE = np.empty(0, np.uint64)


class Numbers:
    """Where rows are by their numbers, in the terms of a `Shard` with one partition per rank.

    Attributes:
        rows: more than any number of a row.
        partitions: one for each rank.
        first: this rank.
        count: 1.
        ids: the rows of this rank, as many as there may be.
        row_bits: bits of a row in its number; the bits above them are the rank.
    """

    count = 1
    ids = 1 << _ROW_BITS
    row_bits = _ROW_BITS

    def __init__(self, rank: int, ranks: int) -> None:
        """Number the rows of so many ranks."""
        self.rows: int = ranks << _ROW_BITS
        self.partitions: int = ranks
        self.first: int = rank

    def partition_of(self, numbers: Any) -> Any:
        """Return the rank of each number."""
        return numbers >> _ROW_BITS

    def rows_of(self, numbers: Any) -> Any:
        """Return the row on its rank of each number."""
        return numbers & ((1 << _ROW_BITS) - 1)

    def ids_of(self, rows: Any) -> Any:
        """Return the number of each row of this rank."""
        return rows + (self.first << _ROW_BITS)


class KeyExchange:
    """Requests the rows of keys of one table from the owners of the keys."""

    def __init__(self, table: KeyedTable, partitions: int, ranks: Ranks) -> None:
        """Serve the keys of the shard of this rank."""
        self._table = table
        self._partitions = partitions
        self._ranks = ranks

    def ask(
        self,
        keys: object,
        what: str,
        serve: Callable[[Asked], Rows],
        check: Callable[[], object] = lambda: None,
    ) -> tuple[Asked, Rows]:
        """Return a batch of keys with the number of each, flat; -1 for those without. Collective.

        Each rank calls `serve` with the keys that are requested from it, one rank after another,
        and answers with the rows that it returns. `what` names the call: all ranks make the same.
        An error in the keys of a rank, of `check` before they are sent, or of its `serve` is raised
        there, and RanksError on the others.
        """
        error: Exception | None = self._ranks.fault_error()
        try:
            asked, _ = self._table._asked(keys)
            check()
            first, inverse, owners = self._distinct(asked)
        except Exception as found:
            error = error or found
            asked = Asked(_NONE, (0,), Texts.of([]))
            first, inverse, owners = self._distinct(asked)
        with self._ranks.midway(f"{what} keys of table {self._table.name!r}"):
            order = np.argsort(owners, kind="stable")
            given = np.bincount(owners, minlength=self._ranks.count)
            coming, taken = self._send(asked.take(first[order]), given, what, error)
            answers = self._answer(coming, taken, given, serve, what)
            numbers = np.empty(len(first), np.int64)
            numbers[order] = answers
            return asked, numbers[inverse]

    def _distinct(self, asked: Asked) -> tuple[Rows, Rows, Rows]:
        """Return where distinct keys are, for each key which of them it is, and their owners."""
        _, first, inverse = np.unique(asked.codes, return_index=True, return_inverse=True)
        if asked.texts is not None and len(first) < len(inverse):
            alike = asked.texts.equal(np.arange(inverse.size), asked.texts, first[inverse])
            if not alike.all():  # two texts of one hash
                first = inverse = np.arange(inverse.size)
        return first, inverse, self._owners_of(asked.codes[first])

    def _owners_of(self, codes: npt.NDArray[np.uint64]) -> Rows:
        owners: Rows = (
            partition_of_key(codes, self._partitions) * self._ranks.count // self._partitions
        )
        return owners

    def _send(
        self, asked: Asked, given: Rows, what: str, error: Exception | None
    ) -> tuple[Asked, Rows]:
        """Send keys, so many to each rank; return those that come, and how many from each.

        Raises what any rank found wrong with its keys.
        """
        texts, tag = asked.texts, zlib.crc32(f"{what} {self._table.name}".encode())
        ends = np.concatenate([[0], np.cumsum(given)])
        sizes = np.zeros_like(given) if texts is None else np.diff(texts.offsets[ends])
        flags = np.full_like(given, error is not None), np.full_like(given, tag)
        told = self._swap(np.stack([given, sizes, *flags], 1), None, None)
        taken = told[:, 0].copy()
        self._check(told, tag, what, error)
        if texts is None:
            codes = self._swap(asked.codes.view(np.int64), given, taken).view(np.uint64)
            return Asked(codes, codes.shape), taken
        lengths = self._swap(np.diff(texts.offsets), given, taken)
        blob = self._swap(texts.blob[: int(texts.offsets[-1])], sizes, told[:, 1])
        arrived = Texts(blob, np.concatenate([[0], np.cumsum(lengths)]))
        return Asked(arrived.hashes(), lengths.shape, arrived), taken

    def _check(self, told: Rows, tag: int, what: str, error: Exception | None) -> None:
        if told[:, 2].any():
            self._ranks.failed(f"{what} keys of table {self._table.name!r}", error)
        for rank, (_, _, _, other) in enumerate(told.tolist()):
            if other != tag:
                text = (
                    f"rank {rank} of {len(told)} does something else than {what} keys of table "
                    f"{self._table.name!r}: every rank makes the same calls in the same order"
                )
                raise self._ranks.of_all(InvalidInputError(text))

    def _answer(
        self, coming: Asked, taken: Rows, given: Rows, serve: Callable[[Asked], Rows], what: str
    ) -> Rows:
        """Answer the keys that came, and return the answers to those that were sent."""
        error: Exception | None = None
        numbers = np.full(coming.codes.size, -1, np.int64)
        try:
            rows = serve(coming)
            own = rows + (self._ranks.rank << _ROW_BITS)
            numbers = np.where(rows < 0, -1, own)
        except Exception as found:
            error = found
        starts = np.cumsum(taken) - taken
        status = np.full(len(taken), error is not None, np.int64)
        answers = self._swap(np.insert(numbers, starts, status), taken + 1, given + 1)
        heads = np.cumsum(given + 1) - given - 1
        if answers[heads].any():
            self._ranks.failed(f"{what} keys of table {self._table.name!r}", error)
        return np.delete(answers, heads)

    def _swap(
        self, values: npt.NDArray[Any], given: Rows | None, taken: Rows | None
    ) -> npt.NDArray[Any]:
        """Send rows `(n, …)` to the ranks, so many to each, and return what comes from each."""
        sent = torch.from_numpy(np.ascontiguousarray(values))
        count = len(values) if taken is None else int(taken.sum())
        out = sent.new_empty(count, *sent.shape[1:])
        with self._ranks.explained(f"exchange keys of table {self._table.name!r}"):
            dist.all_to_all_single(
                out,
                sent,
                None if taken is None else taken.tolist(),
                None if given is None else given.tolist(),
                group=self._ranks.control_group,
            )
        found: npt.NDArray[Any] = out.numpy()
        return found
