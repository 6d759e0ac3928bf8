"""Every public name of the library is documented, by itself or by the base class it overrides."""

from __future__ import annotations

import contextlib
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


@pytest.mark.slow
def test_every_public_method_has_a_docstring() -> None:
    missing, seen = [], 0
    for name in modules():
        with contextlib.suppress(ImportError):  # of an extra that is not installed
            for method, member in public_methods(importlib.import_module(name)):
                missing += [] if inspect.getdoc(member) else [f"{name}: {method}"]
                seen += 1
    assert not missing
    assert seen > 500
