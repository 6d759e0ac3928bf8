"""Files that are streams: `-`, pipes and descriptors, by way of a temporary file.

A file is read more than once, from the start, and written so that it is complete or not there. A
stream allows neither, so it takes its size on the disk for as long as the command runs.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import click

from tierstore.errors import StoreFullError, TierStoreError
from tierstore_cli.failure import stream_errors, writing_output

_BLOCK_BYTES = 1 << 20

STREAM = "-"
"""Standard input or output, in place of a file."""

FORMAT = click.option(
    "--format", "suffix", metavar="SUFFIX", help="Format of - or of a pipe: csv, vec.gz, npy, …"
)


def is_standard_output(place: object) -> bool:
    """Whether a place is `-`, or its name in Linux, which may be a file then."""
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
    """Return the name of the file in place of a stream, with the suffix of its format."""
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

    This is `source` itself, except for standard input, pipes, and files with another suffix.
    Errors of the body name the source.
    """
    if source != STREAM and suffix is None:
        yield source
        return
    what = "standard input" if source == STREAM else source
    with _temporary(source, suffix, what) as path:
        if source != STREAM and (Path(source).is_file() or Path(source).is_dir()):
            path.symlink_to(Path(source).resolve())
        elif source != STREAM:
            with open(source, "rb") as stream:
                _keep(_read(stream, source), path)
        else:
            _keep(standard_input(), path)
        yield str(path)


@contextmanager
def into_stream(target: str, suffix: str | None) -> Iterator[Path]:
    """Yield a path to write to; the file is copied to `target` when the body has ended."""
    with _temporary(target, suffix, "standard output" if target == STREAM else target) as path:
        yield path
        if path.is_dir():
            raise click.UsageError(f"{path.suffix} is a directory, which a stream cannot hold")
        with path.open("rb") as file:
            if target == STREAM:
                for block in _blocks(file):
                    with writing_output():
                        sys.stdout.buffer.write(block)
            else:
                with stream_errors(f"write to {target}"), open(target, "wb") as stream:
                    stream.writelines(_blocks(file))


def standard_input() -> Iterator[bytes]:
    """Return the bytes of standard input in blocks; raises Failure where it cannot be read."""
    return _read(sys.stdin.buffer, "standard input")


def _read(stream: IO[bytes], what: str) -> Iterator[bytes]:
    while True:
        with stream_errors(f"read {what}"):
            block = stream.read(_BLOCK_BYTES)
        if not block:
            return
        yield block


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_BLOCK_BYTES):
        yield block


@contextmanager
def _temporary(stream: str, suffix: str | None, what: str) -> Iterator[Path]:
    """Yield the path of the file in place of a stream; errors name the stream instead."""
    with tempfile.TemporaryDirectory(prefix="tierstore-") as directory:
        path = Path(directory, _name(stream, suffix))
        try:
            yield path
        except TierStoreError as error:
            if isinstance(error, StoreFullError) and str(path) in str(error):
                raise StoreFullError(
                    f"no space in {tempfile.gettempdir()} for {what}, of which a copy is kept "
                    "there meanwhile; free some space, or set TMPDIR to a directory on another disk"
                ) from error
            error.args = (str(error).replace(str(path), what),)
            raise


def _keep(blocks: Iterator[bytes], path: Path) -> None:
    """Write what a stream holds to a file; raises StoreFullError, which names the file."""
    try:
        with path.open("xb") as file:
            file.writelines(blocks)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise StoreFullError(f"no space to write {path}") from error
