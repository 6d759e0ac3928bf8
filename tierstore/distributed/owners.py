"""The distinct ids of a batch by the ranks that own them, and the rows that they have there.

An id of a table has a number, unlike those of all other tables that are looked up with it: the ids
of one table follow another's. Ranks request rows from each other by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tierstore._disk.partitioning import Shard
from tierstore._table.gpu import DeviceAccess
from tierstore._table.host import Access
from tierstore._tiers.gpu.abi import RECORDS, Arguments
from tierstore._tiers.gpu.launcher import Kernel, as_large_as_the_work
from tierstore.distributed.key_exchange import Numbers

Place = Shard | Numbers
"""Which rows a rank has."""

_SOURCE = RECORDS.extended("tierstore.distributed", "owners.cu")
_Places: Any = _SOURCE.structure("Places")
_Asked: Any = _SOURCE.structure("Asked")
_ASK, _TELL, _PLACE, _ARRIVE, _EXPAND = (
    Kernel(_SOURCE, name, as_large_as_the_work)
    for name in ("ask", "tell", "place", "arrive", "expand")
)
_UNIT = 16
"""Bytes of a row that a thread copies at a time."""
_NARROW = torch.int32
"""What a number is sent as where it fits, in half the bytes."""
_REMEMBERED = 64
"""Numbers of ids by feature, and messages, that are kept on a device; training has a few."""


class Looked(Protocol):
    """What a rank looks up."""

    @property
    def ids(self) -> Tensor:
        """Int64 `(n,)`, contiguous, on the device: one feature after another."""

    @property
    def tables(self) -> Sequence[int]:
        """The number of the table of each feature."""

    @property
    def lengths(self) -> Sequence[int]:
        """How many ids each has."""


class Found(Protocol):
    """The distinct ids of a batch, counted by owner."""

    @property
    def told(self) -> Tensor:
        """The message for each rank, and room for theirs, int64 `(2, ranks, words)`.

        A message begins with how many ids are requested from the rank, and whether any failed.
        """
        ...

    def placed(self) -> tuple[Tensor, Tensor]:
        """Return the numbers by owner, and for each id the place of its row among those that come.

        More numbers may follow the distinct ones.
        """


class Owners:
    """Tables of several ranks, whose rows are all distributed alike."""

    def __init__(
        self,
        place: Place,
        ranks: int,
        rows: Sequence[int],
        first_rows: Sequence[int],
        device: str | torch.device,
    ) -> None:
        """Number the ids of tables of so many `rows`, which start at `first_rows` on this rank."""
        self._place, self._ranks, self._device = place, ranks, torch.device(device)
        self._rows = np.array(rows, np.int64)
        self._ends = self._rows.cumsum()
        self._first_rows = np.array(first_rows, np.int64)
        is_narrow = int(self._ends[-1]) <= torch.iinfo(_NARROW).max
        self._kind: torch.dtype = _NARROW if is_narrow else torch.int64

    def find(self, looked: Looked, told: Sequence[int], *, failed: bool) -> Found:
        """Return the distinct ids of a batch; every rank is sent `told` besides.

        `failed` states whether an error of them is known already.
        """
        raise NotImplementedError

    def rows_of(self, numbers: Tensor) -> Tensor:
        """Return the row on this rank, int64, of each number that it owns."""
        raise NotImplementedError

    def expand(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the row of each id, `(ids, dim)`, given those that came and the places of ids."""
        return rows.index_select(0, positions)


class _Sorted(NamedTuple):
    """What was found by sorting; see `Found`."""

    told: Tensor
    numbers: Tensor
    positions: Tensor

    def placed(self) -> tuple[Tensor, Tensor]:
        return self.numbers, self.positions


class HostOwners(Owners):
    """Finds them by operators of torch, which sort and wait."""

    def __init__(
        self,
        place: Place,
        ranks: int,
        rows: Sequence[int],
        first_rows: Sequence[int],
        device: str | torch.device,
    ) -> None:
        """Put what operators take on a device."""
        super().__init__(place, ranks, rows, first_rows, device)
        arrays = self._ends, self._ends - self._rows, self._rows, self._first_rows
        tensors = [torch.from_numpy(each).to(self._device) for each in arrays]
        self._of_ends, self._of_starts, self._of_rows, self._of_first_rows = tensors

    def find(self, looked: Looked, told: Sequence[int], *, failed: bool) -> Found:
        """See `Owners.find`."""
        ranks, (ids, starts, rows) = self._ranks, self._bounds(looked)
        is_bad = (ids < 0) | (ids >= rows)
        if bool(is_bad.any()):
            ids, failed = ids.where(~is_bad, 0), True
        owners = self._place.partition_of(ids) * ranks // self._place.partitions
        bits = int(self._ends[-1]).bit_length()  # of a number; its owner is above them
        kind = _NARROW if ranks << bits < torch.iinfo(_NARROW).max else torch.int64
        keys = ((owners << bits) + (ids + starts)).view(-1).to(kind)
        distinct, positions = torch.unique(keys, return_inverse=True)
        edges = torch.arange(ranks + 1, dtype=kind, device=keys.device) << bits
        message = torch.empty(2, ranks, 2 + len(told), dtype=torch.int64, device=keys.device)
        message[0] = uploaded([0, failed, *told], keys.device)
        message[0, :, 0] = torch.searchsorted(distinct, edges).diff()
        numbers = (distinct & ((1 << bits) - 1)).to(self._kind)
        return _Sorted(message, numbers, positions)

    def _bounds(self, looked: Looked) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ids, and first number and rows of their tables, in shapes that agree."""
        ids, lengths = looked.ids, looked.lengths
        if len(self._rows) == 1:
            return ids, self._of_starts, self._of_rows
        tables = uploaded(looked.tables, ids.device)
        if len(set(lengths)) == 1:
            split = ids.view(len(lengths), -1)
            return split, self._of_starts[tables][:, None], self._of_rows[tables][:, None]
        counts = uploaded(lengths, ids.device)
        of_each = tables.repeat_interleave(counts, output_size=len(ids))
        return ids, self._of_starts[of_each], self._of_rows[of_each]

    def rows_of(self, numbers: Tensor) -> Tensor:
        """See `Owners.rows_of`."""
        numbers = numbers.to(torch.int64)
        if len(self._rows) == 1:
            alone: Tensor = self._of_first_rows + self._place.rows_of(numbers)
            return alone
        tables = torch.searchsorted(self._of_ends, numbers, right=True)
        own = self._place.rows_of(numbers - self._of_starts[tables])
        rows: Tensor = self._of_first_rows[tables] + own
        return rows


class _Hashed(NamedTuple):
    """What was found by hashing; see `Found`.

    Attributes:
        places, asked: what kernels take.
        held: what that points to.
        positions: where the ids are in the table of hashes.
    """

    told: Tensor
    owners: DeviceOwners
    places: Any
    asked: Any
    held: tuple[Tensor, ...]
    positions: Tensor

    def placed(self) -> tuple[Tensor, Tensor]:
        return self.owners.place(self)


class DeviceOwners(Owners):
    """Finds them by kernels, which hash; nothing waits."""

    def __init__(
        self,
        place: Place,
        ranks: int,
        rows: Sequence[int],
        first_rows: Sequence[int],
        access: DeviceAccess,
    ) -> None:
        """Launch kernels where `access` has the nearest tier of the tables."""
        super().__init__(place, ranks, rows, first_rows, access.torch_device)
        self._access = access
        self._sent: dict[tuple[int, ...], Tensor] = {}
        self._features: dict[tuple[int, ...], tuple[Any, Tensor]] = {}

    def _uploaded(self, values: Sequence[int]) -> Tensor:
        """Return numbers on the device; the last ones are remembered."""
        key, known = tuple(values), self._sent
        numbers = known.get(key)
        if numbers is None:
            while len(known) >= _REMEMBERED:
                del known[next(iter(known))]
            numbers = known[key] = uploaded(key, self._device)
        return numbers

    def _places(self, tables: tuple[int, ...]) -> Any:
        """Describe features by their tables to kernels; the last ones are remembered."""
        known = self._features
        found = known.get(tables)
        if found is not None:
            return found[0]
        while len(known) >= _REMEMBERED:
            del known[next(iter(known))]
        numbers, place = np.array(tables, np.intp), self._place
        starts = (self._ends - self._rows)[numbers]
        parts = starts, self._rows[numbers], self._ends, self._first_rows
        held = uploaded(np.concatenate(parts).tolist(), self._device)
        at = held.data_ptr() + 8 * np.cumsum([0, *map(len, parts)])
        described = _Places(
            start=int(at[0]),
            rows=int(at[1]),
            end=int(at[2]),
            first_row=int(at[3]),
            partitions=place.partitions,
            ranks=self._ranks,
            first=place.first,
            count=place.count,
            features=len(tables),
            tables=len(self._rows),
            shift=place.row_bits if isinstance(place, Numbers) else 0,
            narrow=self._kind == _NARROW,
        )
        known[tables] = described, held
        return described

    def find(self, looked: Looked, told: Sequence[int], *, failed: bool) -> Found:
        """See `Owners.find`."""
        ids, ranks, device = looked.ids, self._ranks, self._device
        n, words, places = len(ids), 2 + len(told), self._places(tuple(looked.tables))
        slots = 1 << max(5, (2 * n - 1).bit_length())
        counted = ranks // 2 + 1  # what ranks + 1 counts take
        block = torch.empty(counted + 2 * slots, dtype=torch.int64, device=device)
        message = torch.empty(2, ranks, words, dtype=torch.int64, device=device)
        positions = torch.empty(n, dtype=torch.int32, device=device)
        ends, sent = _NOTHING, self._uploaded(told)
        if len(looked.lengths) > 1:
            ends = self._uploaded(np.cumsum(looked.lengths).tolist())
        asked, at = _Asked(n=n, mask=slots - 1, width=words), block.data_ptr()
        asked.ids, asked.end, asked.told = ids.data_ptr(), ends.data_ptr(), sent.data_ptr()
        asked.counts, asked.keys, asked.found = at, at + 8 * counted, at + 8 * (counted + slots)
        asked.message, asked.positions = message.data_ptr(), positions.data_ptr()
        block[: counted + slots].zero_()
        if failed:
            block.view(torch.int32)[ranks] = 1
        self._launch([(_ASK, n), (_TELL, ranks * words)], places, asked)
        return _Hashed(message, self, places, asked, (ids, block), positions)

    def place(self, found: _Hashed) -> tuple[Tensor, Tensor]:
        """See `Found.placed`."""
        asked, positions = found.asked, found.positions
        numbers = torch.empty(len(positions), dtype=self._kind, device=self._device)
        asked.numbers = numbers.data_ptr()
        self._launch([(_PLACE, len(positions))], found.places, asked)
        return numbers, positions

    def rows_of(self, numbers: Tensor) -> Tensor:
        """See `Owners.rows_of`."""
        rows = torch.empty(len(numbers), dtype=torch.int64, device=self._device)
        asked = _Asked(numbers=numbers.data_ptr(), arrived=rows.data_ptr(), n=len(numbers))
        self._launch([(_ARRIVE, len(numbers))], self._places((0,)), asked)
        return rows

    def expand(self, rows: Tensor, positions: Tensor) -> Tensor:
        """See `Owners.expand`; the kernel of torch leaves the memory idle most of the time."""
        width = rows.shape[1] * rows.element_size()
        fits = width % _UNIT == 0 and rows.data_ptr() % _UNIT == 0 and rows.is_contiguous()
        if not fits or positions.dtype != torch.int32:
            return super().expand(rows, positions)
        expanded = rows.new_empty(len(positions), rows.shape[1])
        asked = _Asked(n=len(positions), width=width // _UNIT)
        asked.rows, asked.expanded = rows.data_ptr(), expanded.data_ptr()
        asked.positions = positions.data_ptr()
        self._launch([(_EXPAND, len(positions))], self._places((0,)), asked)
        return expanded

    def _launch(self, kernels: Sequence[tuple[Kernel, int]], places: Any, asked: Any) -> None:
        """Launch kernels on so many items each, one after another."""
        access, arguments = self._access, Arguments(places, asked)
        with access.using():
            stream = access.stream("torch")
            for kernel, items in kernels:
                access.gpu.launcher.start(kernel, arguments, stream, items)


_NOTHING = torch.empty(0, dtype=torch.int64)


def owners_over(
    place: Place, ranks: int, rows: Sequence[int], first_rows: Sequence[int], access: Access
) -> Owners:
    """Return the owners of tables of so many rows, given the access to those of this rank."""
    if isinstance(access, DeviceAccess):
        return DeviceOwners(place, ranks, rows, first_rows, access)
    return HostOwners(place, ranks, rows, first_rows, "cpu")


def uploaded(values: Sequence[int], device: torch.device | str) -> Tensor:
    """Return numbers on a device, int64, without waiting for the device."""
    device = torch.device(device)
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=True)
    return pinned.to(device, non_blocking=True)
