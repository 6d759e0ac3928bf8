"""What a store holds and what it did: counters of tiers, information, history, Prometheus."""

from __future__ import annotations

from tierstore._counters import Hits, Occupancy, TierStats
from tierstore._info import StoreInfo, TableInformation, TierInformation, Version
from tierstore.stats import prometheus
from tierstore.stats.history import History, Sample

__all__ = [
    "History",
    "Hits",
    "Occupancy",
    "Sample",
    "StoreInfo",
    "TableInformation",
    "TierInformation",
    "TierStats",
    "Version",
    "prometheus",
]
