"""Ranks of a process group, each a process of its own, for tests."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tierstore.errors import LazyUpdatesWarning, RanksError

T = TypeVar("T")

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch.distributed",
        "torch._dynamo",  # which the first step of an optimizer imports, for more than a second
        "tierstore.nn",
        "tierstore.optim",
        *(f"{__package__}.{each.stem}" for each in sorted(Path(__file__).parent.glob("test_*.py"))),
    ]
)
"""What ranks import is imported once: a rank is forked with it, in a tenth of the time."""

PATIENCE = 60.0
"""Seconds for which ranks wait for each other; a test that needs a rank to be missed gives less."""


def in_turn(moments: Sequence[T]) -> list[tuple[int, T]]:
    """Return a victim of two ranks for each moment, 0, 1, 1, 0 …: for pairs, both orders."""
    return [((at + at // 2) % 2, moment) for at, moment in enumerate(moments)]


CONTROL = "control"
HEAD = 32
"""Bytes of a message without content."""
Sent = Callable[[str, int], object]


def watch(sent: Sent) -> None:
    """Call `sent` before each message that goes from this rank to the others from now on.

    It gets what the message is, `CONTROL` for what the ranks tell each other beside rows, and how
    many bytes go to the others.
    """
    from tierstore.distributed.ranks import Ranks

    send, say = Ranks.send, Ranks.say

    def watched(self: Ranks, what: str, kind: str, parts: Any, *more: Any) -> Any:
        nbytes = sum(HEAD + len(part) for at, part in enumerate(parts) if at != self.rank)
        sent(CONTROL if kind in ("gather", "agree", "together") else kind, nbytes)
        return send(self, what, kind, parts, *more)

    def watched_word(self: Ranks, what: str, kind: str, word: int) -> Any:
        sent(kind, HEAD * (self.count - 1))
        return say(self, what, kind, word)

    Ranks.send, Ranks.say = watched, watched_word  # type: ignore[method-assign]


class Killed(Exception):
    """A rank was killed, or ended without saying anything."""


def run(
    ranks: int,
    work: Callable[..., Any],
    *args: Any,
    timeout: float = PATIENCE,
    backend: str = "gloo",
    limit: float = 90,
) -> list[Any]:
    """Call `work(rank, *args)` in each of some ranks; return what each returned.

    Ranks that take longer than `limit` seconds are killed.
    What one raised comes back as the exception, `Killed` for one that ended by a signal.
    """
    with tempfile.TemporaryDirectory() as place:
        started = [
            CONTEXT.Process(
                target=_main,
                args=(work, rank, ranks, place, timeout, backend, args),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(limit)
            if process.is_alive():
                process.kill()
                process.join()
        return [_outcome(Path(place, str(rank))) for rank in range(ranks)]


def no_warnings() -> None:
    """Make warnings of this process errors, but that of rows which are not in a batch."""
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", LazyUpdatesWarning)


def values(found: list[Any]) -> list[Any]:
    """Return what every rank returned; raise what any raised, the cause before its effects."""
    raised = [each for each in found if isinstance(each, BaseException)]
    for each in sorted(raised, key=lambda each: isinstance(each, RanksError)):
        raise each
    return found


def _outcome(path: Path) -> Any:
    if not path.exists():
        return Killed()
    return pickle.loads(path.read_bytes())


def _main(
    work: Callable[..., Any],
    rank: int,
    ranks: int,
    place: str,
    timeout: float,
    backend: str,
    args: Any,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            backend,
            init_method=f"file://{place}/rendezvous",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout),
        )
    value: Any
    try:
        value = work(rank, *args)
    except Exception as error:
        error.add_note(traceback.format_exc())
        value = error
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(RuntimeError(repr(value)))
    temporary = Path(place, f"{rank}.partial")
    temporary.write_bytes(data)
    temporary.rename(Path(place, str(rank)))
    os._exit(0)  # a group that lost a rank may wait for it as it is destroyed
