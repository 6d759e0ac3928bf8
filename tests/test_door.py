"""Interrupts at any moment of a use: none is lost, and none leaves the store taken."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from tierstore import _door as module
from tierstore._door import Call, Door, Errand, Use, interrupts_deferred
from tierstore.errors import ClosedError, CommitFailedError, InternalError, InvalidInputError


class CallersError(Exception):
    """What code of the caller's raises: a progress callback, a signal handler."""


@pytest.fixture
def door() -> Door:
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
def test_an_interrupt_that_a_destructor_lost_is_raised_at_the_end(door: Door) -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), door.use() as use, use.interruptible():
        Dropped()
        reached = True
    assert reached
    assert_nothing_is_left(door)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_passes_through_uses_within_uses(door: Door) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), door.use() as use, use.interruptible():
        with door.use() as inner, inner.interruptible():
            Dropped()
            done.append("inner")
        done.append("outer")
    assert done == ["inner"]
    assert_nothing_is_left(door)


def test_an_interruptible_part_is_left_at_once_and_the_store_stays_open(door: Door) -> None:
    with pytest.raises(KeyboardInterrupt), door.use() as use, use.interruptible():
        with door.use():
            signal.raise_signal(signal.SIGINT)  # held back until the inner one is done
            held = True
        pytest.fail("went on")
    assert held
    assert not door.closed
    assert_nothing_is_left(door)


def test_any_other_part_ends_first(door: Door) -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), door.use():
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done and not door.closed
    with pytest.raises(KeyboardInterrupt), door.use():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a second one is not held back
    assert door.closed
    assert_nothing_is_left(door)


def test_an_interrupt_that_waits_keeps_no_memory_in_use(door: Door) -> None:
    """As that of a manifest, which a commit fills again before the interrupt is told."""
    memory, done = io.BytesIO(b"old"), False

    def interrupted() -> None:
        view = memory.getbuffer()
        signal.raise_signal(signal.SIGINT)
        assert view == b"old"

    with pytest.raises(KeyboardInterrupt), door.use():
        interrupted()
        memory.write(b"new")
        done = True
    assert done
    assert_nothing_is_left(door)


def test_what_came_before_an_interruptible_part_does_not_wait_for_its_end(door: Door) -> None:
    with pytest.raises(KeyboardInterrupt), door.use() as use:
        signal.raise_signal(signal.SIGINT)
        with use.interruptible():
            pytest.fail("went on")
    assert_nothing_is_left(door)


@pytest.mark.parametrize("interruptible", [False, True])
def test_a_handler_that_raises_nothing_is_called_once(door: Door, interruptible: bool) -> None:
    calls = []
    signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    with door.use() as use, use.interruptible() if interruptible else contextlib.nullcontext():
        signal.raise_signal(signal.SIGINT)
    assert calls == [1]


def test_who_waits_for_another_thread_can_be_interrupted(door: Door) -> None:
    taken, over = threading.Event(), threading.Event()

    def take() -> None:
        with door.use():
            taken.set()
            over.wait(60)

    thread = threading.Thread(target=take)
    thread.start()
    assert taken.wait(60)
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        interrupt.start()
        with door.use():
            pytest.fail("two have the store")
    over.set()
    thread.join()
    interrupt.join()
    assert_nothing_is_left(door)


def plain(door: Door) -> None:
    with door.use():
        pass


def nested(door: Door) -> None:
    with door.use(), door.use():
        pass


def open_to_interrupts(door: Door) -> None:
    with door.use() as use, use.interruptible(), door.use():
        pass


def beside(door: Door) -> None:
    with Call(door), Call(door):
        pass


def alone_within_a_call(door: Door) -> None:
    with Call(door), door.use(), Call(door):
        pass


class BesideErrands(Use):
    beside = True


def on_a_device(door: Door) -> None:
    with BesideErrands(door), door.use(), BesideErrands(door):
        pass


def errand(door: Door) -> None:
    with Errand(door):
        pass


BODIES = [plain, nested, open_to_interrupts, beside, alone_within_a_call, on_a_device, errand]


@pytest.mark.variants(2, 3)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_an_interrupt_at_any_bytecode_leaves_nothing_behind(
    body: Callable[[Door], None], twice: bool
) -> None:
    """Nor does another one at once, as where a launcher passes on the Ctrl-C of a terminal."""
    number, reached = 0, True
    while reached:
        number += 1
        door = Door("somewhere", writable=True)
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(number, twice) as moment:
            body(door)
            reached = moment.reached
            assert not reached, f"{moment.where}: nothing was raised"
        assert_nothing_is_left(door, moment.where)
    assert number > 100


class Moment:
    """The bytecodes of the door, counted."""

    def __init__(self, number: int, twice: bool) -> None:
        self.number = number
        self.twice = twice
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
                for _ in range(1 + self.twice):
                    handle: Any = signal.getsignal(signal.SIGINT)
                    handle(signal.SIGINT, frame)
        return self


@contextlib.contextmanager
def interrupted_at(number: int, twice: bool) -> Iterator[Moment]:
    """Have a SIGINT come before the bytecode of that number, or two."""
    before = sys.gettrace()
    moment = Moment(number, twice)
    try:
        sys._getframe().f_trace_opcodes = True  # or Python 3.12 counts none of the first frame's
        sys.settrace(moment)
        yield moment
    finally:
        sys.settrace(before)


def assert_nothing_is_left(door: Door, where: str = "") -> None:
    """Another thread can have the store, and SIGINT is what it was."""
    free: list[bool] = []

    def look() -> None:
        free.extend(lock.acquire(blocking=False) for lock in (door.lock, door.errands))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert free == [True, True], where
    assert not door.calls, where
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
def test_errors_of_this_library_leave_the_store_open(door: Door, error: Exception) -> None:
    with pytest.raises(type(error)), door.use():
        raise error
    assert not door.closed
    assert_nothing_is_left(door)


@pytest.mark.parametrize("error", [*BROKEN, *PASSING], ids=repr)
def test_any_other_error_closes_the_store(door: Door, error: BaseException) -> None:
    """What may have come from the middle of a change; of whose kind it is, decides what is seen."""
    kind = InternalError if error in BROKEN else type(error)
    with pytest.raises(kind) as caught, door.use():
        raise error
    assert door.closed
    assert error in (caught.value, caught.value.__cause__)
    with pytest.raises(ClosedError, match="interrupted in the middle"):
        door.check()
    assert_nothing_is_left(door)


@pytest.mark.parametrize("error", [*OURS, *BROKEN, *PASSING], ids=repr)
def test_no_error_of_an_interruptible_part_closes_the_store(
    door: Door, error: BaseException
) -> None:
    with pytest.raises(BaseException) as caught, door.use() as use, use.interruptible():
        raise error
    assert error in (caught.value, caught.value.__cause__)
    assert isinstance(caught.value, InternalError) == (error in BROKEN[:3])
    assert not door.closed
    assert_nothing_is_left(door)


def test_an_error_after_an_interruptible_part_closes_the_store(door: Door) -> None:
    with pytest.raises(CallersError), door.use() as use:
        with contextlib.suppress(CallersError), use.interruptible():
            raise CallersError
        assert not door.closed
        raise CallersError
    assert door.closed


@pytest.mark.parametrize("enter", [Door.use, Call, Errand], ids=["use", "call", "errand"])
def test_nothing_is_allocated_before_the_store_is_closed(enter: Callable[[Door], Call]) -> None:
    memory = pytest.importorskip("_testcapi")
    for number in range(60):
        door, entered = Door("somewhere", writable=True), False
        memory.set_nomemory(number, number + 1)
        try:
            with enter(door):
                entered = True
                raise SystemError
        except BaseException:
            pass
        finally:
            memory.remove_mem_hooks()
        assert door.closed or not entered
        assert_nothing_is_left(door)


def test_what_closing_left_is_done_when_the_outermost_use_ends(door: Door) -> None:
    done: list[bool] = []
    with door.use():
        with door.use():
            door.close("it was closed within", then=lambda: done.append(door.held))
        assert done == []
        with pytest.raises(ClosedError, match="closed within"):
            door.check()
    assert done == [False]
    assert_nothing_is_left(door)


@pytest.mark.parametrize("error", [MemoryError("none"), CommitFailedError("the sync failed")])
def test_what_closing_left_is_done_after_an_error_too(door: Door, error: Exception) -> None:
    done: list[bool] = []
    with pytest.raises(type(error)), door.use():
        door.close("it was closed within", then=lambda: done.append(door.held))
        raise error
    assert done == [False]
    assert_nothing_is_left(door)


def test_calls_run_beside_each_other_and_a_use_alone(door: Door) -> None:
    inside, over, done = threading.Barrier(3), threading.Event(), []

    def call() -> None:
        with Call(door):
            inside.wait(60)
            over.wait(60)
            with Call(door):  # though a use waits
                done.append("call")

    def use() -> None:
        with door.use():
            done.append("use")
            assert not door.busy(threading.get_ident())

    calls = [threading.Thread(target=call) for _ in range(2)]
    for thread in calls:
        thread.start()
    inside.wait(60)
    alone = threading.Thread(target=use)
    alone.start()
    while not door.fenced:
        pass

    def come_late() -> None:
        with Call(door):
            done.append("late")

    late = threading.Thread(target=come_late)
    late.start()
    late.join(0.1)
    assert late.is_alive() and done == []
    over.set()
    for thread in (*calls, alone, late):
        thread.join(60)
    assert sorted(done[:2]) == ["call", "call"] and done[2:] == ["use", "late"]


def test_an_errand_goes_on_beside_a_device_and_no_other_use(door: Door) -> None:
    begun, over, done = threading.Event(), threading.Event(), []

    def run() -> None:
        with Errand(door):
            begun.set()
            over.wait(60)
            done.append("errand")

    thread = threading.Thread(target=run)
    with BesideErrands(door):  # nor does it wait for one to begin
        thread.start()
        assert begun.wait(60)
    with BesideErrands(door), Call(door):
        done.append("device")
    alone = threading.Thread(target=lambda: plain(door) or done.append("use"))
    alone.start()
    alone.join(0.1)
    assert alone.is_alive() and done == ["device"]
    over.set()
    for each in (thread, alone):
        each.join(60)
    assert done == ["device", "errand", "use"]
    with door.use():
        late = threading.Thread(target=lambda: errand(door) or done.append("late"))
        late.start()
        late.join(0.1)
        assert late.is_alive()
    late.join(60)
    assert done[-1] == "late"
    assert_nothing_is_left(door)


def test_an_errand_of_a_closed_store_does_not_begin(door: Door) -> None:
    door.close()
    with pytest.raises(ClosedError), Errand(door):
        pytest.fail("it began")
    assert_nothing_is_left(door)


def test_who_waits_for_a_call_can_be_interrupted(door: Door) -> None:
    inside, over = threading.Event(), threading.Event()

    def call() -> None:
        with Call(door):
            inside.set()
            over.wait(60)

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(60)
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        interrupt.start()
        with door.use():
            pytest.fail("a use beside a call")
    over.set()
    thread.join()
    interrupt.join()
    assert_nothing_is_left(door)


def test_a_call_that_another_broke_raises_at_its_end(door: Door) -> None:
    with pytest.raises(ClosedError, match="interrupted in the middle"), Call(door):
        breaking = threading.Thread(target=lambda: broken(door))
        breaking.start()
        breaking.join()
        assert door.closed
    assert_nothing_is_left(door)


def broken(door: Door) -> None:
    with contextlib.suppress(MemoryError), Call(door):
        raise MemoryError
