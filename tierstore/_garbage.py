"""What Python frees late: cycles while many objects are made that all stay, frames of errors."""

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
from collections.abc import Iterator

_LOG = logging.getLogger("tierstore")


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
    """Return an error that ended a thread without its traceback, which is logged at DEBUG.

    It stays as long as anyone keeps it, and with a traceback also the frames that it passed, those
    that called them, and whatever they had at hand: files, views of mappings, the store, and the
    object that keeps the error for others.
    """
    if _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("%s", "".join(traceback.format_exception(error)).rstrip())
    known, waiting = set[int](), [error]
    while waiting:
        found = waiting.pop()
        if id(found) not in known:
            known.add(id(found))
            found.__traceback__ = None
            waiting += [each for each in (found.__cause__, found.__context__) if each is not None]
    return error
