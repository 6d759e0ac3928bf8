"""Several files that hold the rows of one matrix, one range after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tierstore._formats.base import Array, Source, StoredParts
from tierstore._formats.keys import Keys
from tierstore._keys.given import given
from tierstore._keys.strings import Strings
from tierstore.errors import FormatError


class JoinedSource(Source):
    """The rows of several sources, in the order given."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """Join `sources`, which this closes; raises FormatError for rows of different kinds."""
        first = sources[0]
        for each in sources[1:]:
            if (each.dim, each.dtype) != (first.dim, first.dtype):
                raise FormatError(
                    f"{each.path} has rows of {each.dim} {each.dtype}, and {first.path} of "
                    f"{first.dim} {first.dtype}: files of one table have rows of one kind"
                )
        rows = sum(each.rows for each in sources)
        super().__init__(first.path, rows, first.dim, first.dtype)
        self._sources = sources
        self.read_as = first.read_as
        self.notes = tuple(dict.fromkeys(note for each in sources for note in each.notes))
        self.filled = tuple(f"{each.path}: {note}" for each in sources for note in each.filled)
        self.scales = tuple(dict.fromkeys(name for each in sources for name in each.scales))

    @property
    def overflowed(self) -> int:  # type: ignore[override]
        """Values that the last pass found too large."""
        return sum(each.overflowed for each in self._sources)

    @cached_property
    def keys(self) -> Keys | None:
        """The keys of all files, of one type; None if none has any, or they number the rows."""
        found = [each.keys for each in self._sources]
        counting = [each.numbering is not None for each in self._sources]
        if all(keys is None for keys in found) and not any(counting):
            return None
        parts: list[Any] = []
        for each, keys in zip(self._sources, found, strict=True):
            if keys is None and each.numbering is None and each.rows:
                raise FormatError(f"{each.path} has no keys, and other files of the table have")
            parts.append(np.arange(each.rows) if keys is None else keys)
        parts = [part for part in parts if len(part)]
        kinds = {str(getattr(part, "dtype", "texts")) for part in parts}
        if kinds <= {"texts"}:
            return Strings(text for part in parts for text in part)
        if "texts" in kinds:
            raise FormatError(
                f"{self.path}: keys are whole numbers in some files of the table, and texts in "
                "others"
            )
        if len(kinds) > 1:  # NumPy would make floats of both
            parts = [given([int(key) for part in parts for key in part])]
        keys = np.concatenate(parts)
        if any(counting) and np.array_equal(keys, np.arange(len(keys))):
            self.numbering = next(each.numbering for each in self._sources if each.numbering)
            return None
        return keys

    def stored(self) -> StoredParts | None:
        """Return where the rows of each file are, if all can be read at random."""
        parts = tuple(each.stored() for each in self._sources)
        if any(part is None or part.dtype != getattr(parts[0], "dtype", "") for part in parts):
            return None
        return StoredParts(
            parts[0].dtype,  # type: ignore[union-attr]
            parts,  # type: ignore[arg-type]
            tuple(each.rows for each in self._sources),
        )

    def held_bytes(self, enough: int) -> int:
        """Return the bytes on the disk that the rows are read from."""
        return sum(each.held_bytes(enough) for each in self._sources)

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        for each in self._sources:
            yield from each.blocks(block_rows)

    def close(self) -> None:
        """Close the files."""
        for each in self._sources:
            each.close()
