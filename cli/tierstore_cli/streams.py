"""Files that are streams: `-`, pipes and descriptors, by way of a temporary file.

A file is read more than once, from the start, and written so that it is complete or not there. A
stream allows neither, so it takes its size on the disk for as long as the command runs.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from tierstore.errors import TierStoreError

__all__ = ["FORMAT", "STREAM", "as_file", "into_stream", "is_standard_output", "is_stream"]

STREAM = "-"
"""Standard input or output, in place of a file."""

FORMAT = click.option(
    "--format", "suffix", metavar="SUFFIX", help="Format of - or of a pipe: csv, vec.gz, npy, …"
)


def is_standard_output(place: object) -> bool:
    """Whether a place is `-`, or what Linux calls it, which may be a file then."""
    return str(place) in (STREAM, "/dev/stdout", "/dev/fd/1")


def is_stream(place: object) -> bool:
    """Whether a place is `-`, a pipe or a device, which takes bytes in order and once."""
    if str(place) == STREAM:
        return True
    try:
        mode = os.stat(str(place)).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _name(what: str, suffix: str | None) -> str:
    """Return the name of the file that stands for a stream, with the suffix of its format."""
    if suffix is None and what != STREAM:
        suffix = Path(what).name.partition(".")[2] or None
    if suffix is None:
        raise click.UsageError(f"{what} has no suffix that names its format: give --format")
    if "/" in suffix:
        raise click.UsageError(f"{suffix!r} is no suffix of a file, such as csv or vec.gz")
    return f"stream.{suffix.lstrip('.')}"


@contextmanager
def as_file(source: str, suffix: str | None) -> Iterator[str]:
    """Yield a path that can be read again and again, with the suffix of its format.

    That is `source` itself, but for standard input, pipes, and files with another suffix. Errors of
    the body name the source.
    """
    if source != STREAM and suffix is None:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="tierstore-") as directory:
        path = Path(directory, _name(source, suffix))
        if source != STREAM and (Path(source).is_file() or Path(source).is_dir()):
            path.symlink_to(Path(source).resolve())
        elif source != STREAM:
            with open(source, "rb") as stream, path.open("xb") as file:
                shutil.copyfileobj(stream, file, 1 << 20)
        else:
            with path.open("xb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        try:
            yield str(path)
        except TierStoreError as error:
            what = "standard input" if source == STREAM else source
            error.args = (str(error).replace(str(path), what),)
            raise


@contextmanager
def into_stream(target: str, suffix: str | None) -> Iterator[Path]:
    """Yield a path to write to; the file is copied to `target` when the body has ended."""
    with tempfile.TemporaryDirectory(prefix="tierstore-") as directory:
        path = Path(directory, _name(target, suffix))
        yield path
        if path.is_dir():
            raise click.UsageError(f"{path.suffix} is a directory, which a stream cannot hold")
        with path.open("rb") as file:
            if target == STREAM:
                shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
                sys.stdout.flush()
            else:
                with open(target, "wb") as stream:
                    shutil.copyfileobj(file, stream, 1 << 20)
