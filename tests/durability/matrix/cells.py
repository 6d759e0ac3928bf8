"""The cells of the matrix: what happens to a store on a file system, and what must be left of it.

Each cell is a generator over a fresh disk with a store at step 0; it yields one outcome a trial.
A trial holds if nothing acknowledged is lost, bit for bit, and the store takes more. In the cells
that say so (`may_refuse`), an error of the library's that says why is as good.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tests import inside
from tests.durability.matrix import work
from tests.durability.matrix.children import Child, Say, in_child
from tests.durability.matrix.disks import Disk, FileSystem
from tests.durability.matrix.work import Lost
from tierstore.budget import Budget
from tierstore.errors import StoreIOError, TierStoreError

__all__ = ["CELLS", "Cell", "Outcome"]

_NONE = Budget(host=0)


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: held, refused (with the sentence) or lost (with what was)."""

    kind: str
    text: str = ""
    trial: str = ""


@dataclass(frozen=True)
class Trial:
    """What a cell gets: the disk, how its store is opened for writing, a seed, how often to try."""

    disk: Disk
    seed: int
    rounds: int

    @property
    def how(self) -> dict[str, Any]:
        """Arguments that open a store for writing here."""
        return {} if self.disk.system.tested else {"allow_untested": True}

    def random(self, number: int) -> random.Random:
        """Return the generator of one round."""
        return random.Random(f"{self.seed} {number}")

    def judge(self, trial: str, work: Callable[[Say], Any], *, may_refuse: bool = False) -> Outcome:
        """Do `work` in a child and say how it ended."""
        try:
            in_child(work)
        except TierStoreError as error:
            text = f"{type(error).__name__}: {error}"
            if "\n" in str(error):
                return Outcome("lost", f"not one sentence: {text}", trial)
            return Outcome("refused" if may_refuse else "lost", text, trial)
        except Exception as error:
            return Outcome("lost", _sentence(error), trial)
        return Outcome("held", trial=trial)

    def step(self) -> int:
        """Return the step that the store is at."""

        def look(say: Say) -> int:
            with tierstore.open(self.disk.store, budget=_NONE) as store:
                return store.step or 0

        return int(in_child(look))

    def check(self, trial: str, acknowledged: int, *, may_refuse: bool = False) -> Outcome:
        """Judge the store, of which this step was acknowledged last; a bad one is made anew."""
        path, how = self.disk.store, self.how
        outcome = self.judge(
            trial, lambda say: work.check(path, acknowledged, **how), may_refuse=may_refuse
        )
        if outcome.kind != "held":
            self.disk.renew()
        return outcome

    def trainer(self, seed: int, **given: Any) -> Child:
        """Start a trainer on the store."""
        path, how = self.disk.store, self.how
        return Child(lambda say: work.train(path, say, seed, **given, **how))


Body = Callable[[Trial], Iterator[Outcome]]


@dataclass(frozen=True)
class Cell:
    """A row of the matrix: its name, what it does, and on which file systems it cannot be."""

    name: str
    body: Body
    needs_image: bool = False

    def why_not(self, system: FileSystem) -> str:
        """The reason why it does not exist on a file system, or an empty string."""
        return "no disk lies below" if self.needs_image and not system.make else ""


def last(child: Child, before: int = 0) -> int:
    """The last step that was acknowledged, by a child or before it began."""
    return max(child.said, default=before)


def ended(trial: str, child: Child) -> Outcome:
    """A child ends its work or meets an error of the library's, and no other."""
    try:
        child.result()
    except TierStoreError:
        pass
    except Exception as error:
        return Outcome("lost", _sentence(error), trial)
    return Outcome("held", trial=trial)


def _sentence(error: Exception) -> str:
    """What a child failed of, without its traceback."""
    return str(error).strip().splitlines()[-1].removeprefix(f"{Lost.__module__}.")


# -- without accidents


def opening(trial: Trial) -> Iterator[Outcome]:
    """A file system that was tested opens for writing; another is refused until it is allowed."""
    path = trial.disk.store
    if trial.disk.system.tested:
        yield trial.judge("open", lambda say: tierstore.open(path, "r+").close())
        specs = {"t": tierstore.TableSpec(50, 4)}
        yield trial.judge(
            "create", lambda say: tierstore.create(path.parent / "new", specs).close()
        )
        return
    try:
        in_child(lambda say: tierstore.open(path, "r+").close())
        yield Outcome("lost", "opened for writing without being allowed to", "open")
    except StoreIOError as error:
        yield Outcome("refused", str(error), "open")
    yield trial.judge("allowed", lambda say: tierstore.open(path, "r+", **trial.how).close())


def commits(trial: Trial) -> Iterator[Outcome]:
    """Commits with payloads and growing tables."""
    with trial.trainer(trial.seed, steps=25, behind_it=False) as child:
        child.result()
        yield trial.check("25 commits", last(child))
    path, how = trial.disk.store, trial.how

    def save(say: Say) -> None:
        with tierstore.open(path, "r+", **how) as store:
            store.save(path.parent / "copy")
        with tierstore.open(path.parent / "copy") as copy:
            work.compare(copy)

    yield trial.judge("save", save)


def folds(trial: Trial) -> Iterator[Outcome]:
    """Folds that were asked for, each after some commits."""
    path, how = trial.disk.store, trial.how

    def fold(say: Say) -> None:
        with tierstore.open(path, "r+", keep=1, **how) as store:
            for step in range(1, 25):
                work.advance(store, step)
                if step % 4 == 0:
                    store.fold()
                    work.compare(store)

    yield trial.judge("6 folds", fold)
    yield trial.check("reopened", 24)


def folds_behind(trial: Trial) -> Iterator[Outcome]:
    """Commits beside folds of a thread."""
    with trial.trainer(trial.seed, steps=60) as child:
        child.result()
        yield trial.check("60 commits", last(child))


def readers(trial: Trial) -> Iterator[Outcome]:
    """Readers that stay, follow, and are opened again during commits and folds."""
    path = trial.disk.store

    def look(say: Say) -> None:
        with tierstore.open(path, budget=_NONE) as stays:
            first = stays.step or 0
            for _ in itertools.repeat(None, 30):
                with tierstore.open(path, budget=_NONE) as reader:
                    for _ in range(3):
                        work.compare(reader)
                        reader.refresh()
                if work.compare(stays) != first:
                    raise Lost("a reader that stays has moved")
                say(None)

    with trial.trainer(trial.seed) as writer:
        writer.listen()
        for number in range(2):
            yield trial.judge(f"reader {number}", look)
        writer.kill()
        yield trial.check("the writer", last(writer))


# -- ends


def kills(trial: Trial) -> Iterator[Outcome]:
    """kill -9 at random moments, again and again."""
    for number in range(trial.rounds):
        rng = trial.random(number)
        with trial.trainer(rng.randrange(1 << 30)) as child:
            child.listen()
            time.sleep(rng.random() * 0.4)
            child.kill()
            yield trial.check(f"kill {number}", last(child))


def _cut(trial: Trial, number: int, child: Child) -> Outcome:
    """Copy the disk below a child that is stopped, end it, and start again from the copy."""
    acknowledged = last(child)
    image = trial.disk.copy()
    child.kill()
    trial.disk.restore(image)
    return trial.check(
        f"cut {number} after step {acknowledged}",
        acknowledged,
        may_refuse=not trial.disk.system.journal,
    )


def cuts(trial: Trial) -> Iterator[Outcome]:
    """Power cuts at any moment: the disk as it is while the writer is stopped."""
    for number in range(trial.rounds):
        rng = trial.random(number)
        with trial.trainer(rng.randrange(1 << 30)) as child:
            child.listen()
            time.sleep(rng.random() * 0.4)
            child.stop()
            yield _cut(trial, number, child)


def cuts_at_commits(trial: Trial) -> Iterator[Outcome]:
    """Power cuts the moment a commit has returned."""
    path, how = trial.disk.store, trial.how
    for number in range(trial.rounds):
        rng = trial.random(number)
        stops, seed = rng.randint(1, 25), rng.randrange(1 << 30)

        def commit(say: Say, stops: int = stops, seed: int = seed) -> None:
            count = itertools.count(1)

            def acknowledge(step: int) -> None:
                say(step)
                if next(count) == stops:
                    os.kill(os.getpid(), signal.SIGSTOP)

            work.train(path, acknowledge, seed, **how)

        with Child(commit) as child:
            for _ in range(stops):
                child.listen()
            child.stop()
            yield _cut(trial, number, child)


# -- space


def full(trial: Trial) -> Iterator[Outcome]:
    """A disk that runs full in the middle, and is emptied again."""
    path, how, disk = trial.disk.store, trial.how, trial.disk
    for number in range(trial.rounds):
        before = trial.step()
        disk.fill(trial.random(number).randrange(1 << 20))

        def commit(say: Say, before: int = before) -> None:
            step = before
            with tierstore.open(path, "r+", **how) as store:
                with contextlib.suppress(TierStoreError):
                    while step < before + 10_000:
                        work.advance(store, step + 1)
                        step += 1
                        say(step)
                        if step % 5 == 0:
                            store.fold()
                if not inside.door(store).closed:
                    store.rollback()
                    if work.compare(store) != step:
                        raise Lost(f"step {step} returned, the store is at {store.step}")

        with Child(commit) as child:
            yield ended(f"full {number}", child)
            disk.ballast.unlink()
            yield trial.check(f"emptied {number}", last(child, before))


def thin(trial: Trial) -> Iterator[Outcome]:
    """A disk that takes what is written and then has no room for it."""
    path, disk = trial.disk.store, trial.disk
    for number in range(trial.rounds):
        rng = trial.random(number)
        before = trial.step()
        disk.thin(rng.randrange(64 << 10, 4 << 20))
        with trial.trainer(rng.randrange(1 << 30), steps=200) as child:
            yield ended(f"thin {number}", child)
            child.kill()
            disk.thicken()
            yield trial.check(
                f"thickened {number}",
                last(child, before),
                may_refuse=not disk.system.journal,
            )

        wide = path.with_name(f"wide {number}")
        rows, values = _scattered(disk.data / wide.name, number)
        disk.thin(rng.randrange(64 << 10, 1 << 20))
        with Child(partial(_fold, wide, trial.how)) as child:
            yield ended(f"fold {number}", child)
        disk.thicken()

        def whole(say: Say, wide: Path = wide, rows: Any = rows, values: Any = values) -> None:
            with tierstore.open(wide, budget=_NONE) as store:
                wrong = np.any(store["t"].read(rows) != values, axis=1).sum()
                if wrong or not store.verify().ok:
                    raise Lost(f"{wrong} of {len(rows)} committed rows after a fold")

        yield trial.judge(f"folded {number}", whole)
        shutil.rmtree(disk.data / wide.name)


def _scattered(path: Path, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make a store of zeros with committed rows far apart; return these."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(200_000)[:988])
    values = rng.standard_normal((988, 64)).astype(np.float32)

    def create(say: Say) -> None:
        with tierstore.create(path, {"t": tierstore.TableSpec(200_000, 64)}) as store:
            store["t"].write(rows, values)
            # Closing would fold what is small.
            store.commit()
            say("committed")
            os.kill(os.getpid(), signal.SIGKILL)

    with Child(create) as child:
        child.listen()
    return rows, values


def _fold(path: Path, how: dict[str, Any], say: Say) -> None:
    with tierstore.open(path, "r+", keep=1, **how) as store:
        store.commit()
        store.fold()


# -- read-only


def read_only(trial: Trial) -> Iterator[Outcome]:
    """A file system that becomes read-only while a writer works, and one that is so."""
    path, how, disk = trial.disk.store, trial.how, trial.disk
    for number in range(trial.rounds):
        rng = trial.random(number)
        before = trial.step()
        with trial.trainer(rng.randrange(1 << 30)) as child:
            child.listen()
            time.sleep(rng.random() * 0.4)
            if not disk.fail():
                break  # only what is read-only from the start can be had here
            yield ended(f"failed {number}", child)
            disk.unmount()
            disk.mount()
            yield trial.check(
                f"after {number}",
                last(child, before),
                may_refuse=not disk.system.journal,
            )
    before = trial.step()
    with trial.trainer(trial.seed) as child:
        child.listen()
        with contextlib.suppress(OSError):
            disk.remount("ro")  # the kernel refuses while files are open for writing
        for _ in range(5):
            child.listen()
        child.kill()
        before = last(child, before)
    disk.remount("ro")

    def look(say: Say) -> None:
        with tierstore.open(path, budget=_NONE) as reader:
            if work.compare(reader) not in (before, before + 1):
                raise Lost(f"step {before} was acknowledged, the store is at {reader.step}")

    yield trial.judge("a reader where nothing can be written", look)
    writer = trial.judge(
        "a writer where nothing can be written",
        lambda say: tierstore.open(path, "r+", **how).close(),
        may_refuse=True,
    )
    yield (
        writer if writer.kind == "refused" else Outcome("lost", "opened for writing", writer.trial)
    )
    disk.remount("rw")
    yield trial.check("writable again", before)


# -- other programs

Step = tuple[str, str]
_ORDERS: dict[str, list[Step]] = {
    "the other commits": [("b", "put"), ("a", "put"), ("b", "put")],
    "the other folds": [("b", "fold"), ("a", "put"), ("a", "fold"), ("b", "put")],
    "the first goes on": [("a", "put"), ("a", "fold"), ("b", "put"), ("a", "put")],
}


def _two_writers(
    path: Path,
    other: Path,
    how: dict[str, Any],
    order: list[Step],
    hurt: Callable[[Path], None],
    say: Say,
) -> None:
    """Write with one writer, do something to its files, and open another; see what is lost.

    Each may be refused at any time; a commit that returned must be there in the end.
    """
    rng = np.random.default_rng(len(order))
    acknowledged: dict[int, np.ndarray] = {}
    rows = {"a": iter(range(100)), "b": iter(range(100, 200))}

    def put(name: str) -> None:
        row, value = next(rows[name]), rng.standard_normal((1, 6)).astype(np.float32)
        writers[name]["plain"].write([row], value)
        writers[name].commit()
        acknowledged[row] = value

    writers = {"a": tierstore.open(path, "r+", keep=1, **how)}
    put("a")
    put("a")
    hurt(path)
    with contextlib.suppress(TierStoreError):
        writers["b"] = tierstore.open(other, "r+", keep=1, **how)
    for name, action in order:
        if name in writers and not inside.door(writers[name]).closed:
            with contextlib.suppress(TierStoreError):
                if action == "put":
                    put(name)
                else:
                    writers[name].fold()
    for writer in writers.values():
        with contextlib.suppress(TierStoreError):
            if not inside.door(writer).closed:
                writer.rollback()
            writer.close()
    with tierstore.open(path, "r+", budget=_NONE, **how) as store:
        found = {row: store["plain"].read([row]) for row in acknowledged}
        wrong = [row for row, value in acknowledged.items() if (found[row] != value).any()]
        if wrong:
            raise Lost(f"{len(wrong)} of {len(acknowledged)} commits that returned are not there")
        if not store.verify().ok:
            raise Lost("verify finds damage")


def _nothing(path: Path) -> None:
    """Leave the files as they are."""


def _remove(name: str, path: Path) -> None:
    (path / name).unlink(missing_ok=True)


def _copy_over(name: str, path: Path) -> None:
    """Put a copy in the place of a file, as editors and backups do."""
    if (path / name).exists():
        shutil.copy(path / name, path / "copied")
        os.replace(path / "copied", path / name)


def _newest_delta(path: Path) -> Path:
    return max((path / "plain").rglob("delta-*"))


def _remove_delta(path: Path) -> None:
    _newest_delta(path).unlink()


def _spoil_delta(path: Path) -> None:
    """Put as many other bytes in the place of a delta."""
    delta = _newest_delta(path)
    spoilt = np.random.default_rng(1).bytes(delta.stat().st_size)
    (path / "spoilt").write_bytes(spoilt)
    os.replace(path / "spoilt", delta)


def removed(trial: Trial) -> Iterator[Outcome]:
    """Files deleted or replaced under a writer, and a second writer that comes then."""
    path, how = trial.disk.store, trial.how
    hurts: dict[str, Callable[[Path], None]] = {
        f"{name} {what}": partial(action, name)
        for name in ("LOCK", "STORE.json")
        for what, action in (("deleted", _remove), ("replaced", _copy_over))
    }
    hurts |= {"a delta deleted": _remove_delta, "a delta replaced": _spoil_delta}
    for (what, hurt), (when, order) in itertools.product(hurts.items(), _ORDERS.items()):
        gone = what == "STORE.json deleted" or "delta" in what
        yield trial.judge(
            f"{what}, {when}",
            partial(_two_writers, path, path, how, order, hurt),
            may_refuse=gone,
        )
        trial.disk.renew()


def second_writers(trial: Trial) -> Iterator[Outcome]:
    """A second writer that comes through another mount, and one that insists."""
    path, disk = trial.disk.store, trial.disk
    for when, order in _ORDERS.items():
        for allow in (False, True):
            for name, other in disk.second_mounts():
                how = {"allow_untested": True} if allow else trial.how
                yield trial.judge(
                    f"{name}, {when}{', allowed' if allow else ''}",
                    partial(_two_writers, path, other, how, order, _nothing),
                )
            disk.renew()


def restored(trial: Trial) -> Iterator[Outcome]:
    """Base files of another moment: from a backup, or copied while a fold was writing."""
    path, how, disk = trial.disk.store, trial.how, trial.disk

    def fold_at(first: int, say: Say) -> None:
        with tierstore.open(path, "r+", keep=1, **how) as store:
            for step in range(first, first + 4):
                work.advance(store, step)
            store.fold()

    def look(mode: str, say: Say) -> None:
        given = how if mode == "r+" else {}
        with tierstore.open(path, mode, budget=_NONE, **given) as store:
            if work.compare(store) != 8:
                raise Lost(f"step 8 was acknowledged, the store is at {store.step}")
            if not store.verify().ok:
                raise Lost("verify finds damage")

    for table, half in itertools.product(work.TABLES, (False, True)):
        in_child(partial(fold_at, 1))
        backup = {file: file.read_bytes() for file in _base_files(path / table)}
        in_child(partial(fold_at, 5))
        yield trial.judge("before", partial(look, "r"))
        for file, data in backup.items():
            new = file.read_bytes()
            cut = len(new) // 2 if half else len(data)
            file.write_bytes(data[:cut] + new[cut:])
        for mode in ("r", "r+"):
            trial_name = f"{'half of ' if half else ''}{table}, opened {mode}"
            yield trial.judge(trial_name, partial(look, mode), may_refuse=True)
        disk.renew()


def _base_files(table: Path) -> list[Path]:
    """The files of a base that folds write over."""
    return [
        file
        for file in sorted(table.rglob("*"))
        if file.is_file() and (file.name in ("rows.npy", "rows.crc") or file.name.startswith("c."))
    ]


CELLS = [
    Cell("opened for writing", opening),
    Cell("commits and copies", commits),
    Cell("folds", folds),
    Cell("folds behind commits", folds_behind),
    Cell("readers beside a writer", readers),
    Cell("kill -9", kills),
    Cell("power cut at any moment", cuts, needs_image=True),
    Cell("power cut as a commit returns", cuts_at_commits, needs_image=True),
    Cell("full disk", full),
    Cell("thin disk", thin, needs_image=True),
    Cell("read-only in the middle", read_only),
    Cell("files deleted or replaced", removed),
    Cell("base of another moment", restored),
    Cell("second writer elsewhere", second_writers),
]
"""The rows of the matrix."""
