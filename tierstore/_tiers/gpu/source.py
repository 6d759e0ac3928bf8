"""Sources of kernels that are not the tier's own and work on the records of a lease."""

from __future__ import annotations

import functools
from importlib.resources import files

__all__ = ["on_records"]


@functools.cache
def on_records(package: str, name: str) -> str:
    """Return a source in a package, behind what all of them begin with: rows.cuh."""
    begin = files("tierstore._tiers.gpu").joinpath("rows.cuh").read_text()
    return begin + files(package).joinpath(name).read_text()
