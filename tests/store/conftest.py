"""What the logger "tierstore" is told."""

import logging
from collections.abc import Generator

import pytest


class Logged(logging.Handler):
    """Keeps what it is told, instead of pytest's plugin, which `pyproject.toml` leaves out.

    That one adds itself to each logger of torch six times a test.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def logged() -> Generator[Logged]:
    """Keep what is logged from `logged.setLevel` on."""
    logger, handler = logging.getLogger("tierstore"), Logged()
    handler.setLevel(logging.CRITICAL)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
