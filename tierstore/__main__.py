"""Runs the command line: python -m tierstore."""

import importlib

if __name__ == "__main__":
    # By name: the library knows nothing of the command line, which stands above it.
    importlib.import_module("tierstore_cli.entry").run(prog_name="tierstore")
