"""Which tests run where."""

import gc
import importlib.util
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from tests import building, decoders, pairs, processors, tries

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
"""Of processor time that a test takes in `make test`; four times what it may take by the rules."""
_MANY_MODULES = 50


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
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector of garbage from what is imported, now and in every test."""
    gc.disable()
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    left = set(left_out)
    items[:] = [item for item in items if item not in left]

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
    rest = {item for first, *others in files.values() for item in others}
    config.hook.pytest_deselected(items=list(rest))
    items[:] = [item for item in items if item not in rest]


def asks_for_more(config: pytest.Config) -> bool:
    """Tell whether more than `make test` runs."""
    return any(config.getoption(f"--{name}") for name in LEFT_OUT_UNLESS_ASKED_FOR)


def seconds_used() -> float:
    """Return the processor time of this process and of the children that have ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in both)


def modules_imported() -> int:
    """Return the number of modules that this process has imported."""
    return len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test of `make test` that takes long: it is to be shorter, or marked slow.

    Whoever imports a large library first pays for others, and is let off. So are all where much
    else runs, which makes every test take more.
    """
    modules, start = modules_imported(), seconds_used()
    yield
    took = seconds_used() - start
    imported = modules_imported() - modules > _MANY_MODULES
    alone = os.getloadavg()[0] <= 1.5 * processors.usable() + 1
    if took > MOST_SECONDS and alone and not imported and not asks_for_more(item.config):
        pytest.fail(f"takes {took:.1f} s of processor time: shorten it or mark it slow", False)


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
