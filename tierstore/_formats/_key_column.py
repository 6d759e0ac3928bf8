"""Which column of a text file holds the keys, decided from the types of a sample of its cells.

Keys are a column of texts, or of distinct whole numbers next to columns of other numbers. Names of
columns decide only if types do not. An index that other tools added is neither keys nor an
element of its row, unless it is the only index.
"""

from __future__ import annotations

import re
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
OTHER_NOTATION = re.compile(r"[+-]?(0x[\da-f]+|\d{1,3}(,\d{3})+|\d+(_\d+)+)", re.I | re.A)


class KeyDecision:
    """The steps that find the column of keys; earlier steps set the attributes.

    Attributes:
        sep: what is between cells.
        decimal: what is before the decimals of a number.
        columns: cells of each row.
        kinds: what each column holds: "integer", "float", "text" or "missing".
        short_header: whether the header leaves out the name of the first column.
        indexes: columns that are neither keys nor numbers of a row.
    """

    sep: str
    decimal: str
    columns: int
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
        names: tuple[str, ...] | None,
        below: list[list[str]],
        counts: tuple[int, int] | None,
        header: list[str] | None,
    ) -> int | None:
        """Return the position of the column of keys."""
        wanted = self.options.key_column
        if wanted is False:
            return None
        if wanted is not None:
            return self._named(wanted, names)
        return self._likely_key(names, below, counts, header)

    def _likely_key(
        self,
        names: tuple[str, ...] | None,
        below: list[list[str]],
        counts: tuple[int, int] | None,
        header: list[str] | None,
    ) -> int | None:
        """Return the position of the keys that follows from the first rows."""
        if counts is not None or self.short_header:
            return 0
        if header and header[0] == "" and below:
            return self._innermost(names or (), below)
        if not below:
            return 0 if names and len(names) > 1 else None
        if names and names[0] == "key" and len(names) > 1:  # as the writer names it
            return 0
        texts = self._texts(below)
        if len(texts) > 1:
            raise self._too_many_texts(texts, names, below)
        if texts:
            return self._text_key(texts[0], below, names)
        return self._integer_key(names, below)

    def _innermost(self, names: tuple[str, ...], below: list[list[str]]) -> int:
        """Return the keys of a table that was saved with its index, maybe more than once.

        If an index only numbers the rows, one column of texts has the keys instead, or the index
        that was saved before it.
        """
        if not self._numbers_rows(0, below):
            return 0
        texts = [at for at in self._texts(below) if at]
        if len(texts) > 1:
            raise self._too_many_texts(texts, names, below)
        if texts:
            return self._text_key(texts[0], below, names)
        at = 0
        while at + 1 < self.columns - 1 and self._is_index(at + 1, names, below):
            at += 1
            if not self._numbers_rows(at, below):
                break
        return at

    def _is_index(self, at: int, names: Sequence[str], below: list[list[str]]) -> bool:
        """Whether a column of distinct whole numbers has the name of an index or an identity."""
        named = names_an_index(names[at]) or IDENTITY.fullmatch(names[at]) is not None
        return named and at in self._distinct(below)

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

    def _indexes(
        self, key: int | None, names: tuple[str, ...] | None, below: list[list[str]]
    ) -> list[int]:
        """Return the columns that number or identify the rows in addition to the keys.

        Raises AmbiguousFileError if one may also be an element of each row.
        """
        others = [at for at, kind in enumerate(self.kinds) if kind == "integer" and at != key]
        if self.sep == BLANKS or not below or "float" not in self.kinds:
            return []
        called = [at for at in others if names and names_an_index(names[at])]
        found = [at for at in called if self._numbers_rows(at, below)]
        if self.options.key_column is False:
            return found
        unsure = [at for at in self._distinct(below) if at in called and at not in found]
        if self.options.key_column is not None:
            leading = [at for at in others if self._is_leading(at)]
            counting = [at for at in leading if self._numbers_rows(at, below, 3)]
            return sorted({*found, *unsure, *counting})
        if key is None:
            return found
        likely = [at for at in others if names and IDENTITY.fullmatch(names[at])]
        found += [at for at in likely if at not in found and self._numbers_rows(at, below)]
        counting = [
            at
            for at in others
            if at not in found and self._numbers_rows(at, below, 3 if self._is_leading(at) else 10)
        ]
        if unsure or counting:
            at = min(unsure + counting)
            what = "numbers the rows" if at in counting else "holds whole numbers, each once,"
            ways = [names[each] if names and names[each] else str(each + 1) for each in (at, key)]
            raise self._ambiguous(
                f"column {at + 1} {what} beside the keys in column {key + 1}, and may be the keys",
                *(f"--key-column {way!r} (key_column={way!r})" for way in ways),
            )
        return found

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

    def _too_many_texts(
        self, texts: list[int], names: tuple[str, ...] | None, below: list[list[str]]
    ) -> FormatError:
        if len(texts) == self.columns:
            cells = ", ".join(f"{cell!r:.40}" for cell in below[-1][:4])
            line = self.lines[len(self.rows) - 1]
            return FormatError(f"{self.path}: no column holds numbers; line {line} has {cells}")
        shown = [names[at] if names else str(at + 1) for at in texts]
        return self._ambiguous(
            f"columns {', '.join(map(repr, shown[:4]))} hold texts, and one can be the keys",
            *(f"--key-column {name} (key_column={name!r})" for name in shown[:2]),
        )

    def _text_key(self, at: int, below: list[list[str]], names: tuple[str, ...] | None) -> int:
        if self.columns == 1:
            raise self._no_number(below, 0, 0)
        texts = [cells[at] for cells in below if not self._spells(cells[at])]
        if all(OTHER_NOTATION.fullmatch(cell) for cell in texts):
            raise self._ambiguous(
                f"{texts[0]!r} in column {at + 1} is a text, or a number in another notation",
                f"--key-column {at + 1} (key_column={at + 1})",
                "write it as a plain number",
            )
        if self.sep != BLANKS and len(texts) * 2 < len(below):
            raise self._ambiguous(
                f"column {at + 1} holds numbers and {texts[0]!r:.100}",
                f"--key-column {at + 1} (key_column={at + 1})",
                "mend the cell",
            )
        return at

    def _integer_key(self, names: tuple[str, ...] | None, below: list[list[str]]) -> int | None:
        """Return the column of distinct whole numbers next to columns of other numbers."""
        if self.columns == 1:
            return None
        distinct = self._distinct(below)
        others = [at for at, kind in enumerate(self.kinds) if kind not in ("integer", "missing")]
        if not distinct:
            self._refuse_rounded_keys(names, below)
            return None
        if others and len(distinct) == 1 and distinct[0] in (0, self.columns - 1):
            return distinct[0]
        named = [at for at in distinct if names and IDENTITY.fullmatch(names[at])]
        indexes = [at for at in distinct if names and names_an_index(names[at])]
        while len(indexes) > 1 and self._numbers_rows(indexes[0], below):
            named = [at for at in named if at != indexes[0]]
            indexes = indexes[1:]
        if len(named) == 1:
            return named[0]
        first = names[distinct[0]] if names and names[distinct[0]] else str(distinct[0] + 1)
        raise self._ambiguous(
            f"column {distinct[0] + 1} holds whole numbers, each once, which may be keys or values",
            f"--key-column {first}",
            "--key-column none (key_column=False)",
        )

    def _refuse_rounded_keys(self, names: tuple[str, ...] | None, below: list[list[str]]) -> None:
        """Refuse an outer column of whole numbers that are written as fractions: maybe ids."""
        floats = [at for at, kind in enumerate(self.kinds) if kind == "float"]
        whole = [at for at in floats if self._rounded(at, below)]
        alone = len(whole) == 1 < len(floats) and whole[0] in (0, self.columns - 1)
        if len(below) > 1 and alone:
            named = names[whole[0]] if names and names[whole[0]] else str(whole[0] + 1)
            raise self._ambiguous(
                f"column {whole[0] + 1} holds whole numbers such as {below[0][whole[0]]!r}, each "
                "once, which may be keys or values",
                f"--key-column {named}",
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

    def _named(self, wanted: str | int, names: tuple[str, ...] | None) -> int:
        """Return the position of the column that the caller names."""
        if isinstance(wanted, str):
            if names and wanted in names:
                return names.index(wanted)
            if not wanted.isdecimal():
                shown = ", ".join(names or ()) or "no names"
                raise InvalidInputError(f"{self.path}: no column {wanted!r}; there are {shown}")
        if not 1 <= int(wanted) <= self.columns:
            raise InvalidInputError(
                f"{self.path}: no column {wanted}; they count from 1 to {self.columns}"
            )
        return int(wanted) - 1
