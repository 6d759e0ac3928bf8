"""The interface of a replacement policy, which selects the slots that a full tier frees.

Each policy is a module of this package. It declares a `PolicySpec`: the policy and its parameters,
before a tier exists. The spec creates the `Policy` of a host tier and defines how a GPU scores
rows. Declaring the class registers its name; no other code compares names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInputError, InvalidTypeError

Rows = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]

Lookup = Callable[[Rows], Slots]
"""Returns the slot of each given row, negative where it has none."""

Barred = Callable[[Slots], npt.NDArray[np.bool_]]
"""Returns a bool for each given slot: whether it must stay."""


class Policy(ABC):
    """The calls of a tier to its policy for each batch: `use`, `touch`, `victims`, `next_batch`.

    A policy handles rows and slots, never bytes. It frees the slots with the lowest scores, with
    ties in any order.
    """

    keeps_batch: bool = True
    """Whether rows of the current batch stay until it ends, even after they were copied."""
    stamps: npt.NDArray[np.uint32] | None = None
    """If set, `(slots,)`: to note the use of a slot is to write `now` there, by any thread, and
    `use` and `touch` may be left out."""
    now: int = 1
    """The number of the current batch, from 1 to 2³² - 1, which `next_batch` raises."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Current memory use in bytes."""

    @abstractmethod
    def use(self, rows: Rows) -> None:
        """Begin a batch that uses `rows`, with or without slots; they may repeat."""

    @abstractmethod
    def touch(self, slots: Slots, *, done: bool = False) -> None:
        """Record that the rows in `slots`, which may repeat, belong to the current batch.

        `done` means that they were copied, so this batch may evict them unless `keeps_batch` is
        set.
        """

    @abstractmethod
    def order(self, rows: Rows) -> npt.NDArray[np.intp] | None:
        """Return the positions of distinct `rows`, most valuable first; None keeps their order."""

    @abstractmethod
    def victims(self, rows: Rows, barred: Barred | None = None, *, force: bool = False) -> Slots:
        """Choose distinct slots to free for a leading part of `rows`, least valuable first.

        `rows` have no slot and are in `order`. Excluded are slots that the current batch touched
        and is not done with, slots that `barred` marks and, unless `force` is set, slots whose row
        scores at least as high as the row that would replace it. The policy forgets the returned
        slots until they are touched.
        """

    @abstractmethod
    def forget(self, slots: Slots) -> None:
        """Record that `slots` are free; they cannot be victims until they are touched again."""

    @abstractmethod
    def next_batch(self) -> None:
        """End the current batch."""

    def grow(self, rows: int) -> None:
        """Have `rows` rows instead of fewer, the new ones without a slot."""

    def announce(self, rows: Rows) -> None:
        """Announce that a future batch, after those already announced, will use `rows`."""

    def prime(self, counts: npt.NDArray[np.float32], start: int = 0) -> None:
        """Replace the history of rows from `start` on by `counts` of earlier uses."""


@dataclass(frozen=True)
class ScoreStep:
    """The effect of a batch on the scores of a GPU tier.

    Attributes:
        on_use: added once to the score of each row that the batch uses.
        on_arrival: the score of a row that gets a slot, in this batch or by a prefetch before the
            next; 0 keeps its score.
        rescale: the factor for all scores before the batch.
    """

    on_use: float = 0.0
    on_arrival: float = 0.0
    rescale: float = 1.0


class DeviceScores:
    """The scores of a GPU tier: one float32 per row on the device; the lowest are evicted first.

    The host determines the numbers of a batch, and the kernels apply them. Scores are finite and
    non-negative.
    """

    def first(self, rows: int) -> npt.NDArray[np.float32] | None:
        """Return the initial scores, float32 `(rows,)`; None means 0 for every row."""
        return None

    def step(self, ids: int, slots: int) -> ScoreStep:
        """Return the effect of the next batch, of `ids` ids, on a tier of `slots` slots."""
        return ScoreStep()


class PolicySpec(ABC):
    """A policy with its parameters, before a tier exists.

    A subclass that sets `name` registers itself. A policy is available by name if it can be created
    without arguments.

    Attributes:
        name: the name for users; "custom" for a policy that sets none.
        needs_arguments: whether the name alone is not sufficient.
        looks_ahead: whether announced batches change what it keeps.
        by_table: whether each table needs separate tiers.
    """

    registry: ClassVar[dict[str, type[PolicySpec]]] = {}
    name: ClassVar[str] = "custom"
    needs_arguments: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = False
    by_table: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            PolicySpec.registry[cls.name] = cls

    @abstractmethod
    def bytes_for(self, rows: int, slots: int) -> int:
        """Maximum memory of the policy in a tier, without the batches that lookahead queues."""

    @abstractmethod
    def make(self, rows: int, slots: int, lookup: Lookup, row_of: npt.NDArray[np.int64]) -> Policy:
        """Create the policy of a tier; `row_of` `(slots,)` is the row in each slot that has one."""

    @abstractmethod
    def on_device(self) -> DeviceScores | None:
        """Return the scores of a GPU tier; None means LRU, which needs no scores.

        Each call returns new scores, which belong to one tier.
        """

    def check(self, rows: int) -> None:
        """Raise InvalidInputError or InvalidTypeError unless it fits a table of `rows` rows."""


PolicyName: TypeAlias = Literal["lru", "lfu", "lookahead"] | str
"""The name of a policy: one of these (for completion in editors), or a registered one."""

PolicyLike: TypeAlias = PolicyName | PolicySpec
"""The name of a policy, or a value returned by `lru`, `lfu`, `static` or `lookahead`."""


Policies: TypeAlias = PolicyLike | Mapping[str, PolicyLike]
"""One policy for all tables, or a dict by table name; omitted tables use "lru"."""

_DEFAULT = "lru"


def registered() -> tuple[str, ...]:
    """Return the policies available by name, the default first."""
    names = [name for name, spec in PolicySpec.registry.items() if not spec.needs_arguments]
    return tuple(sorted(names, key=lambda name: name != _DEFAULT))


def choose(policy: Policies | None, table: str = "") -> PolicySpec:
    """Return the policy for `table`, from a name, a value, or a dict by table; None is "lru".

    Tables omitted in a dict use "lru". Raises InvalidInputError for an unknown name, and
    InvalidTypeError for a value that is neither a name nor a policy.
    """
    if isinstance(policy, Mapping):
        policy = policy.get(table)
    if policy is None:
        policy = _DEFAULT
    if isinstance(policy, PolicySpec):
        return policy
    if not isinstance(policy, str):
        raise InvalidTypeError(
            f"a policy is a name or a value of tierstore.policy, such as static(counts): {policy!r}"
        )
    if policy not in registered():
        raise InvalidInputError(
            f"no policy {policy!r}; there are {', '.join(registered())}, and those of "
            "tierstore.policy that take arguments, such as static(counts)"
        )
    return PolicySpec.registry[policy]()
