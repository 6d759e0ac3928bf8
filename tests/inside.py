"""What tests look at behind the public names, each in one place.

A test that must see inside the library asks a probe of this file, so that when the insides move,
this file moves with them and the tests stay. `tests/counts.py` counts what still reaches for
private names by itself; that number only falls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tierstore import _core, _parts
from tierstore._disk import manifest as _manifest


def space(table: Any) -> Any:
    """Return the cache tiers above the disk that a table shares with others."""
    return table._backing.space


def extent(table: Any) -> Any:
    """Return which rows of its space are a table's."""
    return table._backing.extent


def uncommitted(table: Any) -> Any:
    """Return the rows of a table that changed since the last commit."""
    return space(table).uncommitted(extent(table))


def pins(table: Any) -> Any:
    """Return how many leases hold each slot of a table's host tier."""
    return space(table).host.map.pins.leases


def rest(tier: Any) -> None:
    """Let a host tier believe that no change is under way, so that reads need no lock."""
    with tier._lock:
        tier._changes.rest()


def access(table: Any) -> Any:
    """Return how a table's records are reached: on the host, on a device, or in split columns."""
    return table._backing.access


def only_general_reads(table: Any) -> None:
    """Let a table read without the short way for rows that are resident."""
    table._backing.on_host = access(table)._host = None


def owner(table: Any) -> Any:
    """Return what a table belongs to: its door, prefetcher and folder."""
    return table._backing.home


def together(table: Any) -> Any:
    """Return the context in which calls of a table are one use of it."""
    return table._together()


def generation(table: Any) -> Any:
    """Return the files of a table's open version."""
    return table._backing.generation


def disk(table: Any) -> Any:
    """Return a table's disk tier."""
    return table._backing.disk


def base(tier: Any) -> Any:
    """Return the base below a disk tier's deltas."""
    return tier._base


def index(tier: Any) -> Any:
    """Return which delta of a disk tier has the newest record of each row."""
    return tier._make_index()


def state(store: Any) -> Any:
    """Return what a store has open: directory, ledger, history, tables."""
    return store._state


def manifest(store: Any) -> Any:
    """Return the manifest of a store's open version."""
    return state(store).manifest


def entries() -> set[str]:
    """Return the entries of a manifest that this version knows."""
    return set(_manifest._ENTRIES)


def door(store: Any) -> Any:
    """Return what lets calls into a store, one writer or many readers."""
    return store._door


def parts(store: Any) -> Any:
    """Return the partitions of a store that ranks share, as this rank has them open."""
    return store._state.parts


def root(store: Any) -> Any:
    """Return the store above the partitions, where this rank leads; else None."""
    return store if store._ranks.leads else None


def waiting(queue: Any) -> Any:
    """Return the pieces that a write queue has not written."""
    return queue._waiting


def arrays(memory: Any) -> Any:
    """Return the device arrays of a GPU tier, by name."""
    return memory._arrays


def staging(tier: Any) -> Any:
    """Return where a GPU tier keeps what it writes back until the host has it."""
    return tier._staging


def norm_here(rows: Any) -> Any:
    """Return what a rank tells others of the gradient of its rows."""
    return rows._norm_here()


def number(layer: Any) -> Any:
    """Return the number by which compiled graphs name a layer."""
    return layer._number


def forget_threads() -> None:
    """Let threads that share parts be counted anew, as after a change of processors."""
    _parts._crew.cache_clear()


@contextlib.contextmanager
def core_threads(threads: int) -> Iterator[None]:
    """Let so many threads of the core share the smallest calls, if there are as many processors."""
    _core.set_threads(threads, 1)
    try:
        yield
    finally:
        _core.set_threads(_parts.threads_of_core(), 0)


def rounds_as_torch() -> Any:
    """Return what finds out once for each type whether torch rounds as steps on the host do."""
    from tierstore.optim import on_host

    return on_host._rounds_as_torch
