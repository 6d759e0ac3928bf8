"""Choosing few combinations of many options so that any two values meet in one of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def product(options: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    """Return every allowed combination of options."""
    cases = (
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    )
    return [case for case in cases if allowed(case)]


def pairwise(options: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    """Return allowed combinations that hold every two values which any allowed one holds."""
    every = product(options, allowed)
    random.Random(0).shuffle(every)
    missing = set().union(*(_pairs(case) for case in every))
    chosen = []
    while missing:
        sample = random.Random(len(missing)).sample(every, min(400, len(every)))
        best = max(sample, key=lambda case: len(_pairs(case) & missing))
        if not _pairs(best) & missing:
            best = next(case for case in every if _pairs(case) & missing)
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(case: Case) -> set[Any]:
    items = [(key, repr(value)) for key, value in case.items()]
    return set(itertools.combinations(items, 2))
