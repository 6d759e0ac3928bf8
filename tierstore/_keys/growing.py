"""The keys of a table by key: the row of each, and the bytes to store for new ones.

Rows are numbered in the order in which keys arrive, so the keys of a version are a prefix of the
keys of every later version that continues it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore._keys.given import bits_asked, texts_asked
from tierstore._keys.hashmap import Codes, HashMap, Rows
from tierstore._keys.text import Texts
from tierstore._rowcopy import ascends
from tierstore.errors import ClosedError, CorruptStoreError, InvalidInputError

Parts = Mapping[str, npt.NDArray[np.uint8]]
"""The bytes of keys by the ending of their file."""

PARTS = {"int64": ("int64",), "text": ("utf8", "ends")}
"""The endings of the files of each kind of keys; the last file has eight bytes a key."""

_AHEAD = 1 << 22
_LOADED = 1 << 18
"""Keys that are loaded at a time."""


class Asked:
    """A batch of keys: their flat codes, their shape, and the texts of text keys."""

    def __init__(self, codes: Codes, shape: tuple[int, ...], texts: Texts | None = None) -> None:
        """Hold a batch that was checked."""
        self.codes = codes
        self.shape = shape
        self.texts = texts

    def take(self, at: npt.NDArray[np.intp]) -> Asked:
        """Return the keys at some positions."""
        texts = None if self.texts is None else self.texts.take(at)
        return Asked(self.codes[at], at.shape, texts)


class StoredKeys(ABC):
    """The keys of a table, or of a partition of it, by row, and what makes them durable.

    Attributes:
        lock: held while they change; hold it to prevent others from finding keys meanwhile.
        half_removed: whether an error ended a removal of keys while rows moved; see `check_whole`.
    """

    lock: Any
    half_removed: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of keys."""

    @abstractmethod
    def check_whole(self) -> None:
        """Raise ClosedError for keys of which an error ended a removal halfway."""

    @abstractmethod
    def truncate(self, rows: int) -> None:
        """Drop the keys of all rows from `rows` on."""

    @abstractmethod
    def keys_of(self, rows: Rows) -> npt.NDArray[Any]:
        """Return the keys of rows that have one: int64, or an array of str objects."""

    @abstractmethod
    def codes_of(self, rows: Rows) -> Codes:
        """Return the codes of the keys of rows, from which first rows are drawn."""

    @abstractmethod
    def parts(self, start: int) -> dict[str, npt.NDArray[np.uint8]]:
        """Return the bytes to store for the keys of rows from `start` on, by ending."""


class Follower(Protocol):
    """What has something for each key of a map; it is told within the lock of the map."""

    def added(self, keys: KeyMap, start: int) -> None:
        """Follow keys that came, of rows from `start` on; after an error they go again."""

    def truncate(self, rows: int) -> None:
        """Follow keys that are about to go, of rows from `rows` on."""


class KeyMap(StoredKeys):
    """A growing map from keys to rows; several threads may use it.

    Attributes:
        abandoned: set to stop the loading of stored keys, which then raises ClosedError.
        follower: what follows the map, if anything.
    """

    def __init__(self, texts: Callable[[], Texts] | None = None) -> None:
        """Start without keys; `texts` as in `HashMap`."""
        self.lock: Any = threading.RLock()
        self.abandoned = False
        self.follower: Follower | None = None
        self._map = HashMap(texts)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._map)

    def check_whole(self) -> None:
        """Raise ClosedError for `half_removed` keys, which may have the rows of others.

        A rollback loads keys anew, into another map.
        """
        if self.half_removed:
            raise ClosedError(
                "an error ended a removal of keys halfway; store.rollback() brings them back"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the map and the keys take."""
        return self._map.nbytes

    @abstractmethod
    def asked(self, keys: object) -> Asked:
        """Check a batch of keys; raises InvalidTypeError and InvalidInputError."""

    @abstractmethod
    def find(self, asked: Asked) -> Rows:
        """Return the row of each key, or -1, flat."""

    def add(self, asked: Asked) -> Rows:
        """Return the row of each key, flat; new keys get the next rows, in order of arrival."""
        with self.lock:
            start, found = len(self), self._add(asked)
            if self.follower is not None and len(self) > start:
                try:
                    self.follower.added(self, start)
                except BaseException:
                    self.truncate(start)
                    raise
            return found

    @abstractmethod
    def _add(self, asked: Asked) -> Rows:
        """Do what `add` does, within the lock."""

    def truncate(self, rows: int) -> None:
        """Drop the keys of all rows from `rows` on."""
        with self.lock:
            if rows < len(self):
                if self.follower is not None:
                    self.follower.truncate(rows)
                self._map.truncate(rows)

    @abstractmethod
    def keep(self, rows: Rows) -> None:
        """Keep only the keys of these distinct rows, and number them in this order."""

    def codes_of(self, rows: Rows) -> Codes:
        """Return the codes of the keys of rows, from which first rows are drawn."""
        with self.lock:
            return self._map.codes_of(rows)

    @abstractmethod
    def load(self, parts: Parts) -> None:
        """Take stored keys, of which the map may have the first ones.

        Raises CorruptStoreError if they are no keys or not distinct.
        """

    @abstractmethod
    def parts_of(self, rows: Rows, behind: int = 0) -> dict[str, npt.NDArray[np.uint8]]:
        """Return the bytes to store for the keys of some rows, in their order, by ending.

        Texts are stored after others of `behind` bytes.
        """

    @abstractmethod
    def extend(self, parts: Parts) -> None:
        """Take stored keys that are in no row yet; raises CorruptStoreError as `load` does."""

    def check_wanted(self) -> None:
        """Raise ClosedError if the loading of stored keys was `abandoned`."""
        if self.abandoned:
            raise ClosedError("the store was closed while the keys of a table were loaded")

    def _load(self, codes: Codes) -> None:
        """Append stored keys by their codes, in blocks."""
        self._map.reserve(len(self) + codes.size)
        for at in range(0, codes.size, _LOADED):
            self.check_wanted()
            block, start = codes[at : at + _LOADED].astype(np.uint64), len(self)
            found = self._map.append(block)
            if not np.array_equal(found, np.arange(start, start + block.size)):
                raise CorruptStoreError("a key occurs more than once")


def key_map(kind: str) -> KeyMap:
    """Return an empty map of keys of a kind, "int64" or "text"."""
    return _Integers() if kind == "int64" else _TextMap()


class _Integers(KeyMap):
    def asked(self, keys: object) -> Asked:
        codes, shape = bits_asked(keys)
        return Asked(codes, shape)

    def find(self, asked: Asked) -> Rows:
        with self.lock:
            return self._map.find(asked.codes)

    def _add(self, asked: Asked) -> Rows:
        return self._map.add(asked.codes)

    def keep(self, rows: Rows) -> None:
        with self.lock:
            self._map.keep(rows)

    def keys_of(self, rows: Rows) -> npt.NDArray[Any]:
        with self.lock:
            return self._map.codes_of(rows).view(np.int64)

    def parts(self, start: int) -> dict[str, npt.NDArray[np.uint8]]:
        return self.parts_of(np.arange(start, len(self)))

    def parts_of(self, rows: Rows, behind: int = 0) -> dict[str, npt.NDArray[np.uint8]]:
        with self.lock:
            return {"int64": self._map.codes_of(rows).astype("<u8").view(np.uint8)}

    def load(self, parts: Parts) -> None:
        codes = parts["int64"].view("<u8")
        with self.lock:
            self._load(codes[len(self) :])

    def extend(self, parts: Parts) -> None:
        with self.lock:
            self._load(parts["int64"].view("<u8"))


class _TextMap(KeyMap):
    """Texts by row: all bytes one after another, and where each ends."""

    def __init__(self) -> None:
        super().__init__(self._texts)
        self._blob = np.empty(0, np.uint8)
        self._offsets = np.zeros(1, np.int64)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._blob.nbytes + self._offsets.nbytes

    def _texts(self) -> Texts:
        return Texts(self._blob, self._offsets)

    def asked(self, keys: object) -> Asked:
        texts, shape = texts_asked(keys, "; Table.by_row takes row numbers")
        return Asked(texts.hashes(), shape, texts)

    def find(self, asked: Asked) -> Rows:
        with self.lock:
            return self._map.find(asked.codes, _texts_of(asked))

    def _add(self, asked: Asked) -> Rows:
        rows, texts = self.find(asked), _texts_of(asked)
        missing = np.flatnonzero(rows < 0)
        if missing.size:
            codes, given = asked.codes[missing], texts.take(missing)
            _, firsts = HashMap.of(codes, given)
            is_new = firsts == np.arange(firsts.size)
            new = given.take(np.flatnonzero(is_new))
            rows[missing] = len(self) - 1 + np.cumsum(is_new)[firsts]
            self._extend(new.blob, np.diff(new.offsets))
            self._map.append(codes[is_new])
        return rows

    def _extend(self, blob: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64]) -> None:
        """Append texts to the others; memory grows ahead, and is used up to the last offset."""
        rows, used = len(self), int(self._offsets[len(self)])
        if used + blob.size > self._blob.size:
            ahead = min((used + blob.size) // 4, _AHEAD)
            self._blob.resize(used + blob.size + ahead, refcheck=False)
        if rows + 1 + lengths.size > self._offsets.size:
            ahead = min((rows + lengths.size) // 4, _AHEAD)
            self._offsets.resize(rows + 1 + lengths.size + ahead, refcheck=False)
        self._blob[used : used + blob.size] = blob
        self._offsets[rows + 1 : rows + 1 + lengths.size] = used + np.cumsum(lengths)

    def keep(self, rows: Rows) -> None:
        with self.lock:
            texts = self._texts().take(rows)
            self._blob, self._offsets = texts.blob.copy(), texts.offsets
            self._map.keep(rows)

    def keys_of(self, rows: Rows) -> npt.NDArray[Any]:
        with self.lock:
            texts, flat = self._texts(), np.arange(len(self))[rows].ravel().tolist()
            out = np.empty(len(flat), object)
            out[:] = [texts.encoded(row).decode() for row in flat]
        return out.reshape(np.shape(rows))

    def parts(self, start: int) -> dict[str, npt.NDArray[np.uint8]]:
        with self.lock:
            first, last = self._offsets[[start, len(self)]].tolist()
            ends = self._offsets[start + 1 : len(self) + 1].astype("<i8")
            return {"utf8": self._blob[first:last].copy(), "ends": ends.view(np.uint8)}

    def parts_of(self, rows: Rows, behind: int = 0) -> dict[str, npt.NDArray[np.uint8]]:
        with self.lock:
            texts = self._texts().take(rows)
        ends = (texts.offsets[1:] + behind).astype("<i8")
        return {"utf8": texts.blob, "ends": ends.view(np.uint8)}

    def load(self, parts: Parts) -> None:
        texts = self._stored(parts)
        with self.lock:
            codes = np.empty(texts.offsets.size - 1 - len(self), np.uint64)
            for at in range(0, codes.size, _LOADED):
                self.check_wanted()
                first, block = len(self) + at, codes[at : at + _LOADED]
                block[:] = Texts(texts.blob, texts.offsets[first : first + block.size + 1]).hashes()
            self._blob, self._offsets = texts.blob.copy(), texts.offsets
            self._load(codes)

    def extend(self, parts: Parts) -> None:
        texts = self._stored(parts)
        with self.lock:
            self._extend(texts.blob, np.diff(texts.offsets))
            self._load(texts.hashes())

    def _stored(self, parts: Parts) -> Texts:
        """Return stored texts; raises CorruptStoreError if they are none."""
        blob, ends = parts["utf8"], parts["ends"].view("<i8").astype(np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), ends])
        if offsets[-1] != blob.size or not ascends(offsets):
            raise CorruptStoreError("the ends do not delimit the texts")
        for at in range(0, ends.size, _LOADED):
            self.check_wanted()
            stop = offsets[min(at + _LOADED, ends.size)]
            try:
                blob[offsets[at] : stop].tobytes().decode()
            except UnicodeDecodeError as error:
                raise CorruptStoreError(f"the keys are not UTF-8: {error.reason}") from None
        return Texts(blob, offsets)


def _texts_of(asked: Asked) -> Texts:
    if asked.texts is None:
        raise InvalidInputError("these keys are integers, and those of the table are texts")
    return asked.texts
