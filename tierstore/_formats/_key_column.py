"""Which column of a text file holds the keys, decided from the types of a sample of its cells.

Keys are a column of texts, or of distinct whole numbers next to columns of other numbers. Names of
columns decide only if types do not. An index that other tools added is neither keys nor an
element of its row, unless it is the only index; nor are ids beside keys of texts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from tierstore._formats._cells import BLANKS, MISSING, is_number, thousands
from tierstore._formats._index_columns import counts_rows, names_an_index
from tierstore._formats.base import TextOptions
from tierstore.errors import AmbiguousFileError, FormatError, InvalidInputError

__all__ = ["IDENTITY", "INTEGER", "OTHER_NOTATION", "KeyDecision"]

INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
IDENTITY = re.compile(r"key|id|index|word|.*_id|unnamed: 0|", re.IGNORECASE)
"""Names of columns that hold keys."""
_MOST_EXACT = 2.0**53
"""Above it, not every whole number is a float: none is an id."""
_FEWEST_LEADING, _FEWEST = 3, 10
"""Rows that a column without a telling name must number to be an index: in front of all fractions,
and elsewhere."""
_EACH_ONCE = "holds whole numbers, each once,"
OTHER_NOTATION = re.compile(r"[+-]?(0x[\da-f]+|\d{1,3}(,\d{3})+|\d+(_\d+)+)", re.I | re.A)


class KeyDecision:
    """The steps that find the column of keys; earlier steps set the attributes.

    Attributes:
        sep: what is between cells.
        decimal: what is before the decimals of a number.
        columns: cells of each row.
        names: the names of the columns in the header; or None.
        kinds: what each column holds: "integer", "float", "text" or "missing".
        short_header: whether the header leaves out the name of the first column.
        indexes: columns that are neither keys nor numbers of a row.
    """

    sep: str
    decimal: str
    columns: int
    names: tuple[str, ...] | None = None
    kinds: list[str]
    short_header = False
    vector: tuple[int, int] | None = None
    indexes: Sequence[int] = ()

    def __init__(
        self, path: Path, rows: list[list[str]], lines: list[int], options: TextOptions
    ) -> None:
        self.path = path
        self.rows = rows
        self.lines = lines
        self.options = options
        self.null = frozenset(options.null)

    def _ambiguous(self, what: str, one: str, other: str) -> FormatError:
        return AmbiguousFileError(f"{self.path}: {what}: say {one} or {other}")

    def _wrong(self, row: int, what: str) -> FormatError:
        return FormatError(f"{self.path}: line {self.lines[row]}{what}")

    def _key(
        self,
        below: list[list[str]],
        counts: tuple[int, int] | None,
        header: list[str] | None,
    ) -> int | None:
        """Return the position of the column of keys."""
        wanted = self.options.key_column
        if wanted is False:
            return None
        if wanted is not None:
            return self._named(wanted)
        return self._likely_key(below, counts, header)

    def _likely_key(
        self,
        below: list[list[str]],
        counts: tuple[int, int] | None,
        header: list[str] | None,
    ) -> int | None:
        """Return the position of the keys that follows from the first rows."""
        if counts is not None or self.short_header:
            return 0
        if header and header[0] == "" and below:
            return self._innermost(below)
        if not below:
            return 0 if self.names and self.columns > 1 else None
        if self._name(0) == "key" and self.columns > 1:  # as the writer names it
            return 0
        texts = self._texts(below)
        if len(texts) > 1:
            raise self._too_many_texts(texts, below)
        if texts:
            return self._text_key(texts[0], below)
        return self._integer_key(below)

    def _innermost(self, below: list[list[str]]) -> int:
        """Return the keys of a table that was saved with its index, maybe more than once.

        If an index only numbers the rows, one column of texts has the keys instead, or the index
        that was saved before it.
        """
        if self.kinds[0] != "integer":
            return 0
        texts = [at for at in self._texts(below) if at]
        if not self._numbers_rows(0, below):
            if len(texts) == 1 and 0 in self._distinct(below):
                raise self._either_key(0, texts[0], _EACH_ONCE)
            if not texts or 0 in self._distinct(below):
                return 0
        if len(texts) > 1:
            raise self._too_many_texts(texts, below)
        if texts:
            return self._text_key(texts[0], below)
        at = 0
        while at + 1 < self.columns - 1 and self._is_index(at + 1, below):
            at += 1
            if not self._numbers_rows(at, below):
                break
        return at

    def _is_index(self, at: int, below: list[list[str]]) -> bool:
        """Whether a column of distinct whole numbers has the name of an index or an identity."""
        return (self._called_index(at) or self._called_identity(at)) and at in self._distinct(below)

    def _name(self, at: int) -> str:
        """Return the name of a column, "" if it has none."""
        return self.names[at] if self.names else ""

    def _called_index(self, at: int) -> bool:
        """Whether a header gives a column the name of an index that a tool added."""
        return self.names is not None and names_an_index(self.names[at])

    def _called_identity(self, at: int) -> bool:
        return self.names is not None and IDENTITY.fullmatch(self.names[at]) is not None

    def _label(self, at: int) -> str:
        """Return the name of a column, or its number."""
        return self._name(at) or str(at + 1)

    def _choice(self, at: int) -> str:
        """Return how to say that a column holds the keys.

        A name of several columns means the first, and a number on a command line the column of that
        name if there is one.
        """
        name, names = self._name(at), self.names or ()
        if name and names.index(name) == at and name != "none":
            return f"--key-column {shlex.quote(name)} (key_column={name!r})"
        number = at + 1
        if str(number) in names:
            return f"key_column={number} (in Python)"
        return f"--key-column {number} (key_column={number})"

    def _distinct(self, below: list[list[str]]) -> list[int]:
        """Return the columns of distinct whole numbers."""
        return [
            at
            for at, kind in enumerate(self.kinds)
            if kind == "integer"
            and len({cells[at] for cells in below if self._is_whole(cells[at])}) == len(below)
        ]

    def _numbers_rows(self, at: int, below: list[list[str]], fewest: int = 1) -> bool:
        return counts_rows([cells[at] for cells in below], fewest)

    def _indexes(self, key: int | None, below: list[list[str]]) -> list[int]:
        """Return the columns that number or identify the rows in addition to the keys.

        Raises AmbiguousFileError if one may be the keys, or an element of each row.
        """
        if not below:
            return []
        distinct = [at for at in self._distinct(below) if at != key]
        repeated = [
            at for at in range(self.columns) if at not in (key, *distinct) and self._added(at)
        ]
        called = repeated + [at for at in distinct if self._called_index(at)]
        if self.options.key_column is False:
            return sorted(called)
        identities = [at for at in distinct if self._called_identity(at) and at not in called]
        chosen = self.options.key_column is not None
        if chosen:
            return sorted({*called, *identities, *self._counting(distinct, below, chosen)})
        found = [
            at for at in called + identities if at in repeated or self._numbers_rows(at, below)
        ]
        if key is None:
            return [at for at in found if at in called]
        if self.kinds[key] == "text":
            found = sorted({*found, *identities})
        unsure = [at for at in called + identities if at not in found]
        rest = [at for at in distinct if at not in found]
        counting = self._counting(rest, below, chosen)
        if unsure or counting:
            at = min(unsure + counting)
            raise self._either_key(at, key, "numbers the rows" if at in counting else _EACH_ONCE)
        return sorted(found)

    def _added(self, at: int) -> bool:
        """Whether a column of whole numbers, some equal, stands where a tool puts an index."""
        front = all(self._called_index(each) for each in range(at + 1))
        return self.kinds[at] == "integer" and front and (at == 0 or self._name(at) != "")

    def _either_key(self, at: int, key: int, what: str) -> FormatError:
        return self._ambiguous(
            f"column {at + 1} {what} beside the keys in column {key + 1}, and may be the keys",
            self._choice(at),
            self._choice(key),
        )

    def _counting(
        self, positions: Sequence[int], below: list[list[str]], chosen: bool
    ) -> list[int]:
        """Return those columns beside fractions that number the rows, whatever their names.

        If the caller chose the keys, only columns where tools write an index are among them.
        """
        if self.sep == BLANKS or "float" not in self.kinds:
            return []
        leading = [at for at in positions if self._is_leading(at)]
        others = [] if chosen else [at for at in positions if at not in leading]
        return [at for at in leading if self._numbers_rows(at, below, _FEWEST_LEADING)] + [
            at for at in others if self._numbers_rows(at, below, _FEWEST)
        ]

    def _is_leading(self, at: int) -> bool:
        """Whether a column precedes all fractions, where tools write an index."""
        return "float" not in self.kinds[:at]

    def _texts(self, below: list[list[str]]) -> list[int]:
        """Return the columns of texts; a single cell in a column of numbers is damage."""
        found = []
        for at, kind in enumerate(self.kinds):
            if kind != "text":
                continue
            bad = [n for n, cells in enumerate(below) if not self._spells(cells[at])]
            if at and (len(bad) < 2 or len(bad) * 2 <= len(below)):
                raise self._no_number(below, bad[0], at)
            found.append(at)
        return found

    def _spells(self, cell: str) -> bool:
        return cell in MISSING or cell in self.null or is_number(cell, self.decimal)

    def _no_number(self, below: list[list[str]], row: int, at: int) -> FormatError:
        skipped = len(self.rows) - len(below)
        cell = below[row][at]
        why = thousands(cell)
        return self._wrong(row + skipped, f", column {at + 1}: {cell!r:.100} is no number{why}")

    def _too_many_texts(self, texts: list[int], below: list[list[str]]) -> FormatError:
        if len(texts) == self.columns:
            cells = ", ".join(f"{cell!r:.40}" for cell in below[-1][:4])
            line = self.lines[len(self.rows) - 1]
            return FormatError(f"{self.path}: no column holds numbers; line {line} has {cells}")
        shown = map(repr, map(self._label, texts[:4]))
        return self._ambiguous(
            f"columns {', '.join(shown)} hold texts, and one can be the keys",
            *map(self._choice, texts[:2]),
        )

    def _text_key(self, at: int, below: list[list[str]]) -> int:
        if self.columns == 1:
            raise self._no_number(below, 0, 0)
        texts = [cells[at] for cells in below if not self._spells(cells[at])]
        if all(OTHER_NOTATION.fullmatch(cell) for cell in texts):
            raise self._ambiguous(
                f"{texts[0]!r} in column {at + 1} is a text, or a number in another notation",
                self._choice(at),
                "write it as a plain number",
            )
        if self.sep != BLANKS and len(texts) * 2 < len(below):
            raise self._ambiguous(
                f"column {at + 1} holds numbers and {texts[0]!r:.100}",
                self._choice(at),
                "mend the cell",
            )
        return at

    def _integer_key(self, below: list[list[str]]) -> int | None:
        """Return the column of distinct whole numbers next to columns of other numbers."""
        if self.columns == 1:
            return None
        distinct = self._distinct(below)
        others = [at for at, kind in enumerate(self.kinds) if kind not in ("integer", "missing")]
        if not distinct:
            self._refuse_rounded_keys(below)
            return None
        if others and len(distinct) == 1 and distinct[0] in (0, self.columns - 1):
            return distinct[0]
        named = [at for at in distinct if self._called_identity(at)]
        indexes = [at for at in distinct if self._called_index(at)]
        while len(indexes) > 1 and self._numbers_rows(indexes[0], below):
            named = [at for at in named if at != indexes[0]]
            indexes = indexes[1:]
        if len(named) == 1:
            return named[0]
        raise self._ambiguous(
            f"column {distinct[0] + 1} holds whole numbers, each once, which may be keys or values",
            self._choice(distinct[0]),
            "--key-column none (key_column=False)",
        )

    def _refuse_rounded_keys(self, below: list[list[str]]) -> None:
        """Refuse an outer column of whole numbers that are written as fractions: maybe ids."""
        floats = [at for at, kind in enumerate(self.kinds) if kind == "float"]
        whole = [at for at in floats if self._rounded(at, below)]
        alone = len(whole) == 1 < len(floats) and whole[0] in (0, self.columns - 1)
        if len(below) > 1 and alone:
            raise self._ambiguous(
                f"column {whole[0] + 1} holds whole numbers such as {below[0][whole[0]]!r}, each "
                "once, which may be keys or values",
                self._choice(whole[0]),
                "--key-column none (key_column=False)",
            )

    def _rounded(self, at: int, below: list[list[str]]) -> bool:
        """Whether the numbers of a column are whole and distinct."""
        if self.decimal != "." or not all(is_number(cells[at]) for cells in below):
            return False
        found = {float(cells[at]) for cells in below}
        exact = all(value.is_integer() and abs(value) <= _MOST_EXACT for value in found)
        return exact and len(found) == len(below)

    def _is_whole(self, cell: str) -> bool:
        return INTEGER.fullmatch(cell.strip()) is not None

    def _named(self, wanted: str | int) -> int:
        """Return the position of the column that the caller names."""
        if isinstance(wanted, str):
            if self.names and wanted in self.names:
                return self.names.index(wanted)
            if not wanted.isdecimal():
                shown = ", ".join(self.names or ()) or "no names"
                raise InvalidInputError(f"{self.path}: no column {wanted!r}; there are {shown}")
        if not 1 <= int(wanted) <= self.columns:
            raise InvalidInputError(
                f"{self.path}: no column {wanted}; they count from 1 to {self.columns}"
            )
        return int(wanted) - 1
