"""Which tests run where."""

import gc
import importlib.util
import os
import resource
import signal
import tempfile
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import building, decoders, pairs, processors, rewriting, tries

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported, and for every child: xdist has a process on each core already."""
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
"""For every child, as pytest itself has it: a crash in the core says where."""

LEFT_OUT_UNLESS_ASKED_FOR = {
    "slow": "make test-all",
    "thorough": "make test-all",
    "nightly": "make nightly",
    "torture": "make torture",
}
"""Markers of tests that run with the option of the same name, and the target that gives it."""


REAL_SYNCS = Path(__file__).parent / "durability"
"""Whose tests wait for the disk where slow ones run too."""

REAL_DECODERS = {"test_bounds.py", "test_key_memory.py"}
"""Files of tests that start each process that decodes columns as a user does."""

MOST_SECONDS = 3.0
"""Of processor time that a test may take in `make test`: those that took more are listed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    for name in LEFT_OUT_UNLESS_ASKED_FOR:
        parser.addoption(f"--{name}", action="store_true", help=f"run tests marked {name} too")


def pytest_configure(config: pytest.Config) -> None:
    """Restore signals that a background shell or nohup ignores; let workers share kernels."""
    building.build_core()
    tries.load("nightly" if config.getoption("--nightly") else "ci")
    pairs.load(every=config.getoption("--torture"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "TIERSTORE_TEST_KERNELS" not in os.environ:  # else this is a worker, which shares them
        folder = tempfile.TemporaryDirectory(prefix="tierstore-kernels-")
        os.environ["TIERSTORE_TEST_KERNELS"] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop("TIERSTORE_TEST_KERNELS"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Return what `-n auto` means; xdist counts all processors of the machine where psutil is."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else processors.usable()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the collector of garbage from what is imported, now and in every test."""
    gc.disable()
    rewriting.rewrite_share(session.config)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def why_no_gpu() -> str | None:
    """Return why tests marked gpu cannot run here, or None if they can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CUDA says: {error}"
    return None if devices else "no CUDA device"


def is_left_out(item: pytest.Item) -> bool:
    """Tell whether a test waits for an option; a marker with words means variants that have one."""
    variant = f"-{item.nodeid.partition('[')[2].rstrip(']')}-"
    return any(
        not mark.args or any(f"-{word}-" in variant for word in mark.args)
        for mark in item.iter_markers()
        if mark.name in LEFT_OUT_UNLESS_ASKED_FOR and not item.config.getoption(f"--{mark.name}")
    )


def other_variants(config: pytest.Config, items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield what is not run of tests marked `variants`: those that are run lie evenly between."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("variants"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for variants in tests.values():
        marker = variants[0].get_closest_marker("variants")
        assert marker is not None
        few = [*marker.args, len(variants)][config.getoption("--slow")]
        if not config.getoption("--nightly") and few < len(variants):
            run = {number * len(variants) // few for number in range(few)}
            yield from (item for number, item in enumerate(variants) if number not in run)


def leave_out(
    config: pytest.Config, items: list[pytest.Item], these: Iterable[pytest.Item]
) -> None:
    """Take some tests out of those that are run."""
    left_out = set(these)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out(config, items, filter(is_left_out, items))
    leave_out(config, items, other_variants(config, items))

    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if on_gpu else None
    if reason:
        leave_to_a_gpu(reason, on_gpu, config, items)


def leave_to_a_gpu(
    reason: str, on_gpu: list[pytest.Item], config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip the first test of each file that needs a GPU, for all that do: there are many."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in on_gpu:
        files.setdefault(item.path, []).append(item)
    for first, *others in files.values():
        also = f", nor for {len(others)} more tests of this file" if others else ""
        first.add_marker(pytest.mark.skip(reason=f"{reason}{also}"))
    leave_out(config, items, [item for first, *others in files.values() for item in others])


def asks_for_more(config: pytest.Config) -> bool:
    """Tell whether more than `make test` runs."""
    return any(config.getoption(f"--{name}") for name in LEFT_OUT_UNLESS_ASKED_FOR)


def seconds_used() -> float:
    """Return the processor time of this process and of the children that have ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in both)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Note the processor time of a test."""
    start = seconds_used()
    yield
    item.user_properties.append(("seconds", seconds_used() - start))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """Fail a test after which a Ctrl-C would not be that of Python, as others take it to be."""
    yield
    left = signal.signal(signal.SIGINT, signal.default_int_handler)
    if left is not signal.default_int_handler:
        pytest.fail(f"leaves {left!r} to handle SIGINT", False)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the tests of `make test` that take long: they are to be shorter, or marked slow."""
    passed = terminalreporter.getreports("passed")
    took = {each.nodeid: seconds for each in passed for _, seconds in each.user_properties}
    long = sorted((-seconds, name) for name, seconds in took.items() if seconds > MOST_SECONDS)
    if long and not asks_for_more(config):
        terminalreporter.section(f"over {MOST_SECONDS} s: shorten them or mark them slow")
        for seconds, name in long:
            terminalreporter.line(f"{-seconds:.1f} s of processor time: {name}")


@pytest.fixture(autouse=True, scope="module")
def quick_decoders(request: pytest.FixtureRequest) -> Generator[None]:
    """Fork the processes that decode columns, but at night and where they are what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        if not (request.config.getoption("--nightly") or request.path.name in REAL_DECODERS):
            from tierstore._formats import _columns

            patch.setattr(_columns, "_child", decoders.start)
        yield


@pytest.fixture(autouse=True, scope="module")
def quick_syncs(request: pytest.FixtureRequest) -> Generator[None]:
    """Let syncs return at once, since no test cuts the power.

    They would wait for the disk a quarter of the time. Which syncs there are, and that each is
    needed, the tests of durability find from the calls; they alone wait, in `make test-all`.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not (asks_for_more(request.config) and REAL_SYNCS in request.path.parents):
            from tierstore._io import system

            patch.setattr(system.Calls, "fsync", staticmethod(os.fstat))  # which refuses as well
        yield
