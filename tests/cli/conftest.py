"""Running the command line: `run` in this process, `program` in one of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tierstore_cli.main import cli

Run = Callable[..., Result]
Program = Callable[..., subprocess.CompletedProcess[str]]

COMMAND = [sys.executable, "-c", "from tierstore_cli.main import cli; cli()"]


@pytest.fixture
def run() -> Run:
    """Run a command in this process: `run("inspect", path, code=3)` returns click's Result."""

    def run(*args: object, code: int = 0) -> Result:
        result = CliRunner().invoke(cli, list(map(str, args)))
        assert result.exit_code == code, result.output
        if code:
            assert "Traceback" not in result.output
        return result

    return run


@pytest.fixture
def run_json(run: Run) -> Callable[..., dict[str, Any]]:
    """Run a command with --json; stdout must be one object on one line and nothing else."""

    def run_json(*args: object, code: int = 0) -> dict[str, Any]:
        (line,) = run(*args, "--json", code=code).stdout.splitlines()
        data = json.loads(line)
        assert isinstance(data, dict)
        return data

    return run_json


@pytest.fixture
def program() -> Program:
    """Run a command in a process of its own, as a user does."""

    def program(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *map(str, args)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "TIERSTORE_TEST": "1", **env},
            check=False,
        )

    return program
