"""Types of option values, and the options that several commands share."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

import tierstore
from tierstore.budget import parse_bytes
from tierstore.errors import InvalidInputError, InvalidTypeError, TierStoreError
from tierstore.initializers import Initializer, parse_initializer, syntax
from tierstore.spec import DTYPES, Field, Scale, check_name

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # not generic in older versions of click

SeededInitializer = Callable[[int], Initializer]
Rows = tuple[int, int | None]


class RowRange(ParamType):
    """Rows `A:B`: A to B-1; either may be omitted."""

    name = "A:B"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Rows:
        """Return (first, last + 1), with None for an omitted end."""
        match = re.fullmatch(r"(\d*):(\d*)", str(value), re.ASCII)
        if match is None:
            self.fail(f"{value!r}: write A:B for rows A to B-1, such as 0:5", param, ctx)
        start, stop = int(match[1] or 0), int(match[2]) if match[2] else None
        if stop is not None and stop <= start:
            self.fail(f"{value!r} contains no row: {stop} is not after {start}", param, ctx)
        return start, stop


Share = tuple[int, int]


class Part(ParamType):
    """One of N equal parts, `K/N`, where K counts from 0 as ranks and array tasks do."""

    name = "K/N"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Share:
        """Return (K, N)."""
        match = re.fullmatch(r"(\d+)/(0*[1-9]\d*)", str(value), re.ASCII)
        if match is None:
            self.fail(f"{value!r}: write K/N, such as 0/4 for the first of 4 parts", param, ctx)
        number, count = int(match[1]), int(match[2])
        if number >= count:
            self.fail(f"{value!r}: the {count} parts are 0 to {count - 1}", param, ctx)
        return number, count


class Bytes(ParamType):
    """A number of bytes, such as `8GiB`."""

    name = "SIZE"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the bytes."""
        try:
            return parse_bytes(str(value))
        except (InvalidInputError, InvalidTypeError) as error:
            self.fail(str(error), param, ctx)


class Rate(Bytes):
    """A number of bytes a second, such as `25GB/s`."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the bytes a second; `/s` may be left out."""
        return super().convert(re.sub(r"\s*/\s*s(ec)?$", "", str(value)), param, ctx)


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


class Count(ParamType):
    """A number of rows or elements, such as `10M`, `1e6` or `1_000`; at least 1, or `least`."""

    name = "N"

    def __init__(self, least: int = 1) -> None:
        """Take numbers from `least` on."""
        self._least = least

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number."""
        try:
            return whole_number(str(value), self._least)
        except ValueError:
            why = f"is no number from {self._least} on, such as 1000000, 1e6 or 10M"
            self.fail(f"{value!r} {why}", param, ctx)


def whole_number(text: str, least: int = 1) -> int:
    """Return the whole number from `least` on that a text spells; raises ValueError."""
    match = _COUNT.fullmatch(text)
    number = Decimal(re.sub("[_,]", "", match[1])) * _THOUSANDS[match[2]] if match else -1
    if number < least or number != int(number):
        raise ValueError(text)
    return int(number)


class HitRate(ParamType):
    """A share of ids, such as `90%` or `0.9`."""

    name = "PERCENT"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the fraction."""
        text = str(value)
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            self.fail(f"{text!r} is no share of ids, such as 90% or 0.9", param, ctx)
        return share


class InitializerType(ParamType):
    """An initializer, written as a call: `normal(0,0.01)`."""

    name = syntax()

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> SeededInitializer:
        """Return a function from a seed to the initializer."""
        try:
            return parse_initializer(str(value))
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)


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
    option = click.option(
        "--init", "initializer", type=InitializerType(), metavar=InitializerType.name, help=of
    )
    return lambda function: option(SEED(function))


def state_option(of: str) -> Callable[[Any], Any]:
    """Return the option of the state of an optimizer."""
    return click.option("--state", type=State(), multiple=True, metavar=State.name, help=of)


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
        raise click.UsageError("--seed is that of --init; give both")
    return None


Filling = str | SeededInitializer
"""How to fill rows: a name, or a function from a seed to an initializer."""


class FillType(InitializerType):
    """A replacement of damaged rows."""

    name = "version|zeros|nan|INITIALIZER"

    def convert(  # type: ignore[override]
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Filling:
        """Return a name, or a function from a seed to an initializer."""
        if value in ("version", "zeros", "nan"):
            return str(value)
        return super().convert(value, param, ctx)


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


def _near_preset(name: str) -> str | None:
    """Return the preset that a word misspells or begins."""
    longer = [preset for preset in PRESETS if preset.startswith(f"{name}-")]
    near = [*longer, *difflib.get_close_matches(name, PRESETS, 1, 0.75)]
    return next(iter(near), None)


class State(ParamType):
    """Optimizer state: a preset (`adam`, `adam:bfloat16`) or one field `NAME[:DTYPE[:DIM]]`."""

    name = "adam|adagrad|…|NAME[:DTYPE[:DIM]]"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[StateField]:
        """Return the fields."""
        text = str(value)
        is_field = text.startswith("field:")
        name, dtype, dim = (*text.removeprefix("field:").split(":", 2), "", "")[:3]
        preset = name.lower()
        dtypes = (*DTYPES, "float8") if preset in PRESETS and not is_field else DTYPES
        if dtype and dtype not in dtypes:
            self.fail(f"{dtype!r} in {value!r} is not one of {', '.join(dtypes)}", param, ctx)
        if dim and not re.fullmatch(r"[1-9]\d*", dim, re.ASCII):
            self.fail(f"{dim!r} in {value!r} is not a number of elements", param, ctx)
        if preset in PRESETS and not is_field:
            if dim:
                self.fail(f"{preset} has the dim of the weight; omit {dim!r}", param, ctx)
            return [StateField(each, dtype or None, n) for each, n in PRESETS[preset].items()]
        if meant := None if is_field else _near_preset(preset):
            self.fail(f"{name!r}: did you mean {meant}? A field is field:{value}", param, ctx)
        try:
            check_name(name, "field")
        except InvalidInputError as error:
            self.fail(f"{error}; or one of {', '.join(PRESETS)}", param, ctx)
        return [StateField(name, dtype or None, int(dim) if dim else None)]


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


class KeyColumnType(ParamType):
    """The column of keys: its name, its number from 1, or `none`."""

    name = "NAME|N|none"

    def convert(self, value: Any, param: Any, context: Any) -> str | bool:
        """Return a name or a number as text, False for none."""
        return False if value in ("none", False) else str(value)


class SepType(ParamType):
    """A separator: one character, or `tab`."""

    name = "CHAR|tab"

    def convert(self, value: Any, param: Any, context: Any) -> str:
        """Return the character."""
        text = {"tab": "\t", "\\t": "\t", "blanks": " "}.get(value, str(value))
        if len(text) != 1:
            self.fail(f"{value!r} is not one character, nor tab", param, context)
        return text


STORE = click.argument("store", type=PlaceType(on_disk=True))
READ_STORE = click.argument("store", type=PlaceType())


class VersionType(ParamType):
    """A version, by number or name."""

    name = "V"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the names and numbers of the versions that can be opened."""
        return complete_version(ctx, param, incomplete)

    def convert(self, value: Any, param: Any, context: Any) -> int | str:
        """Return digits as a number."""
        return int(value) if str(value).isdecimal() else str(value)


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


class FieldsType(ParamType):
    """Fields, divided by commas."""

    name = "NAME,…"

    def convert(self, value: Any, param: Any, context: Any) -> Sequence[str]:
        """Return the names."""
        return str(value).split(",")


FIELDS = click.option(
    "--field",
    "fields",
    type=FieldsType(),
    metavar=FieldsType.name,
    shell_complete=complete_field,
    help="The field of the table, or several, divided by commas; default: the first, `weight`.",
)
VERSION = click.option(
    "--version",
    type=VersionType(),
    metavar="V",
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
RANGE = click.option("--range", "span", type=RowRange(), help="Rows A to B-1; may lack an end.")
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
    type=Bytes(),
    default="512MiB",
    show_default=True,
    metavar=Bytes.name,
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
            "--skip-lines", type=int, default=0, metavar="N", help="Leave out the first N lines."
        ),
        click.option("--null", multiple=True, metavar="TEXT", help="Read such cells as NaN."),
        click.option(
            "--vector",
            default="",
            metavar="COLUMNS",
            help="The columns of numbers, such as x,y or x0..x7; others are left out.",
        ),
        click.option("--decimal", type=click.Choice([".", ","]), help="The decimal mark."),
        click.option("--sep", type=SepType(), help="What is between cells."),
        click.option("--key-column", type=KeyColumnType(), help="The column of keys in SRC."),
        click.option(
            "--header/--no-header", default=None, help="Whether the first line names columns."
        ),
    ):
        function = option(function)
    return function
