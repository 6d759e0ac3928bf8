"""Errors as one line on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import click

from tierstore_cli import INTERRUPTED
from tierstore_cli.printing import discard, printable, tell

if TYPE_CHECKING:
    from tierstore.errors import TierStoreError

CLOSED_PIPE = 141
"""The exit code of programs that SIGPIPE ends, in a shell."""


class Failure(click.ClickException):
    """The failure of a command: a message and an exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message to stderr."""
        tell(f"Error: {printable(self.message, keep=chr(10))}", file)


class Unchanged(Failure):
    """There was nothing to do, which a script can distinguish from success."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 10)

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message to stderr."""
        tell(printable(self.message), file)


class Interrupted(click.ClickException):
    """Ctrl-C, SIGTERM or SIGHUP; `done` says what is done nevertheless."""

    exit_code = INTERRUPTED

    def __init__(self, done: str = "") -> None:
        super().__init__(f"interrupted; {done}" if done else "interrupted")

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it on stderr, on its own line."""
        tell(f"\nI{printable(self.message[1:])}.", file)


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


_IN_A_SHELL = {
    r"[Ss]tore\.set_keys(\([^)]*\))?": "tierstore keys set",
    r"[Ss]tore\.release(\([^)]*\))?": "tierstore release",
    r"[Ss]tore\.restore(\([^)]*\))?": "tierstore restore",
    r"[Ss]tore\.grow(\([^)]*\))?": "tierstore grow",
    r"[Ss]tore\.create_table(\([^)]*\))?": "tierstore init",
    r"[Ss]tore\.add_fields(\([^)]*\))?": "tierstore add-field",
    r"[Ss]tore\.verify\(mend=True\)": "tierstore mend",
    r"TableSpec\(track_uses=True\)": "tierstore init --track-uses",
    r"TableSpec\(keys=[^)]*\)": "tierstore init --by-key",
    r"tierstore\.open\(path, version=N\)": "--version N",
    r"allow_untested=True": "--allow-untested",
    r"force=True": "--force",
    r"upsert=True": "--upsert",
    r"expand=True": "--expand",
    r"key_column=\S+?(?=[),;\s]|$)": "--key-column",
    r"keep=\S+?(?=[),;\s]|$)": "tierstore keep",
}
"""What Python names in a message, and what does the same in a shell."""


def in_a_shell(message: str) -> str:
    """Return a message with the words of a shell before what only Python says.

    Python's stay in brackets, for those who read the message in a program that ran the command.
    """
    for pattern, words in _IN_A_SHELL.items():
        if words not in message:
            message = re.sub(pattern, rf"{words} (\g<0>)", message)
    return message


def described(error: TierStoreError | OSError) -> str:
    """Return the message of an error, without the number of an operating system error."""
    if not isinstance(error, OSError) or error.strerror is None or error.args[:1] != (error.errno,):
        return str(error)
    named = [os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None]
    if not named and isinstance(error, FileNotFoundError) and not _has_directory():
        return "the current directory was removed: change to another one"
    return ": ".join([*named, error.strerror])


def _has_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


@contextmanager
def stream_errors(action: str) -> Iterator[None]:
    """Raise Failure for an error of a stream without a name; a closed pipe passes.

    `action` is what the body does: "read standard input" or "write to standard output".
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise Failure(f"cannot {action}: {error.strerror or error}", 6) from error


@contextmanager
def writing_output() -> Iterator[None]:
    """Raise Failure if standard output cannot be written, and write nothing more to it."""
    with stream_errors("write to standard output"):
        try:
            yield
        except OSError:
            discard(sys.stdout)
            raise


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
            tell(printable(traceback.format_exc().rstrip(), keep="\n"))
        if isinstance(error, (TierStoreError, OSError)):
            lines = [described(error), *getattr(error, "__notes__", ())]
            message = in_a_shell("\n".join(map(printable, lines)))
        elif isinstance(error, MemoryError):
            message = "out of memory"
        else:
            message = (
                f"unexpected {type(error).__name__}: {error}\nRun again with --debug and report it."
            )
        raise Failure(message, exit_code(error)) from error
