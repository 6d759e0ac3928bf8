"""Files newer than the newest manifest: named by verify, taken by `repair(adopt=True)`."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import tierstore
from tests.every import every
from tierstore import TableSpec, _io
from tierstore._io.file import File
from tierstore.errors import (
    CorruptStoreError,
    InvalidInputError,
    LockedError,
    TierStoreError,
    VersionError,
)
from tierstore_cli.main import cli

ROWS = 60
RNG = np.random.default_rng(61)


def rows_of(count: int) -> Any:
    return RNG.standard_normal((count, 4)).astype(np.float32)


def run(*args: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, list(map(str, args)))
    assert result.exit_code == code, result.output
    return result


def newest_manifest(path: Path) -> Path:
    return max(path.glob("manifest-*.json"))


def contents(path: Path) -> dict[str, Any]:
    """Return every row of every table, by key where there are keys, with payload and step."""
    with tierstore.open(path) as store:
        found: dict[str, Any] = {"step": store.step, "payload": sorted(store.payload)}
        for name, table in store.items():
            if table.spec.keys is None:
                found[name] = table.read(range(table.rows)).tobytes()
            else:
                found[name] = {key: table.read([key]).tobytes() for key in table.keys}
        return found


@pytest.fixture
def put(tmp_path: Path) -> Path:
    """A store of one table with two commits after it was made."""
    path = tmp_path / "s.tier"
    with tierstore.create(path, {"t": TableSpec(ROWS, 4)}) as store:
        store["t"].write(range(ROWS), rows_of(ROWS))
        store.commit()
        store.fold()
        store["t"].write([2, 50], rows_of(2))
        store.commit()
    return path


@pytest.mark.fault(36)
def test_a_version_whose_manifest_was_removed(put: Path, tmp_path: Path) -> None:
    """`verify` and `doctor` name its delta and exit with 0; `--adopt` brings back its rows."""
    expected = contents(put)
    newest_manifest(put).unlink()
    without = contents(put)
    assert without != expected
    report = tierstore.verify(put)
    assert report.ok and len(report.newer) == 1
    assert report.newer[0].endswith("2 records of version 3")
    shown = run("verify", put)
    assert "no damage" in shown.stdout and "newer than the newest manifest: t/g" in shown.stderr
    assert "or its manifest was removed: `tierstore repair --adopt" in shown.stderr
    assert "newer than its manifest" in run("doctor", put).stdout
    assert contents(put) == without  # nothing was changed by looking
    plain = tierstore.repair(put, tmp_path / "plain")
    assert (plain.version, plain.adopted) == (2, [])
    assert contents(tmp_path / "plain") == without
    done = run("repair", put, tmp_path / "a.tier", "--adopt")
    assert "copied version 3" in done.stdout and "adopted: version 3" in done.stderr
    assert contents(tmp_path / "a.tier") == expected
    adopted = tierstore.repair(put, tmp_path / "b.tier", adopt=True)
    assert (adopted.version, adopted.adopted, adopted.complete) == (3, [3], True)
    assert contents(tmp_path / "b.tier") == expected
    with tierstore.open(tmp_path / "b.tier", "r+") as store:  # and it goes on from there
        store["t"].write([1], rows_of(1))
        assert store.commit() == 4


def test_an_incremental_copy_whose_manifest_was_removed(put: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.tier"
    with tierstore.open(put, "r+") as store:
        store.save(copy)
        store["t"].write([7, 8, 9], rows_of(3))
        store.commit()
        assert store.update_copy(copy).rows
    expected = contents(copy)
    assert expected == contents(put)
    newest_manifest(copy).unlink()
    assert contents(copy) != expected
    tierstore.repair(copy, tmp_path / "b.tier", adopt=True)
    assert contents(tmp_path / "b.tier") == expected


def test_several_versions(tmp_path: Path) -> None:
    """Those that follow each other are taken together; a gap ends them."""
    path = tmp_path / "s.tier"
    states = []
    with tierstore.create(path, {"t": TableSpec(ROWS, 4)}, keep=9) as store:
        for row in range(5):
            store["t"].write([row, 20], rows_of(2))
            store.commit()
            states.append(contents(path))
    for _ in range(3):
        newest_manifest(path).unlink()
    report = tierstore.repair(path, tmp_path / "all", adopt=True)
    assert (report.adopted, report.complete) == ([4, 5, 6], True)
    assert contents(tmp_path / "all") == states[-1]
    deltas = sorted(path.glob("t/*/delta-*.bin"))
    deltas[-2].unlink()
    report = tierstore.repair(path, tmp_path / "some", adopt=True)
    assert report.adopted == [4] and not report.complete
    assert "version 6 cannot be adopted" in report.left_out[0]
    assert contents(tmp_path / "some") == states[2]
    deltas[-3].unlink()
    with pytest.raises(VersionError, match="version 6 cannot be adopted"):
        tierstore.repair(path, tmp_path / "none", adopt=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("at", [0, 17, -70, -100, -115])
def test_a_damaged_delta_is_never_adopted(put: Path, tmp_path: Path, at: int) -> None:
    newest_manifest(put).unlink()
    delta = max(put.glob("t/*/delta-*.bin"))
    data = bytearray(delta.read_bytes())
    data[at] ^= 4
    delta.write_bytes(data)
    with pytest.raises(CorruptStoreError, match="is damaged, so that its version is not adopted"):
        tierstore.repair(put, tmp_path / "b.tier", adopt=True)
    run("repair", put, tmp_path / "b.tier", "--adopt", code=4)
    assert not (tmp_path / "b.tier").exists()


def test_a_delta_without_its_end_is_none(put: Path, tmp_path: Path) -> None:
    newest_manifest(put).unlink()
    delta = max(put.glob("t/*/delta-*.bin"))
    delta.write_bytes(delta.read_bytes()[:-1])
    assert tierstore.verify(put).newer == []
    with pytest.raises(InvalidInputError, match="no files that are newer than version 2"):
        tierstore.repair(put, tmp_path / "b.tier", adopt=True)


def _step(store: tierstore.Store) -> None:
    store["a"].write([1], rows_of(1))
    store.commit(step=4)


def _payload(store: tierstore.Store) -> None:
    store["a"].write([1], rows_of(1))
    store.commit(payload={"note": b"seven"})


def _scalars(store: tierstore.Store) -> None:
    store["a"].scalars["step"] = 3
    store["a"].write([1], rows_of(1))
    store.commit()


def _one(store: tierstore.Store) -> None:
    store["a"].write([1], rows_of(1))
    store.commit()


UNPROVEN: dict[str, tuple[dict[str, TableSpec], Callable[[Any], object], str]] = {
    "step": ({"a": TableSpec(ROWS, 4)}, _step, "step and payload"),
    "payload": ({"a": TableSpec(ROWS, 4)}, _payload, "step and payload|what payload-"),
    "scalars": ({"a": TableSpec(ROWS, 4)}, _scalars, "scalars of table 'a'"),
    "other table": (
        {"a": TableSpec(ROWS, 4), "b": TableSpec(ROWS, 4)},
        _one,
        "whether it changed table 'b'",
    ),
    "by key": ({"a": TableSpec(dim=4, keys="int64")}, _one, "keys of table 'a'"),
    "keys": (
        {"a": TableSpec(ROWS, 4)},
        lambda store: store.set_keys("a", [f"k{row}" for row in range(ROWS)]),
        "no files that are newer|keys of table 'a'",
    ),
    "another shape": (
        {"a": TableSpec(ROWS, 4)},
        lambda store: store.grow("a", 2 * ROWS),
        "only its manifest says what a/g",
    ),
}


@pytest.mark.parametrize("case", UNPROVEN)
def test_what_only_a_manifest_could_say_is_not_guessed(tmp_path: Path, case: str) -> None:
    specs, work, reason = UNPROVEN[case]
    path = tmp_path / "s.tier"
    with tierstore.create(path, specs, keep=9) as store:
        for _ in range(2):
            work(store) if case in ("step", "payload", "scalars") else _one(store)
        work(store)
    newest_manifest(path).unlink()
    assert tierstore.verify(path).ok
    with pytest.raises((VersionError, InvalidInputError), match=reason):
        tierstore.repair(path, tmp_path / "b.tier", adopt=True)
    assert not (tmp_path / "b.tier").exists()


def test_every_table_with_its_delta_is_a_whole_version(tmp_path: Path) -> None:
    path = tmp_path / "s.tier"
    with tierstore.create(path, {name: TableSpec(ROWS, 4) for name in "abc"}, keep=9) as store:
        for _ in range(3):
            for name in "abc":
                store[name].write(RNG.choice(ROWS, 5, replace=False), rows_of(5))
            store.commit()
    expected = contents(path)
    newest_manifest(path).unlink()
    assert tierstore.repair(path, tmp_path / "b.tier", adopt=True).complete
    assert contents(tmp_path / "b.tier") == expected


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path, Path], list[Path]]]:
    """Copies of a store before each operation on its files, as a kill would leave them."""
    found: list[Path] = []
    about: list[Path] = []

    def watch(kind: type, name: str) -> None:
        real = getattr(kind, name)

        @functools.wraps(real)
        def watched(self: Any, *args: Any, **more: Any) -> Any:
            if len(about) == 2:
                copy = about[1] / f"{len(found):03d}.tier"
                shutil.copytree(about[0], copy)
                found.append(copy)
            return real(self, *args, **more)

        monkeypatch.setattr(kind, name, watched)

    for name in ("write", "sync", "truncate"):
        watch(File, name)
    for name in ("create", "put_if_absent", "sync", "unlink"):
        watch(_io.Directory, name)

    def begin(path: Path, place: Path) -> list[Path]:
        about[:] = path, place
        return found

    yield begin


def _plain(store: Any) -> None:
    store["a"].write([3, 40], rows_of(2))
    store.commit()


def _both(store: Any) -> None:
    store["b"].write([5], rows_of(1))
    _plain(store)


def _whole(store: Any) -> None:
    store["a"].scalars["n"] = 5
    store["a"].write([3, 40], rows_of(2))
    store.commit(step=9, payload={"model": {"w": rows_of(2)}})


def _keys(store: Any) -> None:
    store["a"].write([-7, 10**12, 3], rows_of(3))
    store.commit()


def _removal(store: Any) -> None:
    store["a"].remove([1, 5])
    store["a"].write([3], rows_of(1))
    store.commit()


BY_ID, BY_KEY = {"a": TableSpec(ROWS, 4)}, {"a": TableSpec(dim=4, keys="int64")}
KILLED: dict[str, tuple[dict[str, TableSpec], Callable[[Any], object]]] = {
    "rows": (BY_ID, _plain),
    "rows of one of two tables": (BY_ID | {"b": TableSpec(ROWS, 4)}, _plain),
    "rows of two tables": (BY_ID | {"b": TableSpec(ROWS, 4)}, _both),
    "payload, step, scalars": (BY_ID, _whole),
    "new keys": (BY_KEY, _keys),
    "removed keys": (BY_KEY, _removal),
}


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize(
    "case",
    [each if each == "rows" else pytest.param(each, marks=pytest.mark.slow) for each in KILLED],
)
def test_a_commit_that_was_killed_is_adopted_whole_or_refused(
    tmp_path: Path, case: str, moments: Callable[[Path, Path], list[Path]]
) -> None:
    """Before each of its operations; what was adopted is the version that it would have been."""
    specs, work = KILLED[case]
    path, copies = tmp_path / "s.tier", tmp_path / "copies"
    copies.mkdir()
    with tierstore.create(path, specs) as store:
        for name in specs:
            store[name].write(range(ROWS), rows_of(ROWS))
        store.commit()
        before, manifests = contents(path), len(list(path.glob("manifest-*.json")))
        found = moments(path, copies)
        work(store)
    after = contents(path)
    assert len(found) > 5
    taken = 0
    for number, copy in enumerate(list(found)):
        if len(list(copy.glob("manifest-*.json"))) > manifests:
            break  # it is published, and what follows tidies up
        report = tierstore.verify(copy)
        assert report.ok and contents(copy) == before
        try:
            tierstore.repair(copy, tmp_path / f"{number}.fixed", adopt=True)
        except TierStoreError as error:
            assert isinstance(error, (VersionError, InvalidInputError, CorruptStoreError)), error
            assert not (tmp_path / f"{number}.fixed").exists()
        else:
            assert contents(tmp_path / f"{number}.fixed") == after
            taken += 1
    assert taken


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose newest version has rows, keys, a step and a payload of its own."""
    path = tmp_path_factory.mktemp("full") / "s.tier"
    tables = {"t": TableSpec(ROWS, 4), "k": TableSpec(dim=4, keys="text")}
    with tierstore.create(path, tables) as store:
        for number in range(2):
            store["t"].write([2 + number, 50], rows_of(2))
            store["k"].write([f"word {number}", "other"], rows_of(2))
            store.commit(step=number, payload={"model": bytes([number]) * 99})
            if not number:
                store.fold()
    return path


def without_its_name(full: Path, path: Path) -> Path:
    """Copy the store, in which the newest manifest is one that did not get its name."""
    shutil.copytree(full, path)
    newest = newest_manifest(path)
    newest.rename(newest.with_name(f"{newest.name}.0123abcd.tmp"))
    return path


def test_a_manifest_that_did_not_get_its_name_is_proof(full: Path, tmp_path: Path) -> None:
    path = without_its_name(full, tmp_path / "s.tier")
    assert contents(path) != contents(full)
    report = tierstore.repair(path, tmp_path / "copy", adopt=True)
    assert report.complete and report.adopted == [3]
    assert contents(tmp_path / "copy") == contents(full)


@every(pattern=["t/*/delta-*", "k/*/delta-*", "payload-*", "k/*/keys*.utf8"])
def test_a_manifest_is_no_proof_of_files_that_are_damaged(
    full: Path, tmp_path: Path, pattern: str
) -> None:
    path = without_its_name(full, tmp_path / pattern.replace("/", "-").replace("*", "x"))
    file = max(path.glob(pattern), key=lambda file: file.stat().st_mtime_ns)
    data = bytearray(file.read_bytes())
    data[len(data) // 3 if "delta" in pattern else -1] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    dest = tmp_path / "copy"
    with pytest.raises(CorruptStoreError):
        tierstore.repair(path, dest, adopt=True)
    assert not dest.exists()


def test_a_manifest_or_delta_of_another_store_is_not_newer(put: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.tier"
    with tierstore.create(other, {"t": TableSpec(ROWS, 4)}) as store:
        for row in range(5):
            store["t"].write([row], rows_of(1))
            store.commit()
    theirs = newest_manifest(other)
    shutil.copy(theirs, put / f"{theirs.name}.0123abcd.tmp")
    (generation,) = put.glob("t/g*")
    delta = max(other.glob("t/*/delta-*.bin"))
    shutil.copy(delta, generation / delta.name)
    assert tierstore.verify(put).newer == []
    with pytest.raises(InvalidInputError, match="no files that are newer"):
        tierstore.repair(put, tmp_path / "copy", adopt=True)


def test_two_deltas_of_a_table_are_no_version(put: Path, tmp_path: Path) -> None:
    newest_manifest(put).unlink()
    delta = max(put.glob("t/*/delta-*.bin"))
    again = delta.with_name(f"{delta.name[: -len('01234567.bin')]}01234567.bin")
    shutil.copy(delta, again)
    with pytest.raises(VersionError, match="several deltas"):
        tierstore.repair(put, tmp_path / "copy", adopt=True)


@pytest.mark.filterwarnings("ignore::tierstore.errors.UpkeepWarning")
def test_a_writer_is_not_disturbed(put: Path, tmp_path: Path) -> None:
    """What a commit that is under way has written is not called left over."""
    newest_manifest(put).unlink()
    assert tierstore.verify(put).newer
    with tierstore.open(put, "r+"):
        assert tierstore.verify(put).newer == []
        with pytest.raises(LockedError, match="whose commit may be under way"):
            tierstore.repair(put, tmp_path / "b.tier", adopt=True)


def test_a_version_with_adopt_is_no_sense(put: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="leave version=2"):
        tierstore.repair(put, tmp_path / "b.tier", version=2, adopt=True)
    with pytest.raises(InvalidInputError, match="no files that are newer"):
        tierstore.repair(put, tmp_path / "b.tier", adopt=True)
