""".json: rows, keys, or the index of a model in several .safetensors files; read only.

Rows are a list of objects or of lists of numbers, also as the only list of an object; or an object
that maps each key to a list of numbers. Keys are a list. The index, as Hugging Face writes it, maps
the name of each tensor to the file in its directory that holds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from tierstore._formats._encoding import UNPACKING_ERRORS, text_stream
from tierstore._formats.base import FORMATS, Source, Wanted
from tierstore._formats.files import document, open_input, parsing
from tierstore._formats.jsonl import JsonLines, Objects, is_vector
from tierstore._formats.keys import Keys
from tierstore._formats.reading import Reader, choose
from tierstore._formats.safetensors import Safetensors
from tierstore.budget import JSON_COST, Allowance, Size
from tierstore.errors import FormatError

_SHARD = ".safetensors"
_INDEX = "weight_map"
_KEY, _VECTOR = "key", "vector"


class _Items(Objects):
    unit: ClassVar[str] = "item"

    def __init__(self, path: Path, found: Any, allowance: Allowance) -> None:
        self._items, self.notes = _items(path, found)
        super().__init__(path, allowance)

    def objects(self) -> Iterator[tuple[int, Any]]:
        """Yield the items."""
        yield from enumerate(self._items, 1)


def _items(path: Path, found: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Return the list in a document, and what is to be said of the rest; raises FormatError."""
    if isinstance(found, list):
        return found, ()
    if isinstance(found, dict):
        lists = [name for name, each in found.items() if isinstance(each, list)]
        rest = ", ".join(name for name in found if name not in lists)
        if not rest and (len(lists) > 1 or (lists and is_vector(found[lists[0]]))):
            return [{_KEY: name, _VECTOR: each} for name, each in found.items()], ()
        if len(lists) == 1:
            return found[lists[0]], (f"not read: {rest}",) if rest else ()
    raise FormatError(
        f"{path}: no list of rows, no object of one list for each key, and no index of {_SHARD} "
        f"files, in which {_INDEX} has those beside it"
    )


class Json(JsonLines):
    """A document, which is read as a whole."""

    suffixes = (".json",)

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open rows, or the file of a tensor, which the path names, or else the field."""
        found = _document(path, Allowance(path, wanted.memory))
        if isinstance(found, dict) and _INDEX in found:
            return _open_index(path, found, wanted)
        return super().open(path, wanted)

    def reader(self, path: Path, memory: Size) -> Reader:
        """Open rows."""
        allowance = Allowance(path, memory)
        return _Items(path, _document(path, allowance), allowance)

    def read_keys(self, path: Path, name: str | None, memory: Size) -> Keys:
        """Read a list of whole numbers or texts, or the keys of rows."""
        allowance = Allowance(path, memory)
        found = _document(path, allowance)
        if (
            name is None
            and isinstance(found, list)
            and not any(isinstance(each, dict | list) for each in found)
        ):
            found = [{_KEY: each} for each in found]
            return _Items(path, found, allowance).keys(_KEY)
        return super().read_keys(path, name, memory)


def _document(path: Path, allowance: Allowance) -> Any:
    """Return the content of a file; raises FormatError."""
    most = allowance.left // JSON_COST
    with (
        open_input(path, allowance.memory) as file,
        parsing(path, "packed file", *UNPACKING_ERRORS),
    ):
        text = text_stream(file).read(most + 1)
    allowance.check(JSON_COST * len(text), f"JSON of {len(text)} bytes or more")
    return document(path, text)


def _open_index(path: Path, found: dict[str, Any], wanted: Wanted) -> Source:
    shards = _weight_map(path, found)
    places = {each: f"in {shard}" for each, shard in shards.items()}
    if wanted.name is None and len(shards) > 1:
        name = choose(path, wanted, *_parted(path, shards, places, wanted))
    else:
        name = choose(path, wanted, places, {})
    shard = path.with_name(shards[name])
    try:
        return FORMATS[_SHARD].open(shard, dataclasses.replace(wanted, name=name))
    except FormatError as error:
        raise FormatError(f"{path}: {name!r} cannot be read: {error}") from error


def _parted(
    path: Path, shards: dict[str, str], places: dict[str, str], wanted: Wanted
) -> tuple[dict[str, str], dict[str, str]]:
    """Divide the tensors into matrices and others, by the headers of the files."""
    found: set[tuple[str, str]] = set()
    for shard in set(shards.values()):
        with Safetensors().reader(path.with_name(shard), wanted.memory) as reader:
            found |= {
                (shard, n)
                for n, each in reader.columns.items()
                if each.read_as == each.number and each.is_matrix
            }
    matrices = {name: place for name, place in places.items() if (shards[name], name) in found}
    return matrices, {name: place for name, place in places.items() if name not in matrices}


def _weight_map(path: Path, found: dict[str, Any]) -> dict[str, str]:
    """Return the file of each tensor; raises FormatError for JSON that is no such index."""
    shards = found[_INDEX]
    if not isinstance(shards, dict) or not all(map(_is_beside, shards.values())):
        raise FormatError(
            f"{path}: no index of {_SHARD} files, in which {_INDEX} has those beside it"
        )
    return shards


def _is_beside(name: object) -> bool:
    """Whether a name is that of a file in the directory of the index, not a way out of it."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(_SHARD)
