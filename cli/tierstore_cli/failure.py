"""Errors as one line on stderr and an exit code."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from tierstore_cli.text import fitted, printable


class Failure(click.ClickException):
    """The failure of a command: a message and an exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message to stderr."""
        file = file or sys.stderr
        message = printable(self.message, keep="\n")
        click.echo(fitted(f"Error: {message}", file), file=file)


class Unchanged(Failure):
    """There was nothing to do, which a script can tell from success."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 10)

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message to stderr."""
        click.echo(printable(self.message), err=True)


class Interrupted(click.ClickException):
    """Ctrl-C, SIGTERM or SIGHUP."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("interrupted")

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it on stderr, on its own line."""
        click.echo("\nInterrupted.", err=True)


def exit_code(error: BaseException) -> int:
    """Return the exit code for an error of the library or the operating system."""
    from tierstore import errors

    table: list[tuple[type[BaseException], int]] = [
        (errors.NotAStoreError, 3),
        (errors.AmbiguousFileError, 2),
        (errors.FormatError, 3),
        (errors.CorruptStoreError, 4),
        (errors.LockedError, 5),
        (errors.StoreFullError, 6),
        (errors.StoreIOError, 6),
        (errors.CommitFailedError, 6),
        (errors.TierStoreError, 1),
        (OSError, 6),
    ]
    return next((code for kind, code in table if isinstance(error, kind)), 1)


@contextmanager
def failures(debug: bool) -> Iterator[None]:
    """Turn what the body raises into a Failure, after its traceback if `debug`.

    Exceptions of click pass, and so does a closed pipe, for which click exits without a message.
    """
    from tierstore.errors import TierStoreError

    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise
        if debug:
            frames = printable(traceback.format_exc(), keep="\n")
            click.echo(fitted(frames, sys.stderr), err=True, nl=False)
        if isinstance(error, (TierStoreError, OSError)):
            message = "\n".join([str(error), *getattr(error, "__notes__", ())])
        elif isinstance(error, MemoryError):
            message = "out of memory"
        else:
            message = (
                f"unexpected {type(error).__name__}: {error}\nRun again with --debug and report it."
            )
        raise Failure(message, exit_code(error)) from error
