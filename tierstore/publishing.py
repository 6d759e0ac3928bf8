"""Publishes the tables of a version for servers, under a name that never changes.

    serving/
      current -> version-12        what servers open: serving/current/item.npy
      version-12/  item.npy  user.npy  user.keys.npy  version.json
      version-9/

A version's directory appears complete, then the link is replaced in one step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore import _io
from tierstore._html import brief
from tierstore._kinds import check_store
from tierstore._progress import Overall, Progress, Shown, report_nothing, shown
from tierstore._store.versions import refuse_inside_store
from tierstore.errors import ExistsError, InvalidInputError
from tierstore.exporting import export_table

if TYPE_CHECKING:
    from tierstore._store.store import Store

__all__ = ["PublishResult", "publish_tables"]

_LINK, _NOTE = "current", "version.json"
_VERSION = re.compile(r"version-(\d+)", re.ASCII)


@dataclass(frozen=True)
class PublishResult:
    """What was published.

    Attributes:
        path: the directory of the version, to which the link leads.
        version: the version of the store.
        changed: False if the link led to this version already, and nothing was written.
        removed: the older versions whose directories were removed.
    """

    __repr__ = brief

    path: Path
    version: int
    changed: bool
    removed: list[int]


def publish_tables(
    store: Store,
    directory: str | os.PathLike[str],
    *,
    tables: Iterable[str] | None = None,
    format: str = ".npy",
    keep: int = 2,
    progress: Shown = None,
) -> PublishResult:
    """Export tables of the open version, and make the link `directory/current` lead to them.

    Programs open `directory/current/item.npy`, which always is a complete file of the version that
    was published last; those that open several files resolve the link once. A kill or a power
    failure leaves the link at the old version or at the new one, and may leave files that take
    space: from an hour later on, an UpkeepWarning of a call that writes names them with their size.
    Files of versions that are removed remain readable to processes that have opened them.

    Args:
        store: a reader, or a writer without uncommitted rows.
        directory: where the versions are; it is created if its parent exists. One for each store.
        tables: names of the tables; all by default.
        format: suffix of the files, as for `export_table`.
        keep: how many versions remain, the newest included.
        progress: called with rows done and in all; True shows a bar.

    Raises InvalidTypeError for what is no store, InvalidInputError for uncommitted rows and for a
    directory in a store, ExistsError if the directory has versions of another store, LockedError
    while another call publishes there, and the errors of `export_table`.
    """
    progress = shown(progress)
    check_store(store, "publish_tables")
    if keep < 1:
        raise InvalidInputError(f"keep must be at least 1, not {keep}")
    if store.uncommitted_rows():
        raise InvalidInputError("there are uncommitted rows, which belong to no version: commit")
    names = list(store if tables is None else tables)
    place = Path(os.path.abspath(directory))
    target, link = place / f"version-{store.version}", place / _LINK
    note = {"store": store.uuid, "version": store.version, "step": store.step}
    note |= {"tables": names, "format": format}
    refuse_inside_store(target)
    with _made(place), _io.alone_in(place, "publishing to"):
        # It exists if a process was killed before it set the link, or if the link was set back.
        if os.path.exists(target):
            _check_note(target, note)
            report_nothing(progress)
        else:
            _check_store(place, store.uuid)
            _write(store, names, format, target, note, progress)
        changed = not (link.is_symlink() and os.readlink(link) == target.name)
        if changed:
            _io.relink(link, target.name)
        return PublishResult(target, store.version, changed, _remove_old(place, target, keep))


@contextlib.contextmanager
def _made(place: Path) -> Iterator[None]:
    """Make a directory unless it exists; remove it if the body fails and leaves it empty."""
    with _io.explained("create", str(place)):
        is_new = not place.is_dir()
        place.mkdir(exist_ok=True)
    try:
        yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                place.rmdir()
        raise


def _write(
    store: Store,
    names: list[str],
    format: str,
    target: Path,
    note: dict[str, object],
    progress: Progress | None,
) -> None:
    """Write the directory of a version, which appears complete."""
    report = Overall(progress, sum(store[name].rows for name in names))
    with _io.publish(target, kin=_is_own) as partial:
        partial.mkdir()
        for name in names:
            export_table(store[name], partial / f"{name}{format}", progress=report)
            report.passed(store[name].rows)
        (partial / _NOTE).write_text(json.dumps(note) + "\n", encoding="utf-8")
    report.finish()


def _is_own(name: str) -> bool:
    """Whether an entry has a name of those that are published here."""
    return name == _LINK or _VERSION.fullmatch(name) is not None


def _check_note(target: Path, note: dict[str, object]) -> None:
    """Raise ExistsError unless a directory is what would be written to it."""
    found = json.loads((target / _NOTE).read_text(encoding="utf-8"))
    if found != note:
        raise ExistsError(
            f"{target} has other tables, another format or the version of another store: {found}; "
            "publish to another directory",
            filename=str(target),
        )


def _check_store(place: Path, uuid: str) -> None:
    """Raise ExistsError if the link leads to a version of another store."""
    note = place / _LINK / _NOTE
    if os.path.isfile(note):
        found = json.loads(note.read_text(encoding="utf-8"))
        if found.get("store") != uuid:
            raise ExistsError(
                f"{place} has versions of the store {found.get('store')}, not of {uuid}; publish "
                "to another directory",
                filename=str(place),
            )


def _remove_old(place: Path, target: Path, keep: int) -> list[int]:
    """Remove all but the newest versions and the published one; return their numbers."""
    matches = map(_VERSION.fullmatch, os.listdir(place))
    versions = sorted((int(match[1]) for match in matches if match), reverse=True)
    others = [each for each in versions if f"version-{each}" != target.name]
    for version in others[keep - 1 :]:
        _io.withdraw(place / f"version-{version}")
    return sorted(others[keep - 1 :])
