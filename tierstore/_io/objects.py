"""The files of a store as objects: in a zarr store, which may be a bucket, a zip file or memory.

An object has the name its file has on a disk and is written as a whole; parts of it can be read. So
what is saved here can be copied to a disk with any tool and opened there, and the other way round.
All access is zarr's own, on the event loop where zarr keeps its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from tierstore._io.directory import Directory, component
from tierstore._io.file import Buffer, File
from tierstore.errors import (
    CorruptStoreError,
    InvalidInputError,
    MissingExtraError,
    StoreIOError,
    TierStoreError,
)

__all__ = ["ObjectDirectory", "ObjectFile", "Objects", "locate", "reach", "read_ranges"]

T = TypeVar("T")

_AT_ONCE = 64
"""Reads under way together: a store far away answers late, but many at a time."""


class Objects:
    """Where objects are: a zarr store, a `StorePath` within one, or a URL that fsspec knows.

    Attributes:
        name: what messages call it.
    """

    def __init__(self, where: Any) -> None:
        """Refer to it; nothing is opened yet."""
        self._where = where
        self.name: str = str(where)

    def __str__(self) -> str:
        """Return the name."""
        return self.name

    def open(self, *, write: bool = False) -> ObjectDirectory:
        """Open it; raises MissingExtraError for a URL without fsspec, InvalidInputError."""
        from zarr.abc.store import Store
        from zarr.storage import StorePath

        where, prefix = self._where, ""
        if isinstance(where, str):
            where = reach(where, write=write)
        elif isinstance(where, StorePath):
            where, prefix = where.store, where.path
        if not isinstance(where, Store):
            raise InvalidInputError(
                f"not a path, a URL or a zarr store: {where!r}; such as 'emb.tier', "
                "'s3://bucket/emb.tier' or zarr.storage.MemoryStore()"
            )
        return ObjectDirectory(where, prefix, self.name)


def reach(url: str, *, write: bool = False) -> Any:
    """Return the zarr store at a URL that fsspec knows.

    Raises MissingExtraError where there is no fsspec, or not what it needs; InvalidInputError.
    """
    from zarr.storage import FsspecStore

    try:
        return FsspecStore.from_url(url, read_only=not write)
    except ImportError as error:
        raise MissingExtraError(
            f"{url} cannot be reached ({error}); pip install 'zarr[remote]', and "
            "what this kind of store needs beside it"
        ) from error
    except ValueError as error:
        raise InvalidInputError(f"{url} cannot be reached: {error}") from error


def locate(where: Any) -> Path | Objects:
    """Return the absolute path of a directory, or else the objects that `where` stands for."""
    if isinstance(where, str) and "://" in where:
        return Objects(where)
    if isinstance(where, str | os.PathLike):
        return Path(os.path.abspath(where))
    return where if isinstance(where, Objects) else Objects(where)


def _wait(awaited: Awaitable[T], action: str, path: str) -> T:
    """Await something on zarr's loop, and explain what goes wrong.

    What is missing is a FileNotFoundError, as on a disk.
    """
    from zarr.core.sync import sync

    async def run() -> T:
        return await awaited

    try:
        found: T = sync(run())
    except (FileNotFoundError, TierStoreError):
        raise
    except Exception as error:  # every kind of store has errors of its own
        raise StoreIOError(
            f"cannot {action} {path}: {type(error).__name__}: {error}; if the last save did not "
            "come to an end, save again"
        ) from error
    return found


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no such object", path)


class ObjectFile(File):
    """An object: read in ranges, or written once, from its beginning to its end, and kept then."""

    mappable = False

    def __init__(self, store: Any, key: str, path: str, *, size: int | None = None) -> None:
        """Refer to an object of `size` bytes, or for None to one that is to be written."""
        super().__init__(-1, path)
        self._store = store
        self._key = key
        self._size = size
        self._expected = 0
        self._written = bytearray()

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return max(len(self._written), self._expected) if self._size is None else self._size

    @property
    def written(self) -> int:
        """Bytes of the object: one has no holes."""
        return self.size

    @property
    def nameless(self) -> bool:
        """False: an object is its name."""
        return False

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        """Return up to `nbytes` bytes from `offset`; fewer only at the end of the object."""
        nbytes = min(nbytes, self.size - offset)
        return read_ranges([(self, offset, offset + nbytes)])[0] if nbytes > 0 else b""

    def is_hole(self, offset: int, nbytes: int) -> bool:
        """Return False: an object has all its bytes."""
        return False

    async def fetch(self, begin: int, end: int) -> bytes:
        """Return bytes `begin:end`; raises CorruptStoreError if the object is shorter by now."""
        from zarr.abc.store import RangeByteRequest
        from zarr.core.buffer import default_buffer_prototype

        found = await self._store.get(
            self._key, default_buffer_prototype(), byte_range=RangeByteRequest(begin, end)
        )
        if found is None:
            raise _missing(self.path)
        data: bytes = found.to_bytes()
        if len(data) != end - begin:
            raise CorruptStoreError(
                f"{self.path} has {begin + len(data)} bytes, at least {end} are expected; "
                "save the store again"
            )
        return data

    def write(self, data: Buffer, offset: int) -> None:
        """Keep bytes until the object is complete; it is sent when the last one has come.

        What is left out before `offset` is zero.
        """
        if self._size is not None:
            self._refuse("written to")
        view = memoryview(cast(Any, data)).cast("B")
        missing = offset + view.nbytes - len(self._written)
        if missing > 0:
            self._written.extend(bytes(missing))
        self._written[offset : offset + view.nbytes] = view
        if self._expected and len(self._written) == self._expected:
            self._send()

    def allocate(self, offset: int, nbytes: int) -> None:
        """Say how long the object will be."""
        self._expected = max(self._expected, offset + nbytes)

    def truncate(self, nbytes: int) -> None:
        """Say how long the object will be."""
        self._expected = nbytes

    def sync(self) -> None:
        """Send what was written, with zeros up to the length that was announced."""
        if self._size is None:
            self._written.extend(bytes(self.size - len(self._written)))
            self._send()

    def _send(self) -> None:
        data, self._written = bytes(self._written), bytearray()
        _wait(put(self._store, self._key, data), "write", self.path)
        self._size = len(data)

    def advise(self, advice: int, offset: int = 0, nbytes: int = 0) -> None:
        """Do nothing: an object has no pages."""

    def start_writing(self, offset: int, nbytes: int) -> None:
        """Do nothing: an object is sent as a whole."""

    def lock(self, *, exclusive: bool) -> bool:
        """Return that it is free to readers: an object is never changed."""
        if exclusive:
            self._refuse("locked")
        return True

    def unlock(self) -> None:
        """Do nothing: nothing was locked."""

    def lock_range(self, start: int, length: int, *, exclusive: bool) -> bool:
        """Return that it is free to readers: an object is never changed."""
        return self.lock(exclusive=exclusive)

    def unlock_range(self, start: int, length: int) -> None:
        """Do nothing: nothing was locked."""

    def _refuse(self, what: str) -> NoReturn:
        raise StoreIOError(f"{self.path} is an object and cannot be {what}")


def read_ranges(wanted: Sequence[tuple[ObjectFile, int, int]]) -> list[bytes]:
    """Return bytes `begin:end` of each `(file, begin, end)`, asked for many at a time."""

    async def one(file: ObjectFile, begin: int, end: int, turn: asyncio.Semaphore) -> bytes:
        async with turn:
            return await file.fetch(begin, end)

    async def together() -> list[bytes]:
        turn = asyncio.Semaphore(_AT_ONCE)
        return await asyncio.gather(*(one(*each, turn) for each in wanted))

    return _wait(together(), "read", wanted[0][0].path) if wanted else []


async def put(store: Any, key: str, data: bytes) -> None:
    """Write an object."""
    from zarr.core.buffer import default_buffer_prototype

    await store.set(key, default_buffer_prototype().buffer.from_bytes(data))


class ObjectDirectory(Directory):
    """Objects whose names have a beginning in common, as far as a `/`."""

    removable = False

    def __init__(self, store: Any, prefix: str, path: str) -> None:
        """Refer to the objects of a zarr store under `prefix`; `path` is for messages."""
        super().__init__(-1, path)
        self._store = store
        self._prefix = prefix

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{component(name)}" if self._prefix else component(name)

    def _do(self, action: str, name: str, function: Callable[..., Awaitable[T]], *given: Any) -> T:
        return _wait(function(*given), action, self.join(name))

    def again(self) -> Directory:
        """Refer to the same objects once more."""
        return ObjectDirectory(self._store, self._prefix, self.path)

    def directory(self, name: str) -> Directory:
        """Return the objects under a name; there need not be any."""
        return ObjectDirectory(self._store, self._key(name), self.join(name))

    def make_directory(self, name: str) -> Directory:
        """Return the objects under a name: there is nothing to be made."""
        return self.directory(name)

    def create(self, name: str) -> File:
        """Begin an object; it is there when it is complete."""
        return ObjectFile(self._store, self._key(name), self.join(name))

    def open_file(self, name: str, *, write: bool = False) -> File:
        """Open an object for reading; raises FileNotFoundError."""
        if write:
            raise StoreIOError(f"{self.join(name)} is an object and cannot be written to")
        return ObjectFile(self._store, self._key(name), self.join(name), size=self.size(name))

    def names(self) -> list[str]:
        """Names of all objects and of what others have in common, sorted."""

        async def listed() -> list[str]:
            entries: AsyncIterator[str] = self._store.list_dir(self._prefix)
            return [entry.rstrip("/") async for entry in entries]

        return sorted(set(_wait(listed(), "list", self.path)))

    def size(self, name: str) -> int:
        """Bytes of an object."""
        try:
            return int(self._do("examine", name, self._store.getsize, self._key(name)))
        except FileNotFoundError:
            raise _missing(self.join(name)) from None

    def exists(self, name: str) -> bool:
        """Whether there is an object of this name, or others under it."""
        if self._do("examine", name, self._store.exists, self._key(name)):
            return True
        return self.is_directory(name)

    def names_file(self, name: str, file: File) -> bool:
        """Whether there is an object of this name: it is never another."""
        return self.exists(name)

    def is_directory(self, name: str) -> bool:
        """Whether there are objects whose names begin with this one and a `/`."""
        return not self._do("examine", name, self._store.is_empty, self._key(name))

    def put_if_absent(self, temporary: str, name: str) -> bool:
        """Give an object its final name unless that is taken; return whether it was free."""
        if self._do("examine", name, self._store.exists, self._key(name)):
            return False
        self.rename(temporary, name)
        return True

    def rename(self, old: str, new: str) -> None:
        """Copy an object to another name, and remove it under the old one."""
        with self.open_file(old) as file:
            data = file.read(file.size)
        self._do("write", new, put, self._store, self._key(new), data)
        self.unlink(old)

    def unlink(self, name: str) -> None:
        """Remove an object; one that is gone already is no error."""
        self._do("remove", name, self._store.delete, self._key(name))

    def clear(self) -> None:
        """Remove every object here, as far as that can be done: for what came to nothing."""
        with contextlib.suppress(StoreIOError):
            _wait(self._store.delete_dir(self._prefix), "clear", self.path)

    def remove_directory(self, name: str) -> None:
        """Do nothing: what holds no object is not there."""

    def sync(self) -> None:
        """Do nothing: an object that was sent is durable, name included."""

    def free_bytes(self) -> int:
        """Return as many bytes as there can be: a store does not say."""
        return 2**63 - 1
