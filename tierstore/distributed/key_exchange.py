"""Keys between the ranks that use them and the ranks that own them.

An owner answers each key with a number: the rank that owns it, and its row there. Rows and
gradients are exchanged by such numbers as they are by ids. Keys are looked up on the host, and
go through messages on the host, in parallel with GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierstore._disk.partitioning import partition_of_key
from tierstore._keys.growing import Asked
from tierstore._keys.text import Texts
from tierstore._table.keyed import ShardByKey
from tierstore.distributed.ranks import Ranks

Rows = npt.NDArray[np.int64]

_ROW_BITS = 36
"""Bits of the row in a number; the bits above them are the rank."""
_HEAD = 16
"""Bytes of a part before the keys: whether its rank failed, and how many keys follow."""
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

    def __init__(self, name: str, shard: ShardByKey, partitions: int, ranks: Ranks) -> None:
        """Serve the keys of the shard of this rank, of a table of this name."""
        self._name = name
        self._shard = shard
        self._partitions = partitions
        self._ranks = ranks

    def ask(
        self,
        keys: object,
        what: str,
        check: Callable[[], object] = lambda: None,
        serve: Callable[[Asked], Rows] | None = None,
    ) -> tuple[Asked, Rows]:
        """Return a batch of keys with the number of each, flat; -1 for those without. Collective.

        Each rank calls `serve` with the keys that are requested from it, one rank after another,
        and answers with the rows that it returns; None serves as `ShardByKey.serving` says of
        `what`, which names the call: all ranks make the same.
        An error in the keys of a rank, of `check` before they are sent, or of its `serve` is raised
        there, and RanksError on the others.
        """
        error: Exception | None = self._ranks.fault_error()
        serve = serve or self._shard.serving(what)
        try:
            asked = self._shard.asked(keys)
            check()
            first, inverse, owners = self._distinct(asked)
        except Exception as found:
            error = error or found
            asked = Asked(_NONE, (0,), Texts.of([]))
            first, inverse, owners = self._distinct(asked)
        name = f"{what} keys of table {self._name!r}"
        with self._ranks.midway(name):
            order = np.argsort(owners, kind="stable")
            given = np.bincount(owners, minlength=self._ranks.count)
            coming, taken = self._send(asked.take(first[order]), given, name, error)
            answers = self._answer(coming, taken, serve, name)
            numbers = np.empty(len(first), np.int64)
            numbers[order] = answers
            return asked, numbers[inverse]

    def _distinct(self, asked: Asked) -> tuple[Rows, Rows, Rows]:
        """Return where distinct keys are, for each key which of them it is, and their owners."""
        _, first, inverse = np.unique(asked.codes, return_index=True, return_inverse=True)
        texts = asked.texts if len(first) < len(inverse) else None
        if texts is not None and not texts.take(first[inverse]).equal(texts):  # two of one hash
            first = inverse = np.arange(inverse.size)
        return first, inverse, self.owners_of(asked.codes[first])

    def owners_of(self, codes: npt.NDArray[np.uint64]) -> Rows:
        """Return the rank that has each key, given its code."""
        owners: Rows = (
            partition_of_key(codes, self._partitions) * self._ranks.count // self._partitions
        )
        return owners

    def _send(
        self, asked: Asked, given: Rows, what: str, error: Exception | None
    ) -> tuple[Asked, Rows]:
        """Send keys, so many to each rank; return those that come, and how many from each.

        A part of a message is whether its rank failed, and the codes of the keys, or of texts their
        lengths and bytes. Raises what any rank found wrong with its keys.
        """
        texts, ends = asked.texts, np.cumsum(given)
        parts = []
        for first, last in zip(ends - given, ends, strict=True):
            held: list[npt.NDArray[Any]] = [np.array([error is not None, last - first], np.int64)]
            if texts is None:
                held.append(asked.codes[first:last])
            else:
                bounds = texts.offsets[first : last + 1]
                held += [np.diff(bounds), texts.blob[bounds[0] : bounds[-1]]]
            parts.append(np.concatenate([each.view(np.uint8) for each in held]))
        told = self._swap(parts, what)
        heads = np.array([each[:_HEAD].view(np.int64) for each in told])
        if heads[:, 0].any():
            self._ranks.failed(what, error)
        taken, bodies = heads[:, 1], [each[_HEAD:] for each in told]
        if texts is None:
            codes = np.concatenate(bodies).view(np.uint64)
            return Asked(codes, codes.shape), taken
        split = [
            (each[: 8 * count], each[8 * count :])
            for each, count in zip(bodies, taken, strict=True)
        ]
        lengths = np.concatenate([each for each, _ in split]).view(np.int64)
        blob = np.concatenate([each for _, each in split])
        arrived = Texts(blob, np.concatenate([[0], np.cumsum(lengths)]))
        return Asked(arrived.hashes(), lengths.shape, arrived), taken

    def _answer(
        self, coming: Asked, taken: Rows, serve: Callable[[Asked], Rows], what: str
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
        answers = np.split(np.insert(numbers, starts, status), (starts + np.arange(len(taken)))[1:])
        arrived = [each.view(np.int64) for each in self._swap(answers, f"answer {what}")]
        if any(each[0] for each in arrived):
            self._ranks.failed(what, error)
        return np.concatenate([each[1:] for each in arrived])

    def _swap(self, parts: Sequence[npt.NDArray[Any]], what: str) -> list[npt.NDArray[np.uint8]]:
        """Send a part to each rank, and return the bytes that come from each."""
        sent = [torch.from_numpy(np.ascontiguousarray(each).view(np.uint8)) for each in parts]
        message = self._ranks.send(what, what, sent)
        return [each.numpy() for each in self._ranks.receive(what, message)]
