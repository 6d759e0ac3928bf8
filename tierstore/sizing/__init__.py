"""Capacity planning: replays a stream of row ids through tiers of any size.

`load_stream` reads recorded traces and files of ids, `simulate` replays them with policies and
sizes and compares with the optimum, and `plan` derives budgets, hit rates and step times from the
available memory.
"""

from tierstore.sizing.planning import Plan, TierPlan, plan
from tierstore.sizing.simulation import POLICIES, SIZES, Point, Simulation, simulate
from tierstore.sizing.streams import Stream, load_stream, stream_of

__all__ = [
    "POLICIES",
    "SIZES",
    "Plan",
    "Point",
    "Simulation",
    "Stream",
    "TierPlan",
    "load_stream",
    "plan",
    "simulate",
    "stream_of",
]
