"""Opening the tables of a manifest, one by one, so that damage to one leaves the others usable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tierstore import _io
from tierstore._disk.delta import Delta
from tierstore._disk.generation import Generation
from tierstore._disk.manifest import Manifest, TableInfo
from tierstore._store.options import Options
from tierstore._store.versions import History
from tierstore._table.table import Table
from tierstore.errors import CorruptStoreError, FormatError

__all__ = ["Opener", "Opening"]


@dataclass
class Opening:
    """Tables that were opened for a manifest, by name.

    Attributes:
        new: those that were not open before.
        same: those of which the manifest says what they show.
        deltas: the deltas of the others that were open and follow the manifest.
        errors: what opening the others raised.
    """

    new: dict[str, Generation] = field(default_factory=dict)
    same: list[str] = field(default_factory=list)
    deltas: dict[str, list[Delta]] = field(default_factory=dict)
    errors: dict[str, CorruptStoreError | FormatError] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether any table was opened."""
        return bool(self.new or self.same or self.deltas)

    def close(self) -> None:
        """Close what was opened."""
        for generation in self.new.values():
            generation.close()


class Opener:
    """Opens the files of tables."""

    def __init__(self, directory: _io.Directory, history: History, options: Options) -> None:
        """Open nothing yet."""
        self._directory = directory
        self._history = history
        self._options = options

    def open_all(
        self,
        manifest: Manifest,
        tables: Mapping[str, Table],
        opening: Opening,
        *,
        next_seq: Callable[[], int] | None,
        floor: int,
    ) -> None:
        """Open what a manifest names: all of a table, or only the deltas of one that can follow.

        A table that is damaged is noted in `opening.errors`.
        """
        for name, info in manifest.tables.items():
            table = tables.get(name)
            try:
                shown = None if table is None else table._generation.info
                if table is not None and shown is info and table._space.gpu is None:
                    opening.same.append(name)
                elif table is not None and table._can_follow(info):
                    opening.deltas[name] = table._generation.open_deltas(info)
                else:
                    opening.new[name] = self.open(manifest, name, next_seq, floor)
            except (CorruptStoreError, FormatError) as error:
                opening.errors[name] = error

    def open(
        self, manifest: Manifest, name: str, next_seq: Callable[[], int] | None, floor: int
    ) -> Generation:
        """Open the files of a table of a manifest.

        `next_seq` returns the number of the next manifest, for a writer; `floor` is the version up
        to which a fold may be merging deltas into the base. Raises CorruptStoreError, FormatError.
        """
        info = manifest.tables[name]
        try:
            with self._directory.directory(name) as table:
                generation = Generation(table, info, store=manifest.uuid, next_seq=next_seq)
        except FileNotFoundError:
            raise CorruptStoreError(
                f"{self._directory.join(name)}, the directory of a table, is missing; "
                "restore it from a copy"
            ) from None
        try:
            if not isinstance(self._options.path, _io.Objects):
                generation.check_base(floor)
        except BaseException:
            generation.close()
            raise
        return generation

    def check(self, manifest: Manifest, name: str, floor: int) -> None:
        """Raise CorruptStoreError or FormatError unless a table of a manifest can be opened."""
        self.open(manifest, name, None, floor).close()

    def explain(self, manifest: Manifest, name: str, error: Exception) -> CorruptStoreError:
        """Return the error of a damaged table, with what helps."""
        older = self._version_with(manifest, name)
        hint = "" if older is None else f", and version {older} of the table opens"
        path = self._directory.path
        return CorruptStoreError(
            f"table {name!r} is damaged: {error}; 'tierstore verify {path}' lists all damage, "
            f"'tierstore repair {path} DEST' copies what is whole{hint}"
        )

    def _version_with(self, manifest: Manifest, name: str) -> int | None:
        """Return the newest other version in which a table opens, if there is one."""
        for number, other in reversed(self._history.versions().items()):
            if number != manifest.version and name in other.tables:
                with (
                    contextlib.suppress(CorruptStoreError, FormatError, FileNotFoundError),
                    self._directory.directory(name) as table,
                ):
                    info: TableInfo = other.tables[name]
                    Generation(table, info, store=manifest.uuid, next_seq=None).close()
                    return number
        return None
