"""Write docs/cli.md and docs/cli/ from the help of the commands: `make docs`."""

import re
from pathlib import Path

import click

from tierstore_cli.commands import GROUPS, load_command, summaries
from tierstore_cli.main import cli

HERE = Path(__file__).parent
WIDTH = 76
"""Characters of a line, which fit into the box of a page."""

MADE = (
    "<!-- Generated from the commands' help by `make docs`; change the help, not this page. -->\n"
)

HEAD = f"""\
# The command line

{MADE}
Every command takes `--json`, which prints one object on one line of stdout and nothing else:
keys are stable, sizes are bytes as integers. Messages and progress bars go to stderr, bars on a
terminal only and after a second. Environment variables set options too: `--table` of `export` is
`TIERSTORE_EXPORT_TABLE`, and `TIERSTORE_TABLE` is that of every command. A variable that begins
with `TIERSTORE_` and sets nothing is named on stderr, with the nearest that does. Tables have no
colours or frames: they are the same on a terminal and in a file, but for columns that do not fit.
Every command also takes `--debug`, which prints a traceback, and those that write
`--allow-untested`.

Commands that write make the complete result under a temporary name, then rename it: a command that
fails or is interrupted leaves no partial result. One that has printed its result is done, whatever
ends it then.

| exit code | meaning |
|---|---|
| 0 | ok |
| 1 | failure: a target that exists, ids out of range, no such table or version |
| 2 | usage |
| 3 | not a store, or an unreadable file |
| 4 | damage found |
| 5 | locked by another writer |
| 6 | no space, or an I/O error |
| 10 | nothing changed since the version of `--since` or `--if-changed` |
| 130 | interrupted; the message names a version or store that is complete nevertheless |
| 141 | the reader of a pipe closed it |

## Completion

The shell completes commands, options, and the names of a store's tables, fields and versions:

```
eval "$(_TIERSTORE_COMPLETE=bash_source tierstore)"    # bash: ~/.bashrc
eval "$(_TIERSTORE_COMPLETE=zsh_source tierstore)"     # zsh: ~/.zshrc
_TIERSTORE_COMPLETE=fish_source tierstore | source     # fish: ~/.config/fish/config.fish
```
"""


NAMES_BEFORE = """\
## Names of before

Some options were called otherwise. Their old names are taken until the next release, with a line on
stderr; so are those that will go.

| command | before | now |
|---|---|---|
"""


def names_before() -> str:
    """Return the table of options that had other names, or will go."""
    rows = []
    for name in summaries():
        for old, new in sorted(getattr(load_command(name), "was", {}).items()):
            now = f"`{new}`" if new.startswith("--") else f"goes: {new}"
            rows.append(f"| {name} | `{old}` | {now} |\n")
    return NAMES_BEFORE + "".join(rows)


def pages() -> dict[Path, str]:
    """Return every page: one with an overview, and one for each group of commands."""
    top = click.Context(cli, info_name="tierstore", terminal_width=WIDTH, show_default=True)
    lines = summaries()
    made = {}
    overview = [HEAD, "## Commands\n\n| command | |\n|---|---|\n"]
    toctree = "\n```{toctree}\n:hidden:\n\n"
    for title, names in GROUPS.items():
        path = "cli/" + re.sub(r"\W+", "-", title.lower())
        overview.append(f"| **{title}** | |\n")
        sections = [f"# {title}: {', '.join(names.split())}\n\n{MADE}"]
        for name in names.split():
            context = click.Context(
                cli.get_command(top, name), top, info_name=name, terminal_width=WIDTH
            )
            sections.append(section(f"tierstore {name}", context))
            overview.append(f"| [{name}]({path}.md#tierstore-{name}) | {lines[name]} |\n")
        made[HERE / f"{path}.md"] = "\n".join(sections)
        toctree += f"{path}\n"
    overview += [toctree + "```\n\n", section("tierstore", top), "\n", names_before()]
    made[HERE / "cli.md"] = overview[0] + "\n" + "".join(overview[1:])
    return made


def section(title: str, context: click.Context) -> str:
    """Return the help of one command as a section."""
    context.help_option_names = ["-h", "--help"]
    return f"## {title}\n\n```\n{context.command.get_help(context)}\n```\n"


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
