"""Files at URLs of fsspec: copied to be read; written as a stream, to appear complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tierstore._io import unreachable
from tierstore.errors import ExistsError, FormatError

__all__ = ["RemoteFile", "fetch", "publish_remote"]


class RemoteFile:
    """A place that a format writes to as to a path: it opens it once, for writing."""

    def __init__(self, system: Any, path: str, *, replaces: bool) -> None:
        """Write to `path` in a file system of fsspec, where it `replaces` a file or is new."""
        self._system = system
        self._path = path
        self._replaces = replaces
        self._file: Any = None

    def open(self, mode: str) -> IO[bytes]:
        """Open the file, as a stream of bytes."""
        self._file = self._system.open(self._path, "wb", autocommit=False)
        stream: IO[bytes] = self._file
        return stream

    def commit(self) -> None:
        """Give the file its name."""
        self._file.commit()

    def discard(self) -> None:
        """Remove what was written."""
        if self._file is not None:
            with suppress(Exception):  # the error before it says more
                self._file.discard()
                if not self._replaces and self._system.exists(self._path):  # as in memory
                    self._system.rm(self._path)


def fetch(url: str, path: Path) -> None:
    """Copy a file at a URL to a new path; raises FormatError if there is none."""
    try:
        import fsspec

        with fsspec.open(url, "rb") as source, path.open("xb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except FileNotFoundError as error:
        raise FormatError(f"{url}: no such file") from error
    except Exception as error:  # every kind of place has its own errors
        raise unreachable(url, error) from error


@contextmanager
def publish_remote(url: str, *, force: bool) -> Iterator[RemoteFile]:
    """Create a file at a URL that appears complete, or not at all.

    Raises ExistsError unless `force` is set, and MissingExtraError if a package is missing.
    """
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        exists = system.exists(path)
    except Exception as error:  # every kind of place has its own errors
        raise unreachable(url, error) from error
    if exists and not force:
        raise ExistsError(f"{url} exists; choose another name, or replace it (force=True, --force)")
    file = RemoteFile(system, path, replaces=exists)
    try:
        yield file
        file.commit()
    except BaseException:
        file.discard()
        raise
