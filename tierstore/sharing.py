"""An export that several processes share: each writes a part of the target, one completes it.

Parts are files in a directory beside the target, `items.npy.parts`. Beside each is a note, which is
written last: it names the version that the part is of, and the rows. A part without a note is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tierstore._formats import Source, format_of, keys_beside, open_sink, open_source, read_keys
from tierstore._io import publish
from tierstore._progress import Overall, Progress, Shown, report_nothing, shown
from tierstore.errors import FormatError, InvalidInputError

__all__ = ["PartNote", "finish", "part_file", "write_note"]

_JOINED = (".npy", ".safetensors")
"""Files into which parts are copied."""
_LISTED = (".parquet",)
"""Files that a directory of parts is read as."""
_NAME = re.compile(r"part-(\d+)-of-(\d+)\.json", re.ASCII)
_SHOWN = 8


@dataclass(frozen=True)
class PartNote:
    """What a part holds; all but `rows` and `overflowed` is equal for the parts of a target.

    Attributes:
        store, version, table, fields: where the rows are from.
        dtype: element type in the file.
        dim: number of elements per row.
        keyed: whether rows have keys.
        all_rows: the first row of the target, and the last + 1.
        rows: those of the part.
        overflowed: values that became infinite.
    """

    store: str
    version: int | None
    table: str
    fields: list[str]
    dtype: str
    dim: int
    keyed: bool
    all_rows: list[int]
    rows: list[int]
    overflowed: int


def part_file(target: Path, number: int, count: int) -> Path:
    """Return the file for a part of a target, whose note is gone until `write_note`.

    Raises InvalidInputError for a format of which parts make no whole.
    """
    suffix = target.suffix.lower()
    format_of(target, write=True)
    if suffix not in (*_JOINED, *_LISTED):
        raise InvalidInputError(
            f"{target}: parts make no {suffix} file; export parts of {' '.join(_JOINED)}, or of "
            f"{' '.join(_LISTED)}, which becomes a directory"
        )
    place = _place(target)
    place.mkdir(exist_ok=True)
    file = place / f"part-{number:05d}-of-{count:05d}{suffix}"
    with contextlib.suppress(FileNotFoundError):
        file.with_suffix(".json").unlink()
    return file


def write_note(file: Path, about: PartNote) -> None:
    """State that a part is written."""
    with publish(file.with_suffix(".json"), force=True) as partial:
        partial.write_text(json.dumps(asdict(about)))


def finish(target: Path, *, force: bool = False, progress: Shown = None) -> PartNote:
    """Make a target of its parts, which it then has no more; return what it holds.

    A target that is there is replaced if `force`, or if it is that of an earlier try. Raises
    InvalidInputError where parts are missing or differ, FormatError where they are damaged,
    ExistsError, and FileNotFoundError without parts.
    """
    progress = shown(progress)
    place = _place(target)
    if not place.is_dir():
        raise FileNotFoundError(place)
    files, notes = _complete(target, place)
    lost = sum(each.overflowed for each in notes)
    whole = replace(notes[0], rows=notes[0].all_rows, overflowed=lost)
    begun = place / "finishing"
    force = force or begun.exists()
    if not (force or os.path.lexists(target)):
        begun.touch()  # so that a second try replaces what the first one made
    if target.suffix.lower() in _LISTED:
        _list(target, files, force=force)
        report_nothing(progress)
    else:
        _join(target, files, notes, force=force, progress=progress)
    shutil.rmtree(place)
    return whole


def _place(target: Path) -> Path:
    return target.with_name(f"{target.name}.parts")


def _complete(target: Path, place: Path) -> tuple[list[Path], list[PartNote]]:
    """Return the files of the parts in order, and their notes."""
    found: dict[tuple[int, int], PartNote] = {}
    for each in place.iterdir():
        if match := _NAME.fullmatch(each.name):
            found[int(match[1]), int(match[2])] = _read(each)
    counts = sorted({count for _, count in found})
    if len(counts) > 1:
        raise InvalidInputError(
            f"{place}: parts of exports in {' and in '.join(map(str, counts))} parts; remove those "
            "of one"
        )
    missing = [each for count in counts for each in range(count) if (each, count) not in found]
    if missing or not counts:
        shown = ", ".join(f"{number}/{counts[0]}" for number in missing[:_SHOWN]) or "all"
        more = ", …" if len(missing) > _SHOWN else ""
        raise InvalidInputError(
            f"{target}: parts are missing: {shown}{more}; write them with --part"
        )
    notes = [found[key] for key in sorted(found)]
    for name in asdict(notes[0]):
        given = [getattr(each, name) for each in notes]
        other = next((at for at, value in enumerate(given) if value != given[0]), None)
        if other is not None and name not in ("rows", "overflowed"):
            raise InvalidInputError(
                f"{target}: part 0 has {name} {given[0]}, part {other} has {given[other]}; write "
                "all parts with the same arguments, --version among them"
            )
    suffix = target.suffix.lower()
    files = [place / f"part-{number:05d}-of-{count:05d}{suffix}" for number, count in sorted(found)]
    gone = [each.name for each in files if not each.is_file()]
    if gone:
        raise FormatError(f"{place}: {gone[0]} is missing")
    return files, notes


def _read(path: Path) -> PartNote:
    try:
        return PartNote(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise FormatError(f"{path}: not the note of a part: {error}") from None


def _list(target: Path, files: list[Path], *, force: bool) -> None:
    """Make a directory of the parts."""
    with publish(target, force=force, replaceable=_is_listed) as partial:
        partial.mkdir()
        for each in files:
            try:
                os.link(each, partial / each.name)
            except OSError:  # a file system without links
                shutil.copyfile(each, partial / each.name)


def _is_listed(directory: Path) -> bool:
    """Whether a directory is one of parts, which another may replace."""
    return directory.is_symlink() or all(
        re.fullmatch(r"part-\d+-of-\d+\.\w+", each.name) for each in directory.iterdir()
    )


def _join(
    target: Path,
    files: list[Path],
    notes: list[PartNote],
    *,
    force: bool,
    progress: Progress | None,
) -> None:
    """Copy the parts into one file."""
    first = notes[0]
    start, end = first.all_rows
    report, done = Overall(progress, end - start), 0
    keys: Any = None
    if first.keyed:
        parts = [_keys_of(file) for file in files]
        one_type = {each.dtype if isinstance(each, np.ndarray) else None for each in parts}
        if len(one_type) == 1 and None not in one_type:
            keys = np.concatenate(parts)
        else:  # of two types of integers NumPy would make floats
            keys = [key for each in parts for key in each]
    with open_sink(
        target,
        rows=end - start,
        dim=first.dim,
        dtype=first.dtype,
        field=first.fields[0],
        keys=keys,
        first_row=start,
        force=force,
    ) as sink:
        for file, about in zip(files, notes, strict=True):
            with open_source(file, expand=True) as source:
                _check(source, file, about)
                for block in source.blocks():
                    sink.write(block)
                    done += len(block)
                    report(done, end - start)
    report.finish()


def _check(source: Source, file: Path, about: PartNote) -> None:
    """Raise FormatError for a file that is not what its note says."""
    if source.dtype != about.dtype:
        raise InvalidInputError(
            f"{file}: {about.dtype} is read as {source.dtype}: parts of it make no whole; export "
            "floats (--dtype), or .parquet"
        )
    first, stop = about.rows
    if (source.rows, source.dim) != (stop - first, about.dim):
        raise FormatError(f"{file}: not the rows {first}:{stop} of {about.dim} {about.dtype}")


def _keys_of(file: Path) -> Any:
    """Return the keys of a part, which may be in a file beside it."""
    if format_of(file).keys == "never":
        return read_keys(keys_beside(file))
    with open_source(file, expand=True) as source:
        return source.keys
