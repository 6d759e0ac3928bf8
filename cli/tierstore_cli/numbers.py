"""Values of a row as a shell gives them: numbers divided by spaces, commas or tabs."""

from __future__ import annotations

import re

import click
import numpy as np
import numpy.typing as npt


def numbers_in(text: str, what: str = "VALUE") -> npt.NDArray[np.float64]:
    """Return the numbers of a text; raises UsageError, which names `what` they are."""
    words = re.findall(r"[^\s,]+", text)
    if not words:
        raise click.UsageError(f"{what}: there are no numbers")
    return np.array([_number(word, what) for word in words])


def _number(word: str, what: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = None
    if number is None or not word.isascii() or "_" in word:  # which Python takes, `load` does not
        raise click.UsageError(f"{what}: {word!r} is no number")
    if np.isinf(number) and any(map(str.isdigit, word)):
        raise click.UsageError(f"{what}: {word} is too large for float64")
    return number
