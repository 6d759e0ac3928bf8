"""Registries: the kinds of one thing by name, each kind in a module of its own.

A new kind is a new module in the package of its registry. Nothing lists the modules.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, ValuesView
from typing import TypeVar

from tierstore.errors import InvalidInputError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Kinds by name, in the order of their names.

    Kinds add themselves when their module is imported. The modules of the package are imported when
    the registry is first looked at, so they may import whatever imports the registry. Modules with
    a leading underscore belong to a kind and are left to it.
    """

    def __init__(self, what: str, package: str) -> None:
        """Look for kinds in the modules of `package`; `what` one is, for messages."""
        self._what = what
        self._package = package
        self._kinds: dict[str, T] = {}
        self._complete = False

    def add(self, name: str, kind: T) -> None:
        """Add a kind; raises ValueError if the name is taken."""
        if name in self._kinds:
            raise ValueError(f"there is a {self._what} {name!r} already: {self._kinds[name]!r}")
        self._kinds[name] = kind

    def find(self, name: object) -> T:
        """Return a kind; raises InvalidInputError, listing those there are, for another name."""
        if not isinstance(name, str) or name not in self:
            raise InvalidInputError(f"not a {self._what}: {name!r}; choose from {', '.join(self)}")
        return self[name]

    def __getitem__(self, name: str) -> T:
        """Return a kind; raises KeyError."""
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names, sorted."""
        return iter(sorted(self._all()))

    def values(self) -> ValuesView[T]:
        """Return the kinds."""
        return self._all().values()

    def __len__(self) -> int:
        """Return the number of kinds."""
        return len(self._all())

    def _all(self) -> dict[str, T]:
        if not self._complete:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                if not module.name.startswith("_"):
                    importlib.import_module(f"{self._package}.{module.name}")
            self._complete = True
        return self._kinds
