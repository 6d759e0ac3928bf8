"""The command group. Each subcommand is a file of its own, imported when it is asked for."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from tierstore_cli.failure import Interrupted

COMMANDS = {
    "init": "Make a store, or add a table to one.",
    "inspect": "Show what is in a store.",
    "load": "Load rows from a file into a table.",
    "export": "Write a table's rows to a file.",
    "save": "Copy a whole store, also while it is being trained.",
    "verify": "Check every checksum and list the damaged rows.",
    "repair": "Copy what is whole of a damaged store, and list the rest.",
    "fold": "Fold the newest version into the base files.",
    "plan": "Say how much memory to give, and what it brings.",
    "simulate": "Replay a trace through policies and sizes.",
    "bench": "Measure this machine, and tierstore on it.",
    "doctor": "Check this machine and what is installed.",
}
"""Every command and the line about it, here so that `tierstore --help` imports none of them."""


class Group(click.Group):
    """A group that imports a subcommand only to run it, and ends with 130 when interrupted."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order in which one meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(
            importlib.import_module(f"tierstore_cli.{cmd_name}"), cmd_name
        )
        command.short_help = COMMANDS[cmd_name]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; SIGTERM and a closed terminal end it as cleanly as Ctrl-C does."""
        try:
            with ended_like_ctrl_c(signal.SIGTERM, signal.SIGHUP):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


@contextmanager
def ended_like_ctrl_c(*signals: signal.Signals) -> Iterator[None]:
    """Let signals that nobody handles raise KeyboardInterrupt, so that half-made files go."""
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
@click.version_option(package_name="tierstore")
def cli() -> None:
    """Embedding tables larger than the GPU and RAM: create, inspect, load, export, save, verify.

    A store is a directory of tables that are committed together. Every command takes --json for
    one object on stdout, and --debug for a traceback. `tierstore COMMAND -h` shows examples.

    \b
    Examples:
      tierstore init emb.tier --rows 1000000 --dim 128 --init "normal(0,0.01)"
      tierstore inspect emb.tier --stats
      tierstore export emb.tier vectors.npy

    \b
    Exit codes:
      0 ok   1 failure   2 usage   3 not a store, or a file it cannot read   4 damage found
      5 locked by another writer   6 no space or I/O error   130 interrupted
    """
