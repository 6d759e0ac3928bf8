"""Memory limits: the budget of a store and its tables, and the allowance for reading a file.

A file from elsewhere claims sizes: of headers, lists and decompressed parts. A reader charges each
claim to an `Allowance` before it allocates memory, so a malicious file causes an error and does not
exhaust the machine's memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.errors import FormatError, InvalidInputError, InvalidTypeError

__all__ = ["Budget", "Size", "format_bytes", "parse_bytes", "size_of_at_least"]

Size = int | str
"""A number of bytes: an int, or a string such as "2GiB"."""

BUDGET_VARIABLE = "TIERSTORE_BUDGET"
"""The environment variable with the budget of the host tier where a program gives none."""

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE | re.ASCII)


def parse_bytes(size: Size) -> int:
    """Convert a size to a whole number of bytes.

    `"2GiB"` uses powers of 1024, `"2GB"` and `"2G"` powers of 1000; a plain number is in bytes.
    Raises InvalidInputError for anything else and for negative sizes.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise InvalidTypeError(f"a size is an int or a string such as '2GiB', not {size!r}")
    if isinstance(size, int):
        if size < 0:
            raise InvalidInputError(f"a size cannot be negative: {size}")
        return size
    match = _PATTERN.fullmatch(size.strip())
    if match is None:
        raise InvalidInputError(f"not a size: {size!r}; write bytes, or for example 512MiB or 2GB")
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** _POWERS[unit.lower()])


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes for people, in powers of 1024: `"14.3 GiB"`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} PiB"


def size_of_at_least(nbytes: int) -> str:
    """Return a size that `parse_bytes` reads as this or up to one percent more: `"64GiB"`."""
    units = {f"{prefix}iB": 1024 ** (5 - step) for step, prefix in enumerate("PTGMK")}
    for size in units.values():
        if nbytes >= 100 * size:
            nbytes = -(-nbytes // size) * size
            break
    for unit, size in units.items():
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return f"{nbytes}B"


def _check_slots(count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise InvalidTypeError(
            f"a number of rows is an int, not {count!r}; give bytes as host= or gpu="
        )
    if count < 0:
        raise InvalidInputError(f"a number of rows cannot be negative: {count}")


_CHECKS: dict[str, Callable[[Any], object]] = {
    "host": parse_bytes,
    "gpu": parse_bytes,
    "host_rows": _check_slots,
    "gpu_rows": _check_slots,
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Budget:
    """Hard caps on the memory of the host and GPU tiers of one open store.

    `host` and `gpu` are bytes and cover slots, per-row maps, policy arrays and staging; `host` also
    the index of changed rows that the disk tier keeps, at most 4 bytes a row. `host_rows`
    and `gpu_rows` are numbers of slots a table instead, with the maps on top. Each is one value, or
    a dict from table name to value; `open` and `create` raise UnknownNameError for a name that no
    table has. None takes the default: the host tier the tables or a quarter
    of the available RAM, the GPU tier the tables or half of the free device memory, whichever is
    less; a table whose maps alone take more than that quarter gets no host tier. 0 leaves the tier
    out, and only the index is left, without a limit. Where no budget is given at all, the host tier
    gets the size in the environment variable TIERSTORE_BUDGET, if that is set.

    `gpu_whole` names columns that a GPU is to hold for every row, beside the cache of the rest of
    each record: fields, or `"weight.scale"` for the scales of the field `weight`. It is for tables
    that are only read, attached ones and those of a store that is open for reading. The columns are
    loaded when the tables are opened, and count to `gpu`; with `gpu_rows` they come on top. Without
    a GPU they are cached with the rest.

    Tables whose records are equally long share tiers, in which the rows of each get the slots that
    they use, unless a dict names them or their policy needs tiers of its own. Where there are
    several such groups, one that fits whole in an equal part of the bytes gets that; the others
    divide the rest in proportion to their own bytes, each at least what its maps and one record
    take.

    >>> Budget(host="1GiB", gpu_rows=1000)
    Budget(host='1GiB', gpu_rows=1000)
    """

    host: Size | Mapping[str, Size] | None = None
    gpu: Size | Mapping[str, Size] | None = None
    host_rows: int | Mapping[str, int] | None = None
    gpu_rows: int | Mapping[str, int] | None = None
    gpu_whole: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Reject invalid sizes before any memory is allocated."""
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            for size in value.values() if isinstance(value, Mapping) else (value,):
                if size is not None:
                    check(size)
        for tier in ("host", "gpu"):
            if getattr(self, tier) is not None and getattr(self, f"{tier}_rows") is not None:
                raise InvalidInputError(f"give {tier} or {tier}_rows, not both")
        given = self.gpu_whole
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise InvalidTypeError(f"gpu_whole is a list of names of columns, not {given!r}")
        for column in given:
            if not isinstance(column, str):
                raise InvalidTypeError(f"a column in gpu_whole is a name, not {column!r}")
        object.__setattr__(self, "gpu_whole", tuple(dict.fromkeys(given)))

    @classmethod
    def of(cls, value: Budget | Size | None) -> Budget:
        """Return a budget as it is, and a size as the budget of the host tier.

        None is the size in the environment variable TIERSTORE_BUDGET, where that is not empty, or
        else the default. Raises InvalidInputError for what is no size.

        >>> Budget.of("8GiB")
        Budget(host='8GiB')
        """
        if value is None:
            return cls._of_environment()
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise InvalidTypeError(
                "a budget is a tierstore.Budget or a size such as '8GiB', table by table "
                f"tierstore.Budget(host={{'item': '6GiB'}}), not {value!r}"
            )
        return cls(host=value)

    @classmethod
    def _of_environment(cls) -> Budget:
        size = os.environ.get(BUDGET_VARIABLE, "").strip()
        try:
            return cls(host=size or None)
        except InvalidInputError as error:
            raise InvalidInputError(f"{BUDGET_VARIABLE}={size}: {error}") from None

    def __repr__(self) -> str:
        given = [(name, getattr(self, name)) for name in _CHECKS]
        given.append(("gpu_whole", list(self.gpu_whole) or None))
        shown = ", ".join(f"{name}={value!r}" for name, value in given if value is not None)
        return f"Budget({shown})"


DEFAULT_MEMORY = 512 << 20
"""Default limit in bytes for reading a file."""

OBJECT_BYTES = 112
"""Memory of a small Python object and the references to it, rounded up."""

JSON_COST = 32
"""Maximum bytes of Python objects per byte of JSON: `{},` is a dict."""


class Allowance:
    """Memory limit for reading a file.

    Attributes:
        left: bytes not yet charged.
    """

    def __init__(self, name: object, memory: Size = DEFAULT_MEMORY) -> None:
        """Allow `memory` bytes for a file; error messages call it `name`."""
        self._name = name
        self.memory: int = parse_bytes(memory)
        self.left: int = self.memory

    def check(self, nbytes: int, what: str) -> None:
        """Raise FormatError if `what`, which is freed again, needs more bytes than are left."""
        if nbytes > self.left:
            raise FormatError(
                f"{self._name}: {what} would take {format_bytes(nbytes)} of memory, but only "
                f"{format_bytes(max(0, self.left))} of {format_bytes(self.memory)} are left; "
                "if you trust the file, allow more (memory=, --memory)"
            )

    def take(self, nbytes: int, what: str) -> None:
        """Charge the bytes of `what`, which is kept; raise FormatError if fewer are left."""
        self.check(nbytes, what)
        self.left -= nbytes
