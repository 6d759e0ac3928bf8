"""A stand-in for the `calls` of `tierstore._io.system` that notes every change of files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.durability.disk import (
    ROOT,
    Disk,
    Enter,
    Event,
    Image,
    Mark,
    Move,
    Remove,
    Resize,
    Sync,
    Write,
)
from tierstore._io.system import Calls

__all__ = ["Recorder", "lay"]


def lay(image: Image, root: Path) -> None:
    """Write a tree of files to an existing, empty directory."""
    for path, data in sorted(image.items()):
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


class Recorder:
    """Does what `os` does, within and outside of a directory, and keeps a log of the inside."""

    def __init__(self, root: Path, events: Iterable[Event] = ()) -> None:
        """Record what happens in `root`, which is made to look as it did after `events`."""
        self.log: list[Event] = list(events)
        self._root = root
        lay(Disk(self.log).image(), root)
        self._next = 1 + max((e.node for e in self.log if isinstance(e, Enter)), default=ROOT)
        self._nodes = {_inode(os.stat(root)): ROOT}
        self._find_nodes()

    def _find_nodes(self) -> None:
        """Tell which of the files that were laid out is which node."""
        children: dict[int, dict[str, int]] = {}
        for event in self.log:
            if isinstance(event, Enter):
                children.setdefault(event.directory, {})[event.name] = event.node
            elif isinstance(event, Remove):
                children.get(event.directory, {}).pop(event.name, None)
            elif isinstance(event, Move) and event.old in children.get(event.directory, {}):
                entries = children[event.directory]
                entries[event.new] = entries.pop(event.old)
        waiting = [(self._root, ROOT)]
        while waiting:
            path, node = waiting.pop()
            for name, child in children.get(node, {}).items():
                self._nodes[_inode(os.stat(path / name))] = child
                waiting.append((path / name, child))

    def mark(self, kind: str, name: str, number: int) -> None:
        """Note where the workload is."""
        self.log.append(Mark(kind, name, number))

    def __getattr__(self, name: str) -> Any:
        """Whatever changes nothing is left to `os`."""
        return getattr(Calls, name)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_CREAT:
            self._enter(path, dir_fd, os.fstat(fd), is_directory=False)
        return fd

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        os.mkdir(path, mode, dir_fd=dir_fd)
        self._enter(path, dir_fd, os.stat(path, dir_fd=dir_fd), is_directory=True)

    def _enter(
        self, path: Any, dir_fd: int | None, status: os.stat_result, *, is_directory: bool
    ) -> None:
        directory = self._directory(path, dir_fd)
        if directory is not None:
            self._nodes[_inode(status)] = self._next
            name = os.path.basename(path)
            self.log.append(Enter(directory, name, self._next, is_directory))
            self._next += 1

    def _directory(self, path: Any, dir_fd: int | None) -> int | None:
        status = os.stat(os.path.dirname(path)) if dir_fd is None else os.fstat(dir_fd)
        return self._nodes.get(_inode(status))

    def link(self, source: str, target: str, **options: Any) -> None:
        os.link(source, target, **options)
        directory = self._directory(target, options["dst_dir_fd"])
        node = self._nodes.get(_inode(os.stat(target, dir_fd=options["dst_dir_fd"])))
        if directory is not None and node is not None:
            self.log.append(Enter(directory, target, node))

    def rename(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        directory = self._directory(source, src_dir_fd)
        os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if directory is not None:
            self.log.append(Move(directory, source, target))

    def rename_noreplace(self, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        directory = self._directory(old, src_dir_fd)
        Calls.rename_noreplace(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if directory is not None:
            self.log.append(Move(directory, old, new))

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        os.unlink(path, dir_fd=dir_fd)
        self._removed(path, dir_fd)

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        os.rmdir(path, dir_fd=dir_fd)
        self._removed(path, dir_fd)

    def _removed(self, path: str, dir_fd: int | None) -> None:
        directory = self._directory(path, dir_fd)
        if directory is not None:
            self.log.append(Remove(directory, os.path.basename(path)))

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        count = os.pwrite(fd, data, offset)
        if (node := self._node(fd)) is not None:
            self.log.append(Write(node, offset, bytes(data[:count])))
        return count

    def ftruncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)
        if (node := self._node(fd)) is not None:
            self.log.append(Resize(node, size))

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        os.posix_fallocate(fd, offset, size)
        if (node := self._node(fd)) is not None:
            self.log.append(Resize(node, offset + size, least=True))

    def fsync(self, fd: int) -> None:
        os.fsync(fd)
        if (node := self._node(fd)) is not None:
            self.log.append(Sync(node, _site()))

    def _node(self, fd: int) -> int | None:
        return self._nodes.get(_inode(os.fstat(fd)))


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _site() -> str:
    """Say who asked for a sync: the functions of `io`, then the one that called them."""
    names: list[str] = []
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals["__name__"]
        function = frame.f_code.co_qualname
        if module.startswith("tierstore._io."):
            if function not in ("sync_descriptor", *names):
                names.insert(0, function)
        elif module.startswith("tierstore."):
            return " > ".join([f"{module.rpartition('.')[2]}.{function}", *names])
        frame = frame.f_back  # type: ignore[assignment]
    return " > ".join(names)
