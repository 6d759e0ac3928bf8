"""The interface of a replacement policy: which slots a full tier frees.

A policy is one module of this package. It declares a `PolicySpec`: the policy and its parameters,
before a tier exists. The spec makes the `Policy` of a host tier and says how a GPU scores rows.
Declaring the class registers its name; no other code compares names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInputError, InvalidTypeError

__all__ = [
    "Barred",
    "DeviceScores",
    "Policies",
    "Policy",
    "PolicyLike",
    "PolicySpec",
    "Rows",
    "ScoreStep",
    "Slots",
    "choose",
    "registered",
]

Rows = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]

Barred = Callable[[Slots], npt.NDArray[np.bool_]]
"""Returns which of some slots must stay, a bool each."""


class Policy(ABC):
    """What a tier asks of a policy, batch by batch: `use`, `touch`, `victims`, `next_batch`.

    A policy sees rows and slots, never bytes. It frees the slots of least score; ties are open.
    """

    keeps_batch: bool = True
    """Whether rows of the current batch stay until it ends, even those already copied."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes taken now."""

    @abstractmethod
    def use(self, rows: Rows) -> None:
        """Begin a batch that uses `rows`, with or without slots; they may repeat."""

    @abstractmethod
    def touch(self, slots: Slots, *, done: bool = False) -> None:
        """Note that the rows in `slots`, which may repeat, belong to the current batch.

        `done`: they have been copied, so unless `keeps_batch` this batch may evict them already.
        """

    @abstractmethod
    def order(self, rows: Rows) -> npt.NDArray[np.intp] | None:
        """Return the positions of `rows`, distinct, the most valuable first; None: as they are."""

    @abstractmethod
    def victims(self, rows: Rows, barred: Barred | None = None, *, force: bool = False) -> Slots:
        """Take distinct slots to give up for a leading part of `rows`, least valuable first.

        `rows` have no slot and are in `order`. Never a slot that the current batch touched and is
        not done with, nor one that `barred` marks, nor, unless `force`, one whose row scores no
        less than the row it would make room for. What is returned is forgotten until it is touched.
        """

    @abstractmethod
    def forget(self, slots: Slots) -> None:
        """Note that `slots` are free: they are no victims until they are touched again."""

    @abstractmethod
    def next_batch(self) -> None:
        """End the current batch."""

    def announce(self, rows: Rows) -> None:
        """Note that a batch to come, after those announced before, will use `rows`."""

    def prime(self, counts: npt.NDArray[np.float32], start: int = 0) -> None:
        """Replace what was seen of rows from `start` by `counts` of uses before."""


@dataclass(frozen=True)
class ScoreStep:
    """What a batch does to the scores of a GPU tier.

    Attributes:
        on_use: added, once, to the score of each row that the batch uses.
        on_arrival: the score of a row that takes a slot, by this batch or by a prefetch before the
            next; 0 leaves it the score it has.
        rescale: all scores are multiplied by this before the batch.
    """

    on_use: float = 0.0
    on_arrival: float = 0.0
    rescale: float = 1.0


class DeviceScores:
    """How a GPU tier scores rows: one float32 a row on the device; the smallest go first.

    The host decides the numbers of a batch, the kernels apply them. Scores are finite and not
    negative.
    """

    def first(self, rows: int) -> npt.NDArray[np.float32] | None:
        """Return the scores to begin with, float32 `(rows,)`; None is 0 for every row."""
        return None

    def step(self, ids: int, slots: int) -> ScoreStep:
        """Return what the next batch, of `ids` ids, does in a tier of `slots` slots."""
        return ScoreStep()


class PolicySpec(ABC):
    """A policy with its parameters, before a tier exists.

    A subclass that sets `name` registers itself. A policy is available by that name if it can be
    made without arguments.

    Attributes:
        name: what users call it.
        needs_arguments: whether the name alone is not enough.
        looks_ahead: whether announced batches change what it keeps.
        by_table: whether each table needs tiers of its own for it.
    """

    registry: ClassVar[dict[str, type[PolicySpec]]] = {}
    name: ClassVar[str]
    needs_arguments: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = False
    by_table: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            PolicySpec.registry[cls.name] = cls

    @abstractmethod
    def bytes_for(self, rows: int, slots: int) -> int:
        """Most bytes the policy takes in a tier, but for the batches that lookahead queues."""

    @abstractmethod
    def make(
        self, rows: int, slots: int, slot_of: npt.NDArray[np.int32], row_of: npt.NDArray[np.int64]
    ) -> Policy:
        """Make the policy of a tier whose maps are `slot_of` `(rows,)` and `row_of` `(slots,)`."""

    @abstractmethod
    def on_device(self) -> DeviceScores | None:
        """Return how a GPU tier scores rows; None: least recently used, which needs no scores.

        Each call returns new scores: they belong to one tier.
        """

    def check(self, rows: int) -> None:
        """Raise InvalidInputError or InvalidTypeError unless it fits a table of `rows` rows."""


PolicyName: TypeAlias = Literal["lru", "lfu", "lookahead"] | str
"""The name of a policy: one of these, which editors complete, or a registered one."""

PolicyLike: TypeAlias = PolicyName | PolicySpec
"""The name of a policy, or a value that `lru`, `lfu`, `static` or `lookahead` returned."""


Policies: TypeAlias = PolicyLike | Mapping[str, PolicyLike]
"""One policy for all tables, or one by table's name; tables that are left out get "lru"."""

_DEFAULT = "lru"


def registered() -> tuple[str, ...]:
    """Return the policies that are available by name, the default first."""
    names = [name for name, spec in PolicySpec.registry.items() if not spec.needs_arguments]
    return tuple(sorted(names, key=lambda name: name != _DEFAULT))


def choose(policy: Policies | None, table: str = "") -> PolicySpec:
    """Return the policy for `table`: by name, by value, or from a dict by table; None is "lru".

    A table that a dict leaves out gets "lru". Raises InvalidInputError for an unknown name, and
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
