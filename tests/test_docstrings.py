"""Every public name of the library is documented, by itself or by the base class it overrides."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import FunctionType, ModuleType

import pytest

import tierstore


def modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(tierstore.__path__, "tierstore."):
        yield module.name


def public_methods(module: ModuleType) -> Iterator[tuple[str, object]]:
    for cls in vars(module).values():
        if not inspect.isclass(cls) or cls.__module__ != module.__name__:
            continue
        if cls.__name__.startswith("_"):
            continue
        for name, member in vars(cls).items():
            if not name.startswith("_") and isinstance(
                member, FunctionType | property | classmethod | staticmethod
            ):
                yield f"{cls.__name__}.{name}", getattr(cls, name)


@pytest.mark.parametrize("name", list(modules()))
def test_every_public_method_has_a_docstring(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
    missing = [method for method, member in public_methods(module) if not inspect.getdoc(member)]
    assert not missing
