"""The files that records lie in: of one size, numbered, and opened for as long as they are used.

A mapping needs no descriptor, so a table of a thousand chunks holds none of them open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tierstore import io
from tierstore.errors import CorruptStoreError

__all__ = ["Files"]


@dataclass(frozen=True)
class Files:
    """`count` files of `nbytes` each.

    Attributes:
        directory: the directory of the generation.
        name: returns the name of a file by its number.
        inside: the directory within that one which holds them, if any.
    """

    directory: io.Holder
    name: Callable[[int], str]
    nbytes: int
    count: int = 1
    inside: str | None = None

    @contextlib.contextmanager
    def place(self) -> Iterator[io.Directory]:
        """Open the directory that the files are in."""
        with self.directory.use() as generation:
            if self.inside is None:
                yield generation
            else:
                with generation.directory(self.inside) as place:
                    yield place

    def create(self, *, sparse: bool, head: bytes = b"") -> list[io.File]:
        """Create the files, with space for all bytes unless they are sparse, and `head` in each.

        Those on a disk are durable then, and closed; objects are to be filled yet.
        """
        made = []
        with self.place() as place:
            for number in range(self.count):
                with place.create(self.name(number)) as file:
                    file.truncate(self.nbytes) if sparse else file.allocate(0, self.nbytes)
                    if head:
                        file.write(head, 0)
                    if file.mappable:
                        file.sync()
                made.append(file)
        return made

    def open(self, number: int, *, write: bool = False) -> io.File:
        """Open a file, whose size must be right; raises FileNotFoundError, CorruptStoreError."""
        with self.place() as place:
            return self._open(place, number, write=write)

    def each(self) -> Iterator[io.File]:
        """Yield every file, open until the next is asked for."""
        with self.place() as place:
            for number in range(self.count):
                with self._open(place, number) as file:
                    yield file

    def _open(self, place: io.Directory, number: int, *, write: bool = False) -> io.File:
        file = place.open_file(self.name(number), write=write)
        try:
            if file.size != self.nbytes:
                raise CorruptStoreError(
                    f"{file.path} has {file.size} bytes, {self.nbytes} are expected; "
                    "restore it from a copy"
                )
        except BaseException:
            file.close()
            raise
        return file
