"""Which of the arrays in a file is meant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tierstore.errors import FormatError
from tierstore.formats.seam import Wanted

__all__ = ["choose"]

_LISTED = 8


def choose(
    path: Path, wanted: Wanted, matrices: Mapping[str, object], others: Mapping[str, object]
) -> str:
    """Return the name of the matrix to read: the one named, the one preferred, or the only one.

    `matrices` are those that could be read and `others` what else is in the file; both map a name
    to something whose string describes it. Raises FormatError, listing what there is.
    """
    name = wanted.name if wanted.name is not None else wanted.field
    if name is not None and name in matrices:
        return name
    if name is not None and name in others:
        raise FormatError(f"{path}: {name!r} is {others[name]}; need floats of shape (rows, dim)")
    if wanted.name is None and len(matrices) == 1:
        return next(iter(matrices))

    if not matrices:
        raise FormatError(
            f"{path}: holds no floats of shape (rows, dim), only {_listed(others) or 'nothing'}"
        )
    if wanted.name is not None:
        raise FormatError(f"{path}: holds no {wanted.name!r}, but {_listed(matrices)}")
    raise FormatError(
        f"{path}: holds {len(matrices)} matrices: {_listed(matrices)}; "
        f"name one, as in {path.name}:{next(iter(matrices))}"
    )


def _listed(entries: Mapping[str, object]) -> str:
    shown = [f"{name!r} {entry}" for name, entry in list(entries.items())[:_LISTED]]
    if len(entries) > _LISTED:
        shown.append(f"{len(entries) - _LISTED} more")
    return ", ".join(shown)
