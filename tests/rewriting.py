"""Rewriting of asserts that the workers of a run share.

pytest rewrites the asserts of each file of tests as it imports it, and keeps the result. In a fresh
clone all workers import the same files at the same time, and each would rewrite them all.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

__all__ = ["rewrite_share"]


class _Rewritten(Exception):
    """Instead of running what was rewritten."""


class _Module(ModuleType):
    """A module whose loader gets no place to run its code in."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise _Rewritten


def rewrite_share(config: pytest.Config) -> list[Path]:
    """Rewrite every n-th file of tests, before n workers each import all; return which."""
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return []
    number, workers = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    asked = [Path(config.invocation_params.dir, each.partition("::")[0]) for each in config.args]
    files = sorted({file for each in asked for file in each.rglob("test_*.py")})
    for file in files[number::workers]:
        # As pytest asks, with the name that it gives a module with --import-mode=importlib.
        name = ".".join(file.relative_to(config.rootpath).with_suffix("").parts)
        spec = config.pluginmanager.rewrite_hook.find_spec(name, [str(file.parent)])
        if spec is not None and spec.loader is not None:
            module = _Module(name)
            module.__spec__ = spec
            with contextlib.suppress(_Rewritten, SyntaxError):  # which pytest reports
                spec.loader.exec_module(module)
    return files[number::workers]
