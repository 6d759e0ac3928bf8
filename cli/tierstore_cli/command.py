"""The base of every subcommand: --json, --debug, an Output, and exit codes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from tierstore_cli.failure import Interrupted, failures, writing_output
from tierstore_cli.output import Output
from tierstore_cli.params import FiniteRange

WAITING = "tierstore.wait"
"""The key of the seconds of --wait in the context."""
WRITTEN = "tierstore.written"
"""The key of the stores that are open for writing: path, store, and version at its opening."""
MADE = "tierstore.made"
"""The key of the paths where a new store appears once it is complete."""


def _keep_wait(ctx: click.Context, _: click.Parameter, seconds: float) -> None:
    ctx.meta[WAITING] = seconds


def _wait_for(store: str) -> click.Option:
    return click.Option(
        ["--wait"],
        type=FiniteRange(min=0),
        metavar="SECONDS",
        default=0.0,
        expose_value=False,
        callback=_keep_wait,
        help=f"How long to wait while another process has {store} open for writing.",
    )


class Command(click.Command):
    """A subcommand. Its function receives an `Output` as `out`; it `writes` one of its stores."""

    def __init__(self, *args: Any, writes: str = "STORE", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            click.Option(["--json"], is_flag=True, help="Print one JSON object."),
            click.Option(["--debug"], is_flag=True, help="Print a traceback on failure."),
        ]
        if any(each.name == "allow_untested" for each in self.params):  # it opens for writing
            self.params.insert(-2, _wait_for(writes))

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Parse the arguments; with --json, a usage error is an object on stdout too."""
        given = list(args)
        with (
            failures_shown(Output("--json" in given)),
            writing_output(),  # --help
        ):
            return super().make_context(info_name, args, *rest, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command's function."""
        out = ctx.params["out"] = Output(ctx.params.pop("json"))
        with failures_shown(out), failures(debug=ctx.params.pop("debug")), warnings_as_notes(out):
            try:
                super().invoke(ctx)
            except KeyboardInterrupt:
                if done := _committed(ctx):
                    raise Interrupted(done) from None
                raise
            out.flush()


def _committed(ctx: click.Context) -> str:
    """Say which versions the command has committed and which stores it has made, if any."""
    written = ctx.meta.get(WRITTEN, ())
    found = [(path, each.version) for path, each, before in written if each.version != before]
    done = [f"version {version} of {path} is committed" for path, version in found]
    done += [f"{path} is complete" for path in ctx.meta.get(MADE, ()) if os.path.lexists(path)]
    return ", ".join(done)


@contextmanager
def failures_shown(out: Output) -> Iterator[None]:
    """Show an error of the body as an object too, if the output is JSON."""
    try:
        yield
    except click.ClickException as error:
        kind = type(error.__cause__ or error).__name__
        out.fail(kind, error.format_message(), error.exit_code)
        raise


@contextmanager
def warnings_as_notes(out: Output) -> Iterator[None]:
    """Print warnings of the library as lines on stderr, without the location in the code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        out.note(f"Warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
