"""Files of a store replaced by made-up ones that bear valid checksums, as an attacker would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tierstore._checksum import crc32c

__all__ = ["body_of", "crafted", "newest_manifest", "resealed", "sealed"]


def newest_manifest(store: Path) -> Path:
    """Path of the manifest that a store opens by."""
    return max(store.glob("manifest-*.json"))


def sealed(text: bytes) -> bytes:
    """Return a body in an envelope with its checksum."""
    return b'{"crc32c":%d,"body":%s}\n' % (crc32c(text), text)


def body_of(data: bytes) -> bytes:
    """Return what is inside the envelope."""
    return data[data.index(b'"body":') + 7 : -2]


def resealed(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Change the object in an envelope and seal it again."""
    content = json.loads(body_of(data))
    change(content)
    return sealed(json.dumps(content, separators=(",", ":")).encode())


@contextmanager
def replaced(path: Path, data: bytes) -> Iterator[None]:
    """Replace the contents of a file temporarily."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


@contextmanager
def crafted(store: Path, kind: str, name: str, data: bytes) -> Iterator[None]:
    """Put `data` in place of the payload `name`, or of the keys "table.ending"."""
    manifest = newest_manifest(store)
    with ExitStack() as stack:

        def change(body: dict[str, Any]) -> None:
            if kind == "payload":
                info = body["payload"][name]
                info.update(size=len(data), crc32c=crc32c(data))
                path = store / info["name"]
            else:
                table, _, ending = name.partition(".")
                info = body["tables"][table]
                file = next(each for each in info["keys"]["files"] if each.endswith(ending))
                info["keys"]["files"][file] = [len(data), crc32c(data)]
                path = store / table / info["generation"] / file
            stack.enter_context(replaced(path, data))

        changed = resealed(manifest.read_bytes(), change)
        stack.enter_context(replaced(manifest, changed))
        yield
