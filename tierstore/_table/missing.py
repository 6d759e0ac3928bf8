"""What a read gives for keys without a row: an error, their first rows, or a value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Literal, TypeAlias

import numpy as np

from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.spec import Field

Missing: TypeAlias = Literal["raise", "init"] | float
"""An error, the first row of the key, or a value for each element of its row."""

_CHOICES: tuple[Literal["raise"], Literal["init"]] = ("raise", "init")


def checked(missing: object, *, writable: bool) -> Missing:
    """Return a choice; for None, first rows where keys are trained, and else an error.

    Raises InvalidTypeError and InvalidInputError.
    """
    if missing is None:
        return "init" if writable else "raise"
    if isinstance(missing, int | float | np.integer | np.floating) and not isinstance(
        missing, bool
    ):
        with contextlib.suppress(OverflowError):
            return float(missing)
    for choice in _CHOICES:
        if isinstance(missing, str) and missing == choice:
            return choice
    error = InvalidTypeError if not isinstance(missing, str | int) else InvalidInputError
    raise error(f"missing is 'raise', 'init' or a number, not {missing!r}")


def check_fits(value: float, fields: Iterable[tuple[str, Field]], *, raw: bool) -> None:
    """Raise InvalidInputError if rows of these fields cannot have a value."""
    if raw:
        raise InvalidInputError(
            "raw rows are bits, of which no number is one: read them with missing='raise' or 'init'"
        )
    for name, item in fields:
        if not item.element.integer or item.scaled is not None:
            continue
        held = np.iinfo(item.element.stored)
        if not (held.min <= value <= held.max and value.is_integer()):
            raise InvalidInputError(
                f"missing={value!r} is no value of field {name!r}: {item.dtype} holds whole "
                f"numbers from {held.min} to {held.max}"
            )
