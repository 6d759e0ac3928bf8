"""Which columns of a file are the keys and which the numbers of a row: one rule for all formats.

A column is judged by its name and by what kind of cells it has, never by their values. What the
rule leaves open is an `AmbiguousFileError`, which names the options that decide.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tierstore._formats.base import TextOptions
from tierstore.errors import AmbiguousFileError, FormatError, InvalidInputError

_IDENTITY = re.compile(r"key|(.*[_ ])?id|index|word|token|item|user", re.IGNORECASE)
"""Names of columns that hold keys."""
_INDEX = re.compile(
    r"|unnamed: \d+(_level_\d+)?(\.\d+)?|level_\d+|__index_level_\d+__", re.IGNORECASE
)
"""Names that pandas gives to an index without one."""
_NUMBERED = re.compile(r"(.*?)(\d{1,9})")
_NUMBERS = ("integer", "float", "missing")
_TEXTS = ("text", "mixed", "damaged")
_MOST = 8

NO_KEYS = ("--key-column none (key_column=False)", {"key_column": False})

Way = tuple[str, Mapping[str, Any]]
"""An option as people type it, and as a field of `TextOptions`."""


@dataclass(frozen=True)
class Roles:
    """What the columns are.

    Attributes:
        key: the position of the column of keys, or None.
        values: the positions of the numbers of a row, or of the list of them, ascending.
        notes: what is left out, and why.
    """

    key: int | None
    values: tuple[int, ...]
    notes: tuple[str, ...]


def names_keys(name: str) -> bool:
    """Whether a column has a name of keys."""
    return _IDENTITY.fullmatch(name) is not None


def ambiguous(path: Path, what: str, *ways: Way) -> AmbiguousFileError:
    """Return the error for a file that each of the `ways` lets read in another way."""
    said = " or ".join(text for text, _ in ways)
    return AmbiguousFileError(f"{path}: {what}: say {said}", ways=ways)


def label(names: Sequence[str] | None, at: int) -> str:
    """Return the name of a column, or its number from 1."""
    return (names[at] if names else "") or str(at + 1)


def choice(names: Sequence[str] | None, at: int) -> Way:
    """Return how to say that a column holds the keys.

    A name of several columns means the first, and a number on a command line the column of that
    name if there is one.
    """
    known = names or ()
    name = known[at] if known else ""
    if name and known.index(name) == at and name != "none":
        return f"--key-column {shlex.quote(name)} (key_column={name!r})", {"key_column": name}
    if str(at + 1) in known:
        return f"key_column={at + 1} (in Python)", {"key_column": at + 1}
    return f"--key-column {at + 1} (key_column={at + 1})", {"key_column": at + 1}


@dataclass(frozen=True)
class Candidates:
    """The columns of a file, of which one can be the keys and some the numbers of a row.

    Attributes:
        path: the file, for messages.
        names: the names of the columns, or None; "" for one without a name.
        kinds: what each column holds: "integer", "float" (some of its numbers are fractions),
            "text", "mixed" (texts and whole numbers), "damaged" (texts and fractions), "missing"
            (nothing that is known), "list" (of numbers) or another word (none of them).
        options: what the caller decided.
        damage: the first cell that is no number, for people, of each column that has one.
        declared: whether the file declares the types of its columns. There a column of texts or
            whole numbers is left out unless it has the name of keys.
    """

    path: Path
    names: Sequence[str] | None
    kinds: Sequence[str]
    options: TextOptions
    damage: Mapping[int, str]
    declared: bool = False

    def roles(self) -> Roles:
        """Return what each column is; raises AmbiguousFileError, FormatError, InvalidInputError."""
        wanted = self.options.key_column
        vector = self._vector()
        if wanted is None:
            key = self._key(vector)
        else:
            key = None if wanted is False else self._position(wanted)
        if vector is not None and key in vector:
            raise InvalidInputError(
                f"{self.path}: column {self._label(key or 0)!r} cannot be the keys and a number "
                "of each row"
            )
        if key is not None and self.kinds[key] == "list":
            raise InvalidInputError(
                f"{self.path}: column {self._label(key)!r} holds lists of numbers, not keys"
            )
        self._refuse_damage(key, vector)
        values = self._numbers(key) if vector is None else vector
        if not values:
            raise self._no_numbers(key)
        return Roles(key, values, self._notes(key, values))

    def _called(self, pattern: re.Pattern[str]) -> list[int]:
        return [at for at, name in enumerate(self.names or ()) if pattern.fullmatch(name)]

    @cached_property
    def indexes(self) -> list[int]:
        """The columns with a name that pandas gives to an index without one."""
        return self._called(_INDEX)

    @cached_property
    def identities(self) -> list[int]:
        """The columns with a name of keys."""
        return self._called(_IDENTITY)

    def _label(self, at: int) -> str:
        return label(self.names, at)

    def _labels(self, positions: Sequence[int]) -> str:
        shown = [self._label(at) for at in positions[:_MOST]]
        return ", ".join([*shown, *(["…"] if len(positions) > _MOST else [])])

    def _ambiguous(self, what: str, *ways: Way) -> AmbiguousFileError:
        return ambiguous(self.path, what, *ways)

    def _choice(self, at: int) -> Way:
        return choice(self.names, at)

    def _position(self, wanted: str | int) -> int:
        """Return the position of a column by its name, or its number from 1."""
        if isinstance(wanted, str):
            if self.names and wanted in self.names:
                return list(self.names).index(wanted)
            if not wanted.isdecimal():
                shown = ", ".join(filter(None, self.names or ())) or "no names"
                raise InvalidInputError(f"{self.path}: no column {wanted!r}; there are {shown}")
        if not 1 <= int(wanted) <= len(self.kinds):
            raise InvalidInputError(
                f"{self.path}: no column {wanted}; they count from 1 to {len(self.kinds)}"
            )
        return int(wanted) - 1

    def _vector(self) -> tuple[int, ...] | None:
        """Return the columns that the caller, a list or numbered names make the row."""
        if self.options.vector:
            return self._chosen(self.options.vector)
        lists = [at for at, kind in enumerate(self.kinds) if kind == "list"]
        if len(lists) > 1:
            raise self._ambiguous(
                f"columns {self._labels(lists)} hold lists of numbers",
                *map(_vector_way, map(self._label, lists[:2])),
            )
        if lists:
            return tuple(lists)
        found = self._family()
        if found is None:
            return None
        chosen = None
        if self.options.key_column not in (None, False):
            chosen = self._position(self.options.key_column)
        others = [
            at
            for at, kind in enumerate(self.kinds)
            if kind == "float" and at not in (*found, *self.identities, *self.indexes, chosen)
        ]
        if others:
            family = f"{self._label(found[0])}..{self._label(found[-1])}"
            raise self._ambiguous(
                f"{self._labels(others)} beside {family} may belong to the row or not",
                _vector_way(family),
                _vector_way(",".join([*map(self._label, others), family])),
            )
        return found

    def _chosen(self, wanted: Sequence[str | int]) -> tuple[int, ...]:
        """Return the columns that the caller names, as FIRST..LAST too."""
        found: list[int] = []
        for each in wanted:
            first, dots, last = str(each).partition("..")
            if dots and not (self.names and each in self.names):
                start, stop = self._position(first), self._position(last)
                found.extend(range(start, stop + 1))
            else:
                found.append(self._position(each))
        if len(set(found)) < len(found) or found != sorted(found):
            raise InvalidInputError(
                f"{self.path}: name the columns of the row once each, in the order of the file"
            )
        able = (*_NUMBERS, "list") if len(found) == 1 else _NUMBERS
        bad = [at for at in found if self.kinds[at] not in able]
        if bad:
            raise InvalidInputError(
                f"{self.path}: column {self._label(bad[0])!r} holds no numbers alone"
            )
        return tuple(found)

    def _family(self) -> tuple[int, ...] | None:
        """Return the columns of numbers whose names are one stem and 0, 1, 2, … or 1, 2, 3, …."""
        families: dict[str, list[int]] = {}
        firsts: dict[str, int] = {}
        for at, name in enumerate(self.names or ()):
            match = _NUMBERED.fullmatch(name)
            if match is None or self.kinds[at] not in (*_NUMBERS, "mixed", "damaged"):
                continue
            stem, number = match[1], int(match[2])
            if _INDEX.fullmatch(name):
                continue
            members = families.setdefault(stem, [])
            if number == (firsts[stem] + len(members) if members else min(number, 1)):
                firsts.setdefault(stem, number)
                members.append(at)
        found = [tuple(each) for each in families.values() if len(each) > 1]
        return found[0] if len(found) == 1 else None

    def _key(self, vector: tuple[int, ...] | None) -> int | None:
        """Return the position of the keys, by the names first and by what is left then."""
        rest = [at for at in range(len(self.kinds)) if vector is None or at not in vector]
        rest = [at for at in rest if self.kinds[at] in (*_NUMBERS, *_TEXTS)]
        called = ("key", "keys") if self.declared else ("key",)
        exact = [at for at in rest if self.names and self.names[at] in called]
        named = exact[:1] or [at for at in rest if at in self.identities]
        texts = [at for at in rest if self.kinds[at] in ("text", "mixed")]
        if not named:
            named = [at for at in rest if at in self.indexes]
            if named and not self.declared:
                named = sorted({*named, *texts})
        if len(named) > 1:
            raise self._ambiguous(
                f"columns {self._labels(named)} can be the keys", *map(self._choice, named[:2])
            )
        if named:
            return self._named_key(named[0], rest)
        if self.declared:
            return None
        pure = [at for at in texts if self.kinds[at] == "text"]
        if len(self.kinds) == 1:
            return None
        able = [at for at in rest if self.kinds[at] in ("text", "integer")]
        if vector is not None and pure and len(able) > 1:
            raise self._ambiguous(
                f"columns {self._labels(able)} stand beside the row, and one can be the keys",
                self._choice(able[0]),
                NO_KEYS,
            )
        if len(pure) > 1 and len(pure) < len(self.kinds):
            raise self._ambiguous(
                f"columns {self._labels(pure)} hold texts, and one can be the keys",
                *map(self._choice, pure[:2]),
            )
        if len(pure) == 1:
            return pure[0]
        if len(texts) == 1:
            raise self._ambiguous(
                f"{self.damage[texts[0]]}, unless its column holds the keys",
                self._choice(texts[0]),
                ("mend the cell", {}),
            )
        return None if texts else self._integer_key(rest)

    def _named_key(self, at: int, rest: Sequence[int]) -> int | None:
        if len(self.kinds) == 1:
            return None
        if self.kinds[at] in ("float", "missing") and self.names and self.names[at] != "":
            raise self._ambiguous(
                f"column {self._label(at)!r} has the name of keys and holds fractions",
                *(
                    (NO_KEYS, ("save it as whole numbers", {}))
                    if self.declared
                    else (self._choice(at), NO_KEYS)
                ),
            )
        return at

    def _integer_key(self, rest: Sequence[int]) -> int | None:
        whole = [at for at in rest if self.kinds[at] == "integer"]
        if not whole or len(self.kinds) == 1:
            return None
        if len(rest) == 1 and self.names is None:  # beside a row
            return whole[0]
        raise self._ambiguous(
            f"column {self._label(whole[0])} holds whole numbers, which may be keys or values",
            self._choice(whole[0]),
            NO_KEYS,
        )

    def _numbers(self, key: int | None) -> tuple[int, ...]:
        """Return the columns of numbers but for keys and for what has the name of them."""
        left_out = {key, *self.indexes}
        if key is not None:
            left_out.update(self.identities)
        numbers = [
            at for at, kind in enumerate(self.kinds) if kind in _NUMBERS and at not in left_out
        ]
        if self.declared:
            floats = [at for at in numbers if self.kinds[at] == "float"]
            return tuple(floats)
        return tuple(numbers)

    def _refuse_damage(self, key: int | None, vector: tuple[int, ...] | None) -> None:
        """Raise FormatError for a column of numbers in which some cells are none."""
        if self.declared:
            return
        for at in range(len(self.kinds)) if vector is None else vector:
            kind = self.kinds[at]
            alone = kind == "text" and key is None and self.options.key_column is None
            if at != key and (alone or kind in ("mixed", "damaged")):
                hint = "" if alone else "; --vector (vector=) names the columns of the row"
                raise FormatError(f"{self.path}: {self.damage[at]}{hint}")

    def _no_numbers(self, key: int | None) -> FormatError:
        others = [at for at in range(len(self.kinds)) if at != key]
        named = [at for at in others if at in (*self.indexes, *self.identities)]
        without = f", without {self._labels(named)}" if named else ""
        damage = next((f": {self.damage[at]}" for at in others if at in self.damage), "")
        return FormatError(
            f"{self.path}: no column of numbers in {len(self.kinds)} columns{without}{damage}"
        )

    def _notes(self, key: int | None, values: tuple[int, ...]) -> tuple[str, ...]:
        rest = [at for at in range(len(self.kinds)) if at != key and at not in values]
        named = [at for at in rest if at in (*self.indexes, *self.identities)]
        others = [at for at in rest if at not in named]
        found = []
        if named:
            ways = [self._choice(at)[0] for at in named if at in self.identities]
            how = f"; for keys from it say {' or '.join(ways)}" if ways else ""
            found.append(
                f"columns not read, as they number or name the rows: {self._labels(named)}{how}"
            )
        if others:
            found.append(f"columns not read: {self._labels(others)}")
        return tuple(found)


def _vector_way(columns: str) -> Way:
    return (
        f"--vector {shlex.quote(columns)} (vector={columns!r})",
        {"vector": tuple(columns.split(","))},
    )
