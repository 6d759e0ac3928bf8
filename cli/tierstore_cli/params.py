"""Types of option values, and the options that several commands share."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

import tierstore
from tierstore.budget import parse_bytes
from tierstore.errors import InvalidInputError, TierStoreError
from tierstore.initializers import Initializer, parse_initializer, syntax
from tierstore.spec import DTYPES, Field, Scale, check_name

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # not generic in older versions of click

SeededInitializer = Callable[[int], Initializer]
Rows = tuple[int, int | None]


Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def completing(names: Callable[[tierstore.Store, str | None], Iterable[str]]) -> Completer:
    """Return what completes names that a store has; `names` gets the store and the chosen table."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        path = ctx.params.get("store") or next(iter(ctx.args), "")
        try:
            with tierstore.open(path, budget=tierstore.Budget(host=0, gpu=0)) as store:
                every = names(store, ctx.params.get("table"))
                return [CompletionItem(name) for name in every if name.startswith(incomplete)]
        except (TierStoreError, OSError):
            return []

    return complete


def _fields(store: tierstore.Store, table: str | None) -> Iterable[str]:
    tables = store.values() if table is None else [store[table]]
    return dict.fromkeys(name for each in tables for name in each.fields)


def _versions(store: tierstore.Store, _: str | None) -> Iterable[str]:
    kept = store.versions()[::-1]
    return [*(name for each in kept for name in each.names), *(str(each.version) for each in kept)]


complete_table = completing(lambda store, _: store)
complete_field = completing(_fields)
complete_version = completing(_versions)
complete_kept = completing(
    lambda store, _: [name for each in store.versions() for name in each.names]
)


class Spelled(ParamType):
    """A value that a function reads from its text; a ValueError of it says what is wrong."""

    def __init__(
        self, name: str, read: Callable[[str], Any], completes: Completer | None = None
    ) -> None:
        self.name = name
        self._read = read
        self._completes = completes

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return what the text means; a default may be that already."""
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the name as it is, with its small letters."""
        return self.name

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete what there is in the store."""
        return self._completes(ctx, param, incomplete) if self._completes else []


def _row_range(text: str) -> Rows:
    """Return (first, last + 1), with None for an omitted end."""
    match = re.fullmatch(r"(\d*):(\d*)", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r}: write A:B for rows A to B-1, such as 0:5")
    start, stop = int(match[1] or 0), int(match[2]) if match[2] else None
    if stop is not None and stop <= start:
        raise ValueError(f"{text!r} contains no row: {stop} is not after {start}")
    return start, stop


Share = tuple[int, int]


def _part(text: str) -> Share:
    """Return (K, N)."""
    match = re.fullmatch(r"(\d+)/(0*[1-9]\d*)", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r}: write K/N, such as 0/4 for the first of 4 parts")
    number, count = int(match[1]), int(match[2])
    if number >= count:
        raise ValueError(f"{text!r}: the {count} parts are 0 to {count - 1}")
    return number, count


def _rate(text: str) -> int:
    """Return bytes a second; `/s` may be left out."""
    return parse_bytes(re.sub(r"\s*/\s*s(ec)?$", "", text))


ROW_RANGE = Spelled("A:B", _row_range)
"""Rows A to B-1; either may be omitted."""
PART = Spelled("K/N", _part)
"""One of N equal parts, where K counts from 0 as ranks and array tasks do."""
BYTES = Spelled("SIZE", parse_bytes)
"""A number of bytes, such as `8GiB`."""
RATE = Spelled("RATE", _rate)
"""A number of bytes a second, such as `25GB/s`."""
FILE = click.Path(path_type=Path, readable=False)  # its reader reports errors
"""A file or a directory."""


class FiniteRange(click.FloatRange):
    """A number in a range, neither infinite nor NaN, which every range accepts."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


_COUNT = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\d{1,2})?)([kKMGB]?)", re.ASCII)
_THOUSANDS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


def _count(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            return whole_number(text, least)
        except ValueError:
            why = f"is no number from {least} on, such as 1000000, 1e6 or 10M"
            raise ValueError(f"{text!r} {why}") from None

    return read


COUNT_OF = Spelled("N", _count(1))
"""A number of rows or elements, such as `10M`, `1e6` or `1_000`; at least 1."""
COUNT_OR_NONE = Spelled("N", _count(0))
"""Such a number, or 0."""


def whole_number(text: str, least: int = 1) -> int:
    """Return the whole number from `least` on that a text spells; raises ValueError."""
    match = _COUNT.fullmatch(text)
    number = Decimal(re.sub("[_,]", "", match[1])) * _THOUSANDS[match[2]] if match else -1
    if number < least or number != int(number):
        raise ValueError(text)
    return int(number)


def _hit_rate(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"{text!r} is no share of ids, such as 90% or 0.9")
    return share


HIT_RATE = Spelled("PERCENT", _hit_rate)
"""A share of ids, such as `90%` or `0.9`, as a fraction."""
INITIALIZER = Spelled(syntax(), parse_initializer)
"""An initializer, written as a call, `normal(0,0.01)`: a function from a seed to it."""


class RowIdType(click.IntRange):
    """The id of a row."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the id; what is no number may be meant as a key."""
        if isinstance(value, str) and not re.fullmatch(r"\s*[+-]?[\d_]+\s*", value):
            self.fail(f"{value!r} is not the id of a row; a key is named by --key", param, ctx)
        return int(super().convert(value, param, ctx))


ROW_ID = RowIdType(0, 2**63 - 1)
SEED = click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    metavar="S",
    help="Seed of random values; default: 0.",
)


def init_option(of: str) -> Callable[[Any], Any]:
    """Return the options of an initializer and its seed; `of` says for what, and its default."""
    option = click.option("--init", "initializer", type=INITIALIZER, help=of)
    return lambda function: option(SEED(function))


def state_option(of: str) -> Callable[[Any], Any]:
    """Return the option of the state of an optimizer."""
    return click.option("--state", type=STATE, multiple=True, help=of)


def dry_run_option(of: str) -> Callable[[Any], Any]:
    """Return the option that changes nothing; `of` says what is shown."""
    return click.option("--dry-run", is_flag=True, help=f"{of}; change nothing.")


def every_option(default: float, of: str) -> Callable[[Any], Any]:
    """Return the option of seconds between two looks."""
    return click.option(
        "--every",
        type=FiniteRange(min=0, min_open=True),
        metavar="SECONDS",
        default=default,
        show_default=True,
        help=of,
    )


def seeded(initializer: SeededInitializer | None, seed: int | None) -> Initializer | None:
    """Return the initializer of --init with its --seed, or None where neither is given."""
    if initializer is not None:
        return initializer(seed or 0)
    if seed is not None:
        raise click.UsageError("--seed starts the random values of --init: give that too")
    return None


Filling = str | SeededInitializer
"""How to fill rows: a name, or a function from a seed to an initializer."""


def _filling(text: str) -> Filling:
    return text if text in ("version", "zeros", "nan") else parse_initializer(text)


FILL = Spelled("version|zeros|nan|INITIALIZER", _filling)
"""A replacement of damaged rows: a name, or a function from a seed to an initializer."""


# Names of torch.optim in `optimizer.state`; None: the dim of the weight.
PRESETS: dict[str, dict[str, int | None]] = {
    "adadelta": {"square_avg": None, "acc_delta": None},
    "adagrad": {"sum": None},
    "adam": {"exp_avg": None, "exp_avg_sq": None},
    "adamax": {"exp_avg": None, "exp_inf": None},
    "adamw": {"exp_avg": None, "exp_avg_sq": None},
    "amsgrad": {"exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": None},
    "nadam": {"exp_avg": None, "exp_avg_sq": None},
    "radam": {"exp_avg": None, "exp_avg_sq": None},
    "rmsprop": {"square_avg": None},
    "rowwise_adagrad": {"sum": 1},
    "sgd-momentum": {"momentum_buffer": None},
    "sparse_adam": {"exp_avg": None, "exp_avg_sq": None},
}
"""The row-shaped state of optimizers, by the name of the preset."""

SIGNED = {"exp_avg", "momentum_buffer"}
"""The states of presets that may be negative."""


@dataclass(frozen=True)
class StateField:
    """A field in addition to the weight; None uses the value of the weight."""

    name: str
    dtype: str | None
    dim: int | None

    def beside(self, weight: Field) -> Field:
        """Return the field for a table with this weight."""
        dim, dtype = self.dim or weight.dim, self.dtype or weight.dtype
        if dtype != "float8":
            return Field(dim, dtype)
        if dim == 1:
            return Field(1, "bfloat16")
        dtype = "float8_e4m3fn" if self.name in SIGNED else "float8_e5m2"
        return Field(dim, dtype, scale=Scale("float32"))


def with_state(weight: Field, state: Iterable[list[StateField]]) -> dict[str, Field]:
    """Return the fields of rows with a weight, and the state of --state; two of a name are none."""
    fields = {"weight": weight}
    for each in chain.from_iterable(state):
        if each.name in fields:
            raise click.UsageError(f"a row would have two fields named {each.name!r}")
        fields[each.name] = each.beside(weight)
    return fields


def _near_preset(name: str) -> str | None:
    """Return the preset that a word misspells or begins."""
    longer = [preset for preset in PRESETS if preset.startswith(f"{name}-")]
    near = [*longer, *difflib.get_close_matches(name, PRESETS, 1, 0.75)]
    return next(iter(near), None)


def _state(value: str) -> list[StateField]:
    is_field = value.startswith("field:")
    name, dtype, dim = (*value.removeprefix("field:").split(":", 2), "", "")[:3]
    preset = name.lower()
    dtypes = (*DTYPES, "float8") if preset in PRESETS and not is_field else DTYPES
    if dtype and dtype not in dtypes:
        raise ValueError(f"{dtype!r} in {value!r} is not one of {', '.join(dtypes)}")
    if dim and not re.fullmatch(r"[1-9]\d*", dim, re.ASCII):
        raise ValueError(f"{dim!r} in {value!r} is not a number of elements")
    if preset in PRESETS and not is_field:
        if dim:
            raise ValueError(f"{preset} has the dim of the weight; omit {dim!r}")
        return [StateField(each, dtype or None, n) for each, n in PRESETS[preset].items()]
    if meant := None if is_field else _near_preset(preset):
        raise ValueError(f"{name!r}: did you mean {meant}? A field is field:{value}")
    try:
        check_name(name, "field")
    except InvalidInputError as error:
        raise ValueError(f"{error}; or one of {', '.join(PRESETS)}") from None
    return [StateField(name, dtype or None, int(dim) if dim else None)]


STATE = Spelled("adam|adagrad|…|NAME[:DTYPE[:DIM]]", _state)
"""Optimizer state: a preset (`adam`, `adam:bfloat16`) or one field `NAME[:DTYPE[:DIM]]`."""


Place = Path | str
"""A path, or a URL in an object store."""


class PlaceType(click.Path):
    """A path, or a URL unless `on_disk`."""

    def __init__(self, *, on_disk: bool = False) -> None:
        super().__init__(path_type=Path, readable=False)  # its reader reports errors
        self._on_disk = on_disk

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a Path or a URL."""
        if "://" not in str(value):
            return super().convert(value, param, ctx)
        if self._on_disk:
            self.fail(
                f"{value} is not on a disk: save it to a disk first (tierstore save {value} PATH)",
                param,
                ctx,
            )
        return str(value)


def full_name(place: Place) -> str:
    """Return a path made absolute, or a URL."""
    return place if isinstance(place, str) else os.path.abspath(place)


def _sep(text: str) -> str:
    character = {"tab": "\t", "\\t": "\t", "blanks": " "}.get(text, text)
    if len(character) != 1:
        raise ValueError(f"{text!r} is not one character, nor tab")
    return character


KEY_COLUMN = Spelled("NAME|N|none", lambda text: False if text == "none" else text)
"""The column of keys: its name, its number from 1, or `none`."""
SEP = Spelled("CHAR|tab", _sep)
"""A separator: one character, or `tab`."""
VERSION_OF = Spelled(
    "V", lambda text: int(text) if text.isdecimal() else text, completes=complete_version
)
"""A version, by number or name."""
FIELD_NAMES = Spelled("NAME,…", lambda text: text.split(","), completes=complete_field)
"""Fields, divided by commas."""
STORE = click.argument("store", type=PlaceType(on_disk=True))
READ_STORE = click.argument("store", type=PlaceType())


TABLE = click.option(
    "--table",
    metavar="NAME",
    shell_complete=complete_table,
    help="The table; optional if the store has only one.",
)
FIELD = click.option(
    "--field",
    metavar="NAME",
    shell_complete=complete_field,
    help="The field of the table; default: the first, `weight`.",
)


FIELDS = click.option(
    "--field",
    "fields",
    type=FIELD_NAMES,
    help="The field of the table, or several, divided by commas; default: the first, `weight`.",
)
VERSION = click.option(
    "--version",
    type=VERSION_OF,
    help="A kept version, by number or name; default: the newest.",
)
KEYS = click.option(
    "--keys", metavar="FILE", help="File of keys of the rows: .txt, .npy or FILE.parquet:COLUMN."
)
IDS = click.option(
    "--id", "by_id", multiple=True, type=ROW_ID, metavar="N", help="A row by its id."
)
KEY = click.option("--key", "by_key", multiple=True, metavar="KEY", help="A row by its key.")
IDS_FROM = click.option(
    "--ids-from", metavar="FILE", help="Rows by ids in a file: .txt, .npy, FILE.parquet:COL, or -."
)
KEYS_FROM = click.option(
    "--keys-from", metavar="FILE", help="Rows by keys in a file: as of ids, a key a line in .txt."
)
RANGE = click.option("--range", "span", type=ROW_RANGE, help="Rows A to B-1; may lack an end.")
CHANGED = click.option(
    "--changed", "listed", is_flag=True, help="List the ids, and keys, of the rows that changed."
)
REMOVED = click.option("--removed", is_flag=True, help="List the keys that have no row any more.")
FORCE = click.option("--force", is_flag=True, help="Replace what is there.")
LAST = click.option(
    "--last", type=click.IntRange(min=1), metavar="N", help="How many stay, the newest."
)
COUNT = click.option(
    "--count", type=click.IntRange(min=1), metavar="N", help="How many to show; default: no end."
)
DTYPE = click.Choice(list(DTYPES))
MEMORY = click.option(
    "--memory",
    type=BYTES,
    default="512MiB",
    help="Limit of the memory for reading a file, on top of a block of rows.",
)


def text_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that describe a text file."""
    for option in (
        click.option(
            "--errors",
            type=click.Choice(["strict", "replace"]),
            default="strict",
            help="Refuse words that are no UTF-8, or read them with � in them.",
        ),
        click.option("--comment", metavar="CHAR", help="Leave out lines that begin with it."),
        click.option(
            "--skip-lines",
            type=int,
            default=0,
            show_default=False,
            metavar="N",
            help="Leave out the first N lines.",
        ),
        click.option("--null", multiple=True, metavar="TEXT", help="Read such cells as NaN."),
        click.option(
            "--vector",
            default="",
            show_default=False,
            metavar="COLUMNS",
            help="The columns of numbers, such as x,y or x0..x7; others are left out.",
        ),
        click.option("--decimal", type=click.Choice([".", ","]), help="The decimal mark."),
        click.option("--sep", type=SEP, help="What is between cells."),
        click.option("--key-column", type=KEY_COLUMN, help="The column of keys in SRC."),
        click.option(
            "--header/--no-header", default=None, help="Whether the first line names columns."
        ),
    ):
        function = option(function)
    return function
