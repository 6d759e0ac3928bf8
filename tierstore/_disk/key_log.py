"""The keys of a table by key: files that only grow; each version names their length.

A commit appends the keys that it brings, with one checksum over all up to there. A file is appended
to only where it ends with the last key of the version that is open; otherwise, as after a crash in
a commit or after going back to an older version, all keys are written to new files. So no byte that
a version names is ever written again.

Integers are eight bytes each. Texts are their UTF-8, and where each ends in that, eight bytes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._checksum import crc32c
from tierstore._disk.keys import KeyFile, Keys, open_keys, write_keys
from tierstore._disk.manifest import KeysInfo, TableInfo
from tierstore._keys.growing import PARTS, KeyMap, StoredKeys, key_map
from tierstore.errors import FILE_CURE, CorruptStoreError, InvalidInputError, counted
from tierstore.spec import TableSpec

_CHECKED_BYTES = 16 << 20
"""Bytes that are read and checked before a loading thread looks whether it is to end."""


def _read_parts(
    files: Mapping[str, KeyFile],
    info: KeysInfo,
    rows: int,
    check_wanted: Callable[[], None],
) -> dict[str, npt.NDArray[np.uint8]]:
    """Return the bytes of keys by ending; raises CorruptStoreError if they are damaged.

    `check_wanted` is called now and then, and ends the call by an error.
    """
    parts = {}
    for name, (size, expected) in info.files.items():
        file = files[name]
        if file.data.size < size:
            raise CorruptStoreError(f"{file.path} has {file.size} bytes, not at least {size}")
        data = file.data[:size]
        found = 0
        for at in range(0, size, _CHECKED_BYTES):
            check_wanted()
            found = crc32c(data[at : at + _CHECKED_BYTES], found)
        if found != expected:
            raise CorruptStoreError(f"{file.path} does not match its checksum; {FILE_CURE}")
        parts[name.rpartition(".")[2]] = data
    if info.count > rows:
        raise CorruptStoreError(f"{info.count} keys of a table of {counted(rows, 'row')}")
    return parts


def load_keys(into: KeyMap, files: Mapping[str, KeyFile], info: KeysInfo, rows: int) -> None:
    """Fill an empty map with the keys of a version; raises CorruptStoreError.

    Raises ClosedError soon after the map was `abandoned`.
    """
    into.load(_read_parts(files, info, rows, into.check_wanted))


def append_keys(
    directory: _io.Directory, kind: str, info: KeysInfo | None, keys: StoredKeys
) -> KeysInfo:
    """Make all keys of a map durable, the first of which a version already has; describe them."""
    if info is not None and _end_there(directory, info):
        new = keys.parts(info.count)
        files = {}
        for name, (size, value) in info.files.items():
            data = new[name.rpartition(".")[2]]
            with directory.open_file(name, write=True) as file:
                file.write(data, size)
                file.sync()
            files[name] = size + data.size, crc32c(data, value)
        return KeysInfo(info.kind, files)
    return _write(directory, kind, keys.parts(0))


def write_log(directory: _io.Directory, kind: str, rows: int, keys: Any) -> KeysInfo:
    """Write distinct keys of a table's first rows to new, durable files.

    Raises InvalidInputError for a key that repeats, and for more keys than `rows`.
    """
    made = key_map(kind)
    asked = made.asked(keys)
    if len(asked.codes) > rows:
        raise InvalidInputError(f"{len(asked.codes)} keys for a table of {rows}")
    found = made.add(asked)
    twice = np.flatnonzero(found != np.arange(found.size))
    if twice.size:
        row = int(twice[0])
        raise InvalidInputError(
            f"the key {made.keys_of(found[[row]])[0]!r} occurs more than once: rows {found[row]} "
            f"and {row} have it"
        )
    return _write(directory, kind, made.parts(0))


def write_keys_of(directory: _io.Directory, spec: TableSpec, keys: Any) -> KeysInfo | None:
    """Write the keys of a table's rows, by key or external ones; None where there are none.

    Raises what `write_log` or `write_keys` does.
    """
    if keys is None:
        return None
    if spec.keys is None:
        return write_keys(directory, keys, spec.rows)
    return write_log(directory, spec.keys, spec.rows, keys)


def read_keys_of(directory: _io.Directory, info: TableInfo, keys: KeysInfo) -> Keys | KeyMap:
    """Read and check all keys of a table, by key into a map; raises CorruptStoreError."""
    files = open_keys(directory, keys)
    if info.spec.keys is None:
        found = Keys(files, keys, info.spec.rows)
        _ = found[:]  # which decodes texts
        return found
    made = key_map(info.spec.keys)
    load_keys(made, files, keys, info.spec.rows)
    return made


def _write(
    directory: _io.Directory, kind: str, parts: Mapping[str, npt.NDArray[np.uint8]]
) -> KeysInfo:
    stem = f"keys.{uuid.uuid4().hex[:8]}."
    for ending in PARTS[kind]:
        directory.write_file(stem + ending, parts[ending])
    directory.sync()
    files = {stem + ending: (parts[ending].size, crc32c(parts[ending])) for ending in PARTS[kind]}
    return KeysInfo("int64" if kind == "int64" else "str", files)


def _end_there(directory: _io.Directory, info: KeysInfo) -> bool:
    """Whether every file ends with the last key of a version."""
    return all(directory.size(name) == size for name, (size, _) in info.files.items())
