"""The command group. A subcommand is imported when it is run."""

from __future__ import annotations

import difflib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from tierstore_cli.commands import load_command, summaries
from tierstore_cli.failure import Interrupted

CLOSED_PIPE = 141
"""The exit code of programs that SIGPIPE ends, in a shell."""


ELSEWHERE = {
    "append": "load",
    "cat": "get",
    "check": "verify",
    "commits": "log",
    "compact": "fold",
    "copy": "save",
    "cp": "save",
    "create": "init",
    "delete": "drop",
    "dump": "export",
    "fsck": "verify",
    "gc": "fold",
    "history": "log",
    "import": "load",
    "info": "inspect",
    "list": "inspect",
    "ls": "inspect",
    "mv": "rename",
    "new": "init",
    "read": "get",
    "remove": "drop",
    "revert": "restore",
    "rm": "drop",
    "rollback": "restore",
    "search": "near",
    "set": "put",
    "show": "inspect",
    "stats": "inspect",
    "tag": "keep",
    "untag": "release",
    "vacuum": "fold",
    "versions": "log",
    "watch": "top",
    "write": "put",
}
"""What commands of other tools are called, and the command here that does it."""


class Group(click.Group):
    """A group that imports only the subcommand it runs, and exits with 130 when interrupted."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(summaries())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        return load_command(cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; `help [COMMAND]` and `version` are what the options are."""
        if args[:1] == ["help"]:
            args = [*args[1:2], "--help"]
        elif args[:1] == ["version"]:
            args = ["--version"]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command that is named; an unknown name is refused with the nearest one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            meant = ELSEWHERE.get(args[0])
            near = [meant] if meant else difflib.get_close_matches(args[0], summaries(), 1)
            if not near or "Did you mean" in error.message:
                raise
            raise click.UsageError(f"{error.message} Did you mean {near[0]}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(summaries().items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand. SIGTERM and SIGHUP interrupt it as Ctrl-C does."""
        try:
            with raising_interrupt(signal.SIGTERM, signal.SIGHUP):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            _discard_the_rest()
            raise click.exceptions.Exit(CLOSED_PIPE) from None


def _discard_the_rest() -> None:
    """Let what is left in the buffer of stdout go nowhere, without a report when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextmanager
def raising_interrupt(*signals: signal.Signals) -> Iterator[None]:
    """Make unhandled signals raise KeyboardInterrupt, so that partial files are removed."""
    unhandled = [number for number in signals if signal.getsignal(number) == signal.SIG_DFL]
    for number in unhandled:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


@click.group(
    cls=Group,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "TIERSTORE",
        "max_content_width": 100,
    },
)
@click.version_option(None, "-V", "--version", package_name="tierstore")
def cli() -> None:
    """Embedding tables larger than the GPU and RAM: create, inspect, load, export, save, verify.

    A store is a directory of tables that are committed together. Every command takes --json for
    one object on stdout, {"error": …} where it fails, and --debug for a traceback. `tierstore
    COMMAND -h` shows examples.

    \b
    Examples:
      tierstore init emb.tier --rows 1000000 --dim 128 --init "normal(0,0.01)"
      tierstore inspect emb.tier --stats
      tierstore export emb.tier vectors.npy

    \b
    Exit codes:
      0 ok   1 failure   2 usage   3 not a store, or an unreadable file   4 damage found
      5 locked by another writer   6 no space or I/O error   10 nothing changed   130 interrupted
    """
