"""Versions to which states of this process point: they are kept while one of these states lives.

A state has no rows, so what keeps them is a claim, which the state and its copies share. A state in
a file has none; the last one that was saved of a store counts as alive, because programs that stop
early save a state whenever it is the best so far.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from typing import Any, Self

from tierstore._disk.manifest import Manifest

MOST = 8
"""How many versions are kept at most because states point to them; the latest claimed first."""


class Claim:
    """What a state, and every copy of it, holds of the version to which it points."""

    __slots__ = ("__weakref__", "uuid", "version")

    def __init__(self, uuid: str, version: tuple[int, str]) -> None:
        """Claim a version, given by its number and mark, of the store with this uuid."""
        self.uuid: str = uuid
        self.version: tuple[int, str] = version

    def was_saved(self) -> None:
        """Count as alive until another version's state of this store is saved."""
        _saved[self.uuid] = self


living: dict[str, weakref.WeakValueDictionary[int, Claim]] = {}
"""The claims of each store that has had one, by its uuid, in the order in which they were made."""
_numbers = itertools.count()
_saved: dict[str, Claim] = {}


def claim(manifest: Manifest) -> Claim:
    """Return a claim of the version of a manifest, which is the latest then."""
    claimed = Claim(manifest.uuid, (manifest.version, manifest.mark))
    living.setdefault(manifest.uuid, weakref.WeakValueDictionary())[next(_numbers)] = claimed
    return claimed


def claimed(uuid: str) -> list[tuple[int, str]]:
    """Return number and mark of each version of a store that is claimed, the latest first."""
    found = (each() for each in reversed(living[uuid].valuerefs()))  # others may claim meanwhile
    return [*dict.fromkeys(each.version for each in found if each)]


class StatePointer(dict[str, Any]):
    """The pointer that a store's `state_dict()` returns: a dict with the claim of its version."""

    def __init__(self, pointer: dict[str, Any], claim: Claim) -> None:
        """Hold the items of a pointer."""
        super().__init__(pointer)
        self.claim = claim

    def __copy__(self) -> Self:
        """Return a copy with the same claim."""
        return type(self)(self, self.claim)

    copy = __copy__

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with the same claim; the items are no containers."""
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as a dict that `torch.load` accepts."""
        self.claim.was_saved()
        return OrderedDict, (), None, None, iter(self.items())
