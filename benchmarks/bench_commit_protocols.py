"""What does a durable commit cost, compared with an undo journal and rewriting whole chunks?"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import Answer, arguments, back_free_memory, workspace

import tierstore

QUESTION = "A durable commit of some random rows: time, and bytes written for each byte changed"
CHUNK = 256 << 10
ONE_IN = (1000, 100, 10)


class Journal:
    """Rows changed in place, once their old images are in a journal that is synced."""

    def __init__(self, directory: Path, first: np.ndarray) -> None:
        self._width = first[0].nbytes
        self._directory = os.open(directory, os.O_RDONLY)
        self._name = directory / "journal"
        (directory / "journaled").write_bytes(first.tobytes())
        self._file = os.open(directory / "journaled", os.O_RDWR)
        os.fsync(self._file)

    def commit(self, ids: np.ndarray, rows: np.ndarray) -> None:
        ids_sorted, order = np.sort(ids), np.argsort(ids)
        before = b"".join(os.pread(self._file, self._width, at) for at in ids_sorted * self._width)
        journal = os.open(self._name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        write_all(journal, ids_sorted.tobytes() + before)
        os.fsync(journal)
        os.close(journal)
        os.fsync(self._directory)
        for row, at in zip(rows[order], ids_sorted.tolist(), strict=True):
            os.pwrite(self._file, row, at * self._width)
        os.fsync(self._file)
        self._name.unlink()
        os.fsync(self._directory)


class Chunks:
    """Each chunk that holds a changed row rewritten as a new file, synced, and renamed."""

    def __init__(self, directory: Path, first: np.ndarray) -> None:
        self._rows = max(1, CHUNK // first[0].nbytes)
        self._path = directory / "chunks"
        self._path.mkdir()
        self._shape = first.shape[1:]
        for start in range(0, len(first), self._rows):
            (self._path / f"{start // self._rows}").write_bytes(
                first[start : start + self._rows].tobytes()
            )
        os.sync()
        self._directory = os.open(self._path, os.O_RDONLY)

    def commit(self, ids: np.ndarray, rows: np.ndarray) -> None:
        numbers = ids // self._rows
        for number in np.unique(numbers).tolist():
            which = numbers == number
            old = np.frombuffer((self._path / f"{number}").read_bytes(), rows.dtype)
            chunk = old.reshape(-1, *self._shape).copy()
            chunk[ids[which] - number * self._rows] = rows[which]
            new = os.open(self._path / "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            write_all(new, chunk.tobytes())
            os.fsync(new)
            os.close(new)
            os.rename(self._path / "new", self._path / f"{number}")
        os.fsync(self._directory)


class Tierstore:
    """A store whose host tier holds a quarter of the rows; a fold is measured separately."""

    def __init__(self, directory: Path, first: np.ndarray) -> None:
        spec = tierstore.TableSpec(len(first), first.shape[1], init=tierstore.from_array(first))
        budget = tierstore.Budget(host=max(first.nbytes // 4, 1 << 20))
        tierstore.create(directory / "t.tier", {"t": spec}).close()
        self.store = tierstore.open(directory / "t.tier", "r+", budget=budget)

    def commit(self, ids: np.ndarray, rows: np.ndarray) -> None:
        self.store["t"].write(ids, rows)
        self.store.commit()

    def fold(self, *_: np.ndarray) -> None:
        self.store.fold()


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def written_bytes(directory: Path) -> int | None:
    """Return the bytes the device under a directory has written so far; None if it is no device."""
    device = os.stat(directory).st_dev
    status = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    return 512 * int(status.read_text().split()[6]) if status.exists() else None


def cost(
    directory: Path, commit: Callable[..., None], *given: np.ndarray
) -> tuple[float, float | None]:
    """Return the seconds of a commit, and the bytes the device wrote until all is there."""
    os.sync()
    back_free_memory()
    before, begin = written_bytes(directory), time.perf_counter()
    commit(*given)
    seconds = time.perf_counter() - begin
    os.sync()
    after = written_bytes(directory)
    return seconds, None if before is None or after is None else after - before


def measure(
    directory: Path, rows: int, dim: int, repeat: int
) -> dict[tuple[int, str], tuple[float, float | None]]:
    """Return, by share of rows and way, median seconds and bytes written per byte changed."""
    rng = np.random.default_rng(5)
    first = rng.standard_normal((rows, dim), dtype=np.float32)
    ours = Tierstore(directory, first)
    ways: dict[str, Callable[..., None]] = {
        "tierstore": ours.commit,
        "undo journal": Journal(directory, first).commit,
        f"chunks of {CHUNK >> 10} KiB rewritten": Chunks(directory, first).commit,
    }
    found: dict[tuple[int, str], tuple[float, float | None]] = {}
    for one_in in ONE_IN:
        count = max(1, rows // one_in)
        costs: dict[str, list[tuple[float, float | None]]] = {name: [] for name in [*ways, "fold"]}
        for _ in range(repeat):
            ids = rng.choice(rows, count, replace=False)
            new = rng.standard_normal((count, dim), dtype=np.float32)
            for name, commit in ways.items():
                costs[name].append(cost(directory, commit, ids, new))
            costs["fold"].append(cost(directory, ours.fold))
        for name, each in costs.items():
            seconds = statistics.median(second for second, _ in each)
            written = [nbytes for _, nbytes in each if nbytes is not None]
            changed = count * dim * 4
            found[one_in, name] = seconds, statistics.median(written) / changed if written else None
    ours.store.close()
    return found


def main() -> None:
    parser = arguments(QUESTION, rows=200_000, dim=256)
    parser.set_defaults(repeat=5)
    options = parser.parse_args()
    answer = Answer(
        "commit_protocols",
        QUESTION,
        "the changed rows once, in order; written over in place, a page of "
        f"{mmap.PAGESIZE} B for nearly each, and a chunk of {CHUNK >> 10} KiB where chunks are "
        "replaced as a whole",
        "every commit faster than an undo journal's and than rewriting chunks",
        notes=[
            "a fold merges deltas into the base later: here after each commit, else for many",
            "bytes are those the device wrote, its journal included, until all was synced",
        ],
    )
    with workspace(options) as directory:
        found = measure(directory, options.rows, options.dim, options.repeat)
    for (one_in, name), (seconds, amplification) in found.items():
        ours = found[one_in, "tierstore"][0]
        what = "tierstore's fold, later" if name == "fold" else name
        answer.rows.append(
            {"rows changed": f"1 in {one_in}", "way": what, "ms": 1e3 * seconds}
            | {"times tierstore": seconds / ours, "bytes written ÷ changed": amplification}
        )
        if name not in ("tierstore", "fold"):
            answer.ratios[f"{name} ÷ tierstore, 1 in {one_in}"] = seconds / ours
    answer.met = all(ratio > 1 for ratio in answer.ratios.values())
    answer.give(options)


if __name__ == "__main__":
    main()
