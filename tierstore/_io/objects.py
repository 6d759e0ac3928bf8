"""The files of a store as objects in a zarr store: a bucket, a zip file or memory.

An object has the same name as the file on a disk; it is written whole and can be read in parts. A
saved store can therefore be copied to a disk with any tool and opened there, and vice versa. All
access uses zarr, on the event loop where zarr keeps its connections.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from tierstore._io.directory import Directory, Glimpse, component
from tierstore._io.file import Buffer, File
from tierstore.errors import (
    AccessError,
    CorruptStoreError,
    InvalidInputError,
    MissingExtraError,
    StoreIOError,
    TierStoreError,
)

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_REFUSALS = "Credential|Unauthorized|TokenRetrieval|LoginRefresh"
_MAX_READS = 64
"""Concurrent reads: a remote store has a high latency, but serves many requests at once."""


class Objects:
    """The location of objects: a zarr store, a `StorePath` within one, or a URL for fsspec.

    Attributes:
        name: its name in messages.
    """

    def __init__(self, where: Any) -> None:
        """Store the location; nothing is opened yet."""
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
                f"not a path, a URL or a zarr store: {where!r}; give for example 'emb.tier', "
                "'s3://bucket/emb.tier' or zarr.storage.MemoryStore()"
            )
        return ObjectDirectory(where, prefix, self.name)


def reach(url: str, *, write: bool = False) -> Any:
    """Return the zarr store at a URL for fsspec.

    Raises MissingExtraError if fsspec or a package that it needs is missing; InvalidInputError.
    """
    from zarr.storage import FsspecStore

    # Other places have no directories; those of a disk are made as objects need them.
    on_disk = url.startswith(("file://", "local://"))
    options = {"auto_mkdir": True} if on_disk and write else None
    try:
        return FsspecStore.from_url(url, storage_options=options, read_only=not write)
    except Exception as error:  # every kind of place has its own errors
        raise unreachable(url, error) from error


def unreachable(url: str, error: Exception) -> TierStoreError:
    """Return the error to raise for a URL that fsspec cannot open."""
    if isinstance(error, ImportError):
        return MissingExtraError(
            f"{url} cannot be reached ({error}); pip install 'tierstore[s3]' for s3://, or fsspec "
            "and its package for another kind of place"
        )
    if _is_refusal(error):
        return AccessError(
            f"{url} refuses access ({type(error).__name__}: {error}); give credentials that may do "
            "this: for s3:// AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the "
            "role of the machine"
        )
    if isinstance(error, ValueError):
        return InvalidInputError(f"{url} cannot be reached: {error}")
    return StoreIOError(
        f"{url} cannot be reached: {type(error).__name__}: {error}; check the address, that the "
        "bucket exists, the network, and that the package of this kind of place is recent"
    )


def _is_refusal(error: Exception) -> bool:
    """Whether credentials are missing or do not suffice, by the names that clouds' packages use."""
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    return isinstance(error, PermissionError) or re.search(_REFUSALS, kinds) is not None


_PATH_MAX = 4096
"""Bytes of a path that Linux takes, with the NUL at its end."""


def locate(where: Any) -> Path | Objects:
    """Return the absolute path of a directory, or the location of objects."""
    if isinstance(where, str) and "://" in where:
        return Objects(where)
    if isinstance(where, str | os.PathLike):
        if "\0" in os.fsdecode(where):
            raise InvalidInputError(f"no path has a NUL, as this one: {os.fsdecode(where)!r}")
        path = os.path.abspath(os.fsdecode(where))
        if (count := len(os.fsencode(path))) >= _PATH_MAX:
            raise InvalidInputError(
                f"a path has at most {_PATH_MAX - 1:,} bytes, this one {count:,}: {path[:100]}…"
            )
        return Path(path)
    return where if isinstance(where, Objects) else Objects(where)


def _wait(awaited: Awaitable[T], action: str, path: str) -> T:
    """Run a coroutine on zarr's event loop and explain its errors.

    A missing object raises FileNotFoundError, as on a disk.
    """
    from zarr.core.sync import sync

    async def run() -> T:
        return await awaited

    try:
        result: T = sync(run())
    except TierStoreError:
        raise
    except FileNotFoundError as error:
        if action != "write":
            raise
        raise unreachable(path, error) from error
    except Exception as error:  # every kind of store has its own errors
        if _is_refusal(error):
            raise unreachable(path, error) from error
        raise StoreIOError(
            f"cannot {action} {path}: {type(error).__name__}: {error}; check the network, and if "
            "the last save was interrupted, save again"
        ) from error
    return result


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no such object", path)


class ObjectFile(File):
    """An object: read in ranges, or written once from beginning to end."""

    mappable = False

    def __init__(self, store: Any, key: str, path: str, *, size: int | None = None) -> None:
        """Refer to an object of `size` bytes, or with None to a new one that is written."""
        super().__init__(-1, path)
        self._store = store
        self._key = key
        self._size = size
        self._expected = 0
        self._written = bytearray()

    @property
    def size(self) -> int:
        """Size of the object in bytes."""
        return max(len(self._written), self._expected) if self._size is None else self._size

    @property
    def written(self) -> int:
        """Size of the object in bytes: objects have no holes."""
        return self.size

    @property
    def nameless(self) -> bool:
        """False: an open object always has its name."""
        return False

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        """Return up to `nbytes` bytes from `offset`; fewer only at the end of the object."""
        nbytes = min(nbytes, self.size - offset)
        return read_ranges([(self, offset, offset + nbytes)])[0] if nbytes > 0 else b""

    def is_hole(self, offset: int, nbytes: int) -> bool:
        """Return False: objects have no holes."""
        return False

    async def fetch(self, begin: int, end: int) -> bytes:
        """Return bytes `begin:end`; raises CorruptStoreError if the object is shorter."""
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
                f"{self.path} has {begin + len(data)} bytes instead of at least {end}; "
                "save the store again"
            )
        return data

    def write(self, data: Buffer, offset: int) -> None:
        """Buffer bytes and send the object when it is complete.

        Bytes skipped before `offset` are zero.
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
        """Set the final size of the object."""
        self._expected = max(self._expected, offset + nbytes)

    def truncate(self, nbytes: int) -> None:
        """Set the final size of the object."""
        self._expected = nbytes

    def sync(self) -> None:
        """Send the written bytes, followed by zeros up to the final size."""
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
        """Do nothing: an object is sent whole."""

    def lock(self, *, exclusive: bool) -> bool:
        """Return True: an object never changes, so locks are always free."""
        if exclusive:
            self._refuse("locked")
        return True

    def lock_range(self, start: int, length: int, *, exclusive: bool) -> bool:
        """Return True: an object never changes, so locks are always free."""
        return self.lock(exclusive=exclusive)

    def unlock_range(self, start: int, length: int) -> None:
        """Do nothing: nothing was locked."""

    def _refuse(self, what: str) -> NoReturn:
        raise StoreIOError(f"{self.path} is an object and cannot be {what}")


def read_ranges(wanted: Sequence[tuple[ObjectFile, int, int]]) -> list[bytes]:
    """Return bytes `begin:end` of each `(file, begin, end)`, with concurrent requests."""
    import asyncio  # which takes as long to import as a small command takes to run

    async def one(file: ObjectFile, begin: int, end: int, turn: asyncio.Semaphore) -> bytes:
        async with turn:
            return await file.fetch(begin, end)

    async def together() -> list[bytes]:
        turn = asyncio.Semaphore(_MAX_READS)
        return await asyncio.gather(*(one(*each, turn) for each in wanted))

    return _wait(together(), "read", wanted[0][0].path) if wanted else []


async def put(store: Any, key: str, data: bytes) -> None:
    """Write an object."""
    from zarr.core.buffer import default_buffer_prototype

    await store.set(key, default_buffer_prototype().buffer.from_bytes(data))


class ObjectDirectory(Directory):
    """Objects whose names share a prefix that ends at a `/`."""

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
        """Return another reference to the same objects."""
        return ObjectDirectory(self._store, self._prefix, self.path)

    def directory(self, name: str) -> Directory:
        """Return the objects under a name, if any."""
        return ObjectDirectory(self._store, self._key(name), self.join(name))

    def make_directory(self, name: str) -> Directory:
        """Return the objects under a name: there is nothing to create."""
        return self.directory(name)

    def create(self, name: str) -> File:
        """Begin an object, which appears when it is complete."""
        return ObjectFile(self._store, self._key(name), self.join(name))

    def open_file(self, name: str, *, write: bool = False) -> File:
        """Open an object for reading; raises FileNotFoundError."""
        if write:
            raise StoreIOError(f"{self.join(name)} is an object and cannot be written to")
        return ObjectFile(self._store, self._key(name), self.join(name), size=self.size(name))

    def glimpse(self, name: str, nbytes: int) -> Glimpse:
        """Return size and up to `nbytes` first bytes of an object, which has no inode."""
        file = self.open_file(name)
        return Glimpse(file.size, 0, file.read(nbytes))

    def names(self) -> list[str]:
        """Return the names of all objects and the common prefixes of others, sorted."""

        async def listed() -> list[str]:
            entries: AsyncIterator[str] = self._store.list_dir(self._prefix)
            return [entry.rstrip("/") async for entry in entries]

        return sorted(set(_wait(listed(), "list", self.path)))

    def size(self, name: str) -> int:
        """Return the size of an object in bytes."""
        try:
            return int(self._do("examine", name, self._store.getsize, self._key(name)))
        except FileNotFoundError:
            raise _missing(self.join(name)) from None

    def exists(self, name: str) -> bool:
        """Whether an object of this name exists, or objects under it."""
        if self._do("examine", name, self._store.exists, self._key(name)):
            return True
        return self.is_directory(name)

    def names_file(self, name: str, file: File) -> bool:
        """Whether an object of this name exists: it cannot have been replaced."""
        return self.exists(name)

    def may_be_file(self, name: str) -> bool:
        """Return True: every object is one."""
        return True

    def is_directory(self, name: str) -> bool:
        """Whether objects exist whose names begin with this one and a `/`."""
        return not self._do("examine", name, self._store.is_empty, self._key(name))

    def put_if_absent(self, temporary: str, name: str) -> bool:
        """Give an object its final name unless that is taken; return whether it was free."""
        if self._do("examine", name, self._store.exists, self._key(name)):
            return False
        self.rename(temporary, name)
        return True

    def rename(self, old: str, new: str) -> None:
        """Copy an object to another name, then remove the old one."""
        with self.open_file(old) as file:
            data = file.read(file.size)
        self._do("write", new, put, self._store, self._key(new), data)
        self.unlink(old)

    def unlink(self, name: str) -> None:
        """Remove an object, if it exists."""
        self._do("remove", name, self._store.delete, self._key(name))

    def clear(self) -> None:
        """Remove as many of the objects as possible, after a failure."""
        with contextlib.suppress(StoreIOError):
            _wait(self._store.delete_dir(self._prefix), "clear", self.path)

    def remove_directory(self, name: str) -> None:
        """Do nothing: a prefix without objects does not exist."""

    def sync(self) -> None:
        """Do nothing: an object that was sent is durable, as is its name."""

    def free_bytes(self) -> int:
        """Return the largest possible number: zarr stores do not report it."""
        return 2**63 - 1
