"""What the tests may take: `make test` fails for one that takes long and is not marked."""

import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.every import every


def call(monkeypatch, took, asked=(), imported=0, load=0.1):
    """Run the hook around a test that takes so many seconds and imports so many modules."""
    clock = iter([5.0, 5.0 + took])
    modules = iter([100, 100 + imported])
    item = SimpleNamespace(config=SimpleNamespace(getoption=lambda name: name in asked))
    with monkeypatch.context() as patch:  # which the hook around this very test does not see
        patch.setattr(conftest, "seconds_used", lambda: next(clock))
        patch.setattr(conftest.os, "getloadavg", lambda: (load, load, load))
        patch.setattr(conftest, "modules_imported", lambda: next(modules))
        hook = conftest.pytest_runtest_call(item)
        next(hook)
        with pytest.raises(StopIteration):
            next(hook)


def test_a_test_that_takes_long_fails_and_says_what_to_do(monkeypatch):
    call(monkeypatch, 2.9)
    with pytest.raises(pytest.fail.Exception, match=r"takes 3\.1 s of processor time: .* slow"):
        call(monkeypatch, 3.1)


def test_a_first_import_and_slow_runs_are_let_off(monkeypatch):
    call(monkeypatch, 9, imported=900)
    call(monkeypatch, 9, load=99)
    for option in conftest.LEFT_OUT_UNLESS_ASKED_FOR:
        call(monkeypatch, 9, asked=[f"--{option}"])


def test_the_time_of_children_that_have_ended_counts():
    before = conftest.seconds_used()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert conftest.seconds_used() > before + 0.02


def test_a_loop_over_cases_names_the_one_that_fails():
    seen = []

    @every(one=[1, 2], other="ab")
    def loop(one, fixture, other):
        seen.append((one, other, fixture))
        assert (one, other) != (2, "a")

    assert list(inspect.signature(loop).parameters) == ["fixture"]
    with pytest.raises(AssertionError) as failed:
        loop(fixture="given")
    assert failed.value.__notes__ == ["with one=2, other='a'"]
    assert seen == [(1, "a", "given"), (1, "b", "given"), (2, "a", "given")]


def test_a_loop_over_nothing_is_no_test():
    with pytest.raises(AssertionError, match="no cases"):
        every(one=[])(lambda one: None)()
