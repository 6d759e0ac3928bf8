"""Work in a thread of low priority."""

import os
import signal
import threading
import time

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


def test_ctrl_c_ends_the_work_at_its_next_report():
    how, ended = [], threading.Event()

    def work(progress):
        try:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            for number in range(2000):
                progress(number, 2000)
                time.sleep(0.001)
            how.append("by itself")
        except KeyboardInterrupt:
            how.append("told to")
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        in_background(work, lambda *_: None)
    assert ended.wait(60)
    assert how == ["told to"]
