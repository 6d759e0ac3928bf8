"""Loading rows into a host tier before they are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._table.address import host_ids
from tierstore._tiers.host import HostTier
from tierstore.errors import InvalidInputError
from tierstore.policy.frequency import count_keys, most_used

__all__ = ["rows_to_warm"]


def rows_to_warm(
    host: HostTier, ids: object, counts: Any
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32] | None]:
    """Return the rows to load, by id, or the most used by `counts`, or the first; see `Table.warm`.

    With `counts` also these, for the policy.
    """
    if ids is not None and counts is not None:
        raise InvalidInputError("give ids or counts=, not both")
    if ids is not None:
        return host_ids(ids, host.rows).rows, None
    if counts is None:
        return np.arange(host.slots), None
    keys = count_keys(counts, host.rows)
    return most_used(keys, host.slots), keys
