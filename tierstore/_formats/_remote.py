"""Files at URLs of fsspec: copied before a read; written as a stream, and appear complete."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from tierstore._io import explained, unreachable
from tierstore.errors import (
    ExistsError,
    MissingFileError,
    StoreIOError,
    TierStoreError,
)

_BLOCK_BYTES = 1 << 20


class RemoteFile:
    """A place that a format writes to as to a path: it opens it once, for writing."""

    def __init__(self, url: str, system: Any, path: str, *, replaces: bool) -> None:
        """Write to `path` in a file system of fsspec, where it `replaces` a file or is new."""
        self._url = url
        self._system = system
        self._path = path
        self._replaces = replaces
        self._file: Any = None

    def open(self, mode: str) -> IO[bytes]:
        """Open the file, as a stream of bytes."""
        with reaching(self._url):
            self._file = self._system.open(self._path, "wb", autocommit=False)
        return cast(IO[bytes], _Upload(self._file, self._url))

    def commit(self) -> None:
        """Give the file its name."""
        with reaching(self._url):
            self._file.commit()

    def discard(self) -> None:
        """Remove the written data."""
        if self._file is not None:
            with suppress(Exception):  # the earlier error is more precise
                self._file.discard()
                if not self._replaces and self._system.exists(self._path):  # as in memory
                    self._system.rm(self._path)


class _Upload(io.BufferedIOBase):
    """A stream to a file at a URL, whose errors are explained."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with reaching(self._url):
            return int(self._file.write(data))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if self.closed:
            return
        try:
            with reaching(self._url):
                self._file.close()
        finally:
            super().close()


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Explain the errors of packages that reach a URL."""
    try:
        yield
    except TierStoreError:
        raise
    except Exception as error:  # every kind of place has its own errors
        raise unreachable(url, error) from error


def fetch(url: str, path: Path) -> None:
    """Copy a file at a URL to a new path; raises MissingFileError if there is none."""
    try:
        with reaching(url):
            import fsspec

            opened = fsspec.open(url, "rb").open()
    except StoreIOError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            missing = MissingFileError(f"{url}: no such file", filename=url)
            raise missing from error.__cause__
        raise
    with opened as source, explained("write", str(path)), path.open("xb") as file:
        while block := _block(source, url):
            file.write(block)


def _block(source: Any, url: str) -> bytes:
    with reaching(url):
        return bytes(source.read(_BLOCK_BYTES))


@contextmanager
def publish_remote(url: str, *, force: bool) -> Iterator[RemoteFile]:
    """Create a file at a URL that appears complete, or not at all.

    Raises ExistsError unless `force` is set, and MissingExtraError if a package is missing.
    """
    with reaching(url):
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        exists = system.exists(path)
    if exists and not force:
        raise ExistsError(f"{url} exists; choose another name, or replace it (force=True, --force)")
    file = RemoteFile(url, system, path, replaces=exists)
    try:
        yield file
        file.commit()
    except BaseException:
        file.discard()
        raise
