"""Rows that carry their own checksum, read by threads while others write: none is ever torn.

Reads of many rows take no lock, and copy what others may write meanwhile. Whatever comes of it on a
processor, a read must return rows as some writer wrote them, each at its own place.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tierstore
from tierstore import _core
from tierstore._tiers.changes import Changes
from tierstore._tiers.host import HostTier
from tierstore.errors import CorruptRowError

ROWS, WIDTH, MANY = 200_000, 64, 65_536
READERS, WRITERS = 4, 2


def signed(rng: np.random.Generator, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return random values for rows, whose last four bytes are the checksum of row and the rest."""
    values = rng.integers(0, 256, (rows.size, WIDTH), np.uint8)
    sums = np.empty(rows.size, np.uint32)
    _core.sum_rows(rows, values[:, :-4], sums)
    values[:, -4:] = sums.view(np.uint8).reshape(-1, 4)
    return values


def check(rows: npt.NDArray[np.int64], values: npt.NDArray[np.uint8]) -> None:
    sums = np.ascontiguousarray(values[:, -4:]).view(np.uint32).ravel()
    bad = np.empty(rows.size, np.int64)
    count = _core.check_rows(rows, values[:, :-4], sums, False, bad)
    if count:
        raise CorruptRowError("rows are torn, or of other places", rows=rows[bad[:count]].tolist())


def read_beside_writers(path: Path, share: float, reads: float) -> None:
    """Read so many rows of a table in all, of which the memory holds a share."""
    spec = tierstore.TableSpec(ROWS, WIDTH, dtype="uint8")
    budget = tierstore.Budget(host_rows=int(share * ROWS))
    left, lock, errors = [int(reads)], threading.Lock(), list[BaseException]()
    with tierstore.create(path, {"t": spec}, budget=budget, device="cpu") as store:
        table, begin = store["t"], np.random.default_rng(0)
        table.write(np.arange(ROWS), signed(begin, np.arange(ROWS)))
        hot = begin.permutation(ROWS)[: int(0.8 * min(share, 0.5) * ROWS)]  # which the cache holds

        def read(number: int) -> None:
            rng = np.random.default_rng([1, number])
            while left[0] > 0 and not errors:
                rows = rng.choice(hot, MANY)
                check(rows, table.read(rows))
                with lock:
                    left[0] -= MANY

        def write(number: int) -> None:
            rng = np.random.default_rng([2, number])
            while left[0] > 0 and not errors:
                among = hot if rng.random() < 0.9 else np.arange(ROWS)  # the others drive rows out
                rows = np.unique(rng.choice(among, int(rng.choice([1, 64, 4096]))))
                table.write(rows, signed(rng, rows))
                time.sleep(float(rng.choice([0, 1e-3, 1e-2])))

        def run(work: Any, number: int) -> None:
            try:
                work(number)
            except BaseException as error:
                errors.append(error)

        works = [(read, number) for number in range(READERS)]
        works += [(write, number) for number in range(WRITERS)]
        threads = [threading.Thread(target=run, args=each, daemon=True) for each in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not errors:
            check(np.arange(ROWS), table.read(np.arange(ROWS)))
        store.rollback()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("share", [0.1, 0.5, 1], ids=["few", "cache", "whole"])
@pytest.mark.parametrize(
    "reads", [4e6, pytest.param(1e9, marks=pytest.mark.torture)], ids=["some", "many"]
)
def test_no_row_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, reads: float
) -> None:
    apart, read_apart = list[bool](), HostTier.read_apart

    def noted(*given: Any) -> bool:
        apart.append(read_apart(*given))
        return apart[-1]

    monkeypatch.setattr(HostTier, "read_apart", noted)
    read_beside_writers(tmp_path / "s", share, reads)
    assert sum(apart) >= 3, "hardly a read was without the lock"


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.5, 1], ids=["few", "cache", "whole"])
def test_rows_are_torn_where_no_change_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """The negative control of the threads: as many reads find it by far."""
    monkeypatch.setattr(Changes, "number", property(lambda _: 0, lambda *_: None))
    with pytest.raises(CorruptRowError):
        read_beside_writers(tmp_path / "s", share, 1e9)


def test_a_torn_row_is_found() -> None:
    """The negative control of the check."""
    rows = np.arange(9)
    values = signed(np.random.default_rng(3), rows)
    check(rows, values)
    values[4, :30] = signed(np.random.default_rng(4), rows)[4, :30]
    with pytest.raises(CorruptRowError):
        check(rows, values)
