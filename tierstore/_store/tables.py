"""How a store is opened: the options, and the tables of a manifest one by one.

Damage to one table leaves the others usable.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierstore import _io
from tierstore._disk.delta import Delta
from tierstore._disk.generation import Generation
from tierstore._disk.manifest import Manifest, TableInfo
from tierstore._store.versions import History
from tierstore._table.placement import check_fit, place
from tierstore._table.table import Table
from tierstore._table.tiers import Tiers
from tierstore._tiers.gpu.device import Device
from tierstore.budget import Budget
from tierstore.errors import CorruptStoreError, FormatError, InvalidInputError, InvalidTypeError
from tierstore.policy import Policies, choose
from tierstore.spec import TableSpec

__all__ = ["Opener", "Opening", "Options", "whole_number"]


def whole_number(name: str, value: object) -> int:
    """Return a whole number of any type that is one, such as np.int64; raises InvalidTypeError."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise InvalidTypeError(f"{name} is an int, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `tierstore.open`, checked, with the device found; None is the CPU.

    `mark` is the one that the version must have: it tells it from the version of the same number in
    a copy of the store. `within` is a directory that is open already, to be read whatever lies at
    the path by now.

    Raises InvalidTypeError, and InvalidInputError for what contradicts itself.
    """

    path: Path | _io.Objects
    mode: str = "r"
    budget: Budget = field(default_factory=Budget)
    policy: Policies | None = None
    version: int | None = None
    discard_newer: bool = False
    keep: int | None = None
    allow_untested: bool = False
    device: Device | None = None
    check_ids: str = "async"
    mark: str | None = None
    within: _io.Directory | None = None

    def __post_init__(self) -> None:
        """Check each, and that they go together."""
        if not isinstance(self.budget, Budget):
            raise InvalidTypeError(f"a budget is a tierstore.Budget, not {self.budget!r}")
        for name, number in (("keep", self.keep), ("version", self.version)):
            if number is not None:
                object.__setattr__(self, name, whole_number(name, number))
        if self.mode not in ("r", "r+"):
            raise InvalidInputError(f"mode is 'r' or 'r+', not {self.mode!r}")
        if self.keep is not None and self.keep < 1:
            raise InvalidInputError(f"at least one version is kept, not {self.keep}")
        if self.writable and self.version is not None and not self.discard_newer:
            raise InvalidInputError(
                "to write on from an older version, newer ones must go: give discard_newer=True"
            )
        if not self.writable and self.keep is not None:
            raise InvalidInputError("only a writer keeps versions: give keep with mode 'r+'")
        if self.discard_newer and (self.version is None or not self.writable):
            raise InvalidInputError(
                "discard_newer drops the versions after one: give version, and mode 'r+'"
            )
        if self.check_ids not in ("async", "sync"):
            raise InvalidInputError(f"check_ids is 'async' or 'sync', not {self.check_ids!r}")
        if self.writable and not isinstance(self.path, Path):
            raise InvalidInputError(
                f"{self.path} is not on a disk, and can only be read; save it to a disk to go on "
                "from there"
            )

    @property
    def writable(self) -> bool:
        """Whether the store is opened by its one writer."""
        return self.mode == "r+"


@dataclass
class Opening:
    """Tables that were opened for a manifest, by name.

    Attributes:
        new: those that were not open before.
        same: those of which the manifest says what they show.
        deltas: the deltas of the others that were open and follow the manifest.
        errors: what opening the others raised.
    """

    new: dict[str, tuple[Generation, Tiers]] = field(default_factory=dict)
    same: list[str] = field(default_factory=list)
    deltas: dict[str, list[Delta]] = field(default_factory=dict)
    errors: dict[str, CorruptStoreError | FormatError] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether any table was opened."""
        return bool(self.new or self.same or self.deltas)

    def close(self) -> None:
        """Close what was opened."""
        for generation, tiers in self.new.values():
            tiers.close()
            generation.close()


class Opener:
    """Opens tables of a store with the budget, policy and device that the store was opened with."""

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
                if table is not None and shown is info and table._tiers.gpu is None:
                    opening.same.append(name)
                elif table is not None and table._can_follow(info):
                    opening.deltas[name] = table._generation.open_deltas(info)
                else:
                    opening.new[name] = self.open(manifest, name, next_seq, floor)
            except (CorruptStoreError, FormatError) as error:
                opening.errors[name] = error

    def open(
        self, manifest: Manifest, name: str, next_seq: Callable[[], int] | None, floor: int
    ) -> tuple[Generation, Tiers]:
        """Open a table of a manifest, and place its tiers.

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
            return generation, place(
                generation.tier,
                name,
                self._options.budget,
                share=info.spec.nbytes / manifest.nbytes,
                device=self._options.device,
                policy=choose(self._options.policy, name),
            )
        except BaseException:
            generation.close()
            raise

    def check_fit(self, specs: Mapping[str, TableSpec]) -> None:
        """Check that tables of these specs can be opened together, before they are written.

        Raises CapacityError, and what a policy raises that does not suit one of them.
        """
        check_fit(specs, self._options.budget, self._options.policy, self._options.device)

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
