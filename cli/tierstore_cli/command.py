"""The base of every subcommand: --json, --debug, an Output, exit codes, and options of before."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from click.core import ParameterSource

from tierstore_cli.failure import Interrupted, failures, in_a_shell, writing_output
from tierstore_cli.output import Output
from tierstore_cli.params import FiniteRange
from tierstore_cli.printing import tell

WAITING = "tierstore.wait"
"""The key of the seconds of --wait in the context."""
UNTESTED = "tierstore.untested"
"""The key of whether --allow-untested is given."""
WRITTEN = "tierstore.written"
"""The key of the stores that are open for writing: path, store, and version at its opening."""
MADE = "tierstore.made"
"""The key of the paths where a new store appears once it is complete."""
_OF_BEFORE = "tierstore.before"
"""The key of what options with old names got: by parameter the old and new name, and the value."""


def _kept(key: str) -> Any:
    """Return a callback that keeps the value of an option in the context, under a key."""

    def keep(ctx: click.Context, _: click.Parameter, value: object) -> None:
        ctx.meta[key] = value

    return keep


def _writing(store: str) -> list[click.Parameter]:
    """Return the options of every command that writes a store."""
    return [
        click.Option(
            ["--wait"],
            type=FiniteRange(min=0),
            metavar="SECONDS",
            default=0.0,
            show_default=False,
            expose_value=False,
            callback=_kept(WAITING),
            help=f"How long to wait while another process has {store} open for writing.",
        ),
        click.Option(
            ["--allow-untested"],
            is_flag=True,
            hidden=True,  # not in the help of every command; `tierstore --help` has it
            expose_value=False,
            callback=_kept(UNTESTED),
            help="Write to an untested file system.",
        ),
    ]


class Command(click.Command):
    """A subcommand. Its function receives an `Output` as `out`; it `writes` one of its stores.

    `was` has the names that options had before, for one release: they are taken and not shown, and
    a line on stderr says what to write now. An option that is to go stands there with what to do
    instead, in words.
    """

    def __init__(
        self, *args: Any, writes: str = "", was: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            *(_writing(writes) if writes else []),
            click.Option(["--json"], is_flag=True, help="Print one JSON object."),
            click.Option(["--debug"], is_flag=True, hidden=True, help="Print a traceback."),
        ]
        options = {name: each for each in self.params for name in each.opts}
        self.was = dict(was or {})
        for old, new in self.was.items():
            if old in options:
                _leaving(options[old], old, new)
            else:
                self.params.append(_renamed(options[new], old, new))
        for each in self.params:
            each.envvar = variables(self.name or "", each)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; a negative number in them is no option that does not exist."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name[1:2].isdigit():
                what = "-- before it says that it is no option"
                raise click.UsageError(f"{error.option_name} is negative; {what}", ctx) from None
            raise

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Parse the arguments; with --json, a usage error is an object on stdout too."""
        given = list(args)
        with (
            failures_shown(Output("--json" in given)),
            writing_output(),  # --help
        ):
            context = super().make_context(info_name, args, *rest, **extra)
            for name, (old, new, value) in context.meta.pop(_OF_BEFORE, {}).items():
                if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                    raise click.UsageError(f"{old} is the old name of {new}: give one", context)
                context.params[name] = value
            return context

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


def variables(command: str, option: click.Parameter) -> list[str]:
    """Return the environment variables of an option: that of the command, then that of all."""
    if not isinstance(option, click.Option):
        return []
    (long, *_) = [each for each in option.opts if each.startswith("--")] or option.opts
    name = long.strip("-").replace("-", "_").upper()
    own = f"TIERSTORE_{command.replace('-', '_').upper()}_{name}"
    return [own, "TIERSTORE_TABLE"] if long == "--table" else [own]


def given_here(name: str) -> bool:
    """Whether a parameter is given on the command line, not by the environment."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def _renamed(option: click.Parameter, old: str, new: str) -> click.Option:
    """Return a hidden option of an old name, whose value is that of the option of the new name."""

    def take(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if ctx.get_parameter_source(param.name or "") is ParameterSource.DEFAULT:
            return
        _say(ctx, f"{old} is called {new} now")
        ctx.meta.setdefault(_OF_BEFORE, {})[option.name] = old, new, value

    alias = copy.copy(option)
    alias.name, alias.opts, alias.secondary_opts = f"before_{option.name}", [old], []
    alias.expose_value, alias.required, alias.callback = False, False, take
    as_option(alias).hidden = True
    return as_option(alias)


def _leaving(option: click.Parameter, old: str, instead: str) -> None:
    """Hide an option that is to go; where it is given, say what to do instead."""

    def say(ctx: click.Context, param: click.Parameter, value: object) -> object:
        if ctx.get_parameter_source(param.name or "") is not ParameterSource.DEFAULT:
            _say(ctx, f"{old} will go: {instead}")
        return value

    as_option(option).hidden = True
    option.callback = say


def as_option(param: click.Parameter) -> click.Option:
    """Return an option as one."""
    if not isinstance(param, click.Option):
        raise TypeError(f"{param.name} is no option")
    return param


def _say(ctx: click.Context, what: str) -> None:
    tell(f"Deprecated: {ctx.info_name}: {what}; it is taken until the next release")


def _committed(ctx: click.Context) -> str:
    """Say which versions the command has committed and which stores it has made, if any."""
    written = ctx.meta.get(WRITTEN, ())
    changed = [(path, each.version) for path, each, before in written if each.version != before]
    done = [f"version {version} of {path} is committed" for path, version in changed]
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
        out.note(f"Warning: {in_a_shell(str(message))}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
