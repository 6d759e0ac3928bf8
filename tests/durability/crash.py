"""Recorded workloads, and what power cuts at each of their moments leave."""

from __future__ import annotations

import copy
import os
import random
import re
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np

import tierstore
from tests import inside
from tests.durability.disk import ROOT, Disk, Enter, Event, Image, Mark, Sync, Write
from tests.durability.recorder import Recorder
from tests.durability.stepwise import folds_in_steps
from tests.durability.twin import State, Twin, observe
from tierstore import _io
from tierstore._disk.write_queue import WriteQueue
from tierstore.budget import Budget

__all__ = ["Progress", "Recording", "change", "durable", "scratch", "small_deltas"]


@dataclass
class Progress:
    """What the workload had reached: for each store, the last state that is done, and the next."""

    done: dict[str, int] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)

    def note(self, mark: Mark) -> None:
        """Take a remark of the workload."""
        if mark.kind == "begin":
            self.begun[mark.name] = mark.number
        else:
            self.done[mark.name] = self.begun.pop(mark.name)

    def names(self) -> list[str]:
        """Names of the stores so far."""
        return sorted({*self.done, *self.begun})

    def allowed(self, name: str) -> list[int | None]:
        """Numbers of the states a store may be in; None is absence."""
        numbers: list[int | None] = [self.done.get(name)]
        return [*numbers, self.begun[name]] if name in self.begun else numbers


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory in memory where there is one, since thousands of small stores pass through it."""
    memory = Path("/dev/shm")
    place = tempfile.mkdtemp(prefix="tierstore-", dir=memory if memory.is_dir() else None)
    try:
        yield Path(place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def small_deltas(*, behind: bool = False, threads: bool = False) -> Iterator[None]:
    """Let live deltas grow by little, so that images are small.

    Rows that are evicted again are written over, or with `behind` behind all others; then commits
    go past the page cache too, as large ones do. As many as the host tier has slots wait to be
    written: by threads, or, so that all can be repeated, by the caller when he hands down the next.
    """
    few, rows_a_write, cached = (1, 1000, 0) if behind else (64, 8, 32 << 20)
    with (
        mock.patch("tierstore._disk.delta._ALLOCATION", (4096, 1 << 20)),
        mock.patch("tierstore._disk.delta._FEW", few),
        mock.patch("tierstore._disk.delta._ROWS_A_WRITE", rows_a_write),
        mock.patch("tierstore._disk.delta._CACHED_BYTES", cached),
        mock.patch("tierstore._disk.write_queue._MIN_QUEUED_BYTES", 1),
        mock.patch("tierstore._tiers.slots._QUEUE_SHARE", 1),
        nullcontext() if threads else mock.patch.object(WriteQueue, "_start", lambda queue: None),
    ):
        yield


@dataclass
class Recording:
    """The log of a workload and the states it went through; events before `start` are its past."""

    log: list[Event]
    states: list[State]
    start: int = 0
    overlaps: int = 0
    """Steps of the workload that were done while a fold was under way."""

    @classmethod
    def of(
        cls,
        seed: int,
        steps: Iterable[str],
        *,
        backend: str | None = None,
        folds: bool = False,
        read: bool = False,
        linked: bool = False,
    ) -> Recording:
        """Record a workload that begins with `create`; the same seed gives the same log.

        With `folds`, they begin soon and go on a little between any two steps. Where the first
        version is `read` all the while, compactions do. Where it is `linked`, a copy of it by hard
        links is made before each step.
        """
        conducted = folds_in_steps(seed) if folds or read else nullcontext()
        behind = seed % 2 == 1
        with (
            scratch() as root,
            scratch() as other,
            seeded(seed),
            small_deltas(behind=behind),
            conducted as conductor,
        ):
            recorder = Recorder(root)
            twin = Twin(root, recorder.mark, seed, backend=backend)
            with mock.patch.object(_io.system, "calls", recorder):
                twin.run(["create"])
                with tierstore.open(twin.path) if read else nullcontext():
                    for number, step in enumerate(steps):
                        if linked:
                            shutil.copytree(twin.path, other / str(number), copy_function=os.link)
                        twin.run([step])
                        if conductor is not None:
                            conductor.advance()
                    twin.close()
            overlaps = 0 if conductor is None else conductor.overlaps
            return cls(recorder.log, twin.states, overlaps=overlaps)

    def recovered(self, events: list[Event], name: str = "s") -> Recording:
        """Record how a writer takes up what `events` left, commits and closes."""
        states = list(self.states)
        with scratch() as root, small_deltas(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorder = Recorder(root, events)
            with mock.patch.object(_io.system, "calls", recorder):
                with tierstore.open(root / name, budget=Budget(host=0)) as reader:
                    number = states.index(observe(reader))
                recorder.mark("begin", name, number)
                writer = tierstore.open(root / name, "r+", budget=Budget(host=0))
                recorder.mark("done", name, number)
                change(writer)
                recorder.mark("begin", name, len(states))
                writer.commit(step=77)
                recorder.mark("done", name, len(states))
                states.append(observe(writer))
                for kept in list(inside.state(writer).ledger.names):
                    writer.release(kept)  # a fold drops all but the newest
                writer.fold()
                writer.close()
            return Recording(recorder.log, states, len(events))

    def sites(self) -> set[str]:
        """All places in the code that synced something."""
        return {event.site for event in self.log if isinstance(event, Sync)}

    def without(self, site: str) -> Recording:
        """The same workload in which the syncs of one place did nothing."""

        def keep(events: list[Event]) -> list[Event]:
            return [e for e in events if not (isinstance(e, Sync) and re.search(site, e.site))]

        return Recording(keep(self.log), self.states, len(keep(self.log[: self.start])))

    def crashes(
        self, seed: int, each: int, *, first: int = 0
    ) -> Iterator[tuple[int, Image, Progress]]:
        """Yield crash images, `each` after every event from `first` on, and what is allowed then.

        Never of the workload's past.
        """
        rng = random.Random(seed)
        disk, progress = Disk(), Progress()
        for number, event in enumerate(self.log):
            disk.replay(event)
            if isinstance(event, Mark):
                progress.note(event)
            for _ in range(each if number >= max(first, self.start) else 0):
                image = disk.crash(rng, hostile=rng.random() < 0.5)
                yield number, image, copy.deepcopy(progress)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make the unique parts of file names depend on the seed alone."""
    rng = random.Random(seed)
    with mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128), version=4)):
        yield


def durable(image: Image) -> list[Event]:
    """Return events that lead to a tree of files, all of it synced."""
    events: list[Event] = []
    nodes = {"": ROOT}
    for path, data in sorted(image.items()):
        parent, _, name = path.rpartition("/")
        nodes[path] = len(nodes)
        events.append(Enter(nodes[parent], name, nodes[path], data is None))
        if data is not None:
            events.append(Write(nodes[path], 0, data))
    return [*events, *(Sync(node, "image") for node in nodes.values())]


def change(writer: tierstore.Store) -> None:
    """Write to the last row of every table."""
    for table in writer.values():
        for name, item in table.fields.items():
            values = np.full((1, item.dim), 7, item.element.numpy)
            getattr(table, "by_row", table).write([table.rows - 1], values, name)
