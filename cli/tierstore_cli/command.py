"""What every subcommand has in common: --json, --debug, an Output, and its failures' exit codes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from tierstore_cli.failure import failures
from tierstore_cli.output import Output


class Command(click.Command):
    """A subcommand. Its function gets an `Output` as argument `out`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            click.Option(["--json"], is_flag=True, help="Print one JSON object instead."),
            click.Option(["--debug"], is_flag=True, help="Show a traceback when something fails."),
        ]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command's function."""
        out = ctx.params["out"] = Output(ctx.params.pop("json"))
        with failures(debug=ctx.params.pop("debug")), warnings_as_notes(out):
            super().invoke(ctx)
            sys.stdout.flush()  # here, so that a full disk behind stdout is a failure too


@contextmanager
def warnings_as_notes(out: Output) -> Iterator[None]:
    """Show what the library warns of as a line on stderr, without the place in the code."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        out.note(f"Warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
