"""Open the store of a command, and choose its table, field and rows."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import click

import tierstore
from tierstore import Store, Table
from tierstore.errors import (
    ConcurrentWriterError,
    DeviceError,
    LockedError,
    MissingExtraError,
    RowIndexError,
    UnknownNameError,
)
from tierstore_cli.bars import Progress
from tierstore_cli.command import MADE, UNTESTED, WAITING, WRITTEN
from tierstore_cli.output import Output
from tierstore_cli.params import Place, Rows, Share, full_name

if TYPE_CHECKING:  # reading files takes time to import, which few commands do
    from tierstore import Attached

Result = TypeVar("Result")

_POLL_SECONDS = 0.1

PARTITIONS = "partitions"
"""The directory in a store that is in partitions."""

NO_CACHE = tierstore.Budget(host=0, gpu=0)
"""A command reads each row once and needs no caches."""
_ON_GPU = tierstore.Budget(host_rows=1, gpu_rows=1)
"""The smallest budget with which a table is on a GPU, to which rows are then streamed."""


def open_store(
    path: Place,
    mode: Literal["r", "r+"] = "r",
    version: int | str | None = None,
) -> Store:
    """Open a store without caches; a writer waits for its lock for the seconds of --wait.

    A writer opens all partitions of a store that has some.
    """

    def work() -> Store:
        options: dict[str, Any] = {"budget": NO_CACHE, "allow_untested": allow_untested()}
        if mode == "r+" and is_in_partitions(path):
            import tierstore.distributed as distributed  # few stores are in partitions

            return cast(Store, distributed.open(path, **options))
        return tierstore.open(path, mode, version=version, **options)

    if mode == "r":
        return work()
    store = awaited(work)
    _context_meta().setdefault(WRITTEN, []).append((path, store, store.version))
    return store


@dataclass
class StoreChange:
    """A store that a command changes, a bar that says how far it is, and what is shown then."""

    path: Path
    store: Store
    progress: Progress
    shown: tuple[dict[str, Any], str] = ({}, "")

    def done(self, text: str, end: str | None = None, /, **data: Any) -> None:
        """Say what is done, for people and as JSON, where the store and its version are added."""
        version = self.store.version
        end = f"; {self.path} is now at version {version}" if end is None else end
        data.setdefault("version", version)
        self.shown = ({"store": full_name(self.path), **data}, text + end)


@contextlib.contextmanager
def changing(out: Output, path: Path, label: str) -> Iterator[StoreChange]:
    """Open a store for writing; show what is done to it once it is closed."""
    with open_store(path, "r+") as store, Progress(label) as progress:
        change = StoreChange(path, store, progress)
        yield change
    out.show(*change.shown)


def is_in_partitions(path: Place) -> bool:
    """Whether there is a store at a path of which ranks write partitions."""
    return isinstance(path, Path) and os.path.isdir(path / PARTITIONS)


def allow_untested() -> bool:
    """Whether --allow-untested is given."""
    return bool(_context_meta().get(UNTESTED, False))


def _context_meta() -> dict[str, Any]:
    context = click.get_current_context(silent=True)
    return {} if context is None else context.meta


def makes(path: Place) -> None:
    """Have an interrupt tell whether a new store has appeared at `path`, if that is free yet."""
    if isinstance(path, Path) and not os.path.lexists(path):
        _context_meta().setdefault(MADE, []).append(path)


def open_to_read(
    path: Place, version: int | str | None = None, *, device: str = "cpu"
) -> Store | Attached:
    """Open a store without caches; or a file of another program, which is read in place.

    A store is a directory, and a file is FILE or FILE:NAME, or a directory FILE.zarr. `device`
    "auto" is a GPU where one can be had.
    """
    if device == "auto":
        if importlib.util.find_spec("cupy") is not None:
            with contextlib.suppress(DeviceError, MissingExtraError):
                return open_to_read(path, version, device="cuda")
        device = "cpu"
    budget = NO_CACHE if device == "cpu" else _ON_GPU
    file, name = _file_and_name(path)
    if file is None:
        return tierstore.open(path, version=version, budget=budget, device=device)
    if version is not None:
        raise click.UsageError(f"{file} has no versions; leave --version out")
    table = re.sub(r"[^A-Za-z0-9_-]", "_", name or file.stem)[-64:] or "rows"
    return tierstore.attach({table: str(path)}, budget=budget, device=device)


def _file_and_name(path: Place) -> tuple[Path | None, str]:
    """Split FILE:NAME or FILE::NAME; the file is None for what is no file but a store."""
    text = str(path)
    ends = [len(text), *(match.start() for match in re.finditer(":", text))]
    for end in () if "://" in text else ends:
        file = Path(text[:end])
        if file.suffix and (
            os.path.isfile(file) or (file.suffix == ".zarr" and os.path.isdir(file))
        ):
            return file, text[end:].strip(":")
    return None, ""


def awaited(work: Callable[[], Result]) -> Result:
    """Call `work` until no LockedError is raised, for at most the seconds of --wait."""
    seconds = _context_meta().get(WAITING, 0.0)
    limit = time.monotonic() + seconds
    while True:
        try:
            return work()
        except ConcurrentWriterError:
            raise
        except LockedError:
            left = limit - time.monotonic()
            if left <= 0:
                raise
            time.sleep(min(_POLL_SECONDS, left))


def choose_table(store: Mapping[str, Table], name: str | None) -> Table:
    """Return the table of that name, or the only table if `name` is None."""
    if name is not None:
        return store[name]
    if not store:
        raise click.UsageError("the store has no tables")
    if len(store) != 1:
        names = ", ".join(store)
        raise click.UsageError(f"the store has several tables, {names}: choose one with --table")
    (table,) = store.values()
    return table


def choose_field(table: Table, name: str | None) -> str:
    """Return `name`, or the name of the first field if it is None; raises UnknownNameError."""
    if name is None:
        return next(iter(table.fields))
    if name not in table.fields:
        known = ", ".join(table.fields)
        raise UnknownNameError(f"table {table.name!r} has no field {name!r}, only {known}")
    return name


def choose_fields(table: Table, names: Sequence[str] | None) -> list[str]:
    """Return `names`, or that of the first field if it is None; raises UnknownNameError."""
    return [choose_field(table, name) for name in names or list(table.fields)[:1]]


def choose_rows(table: Table, rows: Rows | None, part: Share | None = None) -> tuple[int, int]:
    """Return (first, last + 1) of the rows, by default of all, or of one of N equal parts of them.

    All rows of a table by key may be none, and so are its parts. Raises RowIndexError.
    """
    start, stop = rows or (0, None)
    stop = table.rows if stop is None else stop
    if not (start < stop <= table.rows or start == stop == table.rows == 0):
        raise RowIndexError(
            f"rows {start}:{stop} are outside table {table.name!r}, which has rows 0:{table.rows}"
        )
    if part is not None:
        number, count = part
        first, end = (start + (stop - start) * each // count for each in (number, number + 1))
        if first == end and start < stop:
            raise RowIndexError(f"{stop - start} rows are too few for {count} parts")
        return first, end
    return start, stop


def version_of(opened: Store | Attached) -> int | None:
    """Return the version that is open; a file of another program has none."""
    return opened.version if isinstance(opened, Store) else None
