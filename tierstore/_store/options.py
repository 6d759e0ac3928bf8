"""The options for opening a store."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, fields
from pathlib import Path

from tierstore import _io
from tierstore._table.missing import Missing, checked
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.placement import Placement
from tierstore.budget import Budget
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.policy import Policies


def whole_number(name: str, value: object) -> int:
    """Convert any integer type, such as np.int64, to int; raises InvalidTypeError."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise InvalidTypeError(f"{name} must be an int, not {value!r}")


def version_or_name(version: object) -> int | str:
    """Return a version given by number or name; raises InvalidTypeError."""
    return version if isinstance(version, str) else whole_number("version", version)


def _as_given(value: object) -> object:
    """Return the name of a device, of which each call makes an object; others as they are."""
    return getattr(value, "torch_name", value)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The validated arguments of `tierstore.open`, with the device resolved; None is the CPU.

    `mark` is the required mark of the version, which distinguishes it from the version of the same
    number in a copy of the store. `within` is an open directory to read, regardless of what is at
    the path now.

    Raises InvalidTypeError, and InvalidInputError for contradictory arguments.
    """

    path: Path | _io.Objects
    mode: str = "r"
    budget: Budget = field(default_factory=Budget)
    policy: Policies | None = None
    version: int | str | None = None
    discard_newer: bool = False
    keep: int | None = None
    allow_untested: bool = False
    device: Device | None = None
    check_ids: str = "async"
    missing: Missing | None = None
    mark: str | None = None
    within: _io.Directory | None = None

    def __post_init__(self) -> None:
        """Check the arguments and their combination."""
        if not isinstance(self.budget, Budget):
            raise InvalidTypeError(f"budget must be a tierstore.Budget, not {self.budget!r}")
        if self.keep is not None:
            object.__setattr__(self, "keep", whole_number("keep", self.keep))
        if self.version is not None:
            object.__setattr__(self, "version", version_or_name(self.version))
        if self.mode not in ("r", "r+"):
            raise InvalidInputError(f"mode must be 'r' or 'r+', not {self.mode!r}")
        if self.keep is not None and self.keep < 1:
            raise InvalidInputError(f"keep must be at least 1, not {self.keep}")
        if self.writable and self.version is not None and not self.discard_newer:
            raise InvalidInputError(
                "writing from an older version drops newer ones: give discard_newer=True"
            )
        if not self.writable and self.keep is not None:
            raise InvalidInputError("only a writer keeps versions: give keep only with mode 'r+'")
        if self.writable and self.budget.gpu_whole:
            raise InvalidInputError(
                "gpu_whole holds columns of rows that are only read: open the store with mode 'r', "
                "or leave gpu_whole out"
            )
        if self.discard_newer and (self.version is None or not self.writable):
            raise InvalidInputError(
                "discard_newer drops the versions after version: give version and mode 'r+'"
            )
        if self.check_ids not in ("async", "sync"):
            raise InvalidInputError(f"check_ids must be 'async' or 'sync', not {self.check_ids!r}")
        checked(self.missing, writable=self.writable)
        if self.writable and not isinstance(self.path, Path):
            raise InvalidInputError(
                f"{self.path} is not on a disk, and can only be read; save it to a disk to go on "
                "from there"
            )

    @property
    def writable(self) -> bool:
        """Whether the store is opened for writing."""
        return self.mode == "r+"

    def differing(self, other: Options) -> str:
        """Describe how these differ from those of a store at the same path; "" if they do not."""
        pairs = [
            (each.name, getattr(self, each.name), getattr(other, each.name))
            for each in fields(self)
        ]
        return " and ".join(
            f"{name}={_as_given(one)!r}, not {_as_given(two)!r}"
            for name, one, two in pairs
            if name != "path" and _as_given(one) != _as_given(two)
        )

    def placement(self) -> Placement:
        """Return the placement of tables and the indexes of their deltas within the budget."""
        return Placement(
            self.budget,
            self.policy,
            self.device,
            indexed=True,
            writable=self.writable,
        )
