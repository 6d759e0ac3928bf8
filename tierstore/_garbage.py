"""What Python frees late: cycles while many objects are made that all stay, frames of errors."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["search_put_off", "without_frames"]


@contextlib.contextmanager
def search_put_off() -> Iterator[None]:
    """Search for no cyclic garbage within the body, in any thread.

    A store of a thousand tables consists of fifty thousand objects. While they are made, Python
    would go through them seventy times, and once or twice through all objects of the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def without_frames(error: BaseException) -> BaseException:
    """Return an error that ended a thread, without what the frames that it passed refer to.

    To be called where it is caught. It stays as long as anyone keeps it, and with it whatever these
    had at hand: files, views of mappings, and the object that keeps the error for others.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without the frame that still runs
    known = set[int]()
    found: BaseException | None = error
    while found is not None and id(found) not in known:
        known.add(id(found))
        trace = found.__traceback__
        while trace is not None:
            with contextlib.suppress(RuntimeError):  # it still runs
                trace.tb_frame.clear()
            trace = trace.tb_next
        found = found.__cause__ or found.__context__
    return error
