"""Commands on empty stores, closed pipes, interrupts and narrow terminals."""

import os
import pty
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import tierstore

COMMAND = [sys.executable, "-c", "from tierstore_cli.main import cli; cli()"]


@pytest.fixture
def empty(tmp_path):
    """A store whose only table was dropped."""
    with tierstore.create(tmp_path / "empty.tier", {"t": tierstore.TableSpec(2, 2)}) as store:
        store.drop("t")
    return tmp_path / "empty.tier"


def test_a_store_without_tables(run, run_json, empty, tmp_path):
    assert run_json("diff", empty, 2, 2)["tables"] == {}
    assert [each["version"] for each in run_json("log", empty)["versions"]] == [2, 1]
    run("inspect", empty)
    run("doctor", empty)
    run("top", empty, "--count", 1)
    run("report", empty, tmp_path / "r.html")
    for command in (["near", empty, "--id", 0], ["get", empty, 0], ["put", empty, "--id", 0, 1]):
        run(*command, code=2)
    run("export", empty, tmp_path / "x.npy", "--since", 1, code=2)
    run("diff", empty, 1, "--out", tmp_path / "x.patch", code=1)
    assert not (tmp_path / "x.patch").exists()


@pytest.fixture
def large(tmp_path):
    """A store of 200,000 rows of which all changed in version 2."""
    spec = tierstore.TableSpec(200_000, 4)
    with tierstore.create(tmp_path / "l.tier", {"t": spec}) as store:
        store["t"].write(np.arange(200_000), np.ones((200_000, 4), "f4"))
        store.commit()
    return tmp_path / "l.tier"


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("arguments", [["diff", "STORE", "1", "2", "--changed"], ["log", "STORE"]])
def test_a_reader_that_closes_its_end_gets_no_traceback(large, arguments):
    arguments = [str(large) if each == "STORE" else each for each in arguments]
    child = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child.stdout.readline()
    child.stdout.close()
    said = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=60) in (0, 141)
    assert said == ""


def test_many_rows_are_printed_as_they_are_read(run, tmp_path):
    with tierstore.create(
        tmp_path / "s.tier", {"e": tierstore.TableSpec(3000, 12, init=tierstore.normal(seed=2))}
    ) as store:
        values = store["e"].read(np.arange(3000))
        store.commit()
    lines = run("inspect", tmp_path / "s.tier", "--range", ":").stdout.splitlines()[6:]
    assert lines[0].split() == ["ROW", *"01234567", "…", "12"] and len(lines) == 3001
    for number in (0, 1023, 1024, 2999):
        cells = lines[1 + number].split()
        assert cells == [str(number), *(f"{x:.6g}" for x in values[number, :8].tolist()), "…"]
    assert len({line.index("…") for line in lines[1:]}) == 1  # the columns are those of one table


def test_top_ends_with_an_interrupt(single):
    child = subprocess.Popen(
        [*COMMAND, "top", str(single), "--every", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child.stdout.readline()  # it waits for the next screen
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert said.strip() == "Interrupted."


@pytest.mark.slow
def test_numbers_are_whole_on_80_columns(run_json, pair):
    commands = [["inspect"], ["log"], ["diff", "2", "3"], ["top", "--count", "1"]]
    given = [[command, str(pair), *more] for command, *more in commands]
    program = f"""
from tierstore_cli.main import cli
for arguments in {given}:
    cli(arguments, "tierstore", standalone_mode=False)
"""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=slave,
        stderr=slave,
        env=environment,
    )
    os.close(slave)
    text = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        if not piece:
            break
        text += piece
    os.close(master)
    assert child.wait(timeout=60) == 0
    assert text.count(b"pair") >= 1
    assert "…" not in text.decode()


def test_a_full_disk_leaves_no_patch(run, large, tmp_path, monkeypatch):
    from tierstore._store import patching

    def full(*_):
        raise OSError(28, "No space left on device", str(tmp_path / ".x"))
        yield

    monkeypatch.setattr(patching, "_body", full)
    run("diff", large, 1, "--out", tmp_path / "x.patch", code=6)
    assert [each.name for each in tmp_path.iterdir()] == ["l.tier"]


def test_numbers_that_are_none(run, single, tmp_path):
    """NaN is within every range of click's."""
    np.save(tmp_path / "ids.npy", np.arange(9))
    for wrong in ("nan", "inf"):
        for given in (
            ["top", single, "--every", wrong],
            ["bench", tmp_path, "--seconds", wrong],
            ["fold", single, "--wait", wrong],
            ["simulate", tmp_path / "ids.npy", "--measured", wrong],
        ):
            assert wrong in run(*given, code=2).stderr
    assert "free" in run("bench", tmp_path, "--size", "100PB", code=2).stderr


def test_huge_numbers_of_rows(run, run_json, single, tmp_path):
    for given in (["near", single, "--id"], ["get", single], ["put", single, "--id"]):
        assert "range" in run(*given, 10**30, code=2).stderr
    with tierstore.open(single) as store:
        (table,) = store.values()
        rows = table.rows
    assert len(run_json("near", single, "--id", 0, "-k", 10**15)["near"]) == rows - 1


def test_no_rows_are_asked_for(run, single, tmp_path):
    """As by a pipe in which nothing changed."""
    (tmp_path / "none.txt").write_text("")
    assert run("get", single, "--ids-from", tmp_path / "none.txt").stdout == ""
    run("get", single, code=2)
