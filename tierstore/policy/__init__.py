"""Which rows a full tier keeps.

`lru` keeps the rows used last, `lfu` the rows used often of late, `static` those of the highest
given counts, `lookahead` those that announced batches use soonest. Names or values go to
`tierstore.open(..., policy=)`. Every module of this package that declares a `PolicySpec` adds one.
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
"""The policies that are available by name; `static` needs counts."""
