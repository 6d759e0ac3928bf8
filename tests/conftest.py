"""What every test shares: which tests run where."""

import importlib.util
import signal

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torture", action="store_true", help="run the long crash and fault tests too"
    )
    parser.addoption(
        "--thorough", action="store_true", help="run the tests that mount file systems too"
    )


def pytest_configure() -> None:
    """In the background or under nohup, children of the tests would ignore these signals."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def why_no_gpu() -> str | None:
    """The reason why tests marked gpu cannot run here, or None where they can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CUDA says: {error}"
    return None if devices else "no CUDA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for name, command in (("torture", "make torture"), ("thorough", "make test-all")):
        if not config.getoption(f"--{name}"):
            skip = pytest.mark.skip(reason=f"needs --{name} ({command})")
            for item in items:
                if name in item.keywords:
                    item.add_marker(skip)

    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if on_gpu else None
    if reason:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
