"""The arguments of kernels.cu, laid out as it declares them, and the counters it keeps."""

from __future__ import annotations

import ctypes

import numpy as np

__all__ = [
    "COUNTERS",
    "COUNTERS_BYTES",
    "REGIONS",
    "Arguments",
    "BatchArgument",
    "Mode",
    "Rows",
    "TierArgument",
]

_POINTER, _I64, _U32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint32


class Mode:
    """What a batch does with its rows."""

    READ, WRITE, LEASE, PREFETCH = range(4)
    RANGES = ("tierstore.read", "tierstore.write", "tierstore.lease", "tierstore.fetch")


class TierArgument(ctypes.Structure):
    """`struct Tier`: what stays the same as long as a tier lives."""

    _fields_ = (
        ("slots", _POINTER),
        ("slot_of", _POINTER),
        ("row_of", _POINTER),
        ("stamp", _POINTER),
        ("pins", _POINTER),
        ("arrival", _POINTER),
        ("mark", _POINTER),
        ("dirty", _POINTER),
        ("host", _POINTER),
        ("host_slot_of", _POINTER),
        ("host_dirty", _POINTER),
        ("host_changed", _POINTER),
        ("counters", _POINTER),
        ("poison", _POINTER),
        ("score", _POINTER),
        ("key", _POINTER),
        ("rows", _I64),
        ("record", _I64),
        ("capacity", _U32),
        ("direct", _U32),
        ("stretch", _U32),
    )


class BatchArgument(ctypes.Structure):
    """`struct Batch`: one batch, its workspace, and what a lease or the staging adds."""

    _fields_ = (
        ("ids", _POINTER),
        ("arriving", _POINTER),
        ("n", _I64),
        ("data", _POINTER),
        ("lo", _I64),
        ("bytes", _I64),
        ("deferred", _POINTER),
        ("missed", _POINTER),
        ("place", _POINTER),
        ("contest", _POINTER),
        ("entry", _POINTER),
        ("leaving", _POINTER),
        ("records", _POINTER),
        ("rows", _POINTER),
        ("held", _POINTER),
        ("positions", _POINTER),
        ("count", _POINTER),
        ("verdict", _POINTER),
        ("staged", _POINTER),
        ("evicted", _POINTER),
        ("staged_rows", _POINTER),
        ("evicted_rows", _POINTER),
        ("staged_place", _POINTER),
        ("spill", _POINTER),
        ("first", _U32),
        ("limit", _U32),
        ("width", _U32),
        ("now", _U32),
        ("mode", _U32),
        ("load", _U32),
        ("last", _U32),
        ("in_order", _U32),
        ("admit", _U32),
        ("alone", _U32),
        ("arrival", _U32),
        ("expired", _U32),
        ("on_use", ctypes.c_float),
        ("on_arrival", ctypes.c_float),
        ("rescale", ctypes.c_float),
    )

    def describe(self, data: int, lo: int, hi: int) -> None:
        """Let it copy bytes `lo:hi` of records from or to `data`, as wide as addresses allow."""
        self.data, self.lo, self.bytes = data, lo, hi - lo
        odd = data | lo | hi | 16
        self.width = odd & -odd


class Rows(ctypes.Structure):
    """`struct Rows`: the distinct records of a batch, for kernels that are not the tier's own."""

    _fields_ = (
        ("records", _POINTER),
        ("count", _POINTER),
        ("positions", _POINTER),
        ("n", _I64),
        ("held", _POINTER),
        ("dirty", _POINTER),
        ("host_changed", _POINTER),
        ("host", _POINTER),
        ("record", _I64),
    )


COUNTERS = np.dtype(
    [
        ("bad_position", "u8"),
        ("bad_row", "i8"),
        ("missed_ids", "u8"),
        ("missed_rows", "u8"),
        ("evicted_rows", "u8"),
        ("written_rows", "u8"),
        ("leased_rows", "u8"),
        ("leased_misses", "u8"),
        ("bad", "u4"),
        ("missed", "u4"),
        ("deferred", "u4"),
        ("victims", "u4"),
        ("ties", "u4"),
        ("distinct", "u4"),
        ("absent", "u4"),
        ("evicted", "u4"),
        ("filled", "u4"),
        ("done", "u4"),
        ("lacking", "u4"),
        ("gate", "u4"),
    ]
)
"""The part of `struct Counters` that the host looks at; it comes first."""

REGIONS = 4096
"""Into how many stretches kernels.cu divides host memory at most; see ordering.py."""

COUNTERS_BYTES = 8 * -(-(COUNTERS.itemsize + 4 * (64 + 3 * 2048 + 4 * REGIONS)) // 8)
"""All of it: the moves of recent prefetches, histograms and counts by stretch follow."""


class Arguments:
    """A tier and a batch, and the array of pointers to both that a launch takes."""

    def __init__(self, tier: TierArgument, batch: BatchArgument) -> None:
        """Point to the structures, which the caller may go on changing between launches."""
        self.tier = tier
        self.batch = batch
        self._pointers = (ctypes.c_void_p * 2)(ctypes.addressof(tier), ctypes.addressof(batch))
        self.address = ctypes.addressof(self._pointers)
