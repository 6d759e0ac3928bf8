""".json: the index of a model in several .safetensors files, as Hugging Face writes large ones.

It maps the name of each tensor to the file in its directory that holds the tensor; read only.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tierstore._formats.base import FORMATS, Format, Source, Wanted
from tierstore._formats.files import open_input
from tierstore._formats.reading import choose
from tierstore._formats.safetensors import Safetensors
from tierstore.budget import JSON_COST
from tierstore.errors import FormatError

__all__ = ["SafetensorsIndex"]

_SHARD = ".safetensors"


class SafetensorsIndex(Format):
    """Tensors by name, each in one of several files."""

    suffixes = (".json",)

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open the file of a tensor, which the path names, or else the field."""
        shards = _weight_map(path, wanted)
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


def _weight_map(path: Path, wanted: Wanted) -> dict[str, str]:
    """Return the file of each tensor; raises FormatError for JSON that is no such index."""
    with open_input(path, wanted.memory) as file:
        file.allowance.check(JSON_COST * file.size, f"JSON of {file.size} bytes")
        try:
            found = json.loads(file.read_at(0, file.size))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path}: not JSON: {error!s:.200}") from None
    shards = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(shards, dict) or not all(map(_is_beside, shards.values())):
        raise FormatError(
            f"{path}: no index of {_SHARD} files, in which weight_map has those beside it"
        )
    return shards


def _is_beside(name: object) -> bool:
    """Whether a name is that of a file in the directory of the index, not a way out of it."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(_SHARD)
