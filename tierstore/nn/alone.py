"""torch's operators in threads of this library, each of which works alone."""

from __future__ import annotations

import torch


def work_alone() -> None:
    """Have torch work alone in this thread, which does one of several parts.

    Otherwise torch starts as many threads for each of them as for the caller, who sets its number
    of threads again when all parts are done.
    """
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
