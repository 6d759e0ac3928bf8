"""What the lines and columns of a text file are, decided from the types of a sample of its cells.

A header is a first line of texts, or of whole numbers that count columns, above columns of numbers.
Keys are a column of texts, or of distinct whole numbers next to columns of other numbers. Names of
columns decide only if types do not. Anything else is refused: `AmbiguousFileError` names
both ways to decide it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import numpy as np

from tierstore._formats._cells import BLANKS, MISSING, Row, is_number
from tierstore._formats._index_columns import note_of
from tierstore._formats._key_column import IDENTITY, INTEGER, OTHER_NOTATION, KeyDecision
from tierstore._formats.base import TextOptions
from tierstore.errors import FormatError
from tierstore.spec import MAX_RECORD_BYTES

__all__ = ["Layout", "decide"]

_NUMBERS = ("integer", "float")
_COUNTS = re.compile(r"\d{1,15}")


@dataclass(frozen=True)
class Layout:
    """What the lines and columns of a file are.

    Attributes:
        sep: what is between cells.
        decimal: what is before the decimals of a number.
        skipped: rows before the first one of numbers: a header, or counts.
        names: the names of the columns in the header; or None.
        counts: rows and elements that the first line announces, as word2vec does; or None.
        columns: cells of each row.
        key: the position of the column of keys, or None.
        values: the positions of the columns of numbers, ascending.
        quoted_words: whether words between blanks are quoted, as R writes them.
        rounded_keys: whether keys are whole numbers, some maybe written as fractions: 7.0.
        vector: the position of a cell that holds a list, and the numbers in it, which have a cell
            each in a row; or None.
        notes: what was left out or will lose digits.
    """

    sep: str
    decimal: str
    skipped: int
    names: tuple[str, ...] | None
    counts: tuple[int, int] | None
    columns: int
    key: int | None
    values: tuple[int, ...]
    quoted_words: bool = False
    rounded_keys: bool = False
    vector: tuple[int, int] | None = None
    notes: tuple[str, ...] = field(default=())

    def column(self, position: int) -> str:
        """Return what to call a column in a message."""
        name = self.names[position] if self.names else ""
        return f"column {position + 1}" + (f' ("{name:.40}")' if name else "")

    def described(self, suffix_sep: str) -> str:
        """Return the decisions, for people, without a separator that the suffix implies."""
        head = "counts" if self.counts else "yes" if self.names is not None else "no"
        keys = "no keys"
        if self.key is not None:
            name = self.names[self.key] if self.names else ""
            shown = f'"{name}"' if name else f"column {self.key + 1}"
            keys = f"keys from {shown}"
        parts = [f"header {head}", keys, f"{len(self.values)} numbers"]
        if self.sep != suffix_sep:
            shown = {"\t": "tab", BLANKS: "blanks"}.get(self.sep, f'"{self.sep}"')
            parts.append(f"separator {shown}")
        if self.decimal != ".":
            parts.append(f'decimal "{self.decimal}"')
        return ", ".join(parts)


def decide(
    path: Path,
    rows: Sequence[Row],
    sep: str,
    options: TextOptions,
    whole: bool,
    vector: tuple[int, int] | None = None,
) -> Layout:
    """Return the layout of a file whose first rows are given.

    `whole` means that the sample is the whole file; `vector` is as in `Layout`. Raises
    AmbiguousFileError where the sample can be read in two ways, and FormatError where it is no
    table of numbers.
    """
    kind = _Decision if vector is None else _VectorDecision
    decision = kind(path, [cells for _, cells in rows], [n for n, _ in rows], options)
    decision.vector = vector
    return decision.layout(sep, whole)


def _kind(cells: Sequence[str], decimal: str, null: frozenset[str]) -> str:
    """Return what a column holds: "integer", "float" or "text"; "missing" if nothing is known."""
    known = [cell for cell in cells if cell not in MISSING and cell not in null]
    if not known:
        return "missing" if cells else "text"
    if all(INTEGER.fullmatch(cell.strip()) for cell in known):
        return "integer"
    return "float" if all(is_number(cell, decimal) for cell in known) else "text"


class _Decision(KeyDecision):
    """The steps of one decision, each of which may end it."""

    def layout(self, sep: str, whole: bool) -> Layout:
        """Run the steps."""
        self.sep = sep
        counts = self._counts(whole)
        first, body = self.rows[0], self.rows[1:]
        self.columns = self._columns(first, body, counts)
        self.decimal = self._decimal(body or [first])
        header = False if counts else self._header(first, body)
        if not (header or counts):
            body = self.rows
        below = [self._fitted(cells) for cells in body]
        self.kinds = [
            _kind([cells[at] for cells in below], self.decimal, self.null)
            for at in range(self.columns)
        ]
        self.names = self._names(first) if header else None
        key = self._key(below, counts, first if header else None)
        self.indexes = [] if self.vector else self._indexes(key, below)
        values = self._values(key, below)
        notes = self._notes(key, values)
        quoted = sep == BLANKS and key is not None and bool(below)
        return Layout(
            sep=sep,
            decimal=self.decimal,
            skipped=int(header or counts is not None),
            names=self.names,
            counts=counts,
            columns=self.columns,
            key=key,
            values=values,
            vector=self.vector,
            rounded_keys=key is not None and bool(below) and self._rounded(key, below),
            quoted_words=quoted and all(_is_quoted(cells[key or 0]) for cells in below),
            notes=notes,
        )

    def _counts(self, whole: bool) -> tuple[int, int] | None:
        """Return the two counts that word2vec puts on the first line."""
        first, body = self.rows[0], self.rows[1:]
        if self.options.header is not None or self.sep != BLANKS or len(first) != 2:
            return None
        if not all(_COUNTS.fullmatch(cell) for cell in first):
            return None
        rows, dim = map(int, first)
        if not body:
            if not whole or rows or dim > MAX_RECORD_BYTES:
                raise self._wrong(0, f" announces {rows} rows of {dim}, but none follow")
            return rows, dim
        found = min(map(len, body))
        if found == dim + 1 and (dim > 1 or self._is_count_of(rows, body, whole)):
            return rows, dim
        pairs = [_kind([cells[at] for cells in body], ".", self.null) for at in (0, found - 1)]
        if found == 2 and pairs in (["float", "float"], ["float", "integer"], ["integer"] * 2):
            return None
        raise self._wrong(
            0,
            f" announces rows of a word and {dim} numbers, but line "
            f"{self.lines[1 + [len(cells) for cells in body].index(found)]} has {found} cells",
        )

    def _is_count_of(self, rows: int, body: list[list[str]], whole: bool) -> bool:
        """Whether `R 1` above rows of two cells counts them, and is not a row of numbers."""
        if _kind([cells[0] for cells in body], ".", self.null) == "text":
            return True
        if whole:
            return rows == len(body)
        raise self._ambiguous("the first line may be counts or a row", "--header", "--no-header")

    def _columns(
        self, first: list[str], body: list[list[str]], counts: tuple[int, int] | None
    ) -> int:
        """Return how many cells a row has; raises FormatError for rows of other lengths."""
        if counts is not None:
            return counts[1] + 1
        if not body:
            return len(first)
        columns = Counter(map(len, body)).most_common(1)[0][0]
        named = self.options.header or any(not is_number(cell) for cell in first)
        self.short_header = len(first) == columns - 1 and self.options.header is not False and named
        for at, cells in enumerate(self.rows):
            words = (
                self.sep == BLANKS
                and len(cells) > columns
                and not is_number(cells[len(cells) - columns])
            )
            header = at == 0 and self.options.header is not False
            if len(cells) == columns or words or (header and self.short_header):
                continue
            if at == 0 and len(body) == 1:
                raise self._wrong(1, f" has {_cells(columns)}, but {len(first)} were expected")
            raise self._wrong(at, f" has {_cells(len(cells))}, but {columns} were expected")
        return columns

    def _fitted(self, cells: list[str]) -> list[str]:
        """Return a row with the surplus cells joined to the word in front."""
        surplus = len(cells) - self.columns
        return [" ".join(cells[: surplus + 1]), *cells[surplus + 1 :]] if surplus > 0 else cells

    def _decimal(self, rows: list[list[str]]) -> str:
        """Return the decimal mark: a comma where numbers have one and none has a point."""
        if self.options.decimal is not None:
            return self.options.decimal
        if self.sep == ",":
            return "."
        cells = [cell for row in rows for cell in row if "," in cell]
        commas = [cell for cell in cells if is_number(cell, ",")]
        points = any("." in cell and is_number(cell) for row in rows for cell in row)
        if not commas or len(commas) * 2 < len(cells):
            return "."
        if points:
            raise self._ambiguous(
                f"numbers have a comma ({commas[0]!r}) and others a point",
                "--decimal , (decimal=',')",
                "--decimal . (decimal='.')",
            )
        if all(re.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}", cell) for cell in commas):
            raise self._ambiguous(
                f"the comma in {commas[0]!r} may be a decimal mark or divide thousands",
                "--decimal , (decimal=',')",
                "--decimal . (decimal='.')",
            )
        return ","

    def _header(self, first: list[str], body: list[list[str]]) -> bool:
        """Whether the first line names columns."""
        if self.options.header is not None:
            return self.options.header
        if self.short_header:
            return True
        kinds = [_kind([cell], self.decimal, self.null) for cell in self._fitted(first)]
        if not body:
            return self._header_alone(first, kinds)
        rest = [self._fitted(cells) for cells in body]
        below = [_kind(column, self.decimal, self.null) for column in zip(*rest, strict=True)]
        numeric = [at for at, kind in enumerate(below) if kind != "text"]
        if any(kinds[at] in _NUMBERS for at in range(1, len(below)) if below[at] == "text"):
            return False
        texts = [at for at in numeric if kinds[at] == "text"]
        labels = [first[at] for at in numeric if first[at]]
        if texts:
            if any(kinds[at] == "float" for at in numeric):
                cell = first[texts[0]]
                raise self._ambiguous(
                    f"line {self.lines[0]} has numbers and {cell!r} in column {texts[0] + 1}, "
                    "so that it may be a header or a damaged row",
                    "--header (header=True)",
                    "--no-header (header=False)",
                )
            if all(OTHER_NOTATION.fullmatch(first[at]) for at in texts):
                raise self._either(f"{first[texts[0]]!r} is a number in another notation")
            return True
        if first[0] == "" and len(first) > 1:
            if all(kinds[at] != "float" for at in range(1, len(first))):
                return True
            raise self._either("its first cell is empty")
        fractions = not any(
            INTEGER.fullmatch(cells[at].strip()) for cells in rest for at in numeric
        )
        return self._counting_header(numeric, below, labels, fractions)

    def _counting_header(
        self, numeric: list[int], below: list[str], labels: list[str], fractions: bool
    ) -> bool:
        """Whether whole numbers on the first line are the numbers of columns.

        `fractions`: no number below is written as a whole one.
        """
        if not labels or len(labels) < len(numeric):
            return False
        if not _count_columns(labels):
            floats = all(below[at] == "float" for at in numeric)
            if floats and (len(labels) > 1 or fractions) and _may_be_names(labels):
                raise self._either(f"it holds {', '.join(labels[:4])}, and the others fractions")
            return False
        if len(labels) > 2 and all(below[at] == "float" for at in numeric):
            return True
        if self.rows[0][0] and IDENTITY.fullmatch(self.rows[0][0]):
            return True
        raise self._either(f"it counts {', '.join(labels[:4])}{', …' if len(labels) > 4 else ''}")

    def _header_alone(self, first: list[str], kinds: list[str]) -> bool:
        """Whether the only line is the header of a file without rows, as the writer writes it."""
        if all(kind == "integer" for kind in kinds):
            raise self._either("it holds whole numbers alone")
        texts = all(kind == "text" for kind in kinds)
        if texts and len(first) > 1 and first[0] != "key":
            raise self._wrong(0, " holds texts alone, and no rows of numbers follow")
        return first[0] == "key" and len(first) > 1 and texts

    def _either(self, why: str) -> FormatError:
        return self._ambiguous(
            f"line {self.lines[0]} may be a header or a row: {why}",
            "--header (header=True)",
            "--no-header (header=False)",
        )

    def _names(self, first: list[str]) -> tuple[str, ...]:
        """Return the names of all columns; a header with one name less lacks the first."""
        names = ("", *first) if self.short_header else tuple(first)
        return tuple(name.strip().strip('"') if self.sep == BLANKS else name for name in names)

    def _values(self, key: int | None, below: list[list[str]]) -> tuple[int, ...]:
        """Return the columns of numbers; if the caller names the keys, texts are left out."""
        others = [at for at in range(self.columns) if at != key]
        if not below:
            return tuple(others)
        left_out = {*self.indexes}
        if self.options.key_column is not None:
            left_out |= set(self._texts(below))
        values = tuple(at for at in others if at not in left_out)
        texts = [at for at in values if self.kinds[at] == "text"]
        if texts:
            bad = next(n for n, cells in enumerate(below) if not self._spells(cells[texts[0]]))
            raise self._no_number(below, bad, texts[0])
        if not values:
            left = f", without {self._labels(self.indexes)}" if self.indexes else ""
            raise FormatError(f"{self.path}: no column of numbers in {self.columns} columns{left}")
        return values

    def _notes(self, key: int | None, values: tuple[int, ...]) -> tuple[str, ...]:
        notes = []
        skipped = sorted({*range(self.columns)} - {key, *values, *self.indexes})
        if self.indexes:
            notes.append(note_of(self._labels(self.indexes), self._ways_to_read_indexes()))
        if skipped:
            why = "" if self.vector else ", as they hold texts"
            notes.append(f"columns not read{why}: {self._labels(skipped)}")
        return tuple(notes)

    def _labels(self, positions: Sequence[int]) -> str:
        return ", ".join(map(self._label, positions))

    def _ways_to_read_indexes(self) -> str:
        """Return how to read the columns that are left out for the name of an identity."""
        named = [at for at in self.indexes if self._name(at) and not self._called_index(at)]
        if not named:
            return ""
        keys = " or ".join(map(self._choice, named))
        return f"; for keys from it say {keys}, for numbers give it another name in the header"


class _VectorDecision(_Decision):
    """The decision for rows with a list: only the numbers of the list are values."""

    @property
    def _list(self) -> range:
        at, dim = self.vector or (0, 0)
        return range(at, at + dim)

    def _likely_key(
        self,
        below: list[list[str]],
        counts: tuple[int, int] | None,
        header: list[str] | None,
    ) -> int | None:
        others = [at for at in range(self.columns) if at not in self._list]
        named = [at for at in others if self._called_identity(at)]
        if len(others) > 1 and len(named) != 1:
            shown = map(repr, map(self._label, others[:4]))
            raise self._ambiguous(
                f"columns {', '.join(shown)} stand beside the list, and one can be the keys",
                self._choice(others[0]),
                "--key-column none (key_column=False)",
            )
        return next(iter(named or others), None)

    def _values(self, key: int | None, below: list[list[str]]) -> tuple[int, ...]:
        return tuple(self._list)


def needs_float64(rows: Sequence[Row], layout: Layout) -> bool:
    """Whether numbers in a sample have digits that float32 does not keep."""
    with np.errstate(over="ignore", under="ignore"):
        for _, cells in rows[layout.skipped :]:
            for at in layout.values:
                cell = cells[at - layout.columns] if at else cells[0]
                if len(cell) <= _FLOAT32_DIGITS or not is_number(cell, layout.decimal):
                    continue
                if _is_rounded(cell.replace(layout.decimal, ".")):
                    return True
    return False


_FLOAT32_DIGITS = 6
"""Significant digits that float32 keeps of every number."""


def _is_rounded(cell: str) -> bool:
    """Whether the nearest float32 to a number, in as many digits, is another number."""
    value = float(cell)
    digits = len(re.sub(r"[-+.]|[eE].*", "", cell).lstrip("0"))
    return isfinite(value) and float(f"{np.float32(value):.{max(1, digits)}g}") != value


def _cells(number: int) -> str:
    return f"{number} cell" if number == 1 else f"{number} cells"


def _is_quoted(cell: str) -> bool:
    return len(cell) > 1 and cell[0] == cell[-1] == '"'


def _may_be_names(labels: Sequence[str]) -> bool:
    """Whether whole numbers may name columns, as years do."""
    distinct = len(set(labels)) == len(labels)
    return distinct and all(each.isascii() and each.isdecimal() for each in labels)


def _count_columns(labels: Sequence[str]) -> bool:
    """Whether labels are 0, 1, 2, … or 1, 2, 3, …."""
    return any(list(labels) == [str(start + at) for at in range(len(labels))] for start in (0, 1))
