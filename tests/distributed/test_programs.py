"""Random programs over ranks: whatever they do in whatever order, against one plain store.

A program is a list of sessions, each opened on some number of ranks, of random operations. The
plain store runs it first, over the joined batches, and what it then has in each version is what the
ranks must have, to the bit: gradients are whole numbers, so that no order of a sum matters.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import Killed, run, values, watch
from tests.gpu.emulator import EmulatedDevice
from tierstore import distributed
from tierstore.errors import LockedError, RanksError, StoreFullError, UncommittedRowsWarning
from tierstore.nn import TieredEmbedding, TieredEmbeddingBagCollection, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

pytestmark = pytest.mark.slow

IDS = {"user": 40, "item": 300, "wide": 60, "word": 30, "thing": 200, "broad": 50, "one": 80}
KEYS = {
    "name": [f"é{number}" for number in range(70)],
    "site": (np.arange(90) - 45) * 10**15,
    "rare": np.arange(50) * 7919,
    "seen": np.arange(60) * -31,
}
ADMIT = ("rare", "seen")
"""Tables whose keys get a row with their second use."""
ROWS = {"user": "user", "item": "item", "bought": "item", "wide": "wide", "site": "site"}
ROWS["rare"] = "rare"
BAGS = {"word": "word", "thing": "thing", "got": "thing", "broad": "broad", "seen": "seen"}
FEATURES = ROWS | BAGS
BATCH = 24
OPERATIONS = {
    "rows": 8,
    "bags": 5,
    "one": 4,
    "ahead": 4,
    "write": 4,
    "keys": 4,
    "check": 4,
    "commit": 5,
    "full": 2,
    "rollback": 2,
    "restore": 1,
    "resume": 1,
    "grow": 1,
    "append": 1,
    "create": 1,
    "rename": 1,
    "drop": 1,
    "fields": 1,
    "fold": 1,
    "expire": 2,
    "scalars": 1,
}
"""How often each comes, relative to the others."""

Program = list[tuple[int, list[tuple[str, int]]]]
"""For each session how many ranks it has, and its operations, each with a seed."""


def specs() -> dict[str, tierstore.TableSpec]:
    init = tierstore.normal(std=0.5, seed=3)
    tables = {
        name: tierstore.TableSpec(rows, 6 if name in ("wide", "broad") else 4, init=init)
        for name, rows in IDS.items()
    }
    tables["name"] = tierstore.TableSpec(dim=4, keys="text", init=init)
    tables["site"] = tierstore.TableSpec(dim=4, keys="int64", init=init, track_uses=True)
    for name in ADMIT:
        tables[name] = tierstore.TableSpec(dim=4, keys="int64", init=init, admit_after=2)
    return tables


def program(seed: int, sessions: int, operations: int, *leave_out: str) -> Program:
    random = np.random.default_rng(seed)
    names = [name for name in OPERATIONS if name not in leave_out]
    odds = np.array([OPERATIONS[name] for name in names], float)
    found: Program = []
    for _ in range(sessions):
        kinds = random.choice(names, operations, p=odds / odds.sum()).tolist()
        seeds = random.integers(1 << 30, size=operations).tolist()
        found.append((int(random.integers(1, 4)), list(zip(kinds, seeds, strict=True))))
    return found


class Session:
    """Runs operations on one rank, or on a plain store, which is rank 0 of 1."""

    def __init__(self, store: Any, rank: int, ranks: int, *, admits: bool = True) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        self.checks: list[str] = []
        rows, bags = (
            {name: each for name, each in features.items() if admits or each not in ADMIT}
            for features in (ROWS, BAGS)
        )
        modes = dict(zip(bags, ("sum", "mean", "max", "sum", "mean"), strict=False))
        self.rows = TieredEmbeddingCollection(store, rows, padding_idx={"item": 3})
        self.bags = TieredEmbeddingBagCollection(store, bags, modes, padding_idx={"got": 5})
        self.item, self.name = TieredEmbedding(store["one"]), TieredEmbedding(store["name"])
        self.optimizer = TieredOptimizer(
            torch.optim.SGD, [self.rows, self.bags, self.item, self.name], lr=0.5, momentum=0.5
        )

        self.checkpoint = tierstore.Checkpoint(store, tiered=self.optimizer)

    def run(self, operations: list[tuple[str, int]], done: Callable[[int], None]) -> list[str]:
        for number, (kind, seed) in enumerate(operations):
            getattr(self, f"do_{kind}")(np.random.default_rng(seed))
            done(number)
        return self.checks

    def mine(self, random: np.random.Generator) -> slice:
        """Return the samples of this rank, of BATCH; often none."""
        edges = np.sort(random.integers(0, BATCH + 1, 2))
        edges = np.concatenate([[0], edges[: self.ranks - 1], [BATCH]])
        return slice(int(edges[self.rank]), int(edges[self.rank + 1]))

    def batch(self, random: np.random.Generator, names: list[str], each: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in names:
            table = FEATURES[name]
            every = np.arange(IDS[table]) if table in IDS else KEYS[table]
            at = (random.random((BATCH, each)) ** 2 * len(every)).astype(np.int64)
            found[name] = torch.from_numpy(np.asarray(every)[at])
        return found

    def cut(self, batch: dict[str, Any], mine: slice) -> dict[str, Any]:
        return {name: each[mine] for name, each in batch.items()}

    def train(self, layer: Any, random: np.random.Generator, *, bags: bool, ahead: int) -> None:
        features = list(layer.features)
        names = [name for name in features if random.random() < 0.8] or features[:1]
        mine = self.mine(random)
        batches = [self.batch(random, names, 4) for _ in range(ahead + 1)]
        if random.random() < 0.2:
            layer.prefetch(self.cut(self.batch(random, names, 4), mine))  # which never comes
        for each in batches[:ahead]:
            layer.prefetch(self.cut(each, mine))
        for number, each in enumerate(batches):
            found = layer(self.cut(each, mine))
            weights = {
                name: torch.from_numpy(random.integers(-4, 5, (BATCH, 4, 6)).astype(np.float32))
                for name in names
            }
            left_out = names[0] if len(names) > 1 and random.random() < 0.3 else None
            loss = torch.zeros(())
            for name, rows in found.items():
                if name != left_out:
                    factors = weights[name][mine][..., : rows.shape[-1]]
                    loss = loss + (rows * (factors[:, 0] if bags else factors)).sum()
            if number == 0 and random.random() < 0.15:
                continue  # a lookup that is never trained
            loss.backward()
            if number % 2 == 0 or random.random() < 0.5:
                self.optimizer.step()
        self.optimizer.step()

    def do_rows(self, random: np.random.Generator) -> None:
        self.train(self.rows, random, bags=False, ahead=0)

    def do_bags(self, random: np.random.Generator) -> None:
        self.train(self.bags, random, bags=True, ahead=int(random.integers(0, 2)))

    def do_ahead(self, random: np.random.Generator) -> None:
        self.train(self.rows, random, bags=False, ahead=int(random.integers(1, 4)))

    def do_one(self, random: np.random.Generator) -> None:
        mine = self.mine(random)
        batches = [
            (random.integers(0, IDS["one"], (BATCH, 2))[mine], random.integers(0, 70, BATCH)[mine])
            for _ in range(3)
        ]
        coming: Any = [
            (torch.from_numpy(ids), [KEYS["name"][each] for each in at]) for ids, at in batches
        ]
        if random.random() < 0.5:
            depth = int(random.integers(3))
            coming = tierstore.lookahead(coming, {self.item: 0, self.name: 1}, depth=depth)
        for ids, names in coming:
            factors = torch.from_numpy(random.integers(-4, 5, (BATCH, 2, 4)).astype(np.float32))
            loss = (self.item(ids) * factors[mine]).sum()
            (loss + (self.name(names) * factors[mine][:, 0]).sum()).backward()
            self.optimizer.step()

    def do_write(self, random: np.random.Generator) -> None:
        name, mine = str(random.choice(list(IDS))), self.mine(random)
        ids = random.permutation(IDS[name])[:BATCH]
        dim = self.store[name].fields["weight"].dim
        rows = random.standard_normal((len(ids), dim)).astype(np.float32)
        self.store[name].write(ids[mine], rows[mine])

    def do_keys(self, random: np.random.Generator) -> None:
        name, mine = str(random.choice(["name", "site"])), self.mine(random)
        at = random.permutation(len(KEYS[name]))[:BATCH][mine]
        rows = random.standard_normal((BATCH, 4)).astype(np.float32)[mine]
        self.store[name].write([KEYS[name][each] for each in at], rows)

    def do_check(self, random: np.random.Generator) -> None:
        self.checks.append(digest(self.store))

    def do_commit(self, random: np.random.Generator) -> None:
        keep = "best" if random.random() < 0.4 else None
        step = int(random.integers(1000))
        if random.random() < 0.5:
            self.checkpoint.commit(step, keep=keep, of="all")
        else:
            self.store.commit(step, payload={"of": {"seed": 1}}, keep=keep)

    def do_full(self, random: np.random.Generator) -> None:
        """Commit, while the disk of one of several ranks is full, until it is not."""
        if self.ranks > 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
            if self.rank == random.integers(self.ranks):
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, unlimited[1]))
            try:
                self.store.commit(1)
                return
            except StoreFullError:
                pass
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        self.store.commit(1)

    def do_rollback(self, random: np.random.Generator) -> None:
        self.store.rollback()

    def do_restore(self, random: np.random.Generator) -> None:
        if any("best" in each.names for each in self.store.versions()):
            self.store.restore("best")

    def do_resume(self, random: np.random.Generator) -> None:
        self.store.rollback()
        if "tiered" in self.store.payload:
            assert self.checkpoint.resume() == self.store.step
            assert self.checkpoint.extra == {"of": "all"}

    def do_grow(self, random: np.random.Generator) -> None:
        self.store.rollback()
        self.store.grow("wide", self.store["wide"].rows + int(random.integers(1, 50)))

    def do_append(self, random: np.random.Generator) -> None:
        self.store.rollback()
        self.store.append("user", random.standard_normal((3, 4)).astype(np.float32))

    def do_create(self, random: np.random.Generator) -> None:
        self.store.rollback()
        if "extra" not in self.store:
            rows = int(random.integers(1, 99))
            init = tierstore.uniform(-1, 1, seed=rows)
            self.store.create_table("extra", tierstore.TableSpec(rows, 4, init=init))

    def do_rename(self, random: np.random.Generator) -> None:
        self.store.rollback()
        if "extra" in self.store and "moved" not in self.store:
            self.store.rename("extra", "moved")

    def do_drop(self, random: np.random.Generator) -> None:
        self.store.rollback()
        if "moved" in self.store:
            self.store.drop("moved")

    def do_fields(self, random: np.random.Generator) -> None:
        self.store.rollback()
        if "extra" not in self.store:
            return
        if "more" in self.store["extra"].fields:
            self.store.drop_fields("extra", ["more"])
        else:
            more = tierstore.Field(2, init=tierstore.constant(4.0))
            self.store.add_fields("extra", {"more": more})

    def do_fold(self, random: np.random.Generator) -> None:
        self.store.rollback()
        if any("best" in each.names for each in self.store.versions()):
            self.store.release("best")
        with contextlib.suppress(LockedError):  # by the reader beside
            self.store.fold()

    def do_expire(self, random: np.random.Generator) -> None:
        for _ in self.store["site"].expire(fewer_than=int(random.integers(1, 4))):
            pass

    def do_scalars(self, random: np.random.Generator) -> None:
        self.store["user"].scalars["note"] = int(random.integers(100))


def parts_of(store: Any) -> Iterator[bytes]:
    """Yield what all tables have, as this store shows it."""
    for name in sorted(store):
        table = store[name]
        yield repr((name, sorted(table.scalars.items()))).encode()
        ids = KEYS[name] if name in KEYS else np.arange(table.rows)
        unknown = {}
        if name in KEYS:
            yield table.contains(ids).tobytes()
            unknown = {"missing": "init"}
        for field in sorted(table.fields):
            rows = np.ascontiguousarray(table.read(ids, field, **unknown))
            yield field.encode() + rows.tobytes()


def digest(store: Any) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts_of(store):
        found.update(part)
    return found.hexdigest()


class Plain:
    """What a plain store has in each version of a program, and what its checks find.

    Attributes:
        versions: the digest of each.
        made_by: the session and operation by which each was made.
        checks: what each session found.
    """

    def __init__(self, path: Path, sessions: Program, *, admits: bool = True) -> None:
        with tierstore.create(path, specs()) as store:
            Session(store, 0, 1)  # whose optimizer adds fields
        self.versions: dict[int, str] = {}
        self.made_by: dict[int, tuple[int, int]] = {}
        self.checks: list[list[str]] = []
        with tierstore.open(path) as reader:
            self._note(reader, (0, -1))
            for number, (_, operations) in enumerate(sessions):
                with quiet(tierstore.open(path, "r+")) as store:
                    session = Session(store, 0, 1, admits=admits)

                    def done(at: int, number: int = number) -> None:
                        reader.refresh()
                        if reader.version not in self.versions:
                            self._note(reader, (number, at))

                    self.checks.append(session.run(operations, done))

    def _note(self, reader: Any, by: tuple[int, int]) -> None:
        self.versions[reader.version] = digest(reader)
        self.made_by[reader.version] = by


class quiet:
    """Closes a store without a warning of what was not committed."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __enter__(self) -> Any:
        return self.store

    def __exit__(self, *_: object) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncommittedRowsWarning)
            self.store.close()


def in_ranks(
    rank: int,
    path: Path,
    operations: list[tuple[str, int]],
    on_device: bool = False,
    victim: int | None = None,
    at: int = 0,
) -> list[str]:
    """Run a session; a program in which a rank may be killed counts no uses in memory alone."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    options: dict[str, Any] = {"budget": tierstore.Budget(host_rows=300)}
    if on_device:
        options["device"] = EmulatedDevice(seed=rank)
        options["budget"] = tierstore.Budget(host_rows=600, gpu_rows=400)
    with quiet(distributed.open(path, average=False, **options)) as store:
        session = Session(store, rank, ranks, admits=victim is None)
        if rank == victim:
            killed_at(at)
        return session.run(operations, lambda _: None)


def killed_at(at: int) -> None:
    """Kill this process at a call that it makes with other ranks."""
    calls = 0

    def counted(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(counted)


class Beside:
    """A reader in another thread, that follows what ranks commit and compares each version."""

    def __init__(self, path: Path, versions: dict[int, str]) -> None:
        self._path, self._versions = path, versions
        self.seen: set[int] = set()
        self._stop, self._error = threading.Event(), []  # type: ignore[var-annotated]
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        try:
            with tierstore.open(self._path) as reader:
                while not self._stop.wait(0.05):
                    reader.refresh()
                    if reader.version not in self.seen:
                        assert digest(reader) == self._versions[reader.version], reader.version
                        self.seen.add(reader.version)
        except BaseException as error:
            self._error.append(error)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        if self._error:
            raise self._error[0]


def start(path: Path) -> None:
    with distributed.create(path, specs(), partitions=7) as store:
        Session(store, 0, 1)


def equals(path: Path, plain: Plain) -> int:
    """Check that a store is whole, and is what the plain one was in its version; return that."""
    with tierstore.open(path) as store:
        assert digest(store) == plain.versions[store.version], store.version
        found = store.version
    report = tierstore.verify(path)
    assert report.ok, report
    return found


def ranks_do_what_one_store_does(
    place: Path, seed: int, sessions: int, operations: int, *, on_device: bool = False
) -> None:
    made = program(seed, sessions, operations)
    plain = Plain(place / "plain", made)
    path = place / "parts"
    start(path)
    with Beside(path, plain.versions):
        for number, (ranks, each) in enumerate(made):
            for found in values(run(ranks, in_ranks, path, each, on_device)):
                assert found == plain.checks[number], (seed, number, ranks)
            equals(path, plain)


def test_ranks_do_what_one_store_does(tmp_path: Path) -> None:
    ranks_do_what_one_store_does(tmp_path, 0, 3, 16)


@pytest.mark.torture
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seed", range(100, 150))
def test_ranks_do_what_one_store_does_at_length(tmp_path: Path, seed: int, on_device: bool) -> None:
    ranks_do_what_one_store_does(tmp_path, seed, 5, 60, on_device=on_device)


def whoever_is_killed(place: Path, seed: int, operations: int) -> int:
    """Kill ranks at random calls, and go on behind the version that was reached; count kills."""
    made = program(seed, 1, operations, "check")
    plain = Plain(place / "plain", made, admits=False)
    path, random, kills = place / "parts", np.random.default_rng(seed), 0
    start(path)
    with Beside(path, plain.versions):
        while True:
            _, done = plain.made_by[equals(path, plain)]
            ranks = int(random.integers(2, 4))
            victim = int(random.integers(ranks)) if random.random() < 0.9 else -1
            left, at = made[0][1][done + 1 :], int(random.integers(1, 120))
            found = run(ranks, in_ranks, path, left, False, victim, at)
            if victim < 0 or not isinstance(found[victim], Killed):
                values(found)
                return kills
            kills += 1
            for rank, each in enumerate(found):
                assert rank == victim or isinstance(each, RanksError | list), (at, each)


def test_whoever_is_killed_a_version_is_whole(tmp_path: Path) -> None:
    assert whoever_is_killed(tmp_path, 4, 16) > 0


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(200, 220))
def test_whoever_is_killed_at_length(tmp_path: Path, seed: int) -> None:
    whoever_is_killed(tmp_path, seed, 80)
