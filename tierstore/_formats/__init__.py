"""Reads and writes files of vectors of other tools, as blocks of rows.

Rows are streamed in blocks of a few MiB. Sizes that a file claims are charged to an allowance
before memory is allocated, and code in a file is never executed. A written file appears complete or
not at all. Callers may pass blocks of any size; the writer of a format gets blocks of equal size
with the element type of the file.

Each format is one module with a `Format` (base.py) per kind of file, selected by suffix. A module
with a leading underscore is a helper of the format that imports it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tierstore._dtypes import DEFAULT_DTYPE, ELEMENT_TYPES, check_dtype, convert, held_dtype
from tierstore._formats._encoding import PackedFile, is_packed, packed_name, unpack
from tierstore._formats._remote import fetch, publish_remote
from tierstore._formats._torch_storages import LEGACY
from tierstore._formats.base import (
    FORMATS,
    Array,
    Content,
    Format,
    Source,
    Stored,
    StoredChunks,
    StoredParts,
    TextOptions,
    Wanted,
    Write,
    block_rows_for,
)
from tierstore._formats.claims import check_claim
from tierstore._formats.files import in_archive, open_input, unless_it_fails
from tierstore._formats.joined import JoinedSource
from tierstore._formats.keys import KeyColumn, Keys
from tierstore._formats.npy import write_keys
from tierstore._io import publish, reach
from tierstore._scaled import SCALE_TYPES, ScaledElements
from tierstore._store.versions import STORE
from tierstore.budget import DEFAULT_MEMORY, Allowance, Size
from tierstore.errors import (
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    MissingFileError,
    StoreFullError,
    StoreIOError,
    TierStoreError,
)

__all__ = [
    "SINK_SUFFIXES",
    "SOURCE_SUFFIXES",
    "Keys",
    "Location",
    "Sink",
    "Source",
    "Stored",
    "StoredChunks",
    "StoredParts",
    "TextOptions",
    "fetched",
    "format_of",
    "keys_beside",
    "locate",
    "open_sink",
    "open_source",
    "read_keys",
    "split_name",
]

_RESERVED = frozenset({"key", "keys", "keys_offsets"})
_PICKLE = "a pickle is code: save the matrix alone, as with numpy.save; "
_GENSIM = "gensim saves vectors without code by save_word2vec_format; "
_ARCHIVE = "take the file out of the archive; "
_WAYS = {
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), _PICKLE),
    **dict.fromkeys((".kv", ".model", ".d2v", ".wordvectors"), _GENSIM),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), _ARCHIVE),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as CSV; "),
    **dict.fromkeys((".f32", ".f16", ".memmap", ".mmap"), "name the bytes of a matrix .raw; "),
}
"""How to convert files of other tools into readable ones, by suffix."""

_POINTER = b"version https://git-lfs.github.com/spec/"
_ZIP_MAGIC = b"PK\3\4"
_TORCH = (".pt", ".pth", ".ckpt")
_ARCHIVES = (*_TORCH, ".npz")
_TENSORS = (".safetensors",)
_KINDS = {
    _TORCH: "a file of torch.save: name it .pt",
    _ARCHIVES: "a zip archive, such as torch.save and numpy.savez write: name it .pt or .npz",
    _TENSORS: "a file of safetensors: name it .safetensors",
}
"""What begins as files of some suffixes do, for people."""
_TOLD_APART = (*_ARCHIVES, *_TENSORS, ".npy", ".parquet", ".arrow", ".feather", ".h5", ".csv")
"""Suffixes of files that never begin as those of torch or safetensors do, but for their own."""
_BORROWED = ".bin"
"""The suffix of word2vec that Hugging Face gives to files of torch and safetensors, too."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def format_of(path: Path, *, write: bool = False) -> Format:
    """Return the format of a file by its suffix, ignoring case.

    A directory to read may have any name: the files in it decide. Raises InvalidInputError
    that lists the readable or writable formats, FormatError for a directory of other files, such as
    a store.
    """
    suffix = format_suffix(path)
    if not write and path.is_dir():
        _refuse_store(path)
    if suffix == ".tar" and Path(path.stem).suffix in FORMATS and not write:
        return FORMATS[Path(path.stem).suffix]  # as torch's examples name a checkpoint: .pth.tar
    if suffix == ".zip" and not write and path.is_file():
        with open_input(path) as file:
            inner = Path(packed_name(file))
        if format_suffix(inner) in FORMATS and FORMATS[format_suffix(inner)].is_text:
            return FORMATS[format_suffix(inner)]
    if suffix not in FORMATS and not write and path.is_dir():
        claiming = {type(each): each for each in FORMATS.values() if each.claims(path)}
        if len(claiming) > 1:
            raise InvalidInputError(
                f"{path}: a directory of files of several formats; put those of one into their own"
            )
        if claiming:
            return next(iter(claiming.values()))
    known = [name for name, each in FORMATS.items() if each.is_written or not write]
    if suffix not in known:
        if not write and path.is_dir():
            raise FormatError(
                f"{path}: a directory that holds no .parquet or .arrow files itself{_inside(path)}"
            )
        verb = "written" if write else "read"
        like = () if write or suffix == ".zip" or not path.is_file() else _suffixes_by_head(path)
        way = f"it is {_KINDS[like]}; " if like else _WAYS.get(suffix, "")
        way = "" if write else way
        raise InvalidInputError(
            f"{path}: files ending in {suffix!r} cannot be {verb}; {way}use one of "
            f"{' '.join(known)}"
        )
    return FORMATS[suffix]


def _inside(path: Path) -> str:
    """Say how to come to what a directory of another kind holds."""
    if (path / ".metadata").is_file():
        return (
            "; of a checkpoint of torch.distributed, torch.distributed.checkpoint.format_utils."
            f"dcp_to_torch_save({str(path)!r}, 'whole.pt') makes a file"
        )
    inner = sorted(each for each in path.iterdir() if each.is_dir())
    return f"; name a directory in it, such as {inner[0]}" if inner else ""


def _refuse_store(path: Path) -> None:
    """Raise FormatError for a store or the directory of a table in one."""
    for store in (path, path.absolute().parent):
        if (store / STORE).is_file():
            what = "a store" if store is path else f"part of the store {store}"
            raise FormatError(
                f"{path} is {what}, not a file of rows or keys: export a table of the store to "
                ".safetensors, which holds its keys too, and read that (export_table, tierstore "
                "export); tierstore save copies a whole store"
            )


def format_suffix(path: Path) -> str:
    """Return the suffix that names the format of a file, in lower case.

    Of a packed text file this is the last suffix but one: `.csv` of `items.csv.gz`.
    """
    inner = Path(path.stem).suffix.lower()
    packed = is_packed(path) and inner in FORMATS and FORMATS[inner].is_text
    return inner if packed else path.suffix.lower()


def split_name(source: str | Path) -> tuple[Path, str | None]:
    """Split `FILE:NAME` into the file and the array, tensor or column in it.

    If a file exists under the whole text, it has no NAME part. `FILE::NAME` means the same.
    """
    text = str(source)
    colon = text.find(":")
    while colon >= 0 and not Path(text).exists():
        if format_suffix(Path(text[:colon])) in FORMATS or (colon and Path(text[:colon]).is_dir()):
            return Path(text[:colon]), text[colon + 1 :].removeprefix(":")
        colon = text.find(":", colon + 1)
    return Path(text), None


@contextlib.contextmanager
def fetched(where: Any) -> Iterator[Any]:
    """Yield what to open: `where`, or the path of a temporary copy.

    That is one of a file at a URL, `URL:NAME` becomes `FILE:NAME`, or of a packed file that is no
    text, such as .npy.gz, unpacked. A `.zarr` is read where it is. Raises FormatError for a missing
    file, InvalidInputError for an unknown suffix, MissingExtraError and StoreIOError.
    """
    packed = Path(where) if isinstance(where, str | os.PathLike) else Path()
    inner = FORMATS.get(Path(packed.stem).suffix.lower())
    if inner is not None and not inner.is_text and is_packed(packed) and packed.is_file():
        with tempfile.TemporaryDirectory(prefix="tierstore-") as directory:
            unpack(packed, Path(directory, packed.stem))
            yield Path(directory, packed.stem)
        return
    if isinstance(where, list | tuple):
        with contextlib.ExitStack() as copies:
            yield [copies.enter_context(fetched(each)) for each in where]
        return
    if not isinstance(where, str) or "://" not in where:
        yield where
        return
    file, colon, name = urlsplit(where.rstrip("/")).path.rpartition("/")[2].partition(":")
    if format_of(Path(file)).takes_stores:
        yield where
        return
    with tempfile.TemporaryDirectory(prefix="tierstore-") as directory:
        copy = Path(directory, file)
        fetch(where.removesuffix(colon + name), copy)
        yield f"{copy}{colon}{name}"


def _locate_file(url: str, able: list[str], *, write: bool) -> Location:
    """Return the location of a file at a URL, to which streams are written."""
    path = Path(url)
    if not write:
        raise InvalidInputError(
            f"{url}: only {' '.join(able)} is read from a URL; copy the file to a disk first"
        )
    if format_of(path, write=True).is_directory:
        raise InvalidInputError(f"{url}: a directory, which is not written to a URL")
    return Location(path, url=url)


@dataclass(frozen=True)
class Location:
    """The location of vectors.

    Attributes:
        path: the file, with `:NAME` if given; for a zarr store its name, whose suffix selects the
            format.
        store: the zarr store, or None for a file.
        url: the URL of a file that is not on a disk, or None.
    """

    path: Path
    store: Any = None
    url: str | None = None


def locate(where: Any, *, write: bool = False) -> Location:
    """Return the location for a path, a URL or a zarr store; return a location unchanged.

    Raises InvalidInputError for a URL of a format that does not support stores, InvalidTypeError
    for an array.
    """
    if isinstance(where, Location):
        return where
    able = [suffix for suffix, each in FORMATS.items() if each.takes_stores]
    if isinstance(where, str) and "://" in where:
        if Path(where.rstrip("/")).suffix not in able:
            return _locate_file(where, able, write=write)
        where = reach(where, write=write)
    if isinstance(where, str | os.PathLike):
        return Location(Path(where))
    if hasattr(where, "__array__") or hasattr(where, "weight"):
        raise InvalidTypeError(
            f"this reads and writes files, not {type(where).__name__}; of rows in memory make a "
            "table, TableSpec(*rows.shape, init=tierstore.from_array(rows)), or table.write them"
        )
    return Location(Path(f"{where}".rstrip("/").removesuffix(able[0]) + able[0]), where)


def open_source(
    path: Any,
    *,
    field: str | None = None,
    text_dtype: str = DEFAULT_DTYPE,
    memory: Size = DEFAULT_MEMORY,
    text: TextOptions | None = None,
    dim: int | None = None,
    expand: bool = False,
    beside: tuple[str, ...] = (),
) -> Source:
    """Open a file of vectors for reading; its suffix selects the format. Returns a `Source`.

    Args:
        path: the file, or `FILE:NAME` for one of several arrays, tensors or columns; or a URL for
            fsspec, such as "s3://bucket/items.zarr", or a zarr store. A list of files is read as
            one, whose rows follow each other.
        field: the array to prefer if no name is given; a file with a single array needs neither.
        text_dtype: the element type for text formats, which do not specify one.
        memory: limit in bytes for reading, in addition to a block of rows, such as 536870912 or
            "512MiB". Sizes that the file claims are checked against it before memory is allocated.
        text: options for a text file; `key_column` for other files with columns, too.
        dim: the elements of a row, for files that say it in their rows alone and have none.
        expand: take a file that holds far less than the rows that it claims; see `claims`.
        beside: other fields, which are read from the same file; `field` is then the name in it.

    Raises:
        AmbiguousFileError: a text file can be read in two ways, and `text` does not decide.
        FormatError: the file is missing or damaged, lacks the matrix, claims far more than it
            holds, or needs more than `memory`.
        InvalidInputError: the suffix is unknown; the message lists the known ones. Or `text` is
            given for a file of another kind.
        MissingExtraError: the format needs a package that is not installed.
    """
    options = TextOptions() if text is None else text
    wanted = Wanted(None, field, check_dtype(text_dtype), memory, options, dim, beside)
    return _open(path, wanted, expand=expand)


def _open(path: Any, wanted: Wanted, *, expand: bool) -> Source:
    """Return the open source of a file, or of files one after another."""
    if isinstance(path, list | tuple):
        memory = Allowance(Path(str(path[:1])), wanted.memory).memory // max(1, len(path))
        each_wanted = replace(wanted, memory=memory)
        with contextlib.ExitStack() as opened:
            sources = [
                opened.enter_context(_open(each, each_wanted, expand=expand)) for each in path
            ]
            if not sources:
                raise InvalidInputError("no file to read is named")
            joined = JoinedSource(sources)
            opened.pop_all()
            return joined
    source = _opened(locate(path), wanted)
    if not expand:
        with unless_it_fails(source):
            check_claim(source)
    return source


def _opened(found: Location, wanted: Wanted) -> Source:
    """Return the open source of a location, whose claims are not checked."""
    file, name = (found.path, None) if found.store is not None else split_name(found.path)
    if wanted.beside and name is not None:
        raise InvalidInputError(
            f"{found.path}: several fields are read by their names in the file; leave :{name} out"
        )
    wanted = replace(wanted, name=wanted.field if wanted.beside else name)
    if found.store is not None:
        _check_no_text(file, format_of(file), wanted.text)
        return format_of(file).open_store(found.store, file, wanted)
    if format_suffix(file) not in FORMATS and not os.path.lexists(file):
        raise MissingFileError(f"{file}: no such file", filename=file)
    format_ = format_of(file)
    if not format_.is_text:
        _check_no_text(file, format_, wanted.text)
    if in_archive(file) is not None and not format_.is_text:
        raise InvalidInputError(f"{file}: only text is read from an archive; take the file out")
    format_ = _refused_or_told(file, format_)
    return format_.open(file, wanted)


def _refused_or_told(file: Path, format_: Format) -> Format:
    """Return the format of a file whose suffix is that of several, by its first bytes.

    Raises FormatError for what git-lfs leaves in the place of a file, and for misnamed ones.
    """
    like = _suffixes_by_head(file) if file.is_file() else ()
    suffix = file.suffix.lower()
    if like and suffix == _BORROWED:
        return FORMATS[like[0]]
    if like and suffix in _TOLD_APART and suffix not in like:
        raise FormatError(f"{file}: no {suffix} file but {_KINDS[like]}")
    return format_


def _suffixes_by_head(file: Path) -> tuple[str, ...]:
    """Return the suffixes of files that begin as one does, of torch or safetensors; or none.

    Raises FormatError for a pointer of git-lfs.
    """
    with open_input(file) as found:
        head = found.read_at(0, min(found.size, len(_POINTER)))
        size = found.size
    if head.startswith(_POINTER):
        raise FormatError(
            f"{file}: a pointer of git-lfs, not the file itself: get that with git lfs pull"
        )
    if head.startswith(_ZIP_MAGIC):
        return _ARCHIVES
    if head.startswith(LEGACY):
        return _TORCH
    inside = 1 < int.from_bytes(head[:8], "little") <= size - 8
    return _TENSORS if inside and head[8:9] == b"{" else ()


def _check_no_text(file: Path, format_: Format, options: TextOptions) -> None:
    """Raise InvalidInputError for options that say nothing about a file that is no text."""
    column, vector = options.key_column, options.vector
    if (column is not None or vector) and not format_.has_columns:
        raise InvalidInputError(
            f"{file}: has no columns, so that --key-column (key_column) and --vector (vector) say "
            "nothing about it; --keys (keys=) gives a file of keys"
        )
    errors = options.errors if format_.has_words else "strict"
    if options != TextOptions(key_column=column, vector=vector, errors=errors):
        raise InvalidInputError(f"{file}: is no text, so that header, sep, … say nothing about it")


def read_keys(path: str | Path, *, memory: Size = DEFAULT_MEMORY) -> Keys:
    """Return the keys in a file of keys, in order: integers, uint64 if one needs that, or texts.

    `.txt` has one key per line, in UTF-8. `.npy` is a 1-D array of integers or fixed-width strings.
    `FILE.parquet:COLUMN` is a column of integers or strings, by default `key`. Raises FormatError
    for any other content or if the keys need more than `memory` bytes, InvalidInputError for
    another suffix.
    """
    with fetched(path) as place:
        return _read_keys(place, memory)


def _read_keys(path: str | Path, memory: Size) -> Keys:
    file, name = split_name(path)
    able = [suffix for suffix, each in FORMATS.items() if each.holds_keys_alone]
    if format_suffix(file) not in able and not file.is_dir():
        raise InvalidInputError(f"{path}: keys are read from {' '.join(able)} files")
    format_ = format_of(file)
    if not format_.holds_keys_alone:
        raise InvalidInputError(f"{path}: keys are read from {' '.join(able)} files")
    return format_.read_keys(file, name, memory)


class Sink:
    """Accepts all rows of a matrix in order, in blocks of any size.

    Attributes:
        path: the new file.
        rows, dim: shape of the matrix.
        dtype: element type of the file; the blocks may have a different one.
        rows_written: number of rows accepted so far.
    """

    def __init__(self, path: Path, content: Content, block_dtype: str, write: Write) -> None:
        """Forward blocks of `block_dtype` to `write`."""
        self.path = path
        self.rows = content.rows
        self.dim = content.dim
        self.dtype = content.dtype
        self.rows_written = 0
        self._block_dtype = block_dtype
        self._write = write
        self._scaled: ScaledElements | None = None
        width, stored = content.dim, content.storage
        if content.scale is not None:
            element = ELEMENT_TYPES[content.dtype]
            self._scaled = ScaledElements(element, SCALE_TYPES["float32"], width, width)
            width, stored = self._scaled.nbytes, self._scaled.stored
        self._buffer = np.empty((min(content.block_rows, content.rows), width), stored)
        self._held = 0

    def write(self, block: Array) -> None:
        """Accept rows `(n, dim)` of the stored NumPy dtype; copy them or write them at once.

        Raises InvalidInputError if the shape is wrong or there are more rows than announced,
        InvalidTypeError for a different dtype.
        """
        stored = ELEMENT_TYPES[self._block_dtype].stored
        if block.dtype != stored:
            raise InvalidTypeError(f"the block is {block.dtype}, but {stored} was announced")
        if block.ndim != 2 or block.shape[1] != self.dim:
            raise InvalidInputError(f"the block has shape {block.shape}; need (n, {self.dim})")
        if self.rows_written + len(block) > self.rows:
            raise InvalidInputError(
                f"{self.rows_written + len(block)} rows, but {self.rows} were announced"
            )
        if self._scaled is not None:
            block = self._scaled.encode(ELEMENT_TYPES[self._block_dtype].decode(block))
        else:
            block = np.ascontiguousarray(convert(block, self._block_dtype, self.dtype))
        while len(block):
            taken = self._take(block)
            self.rows_written += taken
            block = block[taken:]

    def _take(self, block: Array) -> int:
        """Write or buffer the first rows of `block`; return how many."""
        size = len(self._buffer)
        if self._held == 0 and len(block) >= size:
            self._write(self.rows_written, *self._parts(block[:size]))
            return size
        taken = min(size - self._held, len(block))
        self._buffer[self._held : self._held + taken] = block[:taken]
        self._held += taken
        if self._held == size:
            self._write(self.rows_written + taken - size, *self._parts(self._buffer))
            self._held = 0
        return taken

    def _parts(self, block: Array) -> tuple[Array, ...]:
        """Return a block, or its elements and scales."""
        if self._scaled is None:
            return (block,)
        scaled = self._scaled
        elements = np.ascontiguousarray(block[:, : self.dim]).view(scaled.element.stored)
        return elements, np.ascontiguousarray(block[:, scaled.scales_at :]).view("<f4")

    def finish(self) -> None:
        """Write the buffered rows; raises InvalidInputError if rows are missing."""
        if self.rows_written != self.rows:
            raise InvalidInputError(
                f"{self.path}: {self.rows_written} rows were written, but {self.rows} announced"
            )
        if self._held:
            held = self._parts(self._buffer[: self._held])
            self._write(self.rows_written - self._held, *held)
            self._held = 0


def keys_beside(path: Path) -> Path:
    """Return the file for the keys of a file that cannot hold them: `items.keys.npy`."""
    return path.with_name(f"{path.stem}.keys.npy")


def open_sink(
    path: Any,
    *,
    rows: int,
    dim: int,
    dtype: str,
    field: str | Mapping[str, int] = "weight",
    keys: Any = None,
    first_row: int = 0,
    header: bool = True,
    key: str | None = None,
    scaled: str | None = None,
    force: bool = False,
) -> contextlib.AbstractContextManager[Sink]:
    """Open a file of vectors for writing, as a context manager; its suffix selects the format.

    The file appears under its name, synced, when the context ends with all rows written; after an
    error nothing remains.

    Args:
        path: the file (a directory for `.zarr`), or a zarr store. Data in a zarr store is visible
            at once, but readers reject it until it is complete.
        rows: number of rows of the matrix, may be 0.
        dim: number of elements per row.
        dtype: element type of the blocks. If the format does not support it, the narrowest type
            that represents its values exactly is written; if there is none, the dtype is refused.
        field: name of the matrix, if the format has names; or the names of several, side by side in
            the blocks, and how many of the `dim` columns each has.
        keys: one integer or string per row, in a sequence that is only sliced, or None. They are
            written to a separate file if the format has no place for them (`keys_beside`).
        first_row: number of the first row; without keys, formats that need a word in each row count
            from it.
        header: whether a file in text begins with a line of names, or of counts.
        key: name of the column of keys; None for the usual one.
        scaled: the element type, of 8 bits, of the matrix in the file, with a scale for each row in
            an array beside it, `weight_scale` of `weight`; None for values as they are.
        force: replace an existing file.

    Raises:
        ExistsError: the file exists, or is a link or a directory.
        InvalidInputError: the suffix is unknown, or the format cannot hold the keys or the dtype.
        MissingExtraError: the format needs a package that is not installed.
        StoreFullError, StoreIOError: the file system failed.
    """
    target = locate(path, write=True)
    format_, fields = format_of(target.path, write=True), _fields(field, dim)
    _check_supported(format_, target.path, fields, header=header, key=key, scaled=scaled)
    for name in _RESERVED.intersection(fields) if keys is not None else ():
        raise InvalidInputError(f"a field named {name!r} cannot be written together with keys")
    if rows < 0 or dim < 1:
        raise InvalidInputError(f"a matrix needs rows >= 0 and dim >= 1, not {rows} and {dim}")
    types = [name for name, each in ELEMENT_TYPES.items() if format_.holds(each)]
    held = held_dtype(check_dtype(dtype), types, f"{target.path}: {target.path.suffix}")
    row_bytes = dim * ELEMENT_TYPES[held].stored.itemsize
    content = Content(
        rows=rows,
        dim=dim,
        dtype=held if scaled is None else check_dtype(scaled),
        block_rows=block_rows_for(row_bytes, format_.block_bytes),
        fields=fields,
        keys=None if keys is None else KeyColumn(keys, rows),
        first_row=first_row,
        header=header,
        key=key or "key",
        scale=None if scaled is None else f"{next(iter(fields))}_scale",
    )
    return _sink(format_, target, content, dtype, force=force)


def _fields(field: str | Mapping[str, int], dim: int) -> Mapping[str, int]:
    return {field: dim} if isinstance(field, str) else field


def _check_supported(
    format_: Format,
    path: Path,
    fields: Mapping[str, int],
    *,
    header: bool,
    key: str | None,
    scaled: str | None,
) -> None:
    """Raise InvalidInputError for what files of the format cannot have."""

    def able(has: str) -> str:
        return " ".join(name for name in SINK_SUFFIXES if getattr(FORMATS[name], has))

    if not (header or format_.is_text):
        raise InvalidInputError(f"{path}: only files in text have no header")
    if len(fields) > 1 and not format_.several:
        raise InvalidInputError(
            f"{path}: a {path.suffix} file holds one field; several go into one of "
            f"{able('several')}"
        )
    if scaled is not None and (not format_.holds_scales or len(fields) > 1):
        raise InvalidInputError(
            f"{path}: {scaled} of floats needs a scale for each row, in an array beside those of "
            f"one field: write one field to {able('holds_scales')}, or another dtype"
        )
    if key is not None and (not format_.names_key or key in fields):
        raise InvalidInputError(
            f"{path}: no column of keys can be named {key!r}: {able('names_key')} files have one, "
            "with a name that no field has"
        )


@contextlib.contextmanager
def _sink(
    format_: Format, target: Location, content: Content, dtype: str, *, force: bool
) -> Iterator[Sink]:
    """Write to a location, and publish the complete result."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_explained(target.path))
        if target.store is not None:
            written = format_.write_store(target.store, target.path, content, force=force)
        else:
            file: Any = stack.enter_context(_published(target, target.path, format_, force=force))
            file = PackedFile(file, target.path) if is_packed(target.path) else file
            if content.keys is not None and format_.keys == "never":  # at a URL, they appear first
                beside = keys_beside(target.path)
                keys = stack.enter_context(_published(target, beside, force=force))
                write_keys(keys, content.keys)
            written = format_.write(file, content)
        write = stack.enter_context(written)
        sink = Sink(target.path, content, dtype, write)
        yield sink
        sink.finish()


def _published(
    target: Location, path: Path, format_: Format | None = None, *, force: bool
) -> contextlib.AbstractContextManager[Any]:
    """Return the place of a file, the target or one beside it, which appears whole or not at all.

    A directory that a format wrote is replaced.
    """
    if target.url is not None:
        url = f"{target.url.rpartition('/')[0]}/{path.name}"
        return publish_remote(url, force=force)

    def replaceable(old: Path) -> bool:
        return format_ is not None and (old.is_symlink() or format_.wrote(old))

    return publish(path, force=force, replaceable=replaceable)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an OSError of a writer into an error with a remedy."""
    try:
        yield
    except TierStoreError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        kind: type[OSError] = StoreFullError if error.errno in _FULL else StoreIOError
        failure = kind(f"cannot write {path}: {reason}; no file was left behind")
        failure.errno = error.errno
        raise failure from error


SOURCE_SUFFIXES = tuple(FORMATS)
"""Suffixes of files that can be read."""

SINK_SUFFIXES = tuple(suffix for suffix, each in FORMATS.items() if each.is_written)
"""Suffixes of files that can be written."""
