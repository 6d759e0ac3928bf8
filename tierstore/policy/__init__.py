"""Which rows a full tier keeps.

`lru` keeps the rows used last, `lfu` the rows used often of late, `static` those of the highest
given counts, `lookahead` those that announced batches use soonest. Names or values go to
`tierstore.open(..., policy=)`.
"""

from tierstore.policy.base import Barred, Policy
from tierstore.policy.choice import (
    NAMES,
    Choice,
    Policies,
    PolicyLike,
    choose,
    lfu,
    lookahead,
    lru,
    static,
)

__all__ = [
    "NAMES",
    "Barred",
    "Choice",
    "Policies",
    "Policy",
    "PolicyLike",
    "choose",
    "lfu",
    "lookahead",
    "lru",
    "static",
]
