"""The grammar of text files (docs/text-files.md): what their lines and columns are.

It is decided from the first lines: from the suffix, from counts on the first line, from a line of
names, and from how cells are spelled. How often, in what order or how large values are decides
nothing. Where this leaves two readings, `AmbiguousFileError` shows both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

import numpy as np

from tierstore._formats._cells import (
    BLANKS,
    MISSING,
    Row,
    is_number,
    list_items,
    may_be_list,
    thousands,
)
from tierstore._formats._roles import NO_KEYS, Candidates, Way, ambiguous, choice
from tierstore._formats.base import TextOptions
from tierstore.errors import AmbiguousFileError, FormatError, InvalidInputError
from tierstore.spec import MAX_RECORD_BYTES

SEPARATORS = (",", ";", "\t", "|", BLANKS)
_COUNTS = re.compile(r"\d{1,15}")
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_OTHER_NOTATION = re.compile(
    r"[+-]?(0x[\da-f.]+(p[+-]?\d+)?|\d{1,3}(,\d{3})+|\d+(_\d+)+)", re.IGNORECASE | re.ASCII
)
_TORN = re.compile(
    r".*([\t,;|: ]\s*[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?|[\t,;|:])\s*", re.DOTALL
)
"""What is left at the end of a key if a separator within a row was taken for a part of the key."""
_HEADER = ("--header (header=True)", {"header": True})
_NO_HEADER = ("--no-header (header=False)", {"header": False})
_SHOWN_ROWS, _SHOWN_CELLS = 3, 4


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
        words: whether the first cell is a word, which may hold blanks.
        quoted_words: whether words between blanks are quoted, as R writes them.
        rounded_keys: whether the keys are whole numbers, some maybe written as fractions: 7.0.
        vector: the position of a cell that holds a list, the numbers in it, which have a cell each
            in a row, and the cells of a row with the list as one; or None.
        notes: what was left out.
    """

    sep: str
    decimal: str
    skipped: int
    names: tuple[str, ...] | None
    counts: tuple[int, int] | None
    columns: int
    key: int | None
    values: tuple[int, ...]
    words: bool = False
    quoted_words: bool = False
    rounded_keys: bool = False
    vector: tuple[int, int, int] | None = None
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

    def rows(self, rows: Sequence[Row]) -> str:
        """Return the first rows as they are read, for people."""
        shown = []
        for _, cells in rows[self.skipped : self.skipped + _SHOWN_ROWS]:
            fitted = _fitted(cells, self.columns)
            numbers = [fitted[at].strip() for at in self.values[:_SHOWN_CELLS]]
            more = " …" if len(self.values) > _SHOWN_CELLS else ""
            key = "" if self.key is None else f"{fitted[self.key]!r:.40} → "
            shown.append(f"{key}{' '.join(numbers)}{more}")
        return "; ".join(shown) or "no rows"


Rows = Callable[[str], tuple[list[Row], tuple[int, int, int] | None]]
"""Returns the first rows with a separator, and where their lists are; raises FormatError."""


def decide(
    path: Path, rows: Rows, own: str, suffix: str, options: TextOptions, whole: bool
) -> Layout:
    """Return the layout of a file.

    `own` is the separator of its `suffix`, and `whole` means that `rows` are all of the file. The
    own separator is taken if the file is a table with it, or if it is a .vec file; another if it
    alone makes a table. Raises
    AmbiguousFileError where there are two readings, FormatError where there is none.
    """

    def layout(sep: str) -> Layout:
        found, vector = rows(sep)
        return _LayoutDecision(path, found, sep, suffix, options, whole, vector).layout()

    if options.sep is not None or suffix == ".vec":
        return layout(options.sep or own)
    try:
        return layout(own)
    except (FormatError, InvalidInputError) as error:
        first = error
    if isinstance(first, AmbiguousFileError) and not isinstance(first, _TornError):
        raise first
    tables: list[Layout] = []
    refused: list[AmbiguousFileError] = []
    for sep in SEPARATORS:
        if sep == own or (own == BLANKS and sep == "\t"):
            continue
        if sep == BLANKS and any(each.sep == "\t" for each in tables):
            continue  # tabs are blanks
        try:
            found = layout(sep)
        except AmbiguousFileError as error:
            refused.append(error)
        except (FormatError, InvalidInputError) as error:
            if not isinstance(first, AmbiguousFileError) and _divides(rows, sep):
                first = error
        else:
            if found.columns > 1:
                tables.append(found)
    torn = [each for each in refused if isinstance(each, _TornError)]
    refused = [each for each in refused if each not in torn]
    if len(tables) == 1 and not refused:
        return tables[0]
    if len(tables) > 1:
        ways = [
            (f"--sep {_shown(each.sep)} (sep={each.sep!r})", {"sep": each.sep}) for each in tables
        ]
        raise ambiguous(path, "its cells can be divided in two ways", *ways[:2])
    if torn and not isinstance(first, AmbiguousFileError):
        first = torn[0]
    raise refused[0] if refused else first


def _divides(rows: Rows, sep: str) -> bool:
    """Whether a separator, not a blank, makes rows of as many cells each, and of more than one."""
    if sep == BLANKS:
        return False
    try:
        widths = {len(cells) for _, cells in rows(sep)[0]}
    except FormatError:  # quotes within cells that another separator makes
        return False
    return len(widths) == 1 and widths != {1}


def _shown(sep: str) -> str:
    return {"\t": "tab", BLANKS: "' '"}.get(sep, f"'{sep}'")


def with_readings(
    error: AmbiguousFileError, read: Callable[[TextOptions], str], options: TextOptions
) -> AmbiguousFileError:
    """Return an error that shows the first rows as each option reads them."""
    lines = []
    for text, way in error.ways:
        if way:
            try:
                shown = read(replace(options, **way))
            except (FormatError, InvalidInputError) as other:
                shown = f"not yet: {str(other).partition(': ')[2]}"
            lines.append(f"\n  {text.partition(' (')[0]}: {shown:.300}")
    return AmbiguousFileError(f"{error}{''.join(lines)}", ways=error.ways)


class _TornError(AmbiguousFileError):
    """Cells may hold several of another separator, with which the file may be a table."""


def _fitted(cells: list[str], columns: int) -> list[str]:
    """Return a row with the surplus cells joined to the word in front."""
    surplus = len(cells) - columns
    return [" ".join(cells[: surplus + 1]), *cells[surplus + 1 :]] if surplus > 0 else cells


@dataclass
class _LayoutDecision:
    """The steps of one decision, each of which may end it."""

    path: Path
    numbered: list[Row]
    sep: str
    suffix: str
    options: TextOptions
    whole: bool
    vector: tuple[int, int, int] | None

    def __post_init__(self) -> None:
        """Divide the lines from their numbers."""
        self.rows = [cells for _, cells in self.numbered]
        self.lines = [number for number, _ in self.numbered]
        self.words = self.sep == BLANKS and self.suffix in (".vec", ".txt")
        self.null = frozenset(self.options.null)

    def layout(self) -> Layout:
        """Run the steps."""
        counts = self._counts()
        first, body = self.rows[0], self.rows[1:]
        self.columns = self._columns(first, body, counts)
        self.decimal = self._decimal(body or [first])
        header = False if counts else self._header(first, body)
        if header and len(first) > self.columns:
            raise self._wrong(0, f" names {len(first)} columns, but rows have {self.columns}")
        if not (header or counts):
            body = self.rows
        self.body = [_fitted(cells, self.columns) for cells in body]
        names = self._names(first) if header else None
        key, values, notes = self._roles(names, counts)
        quoted = self.sep == BLANKS and key is not None and bool(self.body)
        return Layout(
            sep=self.sep,
            decimal=self.decimal,
            skipped=int(header or counts is not None),
            names=names,
            counts=counts,
            columns=self.columns,
            key=key,
            values=values,
            vector=self.vector,
            rounded_keys=key is not None and self._kind(key) == "float" and not self.words,
            words=self.words,
            quoted_words=quoted and all(_is_quoted(cells[key or 0]) for cells in self.body),
            notes=notes,
        )

    def _wrong(self, row: int, what: str) -> FormatError:
        return FormatError(f"{self.path}: line {self.lines[row]}{what}")

    def _ambiguous(self, what: str, *ways: Way) -> AmbiguousFileError:
        return ambiguous(self.path, what, *ways)

    def _counts(self) -> tuple[int, int] | None:
        """Return the two counts that word2vec puts on the first line."""
        first, body = self.rows[0], self.rows[1:]
        if self.options.header is not None or self.sep != BLANKS or len(first) != 2:
            return None
        if not all(_COUNTS.fullmatch(cell) for cell in first):
            return None
        rows, dim = map(int, first)
        if not body:
            if not self.whole or rows or dim > MAX_RECORD_BYTES:
                raise self._wrong(0, f" announces {rows} rows of {dim}, but none follow")
            return rows, dim
        found = min(map(len, body))
        texts = any(not is_number(cells[0]) for cells in body)
        counted = self.suffix == ".vec" or dim > 1 or texts or (self.whole and rows == len(body))
        if found == dim + 1 and counted:
            return rows, dim
        if found == 2 and not texts and self.suffix != ".vec":
            if dim == 1:
                raise self._ambiguous(
                    "the first line may be counts or a row",
                    ("--skip-lines 1 (skip_lines=1)", {"skip_lines": 1}),
                    _NO_HEADER,
                )
            return None
        raise self._wrong(
            0,
            f" announces rows of a word and {dim} numbers, but line "
            f"{self.lines[1 + [len(cells) for cells in body].index(found)]} has {found} cells",
        )

    def _columns(
        self, first: list[str], body: list[list[str]], counts: tuple[int, int] | None
    ) -> int:
        """Return how many cells a row has; raises FormatError for rows of other lengths."""
        self.short_header = False
        if counts is not None:
            return counts[1] + 1
        if not body:
            return len(first)
        columns = min(map(len, body)) if self.sep == BLANKS else len(body[0])
        may_name = self.options.header is not False
        named = self.options.header or not any(map(is_number, first))
        self.short_header = len(first) == columns - 1 and may_name and bool(named)
        for at, cells in enumerate(self.rows):
            words = (
                self.words and len(cells) > columns and not is_number(cells[len(cells) - columns])
            )
            if len(cells) == columns or words or (at == 0 and self.short_header):
                continue
            if at == 0:
                if len(body) == 1:
                    raise self._wrong(1, f" has {_cells(columns)}, but {len(first)} were expected")
                raise self._wrong(
                    0,
                    f" has {_cells(len(first))}, but {columns} were expected; leave lines out with "
                    "--skip-lines (skip_lines=) or --comment (comment=)",
                )
            if columns == len(first) or self.sep != BLANKS:
                raise self._wrong(at, f" has {_cells(len(cells))}, but {columns} were expected")
            short = [len(each) for each in self.rows].index(columns)
            raise self._wrong(short, f" has {_cells(columns)}, but {len(cells)} were expected")
        return columns

    def _decimal(self, rows: list[list[str]]) -> str:
        """Return the decimal mark: a comma where a column has numbers with one."""
        if self.options.decimal is not None:
            return self.options.decimal
        if self.sep == ",":
            return "."
        first = int(self.words and self.columns > 1)  # a word is no number
        fitted = [_fitted(cells, self.columns)[first:] for cells in rows]
        columns = [
            [cell for cell in column if cell not in MISSING and cell not in self.null]
            for column in zip(*fitted, strict=False)
        ]
        commas = [
            cell
            for column in columns
            if all(is_number(cell, ",") for cell in column)
            for cell in column
            if "," in cell
        ]
        if not commas:
            return "."
        points = any(all(map(is_number, each)) and "." in "".join(each) for each in columns)
        ways: tuple[Way, Way] = (
            ("--decimal , (decimal=',')", {"decimal": ","}),
            ("--decimal . (decimal='.')", {"decimal": "."}),
        )
        if points:
            raise self._ambiguous(f"numbers have a comma ({commas[0]!r}) and others a point", *ways)
        if all(re.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}", cell) for cell in commas):
            raise self._ambiguous(
                f"the comma in {commas[0]!r} may be a decimal mark or divide thousands", *ways
            )
        return ","

    def _known(self, cells: Sequence[str]) -> list[str]:
        return [cell for cell in cells if cell not in MISSING and cell not in self.null]

    def _kind_of(self, cells: Sequence[str]) -> str:
        """Return what cells of one column hold, in the words of `roles`."""
        known = self._known(cells)
        if not known:
            return "missing"
        numbers = [cell for cell in known if is_number(cell, self.decimal)]
        if not numbers:
            return "text"
        whole = all(_INTEGER.fullmatch(cell.strip()) for cell in numbers)
        if len(numbers) < len(known):
            return "mixed" if whole else "damaged"
        return "integer" if whole else "float"

    def _kind(self, at: int) -> str:
        return self._kind_of([cells[at] for cells in self.body])

    def _in_list(self, at: int) -> bool:
        return self.vector is not None and self.vector[0] <= at < sum(self.vector[:2])

    def _header(self, first: list[str], body: list[list[str]]) -> bool:
        """Whether the first line names columns."""
        if self.options.header is not None:
            return self.options.header
        marked = first[0].startswith("#")
        if not self.short_header:
            if not body:
                return self._header_alone(first)
            rest = [_fitted(cells, self.columns) for cells in body]
            fitted = _fitted(first, self.columns)
            if not self._names_numbers(fitted, [*zip(*rest, strict=True)]):
                return False
        if marked:
            raise self._ambiguous(
                f"line {self.lines[0]} begins with '#'",
                ("--comment '#' (comment='#')", {"comment": "#"}),
                _HEADER,
            )
        return True

    def _names_numbers(self, first: list[str], below: list[tuple[str, ...]]) -> bool:
        """Whether the first line has a name above a column of numbers."""
        kinds = [self._kind_of(cells) for cells in below]
        numeric = [at for at, kind in enumerate(kinds) if kind != "text" or self._in_list(at)]
        if self.vector is not None:
            return self._names_list(first)
        if self.words and len(kinds) > 1:
            numeric = [at for at in numeric if at]
        above = {at: self._kind_of([first[at]]) for at in range(len(first))}
        texts = [at for at in numeric if above[at] == "text"]
        if any(
            kinds[at] == "text" and above[at] in ("integer", "float") for at in range(1, len(kinds))
        ):
            return False
        if texts:
            if any(above[at] == "float" for at in numeric):
                raise self._ambiguous(
                    f"line {self.lines[0]} has numbers and {first[texts[0]]!r} in column "
                    f"{texts[0] + 1}, so that it may be a header or a damaged row",
                    _HEADER,
                    _NO_HEADER,
                )
            if all(_OTHER_NOTATION.fullmatch(first[at]) for at in texts):
                raise self._either(f"{first[texts[0]]!r} is a number in another notation")
            return True
        if first[0] == "" and len(first) > 1:
            if "" not in self.null and all(above[at] != "float" for at in range(1, len(first))):
                return True
            raise self._either("its first cell is empty")
        labels = [first[at].strip() for at in numeric]
        if not labels or len(set(labels)) < len(labels) or not all(map(str.isdecimal, labels)):
            return False
        fractions = not any(
            _INTEGER.fullmatch(cell.strip()) for at in numeric for cell in below[at]
        )
        counting = len(labels) > 1 and any(
            labels == [str(start + at) for at in range(len(labels))] for start in (0, 1)
        )
        if fractions and counting and len(labels) > 2:
            return True
        if fractions or counting:
            raise self._either(f"it holds {', '.join(labels[:4])}{', …' * (len(labels) > 4)}")
        return False

    def _names_list(self, first: list[str]) -> bool:
        """Whether the first line has a name above the list, and no damaged list."""
        at, dim, _ = self.vector or (0, 0, 0)
        cell = first[at]
        if any(first[at + 1 : at + dim]) or is_number(cell):
            return False  # it is divided, or said to be missing
        if may_be_list(cell):
            raise self._ambiguous(
                f"{cell!r:.60} in line {self.lines[0]} may be a name or a damaged list",
                _HEADER,
                _NO_HEADER,
            )
        return True

    def _header_alone(self, first: list[str]) -> bool:
        """Whether the only line is the header of a file without rows, as the writer writes it."""
        kinds = {self._kind_of([cell]) for cell in first}
        if kinds == {"integer"}:
            raise self._either("it holds whole numbers alone")
        if kinds == {"text"} and len(first) > 1 and first[0] != "key":
            raise self._wrong(0, " holds texts alone, and no rows of numbers follow")
        return kinds == {"text"} and len(first) > 1

    def _either(self, why: str) -> AmbiguousFileError:
        return self._ambiguous(
            f"line {self.lines[0]} may be a header or a row: {why}", _HEADER, _NO_HEADER
        )

    def _names(self, first: list[str]) -> tuple[str, ...]:
        """Return the names of all columns; a header with one name less lacks the first."""
        names = ("", *first) if self.short_header else tuple(first)
        return tuple(name.strip().strip('"') if self.sep == BLANKS else name for name in names)

    def _roles(
        self, names: tuple[str, ...] | None, counts: tuple[int, int] | None
    ) -> tuple[int | None, tuple[int, ...], tuple[str, ...]]:
        """Return the position of the keys, those of the numbers, and what is left out."""
        if not self.body:
            key = 0 if self.options.key_column is None else None
            return key, tuple(range(0 if key is None else 1, self.columns)), ()
        kinds = [self._kind(at) for at in range(self.columns)]
        options = self.options
        if options.key_column is None and not options.vector:
            if counts is not None:
                kinds[0], options = "text", replace(options, key_column=1)
            elif self.words and self.columns > 1 and names is None:
                kinds[0] = self._word(kinds[0])
                if kinds[0] == "text":
                    options = replace(options, key_column=1)
        if self.short_header and kinds[0] == "float":
            raise self._wrong(0, f" has {_cells(self.columns - 1)}, but a row {self.columns}")
        damage = {
            at: self._damage(at)
            for at, kind in enumerate(kinds)
            if kind in ("text", "mixed", "damaged") and not self._in_list(at)
        }
        # One column stands for a list until its place is known.
        at, dim, _ = self.vector or (0, 1, 0)
        gone = dim - 1 if self.vector else 0
        found = [*kinds[:at], *(["list"] if self.vector else kinds[:1]), *kinds[at + dim :]]
        some = None if names is None else (*names[: at + 1], *names[at + 1 + gone :])
        try:
            damage = {n - gone * (n > at): text for n, text in damage.items()}
            chosen = Candidates(self.path, some, found, options, damage).roles()
        except AmbiguousFileError as error:
            if self._is_torn(kinds):
                raise _TornError(str(error), ways=error.ways) from None
            raise
        key = chosen.key if chosen.key is None or chosen.key < at else chosen.key + gone
        values = tuple(range(at, at + dim)) if self.vector else chosen.values
        if key is not None and counts is None and self.options.key_column is None:
            self._refuse_notations(key, kinds)
            if (names is None or self.short_header) and self.options.sep is None:
                self._refuse_torn(key, kinds)
        return key, values, chosen.notes

    def _word(self, kind: str) -> str:
        """Return what the first cells of a file of words are, from their kind."""
        if kind in ("text", "mixed", "damaged", "missing") or (
            self.suffix == ".vec" and kind == "integer"
        ):
            return "text"
        if self.suffix == ".vec":
            raise self._ambiguous(
                "the first number of each row may be a word or a number of the row",
                choice(None, 0),
                NO_KEYS,
            )
        return kind

    def _damage(self, at: int) -> str:
        skipped = len(self.rows) - len(self.body)
        row, cell = next(
            (
                (row, cells[at])
                for row, cells in enumerate(self.body)
                if self._known([cells[at]]) and not is_number(cells[at], self.decimal)
            ),
            (0, self.body[0][at]),  # a number that is a word by its place
        )
        line = self.lines[row + skipped]
        return f"line {line}, column {at + 1}: {cell!r:.100} is no number{thousands(cell)}"

    def _is_torn(self, kinds: Sequence[str]) -> bool:
        """Whether a column of texts may hold more than one cell of another separator."""
        for at, kind in enumerate(kinds):
            cells = self._known([each[at] for each in self.body])
            if kind == "text" and cells:
                for mark in ",;\t|":
                    if mark != self.sep and all(mark in cell for cell in cells):
                        return True
        return False

    def _refuse_notations(self, key: int, kinds: Sequence[str]) -> None:
        """Raise AmbiguousFileError if each key is a list, or a number in another notation: 0x10."""
        cells = [cells[key] for cells in self.body]
        if kinds[key] == "text" and all(map(list_items, cells)):
            error = self._ambiguous(
                f"{cells[0]!r:.60} in column {key + 1} is a key, or a list of numbers",
                choice(None, key),
                (f"--vector {key + 1} (vector=[{key + 1}])", {"vector": (key + 1,)}),
            )
            raise _TornError(str(error), ways=error.ways) if self._is_torn(kinds) else error
        if kinds[key] == "text" and all(map(_OTHER_NOTATION.fullmatch, cells)):
            raise self._ambiguous(
                f"{cells[0]!r:.60} in column {key + 1} is a text, or a number in another notation",
                choice(None, key),
                ("write it as a plain number", {}),
            )

    def _refuse_torn(self, key: int, kinds: Sequence[str]) -> None:
        """Raise AmbiguousFileError if each key ends in a mark, or in a mark and a number."""
        cells = [cells[key] for cells in self.body]
        if kinds[key] == "text" and all(map(_TORN.fullmatch, cells)):
            raise _TornError(
                f"{self.path}: each key ends in a mark or a number after one, as {cells[0]!r:.60} "
                f"does, so that the row may begin there: say {choice(None, key)[0]} or what is "
                "between cells, --sep (sep=)",
                ways=[choice(None, key)],
            )


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
