"""The commands: `tierstore NAME` is the click command `NAME` in the module `NAME`.

Every module in this folder is a command. The first line of its docstring is the command's line in
`tierstore --help`.
"""

from __future__ import annotations

import importlib
import pkgutil

import click

__all__ = ["GROUPS", "load_command", "summaries"]

GROUPS = {
    "Fill a store": "init load put keys expire remove",
    "Look into it": "inspect log get near diff follow top report doctor",
    "Change tables": "add-field alter copy-table drop drop-field grow rename",
    "Versions": "fold keep release restore",
    "Copies, and other programs": "export patch publish save",
    "Damage": "mend repair verify",
    "Memory and speed": "bench plan simulate",
}
"""Every command, by what it is for."""


def summaries() -> dict[str, str]:
    """Return the line about each command by its name, sorted. Imports no command."""
    modules = sorted(each.name for each in pkgutil.iter_modules(__path__))
    return {module.replace("_", "-"): _first_line(module) for module in modules}


def load_command(name: str) -> click.Command | None:
    """Import and return a command, or None if there is none of that name."""
    if name not in summaries():
        return None
    module = name.replace("-", "_")
    command: click.Command = getattr(importlib.import_module(f"{__name__}.{module}"), module)
    return command


def _first_line(module: str) -> str:
    source = pkgutil.get_data(__name__, f"{module}.py") or b""
    return source.partition(b"\n")[0].decode().strip('"')
