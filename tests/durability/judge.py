"""The judgement of what a crash left: the real code opens it, reads all of it and goes on."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import tierstore
from tests.durability.crash import Progress, change, scratch, small_deltas
from tests.durability.disk import Image
from tests.durability.recorder import lay
from tests.durability.twin import State, observe
from tierstore._store.versions import LOCK, STORE
from tierstore.budget import Budget

__all__ = ["Failure", "Judge", "check_files"]


class Failure(AssertionError):
    """A state that a crash must not leave."""


class Judge:
    """Opens what a crash left, as a reader and as a writer, and goes on; once for each sight."""

    def __init__(self, states: list[State]) -> None:
        """Judge crashes of a workload with these states."""
        self._states = states
        self._seen: set[int] = set()
        self.count = 0
        """Stores that were judged, those seen before not counted."""

    def check(self, image: Image, progress: Progress) -> None:
        """Raise Failure if a crash must not leave this."""
        with scratch() as root, small_deltas(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in progress.names():
                store = {
                    p: data for p, data in image.items() if p == name or p.startswith(f"{name}/")
                }
                allowed = progress.allowed(name)
                sight = hash((tuple(sorted(store.items(), key=_path)), tuple(allowed)))
                if sight in self._seen:
                    continue
                self._seen.add(sight)
                self.count += 1
                lay(store, root)
                try:
                    _check_store(root / name, allowed, self._states)
                except Failure:
                    raise
                except Exception as error:
                    raise Failure(f"{name}: {type(error).__name__}: {error}") from error


def _path(item: tuple[str, bytes | None]) -> str:
    return item[0]


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}/")


def _check_store(path: Path, allowed: list[int | None], states: list[State]) -> None:
    if not path.exists():
        if None not in allowed:
            raise Failure(f"{path.name} is gone")
        tierstore.create(path, {"t": tierstore.TableSpec(3, 4)}).close()
        return
    wanted = [states[number] for number in allowed if number is not None]
    with tierstore.open(path, budget=Budget(host=0)) as reader:
        found = observe(reader)
        if found not in wanted:
            raise Failure(
                f"{path.name} is at version {found['version']}, which is no state allowed"
            )
        _check_older(path, reader, states)
    with tierstore.open(path, "r+", budget=Budget(host_rows=3)) as writer:
        if observe(writer) != found:
            raise Failure("a writer sees another state than a reader")
        report = writer.verify()
        if not report.ok:
            raise Failure(f"verify: {report.bad_rows} {report.bad_files}")
        check_files(path, writer)
        found = _go_on(writer)
    with tierstore.open(path, budget=Budget(host=0)) as reader:
        if observe(reader) != found:
            raise Failure("the commit after the crash did not hold")


def _check_older(path: Path, reader: tierstore.Store, states: list[State]) -> None:
    """Every version that is listed opens, and is what was committed under that number."""
    for version in reader.versions()[:-1]:
        with tierstore.open(path, version=version.version, budget=Budget(host=0)) as older:
            if observe(older) not in states:
                raise Failure(f"version {version.version} is not what was committed")


def check_files(path: Path, writer: tierstore.Store) -> None:
    """After a writer has opened the store, no file remains that no version names."""
    named = " ".join(manifest.read_text() for manifest in path.glob("manifest-*.json"))
    for file in path.rglob("*"):
        known = file.name in (STORE, LOCK, "rows.npy", "rows.crc", "rows.zarr", "zarr.json")
        chunk = re.fullmatch(r"c\.\d+\.0", file.name)
        if file.is_dir() and not any(file.iterdir()):
            continue  # the table of a commit that did not take place; it may as well be a user's
        derived = file.suffix == ".index" and f'"{file.stem}.' in named
        if file.name.startswith("manifest-") or derived:
            continue
        if not (known or chunk or f'"{file.name}"' in named):
            raise Failure(f"{file.relative_to(path)} was left over")


def _go_on(writer: tierstore.Store) -> State:
    """Write and commit once more; return the expected contents."""
    change(writer)
    writer.commit(step=77)
    return observe(writer)
