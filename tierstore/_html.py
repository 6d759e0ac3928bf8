"""What notebooks and prompts show: tables with a caption, and a line of bounded length."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_BRIEF = reprlib.Repr()
_BRIEF.maxother = _BRIEF.maxstring = 200


def brief(thing: Any) -> str:
    """Return the `repr` of a data class or a list, with the first six of what there is more of."""
    if isinstance(thing, list):
        return _BRIEF.repr([*thing])
    fields = dataclasses.fields(thing)
    shown = (f"{each.name}={_BRIEF.repr(getattr(thing, each.name))}" for each in fields)
    return f"{type(thing).__name__}({', '.join(shown)})"


def table(caption: str, names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; every text is escaped, and numbers stand to the right."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<table><caption style="text-align: left">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def table_of(caption: str, columns: Mapping[str, str], things: Iterable[object]) -> str:
    """Return a table with a line for each thing, given its attributes by their headings."""
    rows = [[getattr(each, name) for name in columns.values()] for each in things]
    return table(caption, list(columns), rows)


def _cell(value: object) -> str:
    """Return a cell: counts with commas, rates and other fractions with three digits."""
    if value is None:
        return "<td></td>"
    if isinstance(value, int | float):
        text = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
        return f'<td style="text-align: right">{text}</td>'
    return f'<td style="text-align: left">{escape(str(value))}</td>'
