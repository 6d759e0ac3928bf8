"""Choosing few combinations of many options so that any two values meet in one of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

Case = dict[str, Any]
_wanted = {"every": False}


def load(*, every: bool) -> None:
    """Say whether tests that are imported from now on have a case for each combination too."""
    _wanted["every"] = every


def product(options: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    """Return every allowed combination of options."""
    cases = (
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    )
    return [case for case in cases if allowed(case)]


def pairwise(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool], together: int = 2
) -> list[Case]:
    """Return allowed combinations that hold every two values which any allowed one holds.

    With `together=1` they hold every value, and with 3 every three.
    """
    every = product(options, allowed)
    random.Random(0).shuffle(every)
    held = [_held(case, together) for case in every]
    missing = set().union(*held)
    chosen = []
    while missing:
        sample = random.Random(len(missing)).sample(range(len(every)), min(400, len(every)))
        best = max(sample, key=lambda number: len(held[number] & missing))
        if not held[best] & missing:
            best = next(number for number, each in enumerate(held) if each & missing)
        chosen.append(every[best])
        missing -= held[best]
    return chosen


def pairs(
    allowed: Callable[[Case], bool] = lambda _: True, together: int = 2, **options: Sequence[Any]
) -> pytest.MarkDecorator:
    """Parametrize a test with combinations in which any two values meet; torture runs the others.

    The option `place` goes to the fixture of that name, and "cuda" needs a GPU. See `pairwise`.
    """
    chosen = pairwise(options, allowed, together)
    every = product(options, allowed) if _wanted["every"] else ()
    others = [case for case in every if case not in chosen]
    cases = [
        pytest.param(
            *case.values(),
            marks=[pytest.mark.gpu] * ("cuda" in case.values())
            + [pytest.mark.torture] * (number >= len(chosen)),
        )
        for number, case in enumerate(chosen + others)
    ]
    return pytest.mark.parametrize(
        list(options), cases, indirect=[name for name in options if name == "place"]
    )


def _held(case: Case, together: int) -> set[Any]:
    items = [(key, repr(value)) for key, value in case.items()]
    return set(itertools.combinations(items, together))
