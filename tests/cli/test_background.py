"""Work in a thread of low priority."""

import os
import threading

import pytest

from tierstore_cli.background import in_background


def test_the_thread_steps_back_and_the_process_does_not():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen = []

    def work(progress):
        progress(1, 2)
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found = in_background(work, lambda *counts: seen.append(counts))
    assert found == max(before, 10)
    assert seen == [(1, 2)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_errors_come_through():
    def work(_):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        in_background(work, lambda *_: None)
