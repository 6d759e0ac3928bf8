"""Allowance: the memory that reading one file may take, asked for before it is taken.

A file that comes from elsewhere claims sizes: of headers, of lists, of what its parts unpack to.
Each reader asks for what a claim would cost before it believes it, so that a made-up file costs
an error and not the machine's memory.
"""

from __future__ import annotations

from tierstore.budget import Size, format_bytes, parse_bytes
from tierstore.errors import FormatError

__all__ = ["DEFAULT_MEMORY", "JSON_COST", "OBJECT_BYTES", "Allowance"]

DEFAULT_MEMORY = 512 << 20
"""Bytes that reading a file may take where the caller does not say."""

OBJECT_BYTES = 112
"""What a small Python object and the places that refer to it take, rounded up."""

JSON_COST = 32
"""Bytes of Python objects that one byte of JSON becomes at most: `{},` is a dict."""


class Allowance:
    """Bytes of memory that are left for reading a file.

    Attributes:
        left: bytes that have not been taken yet.
    """

    def __init__(self, name: object, memory: Size = DEFAULT_MEMORY) -> None:
        """Allow `memory` bytes for the file `name`, which is for messages."""
        self._name = name
        self.memory = parse_bytes(memory)
        self.left = self.memory

    def check(self, nbytes: int, what: str) -> None:
        """Raise FormatError if `what`, which is given back, takes more bytes than are left."""
        if nbytes > self.left:
            raise FormatError(
                f"{self._name}: {what} would take {format_bytes(nbytes)} of memory, "
                f"{format_bytes(max(0, self.left))} of {format_bytes(self.memory)} are left; "
                "if the file is to be trusted, allow more (memory=, --memory)"
            )

    def take(self, nbytes: int, what: str) -> None:
        """Take the bytes of `what`, which stays; raises FormatError if fewer are left."""
        self.check(nbytes, what)
        self.left -= nbytes
