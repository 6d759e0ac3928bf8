"""Sweeping: removing files that no kept manifest names.

A writer knows what dies with a manifest that goes, and removes just that. What a crash left is
known to nobody: it is looked for once, when a writer opens the store, and only where the directory
shows what the manifests say. A listing that does not is no proof that anything is dead.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby

from tierstore import _io
from tierstore._disk import generation as generations
from tierstore._disk.manifest import (
    DELTA_NAME,
    DIGEST_NAME,
    GENERATION_NAME,
    KEYS_NAME,
    MANIFEST_NAME,
    PAYLOAD_NAME,
    TEMPORARY_NAME,
    Manifest,
    manifest_name,
)
from tierstore.errors import FormatError, UpkeepWarning
from tierstore.spec import TABLE_NAME

__all__ = ["remove_generation", "remove_leftovers", "remove_paths"]

_NUMBER = re.compile(r"\d{20}", re.ASCII)


def remove_paths(directory: _io.Directory, paths: Iterable[str]) -> None:
    """Remove files by their path in the store; those that are gone already are no error."""
    for parent, group in groupby(sorted(paths), lambda path: path.rpartition("/")[0]):
        names = [path.rpartition("/")[2] for path in group]
        if not parent:
            for name in names:
                directory.unlink(name)
            continue
        table_name, _, generation = parent.partition("/")
        try:
            with (
                directory.directory(table_name) as table,
                table.directory(generation) as within,
            ):
                for name in names:
                    within.unlink(name)
        except FileNotFoundError:
            continue


def remove_generation(directory: _io.Directory, path: str) -> None:
    """Remove a generation with all its files, and the table's directory if nothing else is left."""
    table_name, _, generation = path.partition("/")
    try:
        with directory.directory(table_name) as table:
            generations.remove_generation(table, generation)
    except FileNotFoundError:
        return
    directory.remove_directory(table_name)


def remove_leftovers(
    directory: _io.Directory, newest: Manifest, needed: Collection[str], *, is_read: bool
) -> None:
    """Remove what a writer that was killed left: files of this format that no manifest names.

    Nothing is removed, with a warning, where the directory lacks what the manifests name or holds
    what only a later manifest can name. A generation stays while `is_read` says that versions are
    read that are not kept.
    """
    found = set(_files(directory))
    lacking = sorted({manifest_name(newest.seq), *needed} - found)
    left = {path for path in found - set(needed) if MANIFEST_NAME.fullmatch(path) is None}
    latest = {path: newest.seq + (path in left) for path in found}
    ahead = sorted(path for path in found if _number(path) > latest[path])
    if lacking or ahead:
        what = f"lacks {lacking[0]}" if lacking else f"holds {ahead[0]}"
        warnings.warn(
            f"{directory.path} {what}, which does not go with {manifest_name(newest.seq)}, the "
            "newest manifest: nothing was removed; run 'tierstore verify'",
            UpkeepWarning,
            stacklevel=2,
        )
        return
    unused = {path for path in left if _is_generation(path)}
    for path in sorted(unused):
        if not is_read:
            remove_generation(directory, path)
    remove_paths(
        directory, {path for path in left - unused if path.rpartition("/")[0] not in unused}
    )
    for path in filter(_is_generation, sorted(needed)):
        table_name, _, name = path.partition("/")
        with directory.directory(table_name) as table:
            generations.remove_partial_files(table, name)


def _is_generation(path: str) -> bool:
    return GENERATION_NAME.fullmatch(path.rpartition("/")[2]) is not None


def _files(directory: _io.Directory) -> Iterator[str]:
    """Yield the paths of all entries whose names this format gives, but the files of bases."""
    for name in directory.names():
        if any(form.fullmatch(name) for form in (PAYLOAD_NAME, MANIFEST_NAME, TEMPORARY_NAME)):
            yield name
        elif TABLE_NAME.fullmatch(name) and directory.is_directory(name):
            with directory.directory(name) as table:
                for generation in filter(GENERATION_NAME.fullmatch, table.names()):
                    yield from _generation(table, f"{name}/{generation}", generation)


def _generation(table: _io.Directory, path: str, name: str) -> Iterator[str]:
    """Yield the path of a generation and of its files; nothing, with a warning, for another."""
    try:
        with table.directory(name) as directory:
            names = directory.names()
    except FormatError as error:
        warnings.warn(f"{error}: it is left alone", UpkeepWarning, stacklevel=2)
        return
    yield path
    for entry in names:
        if any(form.fullmatch(entry) for form in (DELTA_NAME, KEYS_NAME, DIGEST_NAME)):
            yield f"{path}/{entry}"


def _number(path: str) -> int:
    """Return the number of the manifest that a file was made for; 0 where its name has none."""
    found = _NUMBER.search(path.rpartition("/")[2])
    return int(found[0]) if found else 0
