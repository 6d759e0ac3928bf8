"""Stand-ins for libraries of others that are not installed, so that blocks of pages run.

What a page calls of tierstore is called then as well; what it calls of the other library is not.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

LIBRARIES = {
    "faiss": "faiss",
    "fastapi": "fastapi",
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
}
"""The modules that blocks import, by the package that is looked for."""


class FastAPI:
    """An application whose routes are the functions, by path."""

    def __init__(self, lifespan: Callable[[Any], Any]) -> None:
        self.lifespan, self.routes = lifespan, dict[str, Callable[..., Any]]()

    def get(self, path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda function: self.routes.setdefault(path, function)


class HTTPException(Exception):
    """An answer with a status."""

    def __init__(self, status_code: int, detail: str) -> None:
        super().__init__(status_code, detail)
        self.status_code = status_code


def fastapi() -> ModuleType:
    """Return a module with what the page of FastAPI imports."""
    module = ModuleType("fastapi")
    vars(module).update(FastAPI=FastAPI, HTTPException=HTTPException, Response=mock.Mock)
    return module


def missing(text: str) -> dict[str, Any]:
    """Return stand-ins for the libraries that a block imports and that are not installed."""
    found = {}
    for package, name in LIBRARIES.items():
        imported = re.search(rf"^(?:import|from) {re.escape(name)}\b", text, re.MULTILINE)
        if imported and importlib.util.find_spec(package) is None:
            found[name] = fastapi() if name == "fastapi" else mock.MagicMock()
    return found


@contextlib.contextmanager
def standing_in(text: str) -> Iterator[None]:
    """Let a block import what is missing.

    Other modules that it imports stay, which `mock.patch.dict` would take away.
    """
    added = missing(text)
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]
