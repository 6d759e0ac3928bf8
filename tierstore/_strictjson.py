"""JSON in a canonical form, read without trust.

An object is wrapped in an envelope with the crc32c of its bytes, so a file with any changed bit is
rejected. Types are exact; duplicate and unknown keys, NaN and deep nesting are errors. The caller
limits the size of a file before reading it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tierstore._checksum import crc32c
from tierstore.errors import (
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    NewerVersionError,
    TierStoreError,
)

_ENVELOPE = re.compile(rb'\{"crc32c":(\d{1,10}),"body":(\{.*\})\}\n', re.DOTALL)
_MAX_INT = 2**63 - 1
MAX_SCALARS_BYTES = 64 << 10
"""Maximum bytes of JSON for the scalars of one table, which every version repeats."""
_MAX_DEPTH = 64
"""Maximum nesting of values in scalars, which any program can parse at any stack depth."""


_CANONICAL = json.JSONEncoder(sort_keys=False, separators=(",", ":"), allow_nan=False)


def canonical(body: Any) -> bytes:
    """Return the canonical bytes of a JSON value."""
    return _CANONICAL.encode(body).encode()


def seal(*parts: bytes) -> bytearray:
    """Wrap the canonical bytes of an object, given in parts, in an envelope.

    They are copied once, as fast as the memory is: a manifest of a thousand tables has 0.4 MB.
    """
    data = bytearray().join((bytes(_ROOM), *parts, b"}\n"))
    head = b'{"crc32c":%d,"body":' % crc32c(memoryview(data)[_ROOM:-2])
    data[:_ROOM] = head  # which copies nothing
    return data


_ROOM = 32
"""Bytes that the beginning of an envelope takes at most."""


def unseal(data: bytes, name: str, number: int) -> Section:
    """Return the body of a sealed object of the format of this number; raises FormatError.

    The checksum is verified before parsing. `name` is the file's name, for messages.
    """
    match = _ENVELOPE.fullmatch(data)
    if match is None or int(match[1]) != crc32c(match[2]):
        raise FormatError(
            f"{name} does not match its checksum; restore it from a copy, or open an older version"
        )
    body = Section(parse(match[2], name), name)
    found = body.integer("format")
    if found > number:
        raise NewerVersionError(f"{name} has format {found}, but this tierstore reads {number}")
    if found < number:
        raise FormatError(f"{name}: not a format of any release: {found}")
    return body


def parse(data: bytes, name: str) -> Any:
    """Parse a JSON value; raises FormatError, also for duplicate keys, NaN and deep nesting."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(entries := dict(pairs)) != len(pairs):
            raise FormatError(f"{name}: a key occurs twice")
        return entries

    def finite(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise FormatError(f"{name}: {text} is not a finite number")
        return value

    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=distinct,
            parse_float=finite,
            parse_constant=finite,
        )
    except TierStoreError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name} is not JSON ({error}); restore it from a copy") from None


class Section:
    """A JSON object whose keys are read with exact types."""

    def __init__(self, content: Any, name: str) -> None:
        if type(content) is not dict:
            raise FormatError(f"{name} is not a JSON object")
        self.content: dict[str, Any] = content
        self.name = name

    def __iter__(self) -> Iterator[str]:
        """Yield the keys."""
        return iter(self.content)

    def only(self, allowed: set[str]) -> None:
        """Reject all keys except these, which later versions may add to.

        Raises NewerVersionError: the checksum of the object is right, so a program wrote the key.
        """
        if not self.content.keys() <= allowed:
            unknown = min(self.content.keys() - allowed)
            raise NewerVersionError(f"{self.name}: unknown key {unknown[:80]!r}")

    def value(self, key: str) -> Any:
        """Return the value of a key."""
        if key not in self.content:
            raise FormatError(f"{self.name}: {key!r} is missing")
        return self.content[key]

    def section(self, key: str) -> Section:
        """Return the object of a key."""
        return Section(self.value(key), f"{self.name}: {key}")

    def items(self, key: str) -> list[Any]:
        """Return the list of a key."""
        value = self.value(key)
        if type(value) is not list:
            raise FormatError(f"{self.name}: {key!r} is not a list")
        return value

    def integer(self, key: str) -> int:
        """Return the integer of a key."""
        value = self.content.get(key)
        if type(value) is not int or abs(value) > _MAX_INT:
            self.value(key)  # which names a key that is missing
            raise FormatError(f"{self.name}: {key!r} is not an integer")
        return value

    def natural(self, key: str) -> int:
        """Return the non-negative integer of a key."""
        value = self.integer(key)
        if value < 0:
            raise FormatError(f"{self.name}: {key!r} is negative")
        return value

    def text(self, key: str) -> str:
        """Return the string of a key."""
        value = self.value(key)
        if type(value) is not str:
            raise FormatError(f"{self.name}: {key!r} is not a string")
        return value

    def choice(self, key: str, known: Collection[str]) -> str:
        """Return the string of a key, one of those that this version knows.

        Raises NewerVersionError for another, which a later version may have written.
        """
        value = self.text(key)
        if value not in known:
            raise NewerVersionError(
                f"{self.name}: unknown {key} {value[:80]!r}; known are {', '.join(known)}"
            )
        return value

    def flag(self, key: str) -> bool:
        """Return the boolean of a key."""
        value = self.value(key)
        if type(value) is not bool:
            raise FormatError(f"{self.name}: {key!r} is not true or false")
        return value

    def matching(self, key: str, pattern: re.Pattern[str]) -> str:
        """Return the string of a key, which must match a pattern entirely."""
        value = self.text(key)
        if pattern.fullmatch(value) is None:
            raise FormatError(f"{self.name}: {key!r} has an invalid value: {value[:80]!r}")
        return value


def json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalars of a table as JSON restores them.

    Raises InvalidTypeError for values that JSON cannot represent, InvalidInputError for more than
    MAX_SCALARS_BYTES and for too deep nesting.
    """
    try:
        text = canonical(dict(values))
        parsed: dict[str, Any] = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidTypeError(f"scalars are numbers, strings and lists of them: {error}") from None
    if len(text) > MAX_SCALARS_BYTES:
        raise InvalidInputError(
            f"the scalars of a table take {len(text)} bytes; at most {MAX_SCALARS_BYTES}: "
            "keep large values in the payload"
        )
    if _depth(parsed) > _MAX_DEPTH:
        raise InvalidInputError(
            f"the scalars of a table are nested more than {_MAX_DEPTH} deep; nothing was committed"
        )
    return parsed


def _depth(value: Any) -> int:
    """Return the nesting depth of a JSON object or list, at most one more than the limit."""
    depth, containers = 0, [value]
    while containers and depth <= _MAX_DEPTH:
        depth += 1
        outer, containers = containers, []
        for each in outer:
            for inner in each.values() if isinstance(each, dict) else each:
                if isinstance(inner, dict | list):
                    containers.append(inner)
    return depth
