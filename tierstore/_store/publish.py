"""Publishing: a manifest gets its name, and with that a version exists.

A complete, synced manifest is given its name with a hard link, which never replaces a file, and the
directory is synced: before that moment a crash leaves the version before, after it the new one.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from typing import Any

from tierstore import _io
from tierstore._disk.manifest import MAX_BYTES, MAX_VERSION, Identity, Manifest, manifest_name
from tierstore._store.versions import LOCK, STORE
from tierstore.errors import (
    CommitFailedError,
    ConcurrentWriterError,
    InvalidInputError,
    TierStoreError,
)

__all__ = ["publish", "write_skeleton"]

_MAX_DEPTH = 64
"""How deep values in scalars may be nested: any program can parse that, wherever it is called."""


def publish(
    directory: _io.Directory, manifest: Manifest, settle: Callable[[], object] = lambda: None
) -> None:
    """Make a manifest the store as it is now.

    `settle` makes those of its files durable that are not so yet. It is called when the disk has
    the manifest too, so that all of it is on its way together, and before the manifest gets its
    name.

    Raises InvalidInputError for one that could not be read back, StoreFullError or StoreIOError if
    nothing was published, ConcurrentWriterError if another writer was faster, and CommitFailedError
    if it cannot be told.
    """
    name = manifest_name(manifest.seq)
    temporary = f"{name}.{uuid.uuid4().hex[:8]}.tmp"
    data = _encoded(manifest)
    try:
        with directory.create(temporary) as file:
            file.write(data, 0)
            file.start_writing(0, len(data))
            settle()
            file.sync()
        published = directory.put_if_absent(temporary, name)
    except TierStoreError:
        with contextlib.suppress(OSError):
            directory.unlink(temporary)
        if not _is_published(directory, name, data):
            raise
        published = True
    if not published and not _is_published(directory, name, data):
        with contextlib.suppress(OSError):
            directory.unlink(temporary)
        raise ConcurrentWriterError(
            f"another writer published {name} in between; this store was open for writing twice, "
            "which the lock should prevent; open it again"
        )
    if directory.filesystem not in _io.TESTED:
        with directory.open_file(name) as file:
            file.sync()  # FUSE, for one, need not pass on the sync of a directory
    directory.sync()


def _is_published(directory: _io.Directory, name: str, data: bytes) -> bool:
    """Read back whether a publication whose answer was lost took place."""
    try:
        return directory.read_file(name, MAX_BYTES) == data
    except FileNotFoundError:
        return False
    except TierStoreError as error:
        raise CommitFailedError(
            f"cannot tell whether {name} was published ({error}); open the store again"
        ) from error


def _encoded(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest; InvalidInputError for what a reader would refuse."""
    if manifest.version > MAX_VERSION:
        raise InvalidInputError(f"{manifest.version} is above the last version, {MAX_VERSION}")
    if manifest.step is not None and abs(manifest.step) > 2**63 - 1:
        raise InvalidInputError(f"step {manifest.step} does not fit in 64 bits")
    for name, info in manifest.tables.items():
        if _depth(info.scalars) > _MAX_DEPTH:
            raise InvalidInputError(
                f"the scalars of table {name!r} are nested more than {_MAX_DEPTH} deep; "
                "nothing was committed"
            )
    data = manifest.encode()
    if len(data) > MAX_BYTES:
        raise InvalidInputError(
            f"this version's manifest would have {len(data)} bytes, at most {MAX_BYTES} are read; "
            "fold the store, or keep large values in the payload"
        )
    return data


def _depth(value: Any) -> int:
    """Return how deep a JSON value is nested, as far as one more than is allowed."""
    depth, level = 0, [value]
    while level and depth <= _MAX_DEPTH:
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [
            inner
            for each in containers
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        depth += bool(containers)
    return depth


def write_skeleton(directory: _io.Directory, identity: Identity, manifest: Manifest) -> None:
    """Write the files that make a directory with complete tables a store."""
    directory.write_file(LOCK, b"")
    directory.write_file(STORE, identity.encode())
    publish(directory, manifest)
