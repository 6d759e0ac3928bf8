"""Registries: extensible sets of named kinds, each defined in its own module.

To add a kind, add a module to the package of the registry; no list of modules exists.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, ValuesView
from typing import TypeVar

from tierstore.errors import InvalidInputError

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Kinds by name, sorted by name.

    Kinds register themselves when their module is imported. The modules of the package are imported
    on first access, so they may import modules that import the registry. Modules with a leading
    underscore are helpers of a kind and are not imported here.
    """

    def __init__(self, what: str, package: str) -> None:
        """Find kinds in the modules of `package`; messages call a kind `what`."""
        self._what = what
        self._package = package
        self._kinds: dict[str, T] = {}
        self._complete = False

    def add(self, name: str, kind: T) -> None:
        """Add a kind; raises ValueError if the name is taken."""
        if name in self._kinds:
            raise ValueError(f"{self._what} {name!r} is already registered: {self._kinds[name]!r}")
        self._kinds[name] = kind

    def find(self, name: object) -> T:
        """Return a kind; for an unknown name, raise InvalidInputError that lists all names."""
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
