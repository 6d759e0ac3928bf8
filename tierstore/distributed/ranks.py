"""The ranks of a process group: what they must agree on, and errors that all of them raise.

The engine is torch.distributed. All messages on hosts go through a gloo group of their own, so that
no collective of the training comes between them.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import operator
import os
import pickle
import sys
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from tierstore import _io
from tierstore._store.coordinator import Coordinator
from tierstore.errors import ForkedStoreError, InvalidInputError, RanksError, TierStoreError

if TYPE_CHECKING:  # one rank alone needs no torch, which takes seconds to import
    from torch import Tensor

    from tierstore.distributed.messages import Message, Messages

T = TypeVar("T")

_REASON = 160
"""Characters of a collective's message of its failure, at most."""
_START_AGAIN = "end all ranks and start them again: the last version that was committed is intact"


class Ranks(Coordinator):
    """The ranks of the default process group, as one of them; one alone where there is none.

    Attributes:
        rank, count: which of how many this is.
        data_group: the group that rows on devices go through, of the backend of the default group.
        unlike: how often a rank did something else than others.
        broken: what went wrong between the ranks; empty while they can still talk.
        fault: why what this rank wrote since the last commit is not whole; empty while it is.
    """

    def __init__(self, timeout: float | None = None) -> None:
        """Join the others; `timeout` is how many seconds one rank waits for another.

        None is what `init_process_group` was given: new groups would take the default of torch.
        """
        self._pid = os.getpid()
        self.rank: int = 0
        self.count: int = 1
        self.broken: str = ""
        self.fault: str = ""
        self._of_all: BaseException | None = None
        self.unlike: int = 0
        self.data_group: Any = None
        self._messages: Messages | None = None
        self._leader = 0
        dist = _joined()
        if dist is not None and dist.get_world_size() > 1:
            from tierstore.distributed.messages import Messages

            self.rank, self.count = dist.get_rank(), dist.get_world_size()
            patience = (
                _patience_of_all(dist) if timeout is None else datetime.timedelta(seconds=timeout)
            )
            with self.explained("open the store"):
                group = dist.new_group(backend="gloo", timeout=patience)
                self._messages = Messages(group, self.rank, self.count)
                self.data_group = dist.new_group(timeout=patience)

    def send(
        self,
        what: str,
        kind: str,
        parts: Sequence[Tensor],
        into: Sequence[Tensor] | None = None,
        word: int = 0,
    ) -> Message:
        """Send bytes on the host to each rank; see `Messages.send`. `what` names it in errors."""
        with self.explained(what):
            if self._messages is None:
                raise RuntimeError("one rank has no others")
            return self._messages.send(zlib.crc32(kind.encode()), parts, into, word)

    def say(self, what: str, kind: str, word: int) -> Message:
        """Send a number alone to each rank, without waiting; see `Messages.say`."""
        with self.explained(what):
            if self._messages is None:
                raise RuntimeError("one rank has no others")
            return self._messages.say(zlib.crc32(kind.encode()), word)

    def receive(self, what: str, message: Message) -> Sequence[Tensor]:
        """Wait for what each rank sends. Raises InvalidInputError where one does something else."""
        from tierstore.distributed.messages import Unlike

        with self.explained(what):
            try:
                return message.wait()
            except Unlike as error:
                rank = error.rank
        self.unlike += 1
        raise self.differs(rank, what)

    def differs(self, rank: int, what: str) -> Exception:
        """Return the error that all ranks raise where a rank does something else."""
        return self.of_all(
            InvalidInputError(
                f"rank {rank} of {self.count} does something else, while rank {self.rank} would "
                f"{what}: every rank calls the same layers and tables in the same order, with the "
                "same features and fields, and announces the same batches (lookahead, prefetch)"
            )
        )

    @contextlib.contextmanager
    def explained(self, what: str) -> Any:
        """Raise RanksError from what a collective raises where a rank is gone or silent.

        Raises ForkedStoreError in a process that a rank forked: it is no rank, and would wait.
        """
        if os.getpid() != self._pid:
            raise ForkedStoreError(
                f"rank {self.rank} opened the store before this process was forked; open it again "
                "here, for reading: tierstore.open(path)"
            )
        if self.broken:
            raise RanksError(self.broken)
        try:
            yield
        except TierStoreError:
            raise
        except RuntimeError as error:
            reason = (str(error).splitlines() or ["no reason given"])[0][:_REASON]
            self.broken = (
                f"rank {self.rank} of {self.count} could not {what} with the others: one has "
                f"ended, or did not come in time ({reason}); {_START_AGAIN}"
            )
            raise RanksError(self.broken) from error

    @contextlib.contextmanager
    def midway(self, what: str) -> Iterator[None]:
        """Break off where this rank fails between messages that the others wait for.

        They learn it by the end of the connection; no later message can be mistaken for the one
        that they wait for. Errors that all ranks raise pass.
        """
        try:
            yield
        except BaseException as error:
            is_told = error is self._of_all or self.broken or self.count == 1
            if not is_told and os.getpid() == self._pid:
                self.broken = (
                    f"rank {self.rank} of {self.count} could not {what} with the others "
                    f"({_said(error)}); {_START_AGAIN}"
                )
                self._leave()
            raise

    def of_all(self, error: Exception) -> Exception:
        """Return an error that all ranks raise at this place, so that nothing breaks off."""
        self._of_all = error
        return error

    def failed(self, what: str, error: Exception | None) -> NoReturn:
        """Raise that some ranks, which all know of, could not do something. Collective.

        `error` is raised on this rank; where it is None, RanksError with the message of another.
        """
        try:
            said = self.gather("say what went wrong", None if error is None else _said(error))
        except RanksError:
            if error is None:
                raise
            raise error from None
        if error is not None:
            error.add_note(f"on rank {self.rank} of {self.count}; the other ranks are told")
            raise self.of_all(error)
        rank = next(rank for rank, each in enumerate(said) if each is not None)
        text = f"rank {rank} of {self.count} could not {what}: {said[rank]}"
        raise self.of_all(RanksError(text))

    def fail(self, what: str, error: BaseException) -> None:
        """Refuse what all ranks do from now on until a rollback: this one wrote a part of it."""
        if self.count > 1:
            self.fault = self.fault or (
                f"rank {self.rank} of {self.count} failed to {what}, which may be written in part "
                f"({_said(error)}): roll back on every rank, or open the store again"
            )

    def fault_error(self) -> RanksError | None:
        """Return the error for what all ranks would do after `fail`; None if there is none."""
        return RanksError(self.fault) if self.fault else None

    def gather(self, what: str, value: T, kind: str = "gather") -> list[T]:
        """Return the value of every rank; `what` all do names it in errors.

        Raises RanksError, and InvalidInputError where ranks gather something else, or of another
        `kind`.
        """
        if self.count == 1:
            return [value]
        import torch

        data = torch.frombuffer(bytearray(pickle.dumps((what, value))), dtype=torch.uint8)
        message = self.send(what, kind, [data] * self.count)
        told = [pickle.loads(each.numpy()) for each in self.receive(what, message)]
        calls, values = zip(*told, strict=True)
        self._check_equal("call", calls)
        return list(values)

    def _check_equal(self, name: str, given: Sequence[object]) -> None:
        """Raise InvalidInputError, as all ranks do, unless all give the same value."""
        for rank, value in enumerate(given):
            if value != given[0]:
                error = InvalidInputError(
                    f"ranks disagree on {name}: rank 0 has {given[0]!r}, rank {rank} has "
                    f"{value!r}; every rank makes the same calls with the same arguments"
                )
                raise self.of_all(error)

    def common(self, bits: int) -> int:
        """Return the bits that all ranks give; on the host, in parallel with GPUs."""
        return functools.reduce(operator.and_, self.gather("look up the same batch", bits))

    def agree(self, what: str, values: Mapping[str, object], *, after_fault: bool = False) -> None:
        """Raise InvalidInputError on every rank unless all give the same values.

        Raise RanksError for what a rank wrote in part, unless `after_fault`.
        """
        told = self.gather(what, (self.fault, dict(values)), "agree")
        for fault, _ in told:
            if fault and not after_fault:
                raise RanksError(fault)
        given = [each for _, each in told]
        for name in values if given.count(given[0]) < len(given) else ():
            self._check_equal(name, [each.get(name) for each in given])

    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Do something on every rank, and return what each returned.

        An error on one rank is raised on all, once every rank is done: on that rank itself, on the
        others as the same class where it is an error of this library, naming the rank.
        """
        own: Exception | None = None
        value: Any = None
        try:
            value = work()
        except Exception as error:
            own = error
        outcome = (None if own is None else _described(own), value)
        found = self.gather(what, outcome, "together")
        if own is not None:
            if self.count > 1:
                own.add_note(f"on rank {self.rank} of {self.count}, while all {what}")
            raise own
        for rank, (failure, _) in enumerate(found):
            if failure is not None:
                kind, text = failure
                raise kind(f"rank {rank} of {self.count} could not {what}: {text}")
        return [value for _, value in found]

    def find_leaders(self, path: Path) -> None:
        """Find out which ranks lead those that see the same directory at their paths."""
        leaders = self.leaders(path)
        self._leader = leaders[self.rank]
        self.leads: bool = self._leader == self.rank
        self.several: bool = len(set(leaders)) > 1

    def lead(self, what: str, work: Callable[[], T]) -> T:
        """Do something on the leaders; each rank gets what its own leader returned."""
        found = self.together(what, lambda: work() if self.leads else None)
        return cast(T, found[self._leader])

    def leaders(self, path: Path) -> list[int]:
        """Return for each rank the lowest one that sees the same directory at its path.

        Ranks of a shared file system have one leader, those of hosts with disks of their own one a
        host. `path` is a directory. Each rank writes a file in it to find out, and removes it.
        """
        if self.count == 1:
            return [0]
        token = self.gather("name a file", uuid.uuid4().hex[:8])[0]
        names = [f".rank-{rank}.{token}.partial" for rank in range(self.count)]

        def put() -> None:
            with _io.Directory.open(path) as directory:
                directory.write_file(names[self.rank], b"")

        def look() -> int:
            with _io.Directory.open(path) as directory:
                return next(rank for rank, name in enumerate(names) if directory.exists(name))

        try:
            self.together("write to the place of the store", put)
            return self.together("look into the place of the store", look)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path / names[self.rank])

    def close(self) -> None:
        """Leave the group of control messages; harmless when repeated."""
        self.broken = self.broken or "the store was closed"
        self._leave()

    def _leave(self) -> None:
        """End the groups; ranks that wait in one learn of it."""
        groups = [self.data_group, None if self._messages is None else self._messages.group]
        self.data_group = self._messages = None
        while groups:
            group, dist = groups.pop(), _joined()
            if group is not None and dist is not None:
                with contextlib.suppress(RuntimeError, ValueError):
                    dist.destroy_process_group(group)


def _said(error: BaseException) -> str:
    """Return what other ranks are told of an error."""
    return f"{type(error).__name__}: {error}"


def _described(error: Exception) -> tuple[type[TierStoreError], str]:
    """Return the class and text by which other ranks raise an error."""
    if isinstance(error, TierStoreError):
        return type(error), str(error)
    return RanksError, _said(error)


def _joined() -> Any:
    """Return torch.distributed, which a process that is a rank has imported; None in any other."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _patience_of_all(dist: Any) -> datetime.timedelta | None:
    """Return the timeout that `init_process_group` was given; None where torch does not tell it."""
    group: Any = dist.group.WORLD
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(patience := getattr(options, "_timeout", None), datetime.timedelta):
            return patience
    return None
