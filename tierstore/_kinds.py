"""Checks that a caller gave a store, or a table: the two are easily taken for each other."""

from __future__ import annotations

from tierstore.errors import InvalidTypeError


def check_store(given: object, user: str) -> None:
    """Raise InvalidTypeError unless what `user` was given is a store."""
    if not hasattr(given, "info"):
        raise InvalidTypeError(f"{user} needs a store such as tierstore.open(path), not {given!r}")


def check_table(given: object, user: str) -> None:
    """Raise InvalidTypeError unless what `user` was given is a table."""
    if not hasattr(given, "occupancy"):
        raise InvalidTypeError(f"{user} needs a table such as store['item'], not {given!r}")
