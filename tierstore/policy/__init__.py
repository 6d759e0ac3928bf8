"""Replacement policies, which decide which rows a full tier keeps.

`lru` keeps the most recently used rows, `lfu` the most frequently used of recent batches, `static`
those with the highest given counts, and `lookahead` those that announced batches use soonest. Pass
names or values to `tierstore.open(..., policy=)`, one for all tables or a dict by table, of which a
name that no table has raises UnknownNameError. Every module of this package that declares a
`PolicySpec` adds a policy.
"""

import importlib
import pkgutil

from tierstore.policy.base import (
    Barred,
    DeviceScores,
    Policies,
    Policy,
    PolicyLike,
    PolicyName,
    PolicySpec,
    ScoreStep,
    choose,
    registered,
)
from tierstore.policy.frequency import lfu, static
from tierstore.policy.hints import lookahead
from tierstore.policy.recency import lru

__all__ = [
    "NAMES",
    "Barred",
    "DeviceScores",
    "Policies",
    "Policy",
    "PolicyLike",
    "PolicyName",
    "PolicySpec",
    "ScoreStep",
    "choose",
    "lfu",
    "lookahead",
    "lru",
    "static",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

NAMES = registered()
"""The policies available by name; `static` requires counts."""
