"""External keys: one integer or text per row of a table, stored in files beside the base.

Integers are a plain .npy file of int64, or of uint64 where one needs that. Texts are one UTF-8 blob
plus int64 offsets of the start of each text and the end of the last. The index of them, from which
`lookup` answers, is derived; see `key_index`.
"""

from __future__ import annotations

import contextlib
import mmap
import operator
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._checksum import crc32c
from tierstore._disk.key_index import KeyIndex
from tierstore._disk.manifest import KeysInfo
from tierstore._keys.given import given, integers_asked, texts_asked, unknown_keys
from tierstore._keys.hashmap import Rows
from tierstore._keys.text import Texts
from tierstore._progress import Progress
from tierstore._rowcopy import ascends
from tierstore.errors import (
    FILE_CURE,
    CorruptStoreError,
    InvalidInputError,
    InvalidTypeError,
    TierStoreError,
    UnknownNameError,
    counted,
)

_HEADER = 128
_WALKED = 1 << 12
_NPY_TYPES = {"int64": "<i8", "uint64": "<u8"}


class Keys(Sequence[Any]):
    """The keys of all rows, read on demand: an int index gives one key, others an array.

    `key in keys`, `keys.index(key)` and `lookup` go through a map from keys to rows, which is kept
    in a file beside the keys. Without that file, the first of them builds the map in memory.
    """

    def __init__(
        self,
        files: Mapping[str, KeyFile],
        info: KeysInfo,
        rows: int,
        *,
        index: Callable[[], KeyFile] | None = None,
        rewrite: Callable[[Sequence[npt.NDArray[np.uint8]]], object] | None = None,
    ) -> None:
        """Use the key files, by name, as mapped by `open_keys`.

        `index` opens the file of the map; `rewrite` is called with its bytes if that was missing or
        damaged. Raises CorruptStoreError if a size or checksum does not match, or if the files do
        not contain one key per row.
        """
        self.kind: str = info.kind
        self._info = info
        self._rows = rows
        self._open_index = index
        self._rewrite = rewrite
        self._index: KeyIndex | None = None
        parts = {
            name.rpartition(".")[2]: files[name].checked(size, expected)
            for name, (size, expected) in info.files.items()
        }
        self._keys: npt.NDArray[Any] | Texts
        if info.kind == "str":
            self._keys = self._texts(parts, files)
        else:
            self._keys = self._integers(parts["npy"], files)

    def _integers(
        self, data: npt.NDArray[np.uint8], files: Mapping[str, KeyFile]
    ) -> npt.NDArray[Any]:
        header = _npy_header(self.kind, self._rows)
        self._whole(data, len(header) + 8 * self._rows, files)
        if data[:_HEADER].tobytes() != header:
            raise CorruptStoreError(f"{_path(files)}: the header does not match {self._rows} keys")
        return data[_HEADER:].view(_NPY_TYPES[self.kind])

    def _texts(
        self, parts: Mapping[str, npt.NDArray[np.uint8]], files: Mapping[str, KeyFile]
    ) -> Texts:
        self._whole(parts["offsets"], 8 * (self._rows + 1), files)
        texts = Texts(parts["utf8"], parts["offsets"].view("<i8"))
        ends = texts.offsets[[0, -1]].tolist()
        if ends != [0, texts.blob.size] or not ascends(texts.offsets):
            raise CorruptStoreError(f"{_path(files)}: the offsets do not delimit the strings")
        return texts

    def _whole(
        self, data: npt.NDArray[np.uint8], expected: int, files: Mapping[str, KeyFile]
    ) -> None:
        if data.size != expected:
            raise CorruptStoreError(
                f"{_path(files)} has {data.size} bytes, keys of {self._rows} rows take {expected}"
            )

    @property
    def stored(self) -> npt.NDArray[Any] | Texts:
        """All keys as the files have them, not copied and not to be changed."""
        return self._keys

    def __repr__(self) -> str:
        return f"Keys({self._rows} of {self.kind})"

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._rows

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice | npt.NDArray[np.int64]) -> Any: ...

    def __getitem__(self, index: Any) -> Any:
        """Return the key of a row, or an array of keys for a slice or an array of ids."""
        if not isinstance(self._keys, Texts):
            found = self._keys[index]
            return int(found) if found.ndim == 0 else found.copy()
        if isinstance(index, slice):
            return _objects(self._some_texts(range(self._rows)[index]))
        if not np.ndim(index):
            return self._text(range(self._rows)[operator.index(index)])
        rows = np.arange(self._rows)[index]
        return _objects([self._text(row) for row in rows.ravel().tolist()]).reshape(rows.shape)

    def __iter__(self) -> Iterator[Any]:
        """Yield the keys in the order of rows."""
        for start in range(0, self._rows, _WALKED):
            yield from self[start : start + _WALKED].tolist()

    def _some_texts(self, rows: range) -> list[str]:
        texts = cast(Texts, self._keys)
        if rows and rows.step == 1:
            bounds = texts.offsets[rows.start : rows.stop + 1]
            blob = texts.blob[bounds[0] : bounds[-1]].tobytes()
            if blob.isascii():  # a character is a byte
                found = blob.decode()
                return [found[low:high] for low, high in pairwise((bounds - bounds[0]).tolist())]
        return [self._text(row) for row in rows]

    def _text(self, row: int) -> str:
        try:
            return cast(Texts, self._keys).encoded(row).decode()
        except UnicodeDecodeError as error:
            raise CorruptStoreError(f"the key of row {row} is not UTF-8: {error.reason}") from None

    def lookup(self, keys: object, *, missing: int | None = None) -> npt.NDArray[np.int64]:
        """Return the row id of each key, in the shape of `keys`.

        A key that no row has gets `missing`. Without that, UnknownNameError names the first
        three and how many there are.
        """
        found, shape = self._find(keys)
        if (found < 0).any():
            if missing is None:
                raise UnknownNameError(unknown_keys(np.asarray(keys, object).ravel()[found < 0]))
            found[found < 0] = missing
        return found.reshape(shape)

    def __contains__(self, key: object) -> bool:
        """Whether a row has the key."""
        try:
            found, shape = self._find(key)
        except (InvalidInputError, InvalidTypeError):
            return False
        return shape == () and int(found[0]) >= 0

    def index(self, key: object, start: int = 0, stop: int | None = None) -> int:
        """Return the row of a key; raises ValueError if none of `start:stop` has it."""
        if key in self:
            row = int(self._find(key)[0][0])
            if row in range(self._rows)[start:stop]:
                return row
        raise ValueError(f"{key!r} is not in {self!r}")

    def count(self, key: object) -> int:
        """Return 1 if a row has the key, and 0 otherwise."""
        return int(key in self)

    def _find(self, keys: object) -> tuple[Rows, tuple[int, ...]]:
        """Return the row of each key or -1, flat, and the shape of the keys."""
        index = self._opened()
        if isinstance(self._keys, Texts):
            texts, shape = texts_asked(keys)
            return index.find(texts.hashes(), texts), shape
        codes, possible, shape = integers_asked(keys, self.kind)
        found = index.find(codes, None)
        found[~possible] = -1
        return found, shape

    def _opened(self) -> KeyIndex:
        """Return the map, from its file if that is intact."""
        if self._index is None:
            try:
                self._index = self._decoded()
            except (TierStoreError, OSError):
                self._index, _ = KeyIndex.of(self._keys)
                if self._rewrite is not None:
                    with contextlib.suppress(TierStoreError, OSError):
                        self._rewrite(self._index.encode(self._info))
        return self._index

    def _decoded(self) -> KeyIndex:
        if self._open_index is None:
            raise FileNotFoundError
        return KeyIndex.decode(self._open_index().data, self._info, self._keys)

    def index_damage(self) -> str:
        """Describe the damage to the file of the map; "" if it is intact or missing.

        Every key is looked up: a file whose checksum is right may still hide one.
        """
        try:
            index = self._decoded()
        except FileNotFoundError:
            return ""
        except (TierStoreError, OSError) as error:
            return f"{error}; the next lookup of a writer replaces it"
        for start in range(0, self._rows, _WALKED):
            rows = np.arange(start, min(start + _WALKED, self._rows))
            keys = self._keys.take(rows) if isinstance(self._keys, Texts) else self._keys[rows]
            wrong = np.flatnonzero(index.of_all(keys) < 0)
            if wrong.size:
                return f"it does not find the key of row {rows[wrong[0]]}; remove it"
        return ""


def _objects(values: list[Any]) -> npt.NDArray[np.object_]:
    """Return an array of Python objects."""
    out = np.empty(len(values), object)
    out[:] = values
    return out


@dataclass(frozen=True, eq=False)
class KeyFile:
    """A file of keys, mapped so that it stays readable after it is removed.

    It lasts beyond the store, as does what `table.keys` returned.

    Attributes:
        path: its name in messages.
        size: bytes of the file.
        data: the expected number of bytes, or fewer if the file is shorter.
    """

    path: str
    size: int
    data: npt.NDArray[np.uint8]

    @classmethod
    def open(cls, directory: _io.Directory, name: str, expected: int) -> KeyFile:
        """Map a file of an expected size; raises FileNotFoundError."""
        with directory.open_file(name) as file:
            size = file.size
            nbytes = min(size, expected)
            data = _io.map_files([file], nbytes, advice=mmap.MADV_NORMAL, lasting=True)
            return cls(file.path, size, data)

    def checked(self, size: int, expected: int) -> npt.NDArray[np.uint8]:
        """Return the bytes; raises CorruptStoreError unless size and checksum match."""
        if self.size != size:
            raise CorruptStoreError(f"{self.path} has {self.size} bytes, not {size}")
        if crc32c(self.data) != expected:
            raise CorruptStoreError(f"{self.path} does not match its checksum; {FILE_CURE}")
        return self.data


def open_keys(directory: _io.Directory, info: KeysInfo) -> dict[str, KeyFile]:
    """Map the files of keys by name; raises CorruptStoreError if one is missing."""
    try:
        return {name: KeyFile.open(directory, name, size) for name, (size, _) in info.files.items()}
    except FileNotFoundError as error:
        raise CorruptStoreError(
            f"a file of keys is missing: {error.filename}; {FILE_CURE}"
        ) from None


def indexed_keys(directory: _io.Directory, info: KeysInfo, rows: int) -> Keys:
    """Open keys with their index, as a reader of a directory that stays open meanwhile."""
    files = open_keys(directory, info)
    return Keys(files, info, rows, index=lambda: open_index(directory, info))


def _path(files: Mapping[str, KeyFile]) -> str:
    return next(iter(files.values())).path


def as_stored(keys: Sequence[Any] | Texts | None) -> Any:
    """Return all keys, to write them to another table: without a Python object for each."""
    if isinstance(keys, Keys):
        return keys.stored
    return keys if keys is None or isinstance(keys, Texts) else keys[:]


def open_index(directory: _io.Directory, info: KeysInfo) -> KeyFile:
    """Map the index of keys; raises FileNotFoundError."""
    name = info.index
    return KeyFile.open(directory, name, directory.size(name))


def write_index(
    directory: _io.Directory, info: KeysInfo, parts: Sequence[npt.NDArray[np.uint8]]
) -> None:
    """Write the index of keys, in place of one that is damaged.

    It gets its name when it is durable, so that a power failure leaves it whole or none. Under its
    first name it is the index of keys that no version names, which the next writer removes.
    """
    temporary = f"keys.{uuid.uuid4().hex[:8]}.index"
    try:
        directory.write_file(temporary, *parts)
        directory.unlink(info.index)
        directory.put_if_absent(temporary, info.index)
    except BaseException:
        with contextlib.suppress(TierStoreError, OSError):
            directory.unlink(temporary)
        raise


def write_keys(
    directory: _io.Directory,
    keys: Sequence[Any],
    rows: int,
    name: str | None = None,
    progress: Progress | None = None,
) -> KeysInfo:
    """Write the keys of a table's rows, and their index, to new, durable files of its generation.

    `keys` are `rows` distinct ints or strings; `name` is in the names of the files, by default
    another one each time. `progress` counts the keys twice: they are checked, then written. Raises
    InvalidInputError or InvalidTypeError before anything is written.
    """
    if len(keys) != rows:
        raise InvalidInputError(
            f"a table of {counted(rows, 'row')} needs {counted(rows, 'key')}, not {len(keys)}"
        )
    stem = f"keys.{name or uuid.uuid4().hex[:8]}."
    values = given(keys)
    index, twice = KeyIndex.of(values)
    if twice is not None:
        row, first = twice
        key = values.encoded(row).decode() if isinstance(values, Texts) else int(values[row])
        raise InvalidInputError(
            f"the key {key!r} occurs more than once: rows {first} and {row} have it"
        )
    if progress is not None:
        progress(rows, 2 * rows)
    if isinstance(values, Texts):
        kind = "str"
        offsets = values.offsets.astype("<i8", copy=False)
        parts = {"utf8": [values.blob], "offsets": [offsets.view(np.uint8)]}
    else:
        kind = values.dtype.name
        header = np.frombuffer(_npy_header(kind, rows), np.uint8)
        parts = {"npy": [header, values.astype(_NPY_TYPES[kind], copy=False).view(np.uint8)]}
    files = {}
    for ending, data in parts.items():
        total = 0
        for part in data:
            total = crc32c(part, total)
        files[stem + ending] = sum(part.size for part in data), total
    info = KeysInfo(kind, files)
    try:
        for ending, data in parts.items():
            directory.write_file(stem + ending, *data)
        directory.write_file(info.index, *index.encode(info))
        directory.sync()
        if progress is not None:
            progress(2 * rows, 2 * rows)
    except BaseException:
        with contextlib.suppress(TierStoreError, OSError):
            remove_keys(directory, info)
        raise
    return info


def remove_keys(directory: _io.Directory, info: KeysInfo) -> None:
    """Remove the files of keys that no version names."""
    for name in (*info.files, info.index):
        directory.unlink(name)


def _npy_header(kind: str, rows: int) -> bytes:
    described = {"descr": _NPY_TYPES[kind], "fortran_order": False, "shape": (rows,)}
    magic = b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little")
    return magic + repr(described).encode().ljust(_HEADER - 11) + b"\n"
