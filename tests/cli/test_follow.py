"""tierstore follow: a line for each version that a trainer commits."""

import json
import os
import signal
import subprocess
import threading
from itertools import pairwise

import numpy as np
import pytest

import tierstore
from tests.cli.conftest import COMMAND
from tierstore._store import following


@pytest.fixture
def trained(pair):
    """Yield a function that commits rows of both tables, and the store that it commits to."""
    random = np.random.default_rng(8)
    with tierstore.open(pair, "r+", keep=50) as store:

        def train():
            store["item"].write([9, 2], random.normal(size=(2, 8)).astype("f4"))
            store["user"].write([5], random.normal(size=(1, 3)).astype("f4"))
            return store.commit(step=8)

        yield train


FOLLOW = ("follow", "--every", 0.01)
"""Looking often: nothing else takes time here."""


class Following:
    """A command in a process of its own, whose lines are read as they come."""

    def __init__(self, *options):
        self.process = subprocess.Popen(
            [*COMMAND, "follow", *map(str, options)], stdout=subprocess.PIPE, text=True
        )

    def line(self):
        return self.process.stdout.readline().rstrip("\n")

    def stop(self, number=signal.SIGINT):
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.mark.slow
def test_a_line_for_each_version_until_ctrl_c(pair, trained):
    following = Following(pair, "--json", "--changed", "--every", 0.02)
    timer = threading.Event()

    def train():  # until the other process has opened the store
        while not timer.wait(0.05):
            trained()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        found = [json.loads(following.line()) for _ in range(3)]
    finally:
        timer.set()
        thread.join()
        code = following.stop()
    assert code == 130
    for one, other in pairwise(found):
        assert other["since"] == one["version"] < other["version"]
    for data in found:
        assert (data["step"], data["tables"]) == (8, {"item": 2, "user": 1})
        assert data["rows"] == {
            "item": {"ids": [2, 9], "keys": None},
            "user": {"ids": [5], "keys": ["name_5"]},
        }


@pytest.fixture
def later(monkeypatch, trained):
    """Commit when the command has opened the store, and looks for the first time."""
    waits = following.DirectoryWatch.wait
    left = [trained]

    def wait(watch, *given):
        if left:
            left.pop()()
        return waits(watch, *given)

    monkeypatch.setattr("tierstore._store.following.DirectoryWatch.wait", wait)


def test_lines_for_people(run, pair, later):
    text = run(*FOLLOW, pair, "--count", 1).stdout
    assert text == "version 4 · step 8 · item 2 rows · user 1 row\n"


def test_ids(run, pair, later):
    lines = run(*FOLLOW, pair, "--count", 1, "--changed").stdout.splitlines()
    assert lines == ["4\titem\t2", "4\titem\t9", "4\tuser\t5\tname_5"]


def test_keys_that_went(run, run_json, tmp_path, monkeypatch):
    waits = following.DirectoryWatch.wait
    spec = tierstore.TableSpec(8, 2, keys="text")
    with tierstore.create(tmp_path / "s.tier", {"user": spec}) as store:
        store["user"].write(["a", "b", "c"], np.ones((3, 2), np.float32))
        store.commit()

        def wait(watch, *given):
            store["user"].remove([store["user"].keys[0]])
            store.commit()
            return waits(watch, *given)

        monkeypatch.setattr("tierstore._store.following.DirectoryWatch.wait", wait)
        lines = run(*FOLLOW, tmp_path / "s.tier", "--count", 2, "--removed").stdout.splitlines()
        assert len(lines) == 2 and len({line.split("\t")[2] for line in lines}) == 2
        data = run_json(*FOLLOW, tmp_path / "s.tier", "--count", 1, "--removed", "--changed")
        assert len(data["removed"]["user"]) == 1
    run("follow", tmp_path / "s.tier", "--removed", "--changed", code=2)


def test_a_command_for_each_version(run, pair, later, tmp_path):
    (tmp_path / "out").touch()
    program = f'echo "$STORE $SINCE $VERSION" > {tmp_path}/out'
    run(*FOLLOW, pair, "--count", 1, "--exec", program)
    assert (tmp_path / "out").read_text() == f"{pair} 3 4\n"


@pytest.mark.slow
def test_a_command_that_brings_a_copy_up_to_date(run, pair, later, tmp_path):
    copy = tmp_path / "copy.tier"
    save = f"{' '.join(COMMAND[:2])} '{COMMAND[2]}' save $STORE {copy} --incremental"
    run("save", pair, copy)
    run(*FOLLOW, pair, "--count", 1, "--exec", save)
    with tierstore.open(copy) as one, tierstore.open(pair) as other:
        assert one["item"][:].tobytes() == other["item"][:].tobytes()
        assert one.parent == (other.uuid, 4)


def test_a_command_that_fails(run_json, run, pair, later):
    assert "exit code 3" in run(*FOLLOW, pair, "--exec", "exit 3", code=1).output


@pytest.mark.fault(28)
def test_a_command_gets_the_time_to_clean_up(run, pair, later, tmp_path, monkeypatch):
    """subprocess.run would kill it a quarter of a second after Ctrl-C."""
    wait = subprocess.Popen.wait

    def waits(process, *given, **named):
        (tmp_path / "waiting").touch()
        return wait(process, *given, **named)

    monkeypatch.setattr(subprocess.Popen, "wait", waits)
    program = (
        f"cd {tmp_path}; trap 'sleep 0.3; touch cleaned; exit' TERM; "
        "until [ -e waiting ]; do sleep 0.02; done; "
        "kill -INT $PPID; while :; do sleep 0.05; done"
    )
    run(*FOLLOW, pair, "--exec", program, code=130)
    assert (tmp_path / "cleaned").exists()


def test_the_end_of_waiting(run, pair, single):
    assert run(*FOLLOW, pair, "--timeout", 0).stdout == ""
    with tierstore.open(single, "r+") as store:
        store.commit()
    assert run("follow", single, "--timeout", 0.01, "--every", 0.01).stdout == ""


def test_what_cannot_be_followed(run, tmp_path):
    run("follow", tmp_path / "none.tier", code=3)
    run("follow", os.devnull, "--every", 0, code=2)
