"""Work in a forked child that may be stopped or killed, and what it had said by then."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from tierstore.errors import TierStoreError

__all__ = ["Child", "Say", "in_child"]

_SILENCE_SECONDS = 120
Say = Callable[[Any], None]


class Child:
    """A process that does `work(say)`; it is killed when the body that it is entered for is left.

    What it says reaches the parent at once, whatever becomes of the child.
    """

    def __init__(self, work: Callable[[Say], Any]) -> None:
        """Begin the work."""
        self._said: list[Any] = []
        self._end: tuple[str, Any] | None = None
        self._pipe, theirs = Pipe(duplex=False)
        self._pid = os.fork()
        if self._pid == 0:
            _do(work, theirs)
        self._alive = True
        theirs.close()

    def __enter__(self) -> Child:
        """Return the child."""
        return self

    def __exit__(self, *failure: object) -> None:
        """Kill it."""
        self.kill()
        self._pipe.close()

    def listen(self) -> bool:
        """Wait until it says one thing more; False where it ended instead."""
        if self._end is not None:
            return False
        if not self._pipe.poll(_SILENCE_SECONDS):
            raise TimeoutError(f"a child has said nothing for {_SILENCE_SECONDS} s")
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            kind, value = "died", None
        if kind != "said":
            self._end = kind, value
            return False
        self._said.append(value)
        return True

    @property
    def said(self) -> list[Any]:
        """What it has said until now."""
        while self._end is None and self._pipe.poll():
            self.listen()
        return self._said

    def stop(self) -> None:
        """Stop all of its threads where they are."""
        os.kill(self._pid, signal.SIGSTOP)
        self._alive = os.WIFSTOPPED(os.waitpid(self._pid, os.WUNTRACED)[1])

    def resume(self) -> None:
        """Resume the process."""
        if self._alive:
            os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it as kill -9 does; afterwards it has said all that it will."""
        if self._alive:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._alive = False

    def result(self) -> Any:
        """Wait for the end of its work and return the result, or raise what it raised."""
        while self.listen():
            pass
        if self._alive:
            status = os.waitpid(self._pid, 0)[1]
            self._alive = False
            if self._end == ("died", None):
                raise RuntimeError(f"a child died of signal {os.WTERMSIG(status)}")
        kind, value = self._end or ("died", None)
        if kind == "done":
            return value
        if kind == "raised":
            raise value
        raise RuntimeError(f"a child failed:\n{value}")


def _do(work: Callable[[Say], Any], pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    try:
        try:
            end = "done", work(lambda value: pipe.send(("said", value)))
        except TierStoreError as error:
            # A copy without what may not be pickled: the class and the sentence.
            end = "raised", type(error)(str(error))
        except BaseException:
            end = "failed", traceback.format_exc()
        pipe.send(end)
    finally:
        os._exit(0)


def in_child(work: Callable[[Say], Any]) -> Any:
    """Do `work` in a child, and return or raise what it did."""
    with Child(work) as child:
        return child.result()
