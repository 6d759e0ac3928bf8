"""What tests know of each kind of thing, keyed by the names in the library's registries.

A kind that the library has and a table here lacks raises, so that it cannot stay untested.
"""

import random
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

ABSENT = "no-such-thing"
"""A name that no kind will ever bear, for tests of what is refused."""


def entry(table: Mapping[str, T], name: str) -> T:
    """Return the entry of a kind; raises LookupError that says what to add."""
    if name not in table:
        raise LookupError(f"tests know nothing of {name!r}: give it an entry in tests/reference")
    return table[name]


def draw(source: random.Random, names: Iterable[str]) -> str:
    """Return one of `names` at random, so that a longer list leaves most draws as they were."""
    seed = source.random()
    return max(names, key=lambda name: random.Random(f"{seed} {name}").random())
