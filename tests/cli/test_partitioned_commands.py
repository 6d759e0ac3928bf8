"""Every command on a store with partitions: it takes it as one store, or says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tierstore
from tierstore_cli.main import cli

pytest.importorskip("torch")

READING = [
    "inspect s.tier --stats",
    "log s.tier",
    "get s.tier --table item 1",
    "get s.tier --table who --key twice",
    "near s.tier --table item --id 1",
    "export s.tier rows.npy --table item",
    "diff s.tier 1 2",
    "report s.tier page.html",
    "verify s.tier",
    "save s.tier copy.tier",
    "save s.tier wide.tier --partitions 5",
    "save s.tier new.tier --incremental",
    "publish s.tier serving",
    "doctor s.tier",
    "repair s.tier fixed.tier",
]
"""Commands that read the store."""
UPKEEP = [
    ("put s.tier --table item --id 1 1 2 3 4", 3),
    ("keep s.tier best", 2),
    ("release s.tier good", 2),
    ("fold s.tier", 2),
    ("keys set s.tier keys.txt --table item", 3),
    ("expire s.tier --table who --fewer-than 2", 3),
    ("load s.tier rows.npy --table item", 3),
    ("grow s.tier --table item --rows 80", 3),
    ("init s.tier --table more --rows 3 --dim 2", 3),
    ("add-field s.tier more --table item --dim 4", 3),
]
"""Commands that write the store as one process would, and the version that they leave."""
WRITING = [
    "rename s.tier item other",
    "drop s.tier user",
    "restore s.tier --version 1",
    "patch s.tier some.patch",
]
"""Commands that would write it by themselves."""
OTHERS = {"bench", "follow", "plan", "simulate", "top"}
"""Commands that take no store, or that watch one until they are interrupted."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tables = {
        "item": tierstore.TableSpec(60, 4, init=tierstore.normal(seed=1)),
        "user": tierstore.TableSpec(9, 4, init=tierstore.normal(seed=2)),
        "who": tierstore.TableSpec(dim=4, keys="text", track_uses=True),
    }
    with tierstore.distributed.create("s.tier", tables, partitions=3) as store:
        store["item"].write([1], np.ones((1, 4), np.float32))
        store["who"].write(["once", "twice"], np.ones((2, 4), np.float32))
        store["who"].write(["twice"], np.ones((1, 4), np.float32))
        store.commit(1)
    np.save("rows.npy", np.random.default_rng(7).random((60, 4), np.float32))
    Path("keys.txt").write_text("\n".join(map(str, range(60))), encoding="utf-8")
    Path("some.patch").mkdir()
    return tmp_path


def outcome(line: str) -> Any:
    return CliRunner().invoke(cli, line.split())


def test_every_command_is_walked() -> None:
    walked = {line.split()[0] for line in READING + WRITING + [line for line, _ in UPKEEP]}
    assert walked | OTHERS == set(cli.list_commands(None))  # type: ignore[arg-type]


@pytest.mark.parametrize("line", READING)
def test_commands_that_read_take_it_as_one_store(place: Path, line: str) -> None:
    Path("rows.npy").unlink()
    result = outcome(line)
    assert result.exit_code == 0, result.output
    if line.startswith("export"):
        with tierstore.open("s.tier") as store:
            assert np.array_equal(np.load("rows.npy"), store["item"][:])


@pytest.mark.parametrize(("line", "version"), UPKEEP)
def test_commands_of_upkeep_write_it_as_one_store(place: Path, line: str, version: int) -> None:
    with tierstore.distributed.open("s.tier") as store:
        store.keep(2, "good")
        expected = store["item"][:]
    result = outcome(line)
    assert result.exit_code == 0, result.output
    if line.startswith("put"):
        expected[1] = [1, 2, 3, 4]
    if line.startswith("load"):
        expected = np.load("rows.npy")
    names = {"good": {"good"}, "best": {"best", "good"}, "release": set()}
    wanted = names["release" if "release" in line else "best" if "best" in line else "good"]
    with tierstore.open("s.tier") as store:
        kept = {each.version: set(each.names) for each in store.versions()}
        assert store.version == version and kept[2] == wanted
        assert (1 in kept) == line.startswith(("keep", "release"))
        assert store["who"].keys[:].tolist().count("once") != line.startswith("expire")
        assert np.array_equal(store["item"][:60], expected)
        assert store["item"].rows == (80 if line.startswith("grow") else 60)
        assert ("more" in store) == line.startswith("init")
        assert ("more" in store["item"].fields) == line.startswith("add-field")
    assert tierstore.verify("s.tier").ok


@pytest.mark.parametrize("line", WRITING)
def test_commands_that_write_say_what_to_do(place: Path, line: str) -> None:
    with tierstore.open("s.tier") as store:
        before = store["item"][:]
    result = outcome(line)
    assert result.exit_code not in (0, 2), result.output
    assert "partitions" in result.output
    assert "unexpected" not in result.output
    with tierstore.open("s.tier") as store:
        assert store.version == 2
        assert np.array_equal(store["item"][:], before)
