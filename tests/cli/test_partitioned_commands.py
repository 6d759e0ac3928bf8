"""Every command on a store with partitions takes it as one store: it does what it does to another.

Each is run on such a store and on a plain one with the same rows, in directories of their own.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import tierstore
from tierstore._disk.manifest import Manifest
from tierstore._store import partitions
from tierstore.stats import Version
from tierstore_cli.main import cli

READING = [
    "get s.tier --table item 1",
    "get s.tier --table who --key twice",
    "near s.tier --table item --id 1",
    "export s.tier out.npy --table item",
    "export s.tier out.npy --table item --part 1/3 --version base",
    "diff s.tier 2 3",
    "diff s.tier 2 4 --table item --changed",
    "diff s.tier base --out other.patch",
    "follow s.tier --timeout 0",
    "save s.tier copy.tier",
    "publish s.tier serving",
    "repair s.tier fixed.tier",
]
"""Commands that read the store, and say the same."""
TELLING = [
    "inspect s.tier --stats",
    "log s.tier",
    "report s.tier page.html",
    "verify s.tier",
    "doctor s.tier",
    "top s.tier --count 1",
    "save s.tier new.tier --incremental",
]
"""Commands that read the store, and tell of its files."""
WRITING = [
    "put s.tier --table item --id 1 1 2 3 4",
    "put s.tier --table who --key thrice 1 2 3 4",
    "keep s.tier best",
    "keep s.tier --by-date --last 1",
    "alter s.tier --table item --dtype float16",
    "copy-table more.tier s.tier --table item --as other",
    "copy-table more.tier s.tier --table who --as other",
    "copy-table more.tier s.tier --table user --as other",
    "release s.tier good",
    "fold s.tier",
    "keys set s.tier keys.txt --table item",
    "keys forget s.tier --table user",
    "expire s.tier --table who --fewer-than 2",
    "remove s.tier --table who --key twice",
    "load s.tier rows.npy --table item",
    "load s.tier rows.npy --table fresh",
    "grow s.tier --table item --rows 80",
    "init s.tier --table more --rows 3 --dim 2",
    "add-field s.tier more --table item --dim 4",
    "drop-field s.tier more --table item",
    "rename s.tier item other",
    "rename s.tier user other",
    "rename s.tier who other",
    "drop s.tier user",
    "drop s.tier who",
    "restore s.tier base",
    "restore s.tier 1",
    "patch copy.tier some.patch",
]
"""Commands that write the store as one process would."""
WRONG = [
    "rename s.tier nothing other",
    "rename s.tier item user",
    "rename s.tier item a/b",
    "drop s.tier nothing",
    "restore s.tier 77",
    "restore s.tier nothing",
    "patch s.tier keys.txt",
    "grow s.tier --table item --rows 1",
    "put s.tier --table item --id 99 1 2 3 4",
    "keep s.tier best --version 77",
    "release s.tier nothing",
]
"""What fails, and says the same."""
OTHERS = {"bench", "mend", "plan", "simulate"}
"""Commands that take no store, or none in partitions."""
KINDS = ("parts", "plain")


PREPARED = {
    "copy-table": ["save s.tier more.tier"],
    "drop-field s.tier more --table item": ["add-field s.tier more --table item --dim 4"],
    "fold s.tier": ["release s.tier good", "release s.tier base"],
    "patch copy.tier some.patch": [
        "save s.tier copy.tier",
        "put s.tier --table item --id 8 1 2 3 4",
        "diff s.tier 4 --out some.patch",
    ],
}
"""What goes before a command."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with a store in partitions, and one with a plain store."""
    rows = np.random.default_rng(7).random((60, 4), np.float32)
    tables = {
        "item": tierstore.TableSpec(60, 4, init=tierstore.normal(seed=1)),
        "user": tierstore.TableSpec(9, 4, init=tierstore.normal(seed=2)),
        "who": tierstore.TableSpec(dim=4, keys="text", track_uses=True),
    }
    parent = tmp_path_factory.mktemp("stores")
    for kind in KINDS:
        place = parent / kind
        place.mkdir()
        make: Any = tierstore.distributed.create if kind == "parts" else tierstore.create
        count = {"partitions": 3} if kind == "parts" else {}
        with make(place / "s.tier", tables, keep=9, **count) as store:
            store.set_keys("user", [f"user {each}" for each in range(9)])
            store["item"].write([1], rows[:1])
            store["who"].write(["once", "twice"], rows[:2])
            store["who"].write(["twice"], rows[2:3])
            store["user"].scalars["lr"] = 0.5
            store.commit(1)
            store.keep(3, "base")
            store["item"].write([3, 5, 7], rows[:3])
            store.commit(2, payload={"of": {"step": 2}})
            store.keep(4, "good")
        np.save(place / "rows.npy", rows)
        (place / "keys.txt").write_text("\n".join(map(str, range(60))), encoding="utf-8")
    return parent


@pytest.fixture
def places(made: Path, tmp_path: Path) -> list[Path]:
    """Copy the two directories."""
    return [shutil.copytree(made / kind, tmp_path / kind) for kind in KINDS]


def outcomes(places: list[Path], line: str, monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """Run a command in each place; what it says of its place is made equal."""
    found = []
    for place in places:
        monkeypatch.chdir(place)
        found.append(CliRunner().invoke(cli, line.split()))
    return found


def said(result: Result, place: Path) -> str:
    """Return what was printed, but for the place and for a size, in which times are written."""
    return re.sub(r"\d+ B\b", "N B", result.output.replace(str(place), "PLACE"))


def contents(path: Path) -> Any:
    """Return what a reader finds: version, names, step, payload, and keys, rows and scalars."""
    found = {}
    with tierstore.open(path) as store:
        for name, table in store.items():
            keys = None if table.keys is None else table.keys[:].tolist()
            if table.spec.keys is not None:
                keys = sorted(keys)
            for field in table.fields:
                rows = table.read(keys if table.spec.keys else np.arange(table.rows), field)
                found[name, field] = keys, rows.tolist(), dict(table.scalars)
        kept = [(each.version, each.step, sorted(each.names)) for each in store.versions()]
        payload = {name: value.tree() for name, value in store.payload.items()}
        return store.version, kept, payload, found


def test_every_command_is_walked() -> None:
    walked = {line.split()[0] for line in READING + TELLING + WRITING}
    assert walked | OTHERS == set(cli.list_commands(None))  # type: ignore[arg-type]


@pytest.mark.variants(2, 7)
@pytest.mark.parametrize("line", READING)
def test_commands_read_what_is_in_a_plain_store(
    places: list[Path], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = outcomes(places, line, monkeypatch)
    assert one.exit_code == other.exit_code == 0, one.output + other.output
    if "publish" not in line:
        assert said(one, places[0]) == said(other, places[1])
    for made in ("copy.tier", "fixed.tier"):
        if (places[0] / made).exists():
            assert contents(places[0] / made)[2:] == contents(places[1] / made)[2:]
    if "export" in line:
        out = "out.npy.parts/part-00001-of-00003.npy" if "--part" in line else "out.npy"
        assert (places[0] / out).read_bytes() == (places[1] / out).read_bytes()


@pytest.mark.variants(1, 4)
@pytest.mark.parametrize("line", [*TELLING, "save s.tier wide.tier --partitions 5"])
def test_commands_tell_of_its_files(
    places: list[Path], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for result in outcomes(places, line, monkeypatch):
        assert result.exit_code == 0, result.output


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("line", WRITING)
def test_commands_write_what_they_write_to_a_plain_store(
    places: list[Path], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in PREPARED.get(line, PREPARED.get(line.split()[0], ())):
        for result in outcomes(places, each, monkeypatch):
            assert result.exit_code == 0, result.output
    path = line.split()[2 if line.startswith(("keys", "copy-table")) else 1]
    before = contents(places[0] / path)
    assert before == contents(places[1] / path)
    one, other = outcomes(places, line, monkeypatch)
    assert one.exit_code == other.exit_code == 0, one.output + other.output
    assert said(one, places[0]) == said(other, places[1])
    assert contents(places[0] / path) == contents(places[1] / path) != before
    assert tierstore.verify(places[0] / path).ok


@pytest.mark.variants(1, 5)
@pytest.mark.parametrize("line", WRONG)
def test_commands_refuse_what_they_refuse_of_a_plain_store(
    places: list[Path], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(places[0] / "s.tier")
    one, other = outcomes(places, line, monkeypatch)
    assert one.exit_code == other.exit_code != 0
    assert "unexpected" not in one.output
    assert said(one, places[0]) == said(other, places[1])
    assert contents(places[0] / "s.tier") == before


def test_what_the_partitions_wrote_is_added_up(
    places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (
        json.loads(each.stdout) for each in outcomes(places, "log s.tier --json", monkeypatch)
    )
    written = [each["written_rows"] for each in one["versions"]]
    assert written == [each["written_rows"] for each in other["versions"]]
    assert written[:2] == [3, 3]  # of the two commits
    assert [each["written_bytes"] > 0 for each in one["versions"]] == [each > 0 for each in written]
    shown = outcomes(places, "top s.tier --count 1 --json", monkeypatch)
    assert [json.loads(each.stdout)["written_rows"] for each in shown] == [3, 3]


def test_a_commit_counts_what_it_wrote_and_no_partition_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that a commit does not write stays at the version of an earlier one."""
    rows = np.random.default_rng(3).random((30, 2), np.float32)
    spec = {"item": tierstore.TableSpec(30, 2, init=tierstore.normal(seed=1))}
    with tierstore.distributed.create(tmp_path / "s.tier", spec, partitions=4, keep=9) as store:
        for count in (30, 1, 0, 2):
            store["item"].write(np.arange(count), rows[:count])
            store.commit()
            assert store.versions()[-1].written_rows == count
        assert [each.written_rows for each in store.versions()][-4:] == [30, 1, 0, 2]
    with tierstore.open(tmp_path / "s.tier") as reader:
        assert [each.written_rows for each in reader.versions()][-4:] == [30, 1, 0, 2]
        assert reader.versions()[-1].delta_rows == sum(
            each.delta_rows for each in reader.info().tables
        )
        described = partitions._described

        def uncounted(manifest: Manifest, *others: Any) -> Version:
            """As earlier programs wrote it; what a commit wrote is then that of its deltas."""
            return described(dataclasses.replace(manifest, written=None), *others)

        monkeypatch.setattr(partitions, "_described", uncounted)
        assert [each.written_rows for each in reader.versions()][-4:] == [30, 1, 0, 2]


def test_inspect_asks_the_partitions(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their deltas and keys are in no manifest of the root, and their bases in several files."""
    for line, folded in (("inspect s.tier", False), ("fold s.tier", True)):
        for each in PREPARED[line] if folded else ():
            outcomes(places, each, monkeypatch)
        outcomes(places, line, monkeypatch)
        shown = outcomes(places, "inspect s.tier --json", monkeypatch)
        one, other = (json.loads(each.stdout) for each in shown)
        assert one["folded"] is other["folded"] is folded
        kinds = [{each["name"]: each["keys"] for each in data["tables"]} for data in (one, other)]
        assert kinds == [{"item": None, "user": "str", "who": "str"}] * 2
        assert any(each["delta_rows"] for each in one["tables"]) is not folded
        text, plain = (each.stdout for each in outcomes(places, "inspect s.tier", monkeypatch))
        assert ("not folded" in text) is ("not folded" in plain) is not folded
        assert "np.load" in plain and "np.load" not in text and "without tierstore" not in text
        with tierstore.open(places[0] / "s.tier") as store:
            assert store.info().folded is folded


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_no_command_needs_torch() -> None:
    """All of the above, where there is none."""
    tests = [__file__, "--slow", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-c", WITHOUT_TORCH, *tests, "-k", "not needs_torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
