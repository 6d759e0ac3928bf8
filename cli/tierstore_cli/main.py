"""The command group. A subcommand is imported when it is run."""

from __future__ import annotations

import difflib
import errno
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import click

from tierstore_cli.commands import GROUPS, load_command, summaries
from tierstore_cli.failure import CLOSED_PIPE, Interrupted, writing_output
from tierstore_cli.printing import discard, tell

_CALLED = {
    "alter": "alter-table convert",
    "drop": "delete rm",
    "export": "dump",
    "fold": "compact gc vacuum",
    "get": "cat read",
    "init": "create new",
    "inspect": "info list ls show stats",
    "keep": "tag",
    "load": "append import",
    "log": "commits history versions",
    "mend": "fix",
    "near": "search",
    "put": "set write",
    "release": "untag",
    "rename": "mv",
    "restore": "revert rollback",
    "save": "backup copy cp",
    "top": "watch",
    "verify": "check fsck",
}
"""Commands, and what they are called in other tools."""

ELSEWHERE = {word: name for name, words in _CALLED.items() for word in words.split()}
"""Names of commands in other tools, and the command here that does the same."""


BEGIN = {
    "make a store of a file of vectors": "tierstore load emb.tier vectors.npy",
    "show what is in it": "tierstore inspect emb.tier",
    "write its rows for other tools": "tierstore export emb.tier rows.parquet",
}
"""The commands to begin with, by what they do."""

VARIABLES = ("TIERSTORE_BUDGET", "TIERSTORE_CORE_DEBUG", "TIERSTORE_CORE_TARGET", "TIERSTORE_TABLE")
"""The environment variables that are no options of one command."""


class Group(click.Group):
    """A group that imports only the subcommand it runs, and exits with 130 when interrupted."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(summaries())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        return load_command(cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; `help [COMMAND]` and `version` mean the options of these names."""
        if not args and not ctx.resilient_parsing:
            self.parse_nothing(ctx)
        if args[:1] == ["help"]:
            args = [*args[1:2], "--help"]
        elif args[:1] == ["version"]:
            args = ["--version"]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command that is named; an unknown name is refused with the nearest one."""
        with failures_as_json(args):
            resolved = self._resolved(ctx, args)
        if not ctx.resilient_parsing:
            say_unknown_variables()
        return resolved

    def _resolved(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            meant = ELSEWHERE.get(args[0])
            near = [meant] if meant else difflib.get_close_matches(args[0], summaries(), 1)
            said = error.format_message()
            hint = f" Did you mean {near[0]}?" if near and "Did you mean" not in said else ""
            raise click.UsageError(f"{said}{hint}", ctx) from None

    def parse_nothing(self, ctx: click.Context) -> None:
        """Say how to begin, where no command is named."""
        click.echo(f"Usage: {ctx.command_path} COMMAND [ARGS]...\n\nTo begin with:", err=True)
        for line, example in BEGIN.items():
            click.echo(f"  {example:<{max(map(len, BEGIN.values()))}}   {line}", err=True)
        click.echo(f"\n`{ctx.command_path} --help` lists all commands.", err=True)
        ctx.exit(2)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, by what they are for, without importing them."""
        lines = summaries()
        width = max(map(len, lines))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", lines[name]) for name in names.split()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; end the program unless `standalone_mode` is False."""
        hold_standard_streams()
        run = partial(super().main, args, prog_name, complete_var, False, **extra)
        if not standalone_mode:
            return run()
        try:
            sys.exit(run())
        except click.Abort:  # Ctrl-C before the subcommand has begun
            failure: click.ClickException = Interrupted()
        except click.ClickException as error:
            failure = error
        try:
            failure.show()
        except OSError:  # click could not write how the command is used
            discard(sys.stderr)
        sys.exit(failure.exit_code)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Parse the arguments before the subcommand."""
        with quiet_where_a_pipe_is_closed(), writing_output(), failures_as_json(list(args)):
            return super().make_context(info_name, args, *rest, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand. SIGTERM and SIGHUP interrupt it as Ctrl-C does."""
        try:
            with (
                quiet_where_a_pipe_is_closed(),
                raising_interrupt(signal.SIGTERM, signal.SIGHUP),
            ):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


def say_unknown_variables() -> None:
    """Say which variables of the environment look like options and are none, in a line each."""
    for name in sorted(os.environ):
        if name.startswith("TIERSTORE_") and name not in VARIABLES and name[10:15] != "TEST_":
            known = _variables_of(name)
            if name not in known:
                near = difflib.get_close_matches(name, [*VARIABLES, *known], 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                tell(f"Warning: {name} in the environment sets nothing{hint}")


def _variables_of(name: str) -> list[str]:
    """Return the variables of the options of the command that a name begins with."""
    words = name.removeprefix("TIERSTORE_").lower().replace("_", "-")
    named = [each for each in summaries() if words.startswith(f"{each}-")]
    command = load_command(max(named, key=len)) if named else None
    params = [] if command is None else command.params
    every = [each.envvar if isinstance(each.envvar, list) else [] for each in params]
    return [variable for variables in every for variable in variables]


@contextmanager
def failures_as_json(args: list[str]) -> Iterator[None]:
    """Show an error of the body, before a subcommand, as an object if JSON is requested."""
    as_json = "--json" in args
    try:
        yield
    except click.ClickException as error:
        if as_json:
            from tierstore_cli.output import Output

            Output(as_json=True).fail(type(error).__name__, error.format_message(), error.exit_code)
        raise


def hold_standard_streams() -> None:
    """Occupy the descriptors of closed standard streams, which files would get otherwise.

    Reading and writing these fails, as it does for programs in C; messages are dropped.
    """
    for number, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDWR)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", errors="backslashreplace", closefd=False)


@contextmanager
def quiet_where_a_pipe_is_closed() -> Iterator[None]:
    """Exit without a message if the reader of the output has ended."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        discard(sys.stdout)
        raise click.exceptions.Exit(CLOSED_PIPE) from None


@contextmanager
def raising_interrupt(*signals: signal.Signals) -> Iterator[None]:
    """Make unhandled signals do what Ctrl-C does, so that partial files are removed."""
    unhandled = [number for number in signals if signal.getsignal(number) == signal.SIG_DFL]
    for number in unhandled:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Call the current handler of Ctrl-C, which an indivisible change defers."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # it is ignored, as in background jobs of a shell
        handler = signal.default_int_handler
    handler(signal.SIGINT, frame)


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from tierstore import __version__
        from tierstore.machine import core

        click.echo(f"tierstore, version {__version__}, core {core()}")
        ctx.exit()


@click.group(
    cls=Group,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Embedding tables larger than the GPU and RAM: create, inspect, load, export, save, verify.

    A store is a directory of tables that are committed together. Every command takes --json for
    one object on stdout, {"error": …} where it fails, and --debug for a traceback; those that write
    take --allow-untested for a file system that is not tested. `tierstore COMMAND -h` shows
    examples. An option that is not given is that of the environment: TIERSTORE_EXPORT_TABLE is
    --table of export, TIERSTORE_TABLE that of all commands.

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
