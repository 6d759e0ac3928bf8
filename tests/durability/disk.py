"""A disk that loses power: what is durable, what is only cached, and what a crash may leave of it.

The model is that of SQLite's test6.c and of ALICE (Pillai et al., OSDI'14). Bytes that were
written but not synced reach the disk sector by sector, in any order: each sector of 512 bytes holds
what any prefix of the writes left in it, or, where it was being written, garbage. A file's size is
that after any of its writes. Names that were made or removed and not synced survive as a prefix (a
journal), or, in the hostile mode, as any subset.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "ROOT",
    "SECTOR",
    "Disk",
    "Enter",
    "Event",
    "Image",
    "Mark",
    "Move",
    "Remove",
    "Resize",
    "Sync",
    "Write",
]

SECTOR = 512
ROOT = 0
"""Number of the root directory among the nodes."""

Image = dict[str, bytes | None]
"""A tree of files: bytes by path, None for a directory."""


class Write(NamedTuple):
    """Bytes written to a file."""

    node: int
    offset: int
    data: bytes


class Resize(NamedTuple):
    """A new size of a file; with `least`, only if it is larger."""

    node: int
    size: int
    least: bool = False


class Sync(NamedTuple):
    """A file or directory synced, and the place in the code that asked for it."""

    node: int
    site: str


class Enter(NamedTuple):
    """A name given to a node that is new, or that has another name already."""

    directory: int
    name: str
    node: int
    is_directory: bool = False


class Remove(NamedTuple):
    """A name removed."""

    directory: int
    name: str


class Move(NamedTuple):
    """A name changed within a directory, over another if that is taken."""

    directory: int
    old: str
    new: str


class Mark(NamedTuple):
    """A remark of the workload: state `number` of the store `name` "begins" or is "done"."""

    kind: str
    name: str
    number: int


Event = Write | Resize | Sync | Enter | Remove | Move | Mark


@dataclass
class _File:
    durable: bytes = b""
    pending: list[Write | Resize] = field(default_factory=list)

    def stages(self) -> list[bytes]:
        """Return the contents after each prefix of the pending writes."""
        stages = [self.durable]
        for event in self.pending:
            data = bytearray(stages[-1])
            if isinstance(event, Resize):
                if event.size > len(data):
                    data.extend(bytes(event.size - len(data)))
                elif not event.least:
                    del data[event.size :]
            else:
                end = event.offset + len(event.data)
                data.extend(bytes(max(0, end - len(data))))
                data[event.offset : end] = event.data
            stages.append(bytes(data))
        return stages

    def crashed(self, rng: random.Random) -> bytes:
        """Return what a power cut may leave of the contents."""
        stages = self.stages()
        kind = rng.choice(("nothing", "everything", "prefix", "sectors", "sectors", "garbage"))
        if kind == "nothing" or len(stages) == 1:
            return stages[0]
        if kind in ("everything", "prefix"):
            return stages[-1 if kind == "everything" else rng.randrange(len(stages))]
        size = len(rng.choice(stages))
        whole = bytearray()
        for start in range(0, size, SECTOR):
            piece = rng.choice(stages)[start : start + SECTOR].ljust(SECTOR, b"\0")
            before = stages[0][start : start + SECTOR].ljust(SECTOR, b"\0")
            if kind == "garbage" and piece != before and rng.random() < 0.5:
                piece = bytes(
                    new if new == old else rng.randrange(256)
                    for new, old in zip(piece, before, strict=True)
                )
            whole += piece
        return bytes(whole[:size])


@dataclass
class _Directory:
    durable: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[int, Enter | Remove | Move]] = field(default_factory=list)


def _apply(entries: dict[str, int], event: Enter | Remove | Move) -> None:
    if isinstance(event, Enter):
        entries[event.name] = event.node
    elif isinstance(event, Remove):
        entries.pop(event.name, None)
    elif event.old in entries:
        entries[event.new] = entries.pop(event.old)


class Disk:
    """Replays events, and says what is left after a crash at this point."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        """Start with an empty root, then replay `events`."""
        self._files: dict[int, _File] = {}
        self._directories: dict[int, _Directory] = {ROOT: _Directory()}
        self._count = 0
        self._journaled = 0
        for event in events:
            self.replay(event)

    def replay(self, event: Event) -> None:
        """Apply an event."""
        self._count += 1
        if isinstance(event, Write | Resize):
            self._files[event.node].pending.append(event)
        elif isinstance(event, Sync):
            self._sync(event.node)
        elif isinstance(event, Enter | Remove | Move):
            if isinstance(event, Enter):
                if event.is_directory:
                    self._directories.setdefault(event.node, _Directory())
                else:
                    self._files.setdefault(event.node, _File())
            self._directories[event.directory].pending.append((self._count, event))

    def _sync(self, node: int) -> None:
        if node in self._files:
            file = self._files[node]
            file.durable, file.pending = file.stages()[-1], []
        else:
            directory = self._directories[node]
            for _, event in directory.pending:
                _apply(directory.durable, event)
            directory.pending = []
            self._journaled = self._count

    def image(self) -> Image:
        """Return what programs see, durable or not."""
        contents = {node: file.stages()[-1] for node, file in self._files.items()}
        return self._tree(contents, range(self._count + 1))

    def crash(self, rng: random.Random, *, hostile: bool) -> Image:
        """Return what a power cut at this point may leave."""
        pending = [count for item in self._directories.values() for count, _ in item.pending]
        if hostile:
            chance = rng.choice((0.1, 0.5, 0.9))
            survivors: Container[int] = {count for count in pending if rng.random() < chance}
        else:
            survivors = range(max(rng.choice([0, *pending]), self._journaled) + 1)
        contents = {node: file.crashed(rng) for node, file in self._files.items()}
        return self._tree(contents, survivors)

    def _tree(self, contents: dict[int, bytes], survivors: Container[int]) -> Image:
        """Return the tree in which, of the pending changes of names, the survivors took place."""
        image: Image = {}
        waiting = [("", ROOT)]
        while waiting:
            path, node = waiting.pop()
            directory = self._directories[node]
            entries = dict(directory.durable)
            for count, event in directory.pending:
                if count in survivors:
                    _apply(entries, event)
            for name, child in entries.items():
                image[path + name] = contents.get(child)
                if child not in contents:
                    waiting.append((f"{path}{name}/", child))
        return image
