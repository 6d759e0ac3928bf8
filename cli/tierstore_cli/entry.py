"""The entry of the program: its imports take long enough to be interrupted."""

from __future__ import annotations

import sys

from tierstore_cli import INTERRUPTED


def run(prog_name: str | None = None) -> None:
    """Run the command line and end the program, with one line if it is interrupted at any time."""
    try:
        from tierstore_cli.main import cli

        cli(prog_name=prog_name)
    except KeyboardInterrupt:  # while it is imported
        sys.stderr.write("\nInterrupted.\n")
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            import logging

            logging.disable()  # libraries warn about unfinished work
        raise
