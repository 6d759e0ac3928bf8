"""A second reader of text files, written from docs/text-files.md alone, in a plain way.

It takes whole files of a few rows without quotes, and shares no code with the package.
"""

from __future__ import annotations

import re
from itertools import pairwise

__all__ = ["Refused", "read"]

MISSING = {"", "NA", "N/A", "#N/A", "<NA>", "NULL", "null", "None", "NaT", "\\N"}
MISSING |= {"#DIV/0!", "#NUM!", "#REF!", "#VALUE!"}
OWN = {"csv": ",", "tsv": "\t", "txt": " ", "vec": " "}
WHOLE = re.compile(r"[ \t]*[+-]?[0-9]+[ \t]*")
KEY_NAME = re.compile(r"key|(.*[_ ])?id|index|word|token|item|user", re.IGNORECASE)
INDEX_NAME = re.compile(r"|unnamed: \d+(_level_\d+)?(\.\d+)?|level_\d+|__index_level_\d+__", re.I)
ENDS_IN_MARK = re.compile(
    r".*([\t,;|: ]\s*[+-]?(\d+[.,]?\d*|[.,]\d+)(e[+-]?\d+)?|[\t,;|:])\s*", re.I
)
OTHER = re.compile(r"[+-]?(0x[\da-f.]+(p[+-]?\d+)?|\d{1,3}(,\d{3})+|\d+(_\d+)+)", re.I)
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")


class Refused(Exception):
    """There is no reading, or more than one: `ways`."""

    def __init__(self, why: str, ways: int = 0) -> None:
        super().__init__(why)
        self.ways = ways


def number(cell: str, decimal: str = ".") -> float | None:
    if not cell.isascii() or "_" in cell or (decimal == "," and "." in cell):
        return None
    if any(c not in "\t " and not "!" <= c <= "~" for c in cell):
        return None
    try:
        return float(cell.replace(decimal, "."))
    except ValueError:
        return None


def kind(cells: list[str], decimal: str) -> str:
    """One word for the cells of a column: text, whole, fraction, mixed, damaged, or missing."""
    known = [cell for cell in cells if cell not in MISSING]
    numbers = [cell for cell in known if number(cell, decimal) is not None]
    whole = all(WHOLE.fullmatch(cell) for cell in numbers)
    if not known:
        return "missing"
    if not numbers:
        return "text"
    if len(numbers) < len(known):
        return "mixed" if whole else "damaged"
    return "whole" if whole else "fraction"


def items(cell: str) -> list[str] | None:
    """The cells of a list, or None."""
    cell = cell.strip()
    inside = len(cell) > 2 and cell[0] + cell[-1] in ("[]", "()", "{}")
    text = cell[1:-1] if inside else cell
    found = divided_list(text)
    if not found or any(number(each) is None for each in found):
        return None
    if not inside:
        few = len(found) == 2 and "," in text and "." not in text
        thousands = re.fullmatch(r"[+-]?\d{1,3}((\.\d{3})+(,\d*)?|(,\d{3})+(\.\d*)?)", text)
        if len(found) < 2 or few or thousands:
            return None
    return found


def divided_list(text: str) -> list[str]:
    return text.split(",") if "," in text else text.split(";") if ";" in text else text.split()


def bracketed(cell: str) -> bool:
    cell = cell.strip()
    return len(cell) > 2 and cell[0] + cell[-1] in ("[]", "()", "{}")


def split(line: str, sep: str) -> list[str]:
    return line.replace("\t", " ").split() if sep == " " else line.split(sep)


def read(name: str, text: str) -> tuple[list[list[float]], list[str] | None]:
    """The rows and the keys of a file without options; raises Refused."""
    suffix = name.rpartition(".")[2]
    lines = text.split("\n")
    if not any(line.strip(" \t") if OWN[suffix] in " \t" else line for line in lines):
        raise Refused("empty")
    own = OWN[suffix]
    try:
        return one(lines, own, suffix)
    except Refused as error:
        first = error
    if suffix == "vec" or first.ways == 2:
        raise first
    found = {}
    open_ways = 0
    for sep in (",", ";", "\t", "|", " "):
        if sep == own or (sep == "\t" and own == " ") or (sep == " " and "\t" in found):
            continue
        try:
            found[sep] = one(lines, sep, suffix, other=True)
        except Refused as error:
            open_ways += error.ways == 2
    if len(found) == 1 and not open_ways:
        return next(iter(found.values()))
    raise Refused("no separator, or several", len(found) + open_ways)


def one(
    lines: list[str], sep: str, suffix: str, *, other: bool = False
) -> tuple[list[list[float]], list[str] | None]:
    """The reading with one separator; `ways` of Refused is 3 where another may be right."""
    lines = [line for line in lines if line and split(line, sep)]
    rows = [split(line, sep) for line in lines]
    if not rows:
        raise Refused("empty")
    words = sep == " " and suffix in ("txt", "vec")
    body = rows[1:] or rows
    place = list_place(body)
    if place is not None:
        at, dim = place
        wide = []
        for cells in rows:
            if len(cells) != min(map(len, body)):
                raise Refused("another number of cells")
            cell = cells[at].strip()
            found = divided_list(cell[1:-1] if bracketed(cell) else cell)
            if not bracketed(cell) and not (found and number(found[0]) is not None):
                rest = cells[at] if cells[at] in MISSING else ""
                found = [cells[at], *[rest] * (dim - 1)]
            if len(found) != dim:
                raise Refused("another length of lists")
            wide.append([*cells[:at], *found, *cells[at + 1 :]])
        rows, body = wide, wide[1:] or wide
    in_list = range(place[0], sum(place)) if place else range(0)

    counts = None
    if sep == " " and len(rows[0]) == 2 and all(re.fullmatch(r"\d{1,15}", c) for c in rows[0]):
        counts = counted(rows, suffix)
    if counts is not None:
        width = counts[1] + 1
    elif len(rows) == 1:
        width = len(rows[0])
    else:
        width = min(map(len, body)) if sep == " " else len(body[0])
    if width == 1 and other:
        raise Refused("one column")

    short = (
        counts is None
        and len(rows) > 1
        and len(rows[0]) == width - 1
        and all(number(c) is None for c in rows[0])
    )
    fitted = []
    for n, cells in enumerate(rows):
        if counts is not None and n == 0:
            continue
        more = len(cells) - width
        if more > 0 and words and number(cells[more]) is None:
            word = re.fullmatch(rf"[ \t]*(.*?)(?:[ \t]+[^ \t]+){{{width - 1}}}[ \t]*", lines[n])
            cells = [word[1] if word else "", *cells[more + 1 :]]
        if len(cells) != width and not (n == 0 and short):
            raise Refused(f"row {n} has {len(cells)} cells, not {width}")
        fitted.append(cells)

    later = fitted if counts is not None else fitted[1:] or fitted
    decimal = decimal_mark([row[1:] if words and width > 1 else row for row in later], sep)
    first, names = fitted[0], None
    if counts is None and (short or is_header(fitted, in_list, words, decimal)):
        if first[0].startswith("#"):
            raise Refused("#", 2)
        if not short and len(rows[0]) > width:
            raise Refused("more names than columns")
        names = ["", *first] if short else list(first)
        if sep == " ":
            names = [each.strip().strip('"') for each in names]
        fitted = fitted[1:]
    if not fitted:
        raise Refused("no rows")

    kinds = [kind([row[at] for row in fitted], decimal) for at in range(width)]
    divided = any(
        all(mark in row[at] for row in fitted if row[at] not in MISSING)
        for at in range(width)
        if kinds[at] == "text"
        for mark in ",;\t|"
        if mark != sep
    )
    try:
        key, values, torn = roles(kinds, names, counts, in_list, words, suffix, fitted, short)
    except Refused as error:
        raise Refused(str(error), 3 if error.ways and divided else error.ways) from None
    if counts is not None and counts[0] != len(fitted):
        raise Refused("another number of rows")
    matrix = []
    for row in fitted:
        found = [number(row[at], decimal) for at in values]
        if None in found:
            raise Refused("no number")
        matrix.append(found)
    if torn:
        raise Refused("the row may begin in the key", 3)
    keys = None if key is None else [row[key] for row in fitted]
    if keys is not None and kinds[key] == "fraction" and not words:
        raise Refused("keys are fractions")
    return matrix, keys


def list_place(body: list[list[str]]) -> tuple[int, int] | None:
    found = []
    width = min(map(len, body))
    for at in range(width):
        known = [row[at] for row in body if row[at] not in MISSING]
        if width != 2 and not all(map(bracketed, known)):
            continue
        lists = [items(cell) for cell in known]
        if lists and all(lists):
            found.append((at, len(lists[0] or [])))
    return found[0] if len(found) == 1 else None


def counted(rows: list[list[str]], suffix: str) -> tuple[int, int] | None:
    count, dim = map(int, rows[0])
    body = rows[1:]
    if not body:
        if count:
            raise Refused("no rows follow")
        raise Refused("no rows")
    least = min(map(len, body))
    words = any(number(row[0]) is None for row in body)
    if least == dim + 1 and (suffix == "vec" or dim > 1 or words or count == len(body)):
        return count, dim
    if least == 2 and not words and suffix != "vec":
        if dim == 1:
            raise Refused("counts or a row", 2)
        return None
    raise Refused("counts that the rows do not have")


def decimal_mark(rows: list[list[str]], sep: str) -> str:
    if sep == ",":
        return "."
    columns = [
        [cell for cell in column if cell not in MISSING] for column in zip(*rows, strict=False)
    ]
    commas = []
    for column in columns:
        if all(number(cell, ",") is not None for cell in column):
            commas += [cell for cell in column if "," in cell]
    if not commas:
        return "."
    for column in columns:
        if all(number(cell) is not None for cell in column) and any("." in c for c in column):
            raise Refused("commas and points", 2)
    if all(THOUSANDS.fullmatch(cell) for cell in commas):
        raise Refused("decimals or thousands", 2)
    return ","


def is_header(rows: list[list[str]], in_list: range, words: bool, decimal: str) -> bool:
    first, body = rows[0], rows[1:]
    if not body:
        kinds = {kind([cell], decimal) for cell in first}
        if kinds == {"whole"}:
            raise Refused("a header or a row", 2)
        if kinds == {"text"} and len(first) > 1:
            raise Refused("names alone")
        return False
    if in_list:
        cell = first[in_list[0]].strip()
        if any(first[in_list[0] + 1 : in_list[-1] + 1]) or number(cell) is not None:
            return False
        inner = cell[1:-1] if bracketed(cell) else cell
        found = divided_list(inner)
        if cell[:1] in "[({" or (len(found) > 1 and any(number(c) is not None for c in found)):
            raise Refused("a name or a damaged list", 2)
        return True
    below = [kind([row[at] for row in body], decimal) for at in range(len(first))]
    above = [kind([cell], decimal) for cell in first]
    numeric = [at for at, each in enumerate(below) if each != "text"]
    if words and len(first) > 1:
        numeric = [at for at in numeric if at]
    if any(
        below[at] == "text" and above[at] in ("whole", "fraction") for at in range(1, len(first))
    ):
        return False
    texts = [at for at in numeric if above[at] == "text"]
    if texts:
        if any(above[at] == "fraction" for at in numeric):
            raise Refused("a header or a damaged row", 2)
        if all(OTHER.fullmatch(first[at]) for at in texts):
            raise Refused("another notation", 2)
        return True
    if first[0] == "" and len(first) > 1:
        if "fraction" in above[1:]:
            raise Refused("an empty first cell", 2)
        return True
    labels = [first[at].strip() for at in numeric]
    if not labels or len(set(labels)) < len(labels) or not all(map(str.isdecimal, labels)):
        return False
    fractions = not any(WHOLE.fullmatch(row[at]) for row in body for at in numeric)
    steps = all(int(b) - int(a) == 1 for a, b in pairwise(labels))
    plain = all(str(int(each)) == each for each in labels)
    counting = len(labels) > 1 and int(labels[0]) in (0, 1) and steps and plain
    if fractions and counting and len(labels) > 2:
        return True
    if fractions or counting:
        raise Refused("whole numbers on the first line", 2)
    return False


def roles(kinds, names, counts, in_list, words, suffix, rows, short):
    """The column of keys, the columns of numbers, and whether a row may begin in a key."""
    width = len(kinds)
    numbers = ("whole", "fraction", "missing")
    outside = [at for at in range(width) if at not in in_list]
    text = {at for at in outside if kinds[at] == "text"}
    mixed = {at for at in outside if kinds[at] in ("mixed", "damaged")}
    chosen = None
    if counts is not None:
        chosen = 0
    elif words and names is None and width > 1 and 0 not in in_list:
        if suffix == "vec" and kinds[0] == "fraction":
            raise Refused("a word or a number", 2)
        if kinds[0] not in ("fraction", "whole") or (suffix == "vec" and kinds[0] == "whole"):
            chosen = 0
    if short and kinds[0] == "fraction":
        raise Refused("a name is missing")

    named, indexes = [], []
    if names is not None:
        heads = {at: names[at] for at in outside}
        named = [at for at, each in heads.items() if KEY_NAME.fullmatch(each)]
        indexes = [at for at, each in heads.items() if INDEX_NAME.fullmatch(each)]
    family = None if in_list or names is None else one_family(names, kinds)
    vector = list(in_list) if in_list else family
    if family:
        beside = [
            at
            for at in outside
            if kinds[at] == "fraction" and at not in (*family, *named, *indexes)
        ]
        if beside:
            raise Refused("fractions beside a family", 2)
    if chosen is not None:
        key = chosen
    else:
        key = find_key(kinds, names, named, indexes, vector, outside, text, mixed, width, rows)
    if vector is None:
        vector = [
            at
            for at in range(width)
            if kinds[at] in numbers
            and at != key
            and at not in indexes
            and (key is None or at not in named)
        ]
        damaged = mixed - {key}
    else:
        damaged = mixed & set(vector)
    if damaged or (key is None and text - set(named) and not in_list):
        raise Refused("damage")
    if not vector or key in vector:
        raise Refused("no numbers")
    torn = False
    if key is not None and kinds[key] == "text" and counts is None and not (words and chosen == 0):
        cells = [row[key] for row in rows]
        if all(items(cell) for cell in cells) or all(OTHER.fullmatch(cell) for cell in cells):
            raise Refused("keys that are numbers", 2)
    if key is not None and kinds[key] == "text" and counts is None and (names is None or short):
        torn = all(ENDS_IN_MARK.fullmatch(row[key]) for row in rows)
    return key, vector, torn


def one_family(names, kinds):
    families = {}
    for at, each in enumerate(names):
        match = re.fullmatch(r"(.*?)(\d{1,9})", each)
        able = kinds[at] in ("whole", "fraction", "missing", "mixed", "damaged")
        if not match or not able or INDEX_NAME.fullmatch(each):
            continue
        members = families.setdefault(match[1], [])
        expected = members[-1][1] + 1 if members else min(int(match[2]), 1)
        if int(match[2]) == expected:
            members.append((at, int(match[2])))
    found = [[at for at, _ in each] for each in families.values() if len(each) > 1]
    return found[0] if len(found) == 1 else None


def find_key(kinds, names, named, indexes, vector, outside, text, mixed, width, rows):
    rest = [at for at in outside if vector is None or at not in vector]
    if width == 1:
        if text:
            raise Refused("one column of texts")
        return None
    able = [at for at in named if at in rest]
    exact = [at for at in able if names[at] == "key"]
    if exact or able:
        candidates = exact[:1] or able
    else:
        candidates = [at for at in indexes if at in rest]
        if candidates:
            candidates = sorted({*candidates, *((text | mixed) & set(rest))})
    if len(candidates) > 1:
        raise Refused("several names of keys", 2)
    if candidates:
        at = candidates[0]
        if kinds[at] in ("fraction", "missing") and names[at] != "":
            raise Refused("keys that are fractions", 2)
        return at
    texts = [at for at in rest if at in text]
    whole = [at for at in rest if kinds[at] == "whole"]
    if vector is not None and texts and len(texts) + len(whole) > 1:
        raise Refused("several columns beside the row", 2)
    if 1 < len(texts) < width:
        raise Refused("several columns of texts", 2)
    if len(texts) == 1:
        return texts[0]
    loose = [at for at in rest if at in mixed]
    if len(texts) == 0 and len(loose) == 1:
        raise Refused("damage, or keys", 2)
    if texts or loose or not whole:
        return None
    if vector is not None and len(rest) == 1 and names is None:
        return whole[0]
    raise Refused("whole numbers", 2)
