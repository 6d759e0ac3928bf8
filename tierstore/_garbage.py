"""Python's search for cyclic garbage, put off while many objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["search_put_off"]


@contextlib.contextmanager
def search_put_off() -> Iterator[None]:
    """Search for no cyclic garbage within the body, in any thread.

    A store of a thousand tables consists of fifty thousand objects. While they are made, Python
    would go through them seventy times, and once or twice through all objects of the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
