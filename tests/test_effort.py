"""What the tests may take: some of many variants, and a list of tests that take long."""

import inspect
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import conftest, rewriting
from tests.every import every


def asked(*options):
    return SimpleNamespace(getoption=lambda name: name in options)


def run_of(few, count, *options):
    """Return the numbers of the variants of a test that are run."""
    marker = SimpleNamespace(args=few)
    items = [
        SimpleNamespace(nodeid=f"a.py::test[{number}]", get_closest_marker=lambda name: marker)
        for number in range(count)
    ]
    left_out = list(conftest.other_variants(asked(*options), items))
    return [number for number, item in enumerate(items) if item not in left_out]


def test_variants_that_are_run_lie_evenly_between_the_others():
    assert run_of((3,), 9) == [0, 3, 6]
    assert run_of((3, 4), 10, "--slow") == [0, 2, 5, 7]
    assert run_of((0, 1), 10) == []
    assert run_of((3,), 9, "--slow") == run_of((3, 4), 9, "--slow", "--nightly") == list(range(9))
    for count in range(1, 20):
        for few in range(1, 20):
            assert len(run_of((few,), count)) == min(few, count)


def test_tests_that_take_long_are_listed_and_say_what_to_do():
    def listed(*options):
        lines = []
        reports = [
            SimpleNamespace(nodeid=name, user_properties=[("seconds", took)])
            for name, took in [("quick", 2.9), ("long", 3.1), ("longest", 9.0)]
        ]
        printed = SimpleNamespace(
            getreports=lambda kind: reports, section=lines.append, line=lines.append
        )
        conftest.pytest_terminal_summary(printed, asked(*options))
        return lines

    head, *lines = listed()
    assert "mark them slow" in head
    assert lines == ["9.0 s of processor time: longest", "3.1 s of processor time: long"]
    for option in conftest.LEFT_OUT_UNLESS_ASKED_FOR:
        assert listed(f"--{option}") == []


def test_a_test_that_leaves_another_handler_of_sigint_fails():
    hook = conftest.pytest_runtest_teardown()
    next(hook)
    before = signal.signal(signal.SIGINT, lambda *_: None)
    with pytest.raises(pytest.fail.Exception, match="to handle SIGINT"):
        next(hook)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_time_of_a_test_is_noted():
    item = SimpleNamespace(user_properties=[])
    hook = conftest.pytest_runtest_call(item)
    next(hook)
    with pytest.raises(StopIteration):
        next(hook)
    ((name, seconds),) = item.user_properties
    assert name == "seconds" and seconds >= 0


def test_the_time_of_children_that_have_ended_counts():
    before = conftest.seconds_used()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert conftest.seconds_used() > before + 0.02


@pytest.mark.parametrize("worker", ["gw0", "gw1"])
def test_each_worker_rewrites_other_files_without_running_them(
    tmp_path, monkeypatch, request, worker
):
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text("raise SystemExit\n")
    config = SimpleNamespace(
        workerinput={"workerid": worker, "workercount": 2},
        invocation_params=SimpleNamespace(dir=tmp_path),
        rootpath=tmp_path,
        args=[str(tmp_path), "test_a.py::test"],
        pluginmanager=request.config.pluginmanager,
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    found = rewriting.rewrite_share(config)
    assert [each.name[5] for each in found] == list("ac" if worker == "gw0" else "bd")
    kept = {each.name.partition(".")[0] for each in tmp_path.rglob("*pytest*.pyc")}
    assert kept == {each.stem for each in found}
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert rewriting.rewrite_share(config) == []


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
