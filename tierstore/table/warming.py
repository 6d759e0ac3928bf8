"""Loading rows into a host tier before they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tierstore.errors import InvalidInputError
from tierstore.policy.frequency import count_keys, most_used
from tierstore.table.ids import host_ids
from tierstore.tier.host import HostTier

__all__ = ["warm"]


def warm(
    host: HostTier, ids: object, counts: Any, progress: Callable[[int, int], None] | None
) -> int:
    """Load rows by id, or the most used by `counts`, or the first; see `Table.warm`."""
    if ids is not None and counts is not None:
        raise InvalidInputError("give ids or counts=, not both")
    if ids is not None:
        return host.warm(host_ids(ids, host.rows).rows, progress)
    if counts is None:
        return host.warm(np.arange(host.slots), progress)
    keys = count_keys(counts, host.rows)
    host.map.prime(keys)
    return host.warm(most_used(keys, host.slots), progress)
