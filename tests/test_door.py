"""Interrupts at any moment of a use: none is lost, and none leaves the store taken."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from tierstore import _door as module
from tierstore._door import Door, Use, interrupts_deferred
from tierstore.errors import ClosedError, CommitFailedError, InternalError, InvalidInputError


class CallersError(Exception):
    """What code of the caller's raises: a progress callback, a signal handler."""


@pytest.fixture
def guard() -> Door:
    return Door("somewhere", writable=True)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Leave SIGINT as it was."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Dropped:
    """Is interrupted as it goes: Python prints what a destructor raises, and goes on."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_destructor_lost_is_raised_at_the_end(guard: Door) -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), guard.use() as use, use.interruptible():
        Dropped()
        reached = True
    assert reached
    assert_nothing_is_left(guard)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_passes_through_uses_within_uses(guard: Door) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), guard.use() as use, use.interruptible():
        with guard.use() as inner, inner.interruptible():
            Dropped()
            done.append("inner")
        done.append("outer")
    assert done == ["inner"]
    assert_nothing_is_left(guard)


def test_an_interruptible_part_is_left_at_once_and_the_store_stays_open(guard: Door) -> None:
    with pytest.raises(KeyboardInterrupt), guard.use() as use, use.interruptible():
        with guard.use():
            signal.raise_signal(signal.SIGINT)  # held back until the inner one is done
            held = True
        pytest.fail("went on")
    assert held
    assert not guard.closed
    assert_nothing_is_left(guard)


def test_any_other_part_ends_first(guard: Door) -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), guard.use():
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done and not guard.closed
    with pytest.raises(KeyboardInterrupt), guard.use():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a second one is not held back
    assert guard.closed
    assert_nothing_is_left(guard)


def test_what_came_before_an_interruptible_part_does_not_wait_for_its_end(guard: Door) -> None:
    with pytest.raises(KeyboardInterrupt), guard.use() as use:
        signal.raise_signal(signal.SIGINT)
        with use.interruptible():
            pytest.fail("went on")
    assert_nothing_is_left(guard)


@pytest.mark.parametrize("interruptible", [False, True])
def test_a_handler_that_raises_nothing_is_called_once(guard: Door, interruptible: bool) -> None:
    calls = []
    signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    with guard.use() as use, use.interruptible() if interruptible else contextlib.nullcontext():
        signal.raise_signal(signal.SIGINT)
    assert calls == [1]


def test_who_waits_for_another_thread_can_be_interrupted(guard: Door) -> None:
    taken, over = threading.Event(), threading.Event()

    def take() -> None:
        with guard.use():
            taken.set()
            over.wait(60)

    thread = threading.Thread(target=take)
    thread.start()
    assert taken.wait(60)
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt), guard.use():
        pytest.fail("two have the store")
    over.set()
    thread.join()
    interrupt.join()
    assert_nothing_is_left(guard)


def plain(guard: Door) -> None:
    with guard.use():
        pass


def nested(guard: Door) -> None:
    with guard.use(), guard.use():
        pass


def open_to_interrupts(guard: Door) -> None:
    with guard.use() as use, use.interruptible(), guard.use():
        pass


def beside(guard: Door) -> None:
    with guard.call(), guard.call():
        pass


def alone_within_a_call(guard: Door) -> None:
    with guard.call(), guard.use(), guard.call():
        pass


@pytest.mark.parametrize("body", [plain, nested, open_to_interrupts, beside, alone_within_a_call])
def test_an_interrupt_at_any_bytecode_leaves_nothing_behind(body: Callable[[Door], None]) -> None:
    number, reached = 0, True
    while reached:
        number += 1
        guard = Door("somewhere", writable=True)
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(number) as moment:
            body(guard)
            reached = moment.reached
            assert not reached, f"{moment.where}: nothing was raised"
        assert_nothing_is_left(guard, moment.where)
    assert number > 100


class Moment:
    """The bytecodes of the guard, counted."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.where = ""

    @property
    def reached(self) -> bool:
        return bool(self.where)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Moment | None:
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.number -= 1
            if self.number == 0:
                self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self


@contextlib.contextmanager
def interrupted_at(number: int) -> Iterator[Moment]:
    """Raise a SIGINT before the bytecode of that number."""
    before = sys.gettrace()
    moment = Moment(number)
    try:
        sys.settrace(moment)
        yield moment
    finally:
        sys.settrace(before)


def assert_nothing_is_left(guard: Door, where: str = "") -> None:
    """Another thread can have the store, and SIGINT is what it was."""
    free: list[bool] = []
    thread = threading.Thread(target=lambda: free.append(guard.lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    assert free == [True], where
    assert not guard.calls, where
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, where
    assert not interrupts_deferred._deferring, where


OURS = [InvalidInputError("a check"), RuntimeWarning("of something done")]
BROKEN = [
    SystemError("error return without exception set"),
    ctypes.ArgumentError("argument 1"),
    RuntimeError("can't allocate lock"),
    AttributeError("no"),
    OSError(5, "bare"),
]
PASSING = [MemoryError(), KeyboardInterrupt(), SystemExit(3), TimeoutError(), CallersError("mine")]


@pytest.mark.parametrize("error", OURS, ids=repr)
def test_errors_of_this_library_leave_the_store_open(guard: Door, error: Exception) -> None:
    with pytest.raises(type(error)), guard.use():
        raise error
    assert not guard.closed
    assert_nothing_is_left(guard)


@pytest.mark.parametrize("error", [*BROKEN, *PASSING], ids=repr)
def test_any_other_error_closes_the_store(guard: Door, error: BaseException) -> None:
    """What may have come from the middle of a change; of whose kind it is, decides what is seen."""
    kind = InternalError if error in BROKEN else type(error)
    with pytest.raises(kind) as caught, guard.use():
        raise error
    assert guard.closed
    assert error in (caught.value, caught.value.__cause__)
    with pytest.raises(ClosedError, match="broken off"):
        guard.check()
    assert_nothing_is_left(guard)


@pytest.mark.parametrize("error", [*OURS, *BROKEN, *PASSING], ids=repr)
def test_no_error_of_an_interruptible_part_closes_the_store(
    guard: Door, error: BaseException
) -> None:
    with pytest.raises(BaseException) as caught, guard.use() as use, use.interruptible():
        raise error
    assert error in (caught.value, caught.value.__cause__)
    assert isinstance(caught.value, InternalError) == (error in BROKEN[:3])
    assert not guard.closed
    assert_nothing_is_left(guard)


def test_an_error_after_an_interruptible_part_closes_the_store(guard: Door) -> None:
    with pytest.raises(CallersError), guard.use() as use:
        with contextlib.suppress(CallersError), use.interruptible():
            raise CallersError
        assert not guard.closed
        raise CallersError
    assert guard.closed


@pytest.mark.parametrize("enter", [Door.use, Door.call], ids=["use", "call"])
def test_nothing_is_allocated_before_the_store_is_closed(enter: Callable[[Door], Use]) -> None:
    memory = pytest.importorskip("_testcapi")
    for number in range(60):
        guard, entered = Door("somewhere", writable=True), False
        memory.set_nomemory(number, number + 1)
        try:
            with enter(guard):
                entered = True
                raise SystemError
        except BaseException:
            pass
        finally:
            memory.remove_mem_hooks()
        assert guard.closed or not entered
        assert_nothing_is_left(guard)


def test_what_closing_left_is_done_when_the_outermost_use_ends(guard: Door) -> None:
    done: list[bool] = []
    with guard.use():
        with guard.use():
            guard.close("it was closed within", then=lambda: done.append(guard.held))
        assert done == []
        with pytest.raises(ClosedError, match="closed within"):
            guard.check()
    assert done == [False]
    assert_nothing_is_left(guard)


@pytest.mark.parametrize("error", [MemoryError("none"), CommitFailedError("the sync failed")])
def test_what_closing_left_is_done_after_an_error_too(guard: Door, error: Exception) -> None:
    done: list[bool] = []
    with pytest.raises(type(error)), guard.use():
        guard.close("it was closed within", then=lambda: done.append(guard.held))
        raise error
    assert done == [False]
    assert_nothing_is_left(guard)


def test_calls_run_beside_each_other_and_a_use_alone(guard: Door) -> None:
    inside, over, done = threading.Barrier(3), threading.Event(), []

    def call() -> None:
        with guard.call():
            inside.wait(60)
            over.wait(60)
            with guard.call():  # though a use waits
                done.append("call")

    def use() -> None:
        with guard.use():
            done.append("use")
            assert not guard.busy(threading.get_ident())

    calls = [threading.Thread(target=call) for _ in range(2)]
    for thread in calls:
        thread.start()
    inside.wait(60)
    alone = threading.Thread(target=use)
    alone.start()
    while not guard.fenced:
        pass

    def come_late() -> None:
        with guard.call():
            done.append("late")

    late = threading.Thread(target=come_late)
    late.start()
    late.join(0.1)
    assert late.is_alive() and done == []
    over.set()
    for thread in (*calls, alone, late):
        thread.join(60)
    assert sorted(done[:2]) == ["call", "call"] and done[2:] == ["use", "late"]


def test_who_waits_for_a_call_can_be_interrupted(guard: Door) -> None:
    inside, over = threading.Event(), threading.Event()

    def call() -> None:
        with guard.call():
            inside.set()
            over.wait(60)

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(60)
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt), guard.use():
        pytest.fail("a use beside a call")
    over.set()
    thread.join()
    interrupt.join()
    assert_nothing_is_left(guard)


def test_a_call_that_another_broke_raises_at_its_end(guard: Door) -> None:
    with pytest.raises(ClosedError, match="broken off"), guard.call():
        breaking = threading.Thread(target=lambda: broken(guard))
        breaking.start()
        breaking.join()
        assert guard.closed
    assert_nothing_is_left(guard)


def broken(guard: Door) -> None:
    with contextlib.suppress(MemoryError), guard.call():
        raise MemoryError
