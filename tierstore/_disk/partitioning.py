"""The rows of a partitioned table, by arithmetic that works for arrays and tensors alike.

A table of P partitions is cut into blocks of P ids. Each block gives one row to every partition, in
an order that a hash of the block's number rotates, so that ids that are close to each other, or
congruent modulo some number, are spread over all partitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PARTITIONS = "partitions"
"""The directory that holds the stores of the partitions."""
MOST_PARTITIONS = 4096

_FIRST = 0x9E3779B97F4A7C15 - 2**64
_SECOND = 0xBF58476D1CE4E5B9 - 2**64


def partition_name(number: int) -> str:
    """Return the name of the directory of a partition."""
    return f"{number:05d}"


def mix(blocks: Any) -> Any:
    """Hash the numbers of blocks to 31 bits, in int64.

    The multiplier and the first shift are those of Fibonacci hashing, the second multiplier is of
    splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA'14).
    """
    x = blocks * _FIRST
    x = (x ^ (x >> 32 & 0xFFFFFFFF)) * _SECOND
    return x >> 33 & 0x7FFFFFFF


def _divmod(numbers: Any, partitions: int) -> tuple[Any, Any]:
    """Return numbers divided by the number of partitions, rounded down, and what is left.

    By bits where that can be: to divide takes several times as long.
    """
    if partitions & (partitions - 1):
        return numbers // partitions, numbers % partitions
    return numbers >> (partitions.bit_length() - 1), numbers & (partitions - 1)


def partition_of_key(codes: Any, partitions: int) -> Any:
    """Return the partition of each key of a table by key, by their codes, uint64 `(n,)`."""
    return mix(codes.view(np.int64)) % partitions


@dataclass(frozen=True)
class Shard:
    """Some consecutive partitions of a table, whose rows are numbered in the order of their ids.

    The shard of all partitions numbers each row by its id.

    Attributes:
        rows: of the whole table.
        partitions: of the whole table.
        first: the first partition of the shard.
        count: how many partitions it has.
    """

    rows: int
    partitions: int
    first: int
    count: int

    @classmethod
    def of_rank(cls, rows: int, partitions: int, rank: int, ranks: int) -> Shard:
        """Return the shard of a rank: the partitions p with p * ranks // partitions == rank."""
        first, end = (-(-each * partitions // ranks) for each in (rank, rank + 1))
        return cls(rows, partitions, first, end - first)

    @property
    def blocks(self) -> int:
        """Rows of each partition; in the last block some may have no id."""
        return -(-self.rows // self.partitions)

    def __len__(self) -> int:
        """Return the number of rows of the shard, at least 1; the only one may have no id."""
        return max(1, self.ids)

    @property
    def ids(self) -> int:
        """Number of ids in the shard."""
        block, rest = divmod(self.rows, self.partitions)
        start, wrapped = self._span(block)
        last = min(rest, wrapped) + max(0, min(rest, start + self.count - wrapped) - start)
        return block * self.count + last

    def partition_of(self, ids: Any) -> Any:
        """Return the partition of each id, of all partitions of the table."""
        block, _ = _divmod(ids, self.partitions)
        return _divmod(ids + mix(block), self.partitions)[1]

    def rows_of(self, ids: Any) -> Any:
        """Return the row in the shard of each id, which must be in one of its partitions."""
        block, place = _divmod(ids, self.partitions)
        start, wrapped = self._spans(block)
        return block * self.count + place - (place >= wrapped) * (start - wrapped)

    def ids_of(self, rows: Any) -> Any:
        """Return the id of each row of the shard."""
        block = rows // self.count
        start, wrapped = self._spans(block)
        place = rows % self.count
        return block * self.partitions + place + (place >= wrapped) * (start - wrapped)

    def locate(self, rows: Any) -> tuple[Any, Any]:
        """Return for each row of the shard its partition, counted from the first, and row there."""
        return self.partition_of(self.ids_of(rows)) - self.first, rows // self.count

    def rows_in(self, partition: int, rows: Any) -> Any:
        """Return the rows in the shard of rows of a partition, counted from its first."""
        place = (partition + self.first - mix(rows)) % self.partitions
        return self.rows_of(rows * self.partitions + place)

    def _spans(self, blocks: Any) -> tuple[Any, Any]:
        """Return where in each block the ids of the shard start, and how many of them wrap around.

        Those at the start of the block follow those at its end.
        """
        start = _divmod(self.first - mix(blocks), self.partitions)[1]
        return start, (start + self.count - self.partitions).clip(0)

    def _span(self, block: int) -> tuple[int, int]:
        start, wrapped = self._spans(np.array([block], np.int64))
        return int(start[0]), int(wrapped[0])
