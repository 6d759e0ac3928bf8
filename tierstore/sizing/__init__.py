"""Capacity planning: replays a stream of row ids through tiers of any size.

`load_stream` reads recorded traces and files of ids, `simulate` replays them through policies and
sizes beside the optimum, `plan` turns the memory at hand into budgets, hit rates and step times,
`plan_budgets` those of several sizes, and `plan_tables` says how many tables would divide it.
"""

from tierstore.sizing.planning import (
    Plan,
    SpacePlan,
    TierPlan,
    host_for_hits,
    plan,
    plan_budgets,
    plan_tables,
)
from tierstore.sizing.simulation import POLICIES, SIZES, Point, Simulation, simulate
from tierstore.sizing.streams import Stream, load_stream, stream_of

__all__ = [
    "POLICIES",
    "SIZES",
    "Plan",
    "Point",
    "Simulation",
    "SpacePlan",
    "Stream",
    "TierPlan",
    "host_for_hits",
    "load_stream",
    "plan",
    "plan_budgets",
    "plan_tables",
    "simulate",
    "stream_of",
]
