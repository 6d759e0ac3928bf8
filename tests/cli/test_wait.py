"""--wait: a command waits for the writer that has the store, no longer than it is told."""

import time
from types import SimpleNamespace

import click
import numpy as np
import pytest

import tierstore
from tierstore.errors import ConcurrentWriterError
from tierstore_cli import stores
from tierstore_cli.command import WAITING
from tierstore_cli.main import cli

WRITERS = {
    "fold": [],
    "keep": ["name"],
    "drop": ["embeddings"],
    "load": ["rows.npy"],
    "grow": ["--rows", 60],
}


@pytest.mark.parametrize("command", WRITERS)
def test_a_command_waits_until_the_writer_has_closed(run, single, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", np.random.default_rng(1).normal(size=(50, 16)).astype("f4"))
    store = tierstore.open(single, "r+")
    assert "open" in run(command, single, *WRITERS[command], code=5).stderr
    run(command, single, *WRITERS[command], "--wait", 0.05, code=5)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            store.close()

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(stores, "time", clock)
    run(command, single, *WRITERS[command], "--wait", 60)
    assert len(waits) == 2 and 0 < max(waits) < 5


def test_no_command_waits_for_another_writer_to_undo_what_it_published():
    """The store was open for writing twice: that is no lock, and to try again may lose rows."""
    calls = []

    def work():
        calls.append(1)
        raise ConcurrentWriterError("another writer has published")

    with click.Context(cli) as context, pytest.raises(ConcurrentWriterError):
        context.meta[WAITING] = 0.5
        stores.awaited(work)
    assert calls == [1]


def test_no_command_waits_for_what_is_no_lock(run, single, tmp_path):
    began = time.monotonic()
    run("fold", tmp_path / "nothing", "--wait", 60, code=3)
    run("fold", single, "--wait", -1, code=2)
    run("inspect", single, "--wait", 1, code=2)
    assert time.monotonic() - began < 50
