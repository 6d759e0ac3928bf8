"""Running the command line: `run` in this process, `program` in one of its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import tierstore
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
            timeout=600,
            env={**os.environ, **env},
            check=False,
        )

    return program


@pytest.fixture
def pair(tmp_path) -> Path:
    """A store of two tables with random rows, at version 3, some of them not folded.

    item: 300 x 8 float32 with exp_avg; user: 20 x 3 bfloat16, backend zarr, with text keys.
    """
    path = tmp_path / "pair.tier"
    fields = {
        "weight": tierstore.Field(8, init=tierstore.normal(seed=1)),
        "exp_avg": tierstore.Field(8),
    }
    item = tierstore.TableSpec(300, fields=fields)
    user = tierstore.TableSpec(
        20, 3, "bfloat16", init=tierstore.uniform(-1, 1, seed=2), backend="zarr"
    )
    random = np.random.default_rng(3)
    with tierstore.create(path, {"item": item, "user": user}) as store:
        store.set_keys("user", [f"name_{n}" for n in range(20)])
        rows = {
            "weight": random.normal(size=(5, 8)).astype("f4"),
            "exp_avg": random.normal(size=(5, 8)).astype("f4"),
        }
        store["item"].write([3, 1, 4, 15, 92], rows)
        store.commit(step=7)
    return path


@pytest.fixture
def single(tmp_path) -> Path:
    """A store of one table, `embeddings`, 50 x 16 float32: random rows, folded, no padding."""
    path = tmp_path / "single.tier"
    spec = tierstore.TableSpec(50, 16, init=tierstore.normal(seed=5))
    tierstore.create(path, {"embeddings": spec}).close()
    return path


@pytest.fixture
def files() -> Callable[[Path], dict[str, bytes]]:
    """Read every file under a path but the writer's note: what must not change by a refusal."""

    def files(path: Path) -> dict[str, bytes]:
        every = (file for file in sorted(path.rglob("*")) if file.is_file())
        found = (file for file in every if file.name != "LOCK")
        return {str(file.relative_to(path)): file.read_bytes() for file in found}

    return files


SHAPES = ("plain", "state", "keyed", "parts")


@pytest.fixture(scope="session")
def originals(tmp_path_factory) -> dict[str, Path]:
    """A store of each shape: one table, several with state, by text key, in partitions."""
    rows = np.random.default_rng(1).normal(size=(40, 6)).astype("f4")
    fields = {"weight": tierstore.Field(6), "exp_avg": tierstore.Field(6, "bfloat16")}
    specs = {
        "plain": {"item": tierstore.TableSpec(40, 6)},
        "state": {
            "item": tierstore.TableSpec(40, fields=fields),
            "user": tierstore.TableSpec(5, 2, "float16"),
        },
        "keyed": {"item": tierstore.TableSpec(dim=6, keys="text")},
        "parts": {"item": tierstore.TableSpec(40, 6)},
    }
    place = tmp_path_factory.mktemp("shapes")
    for shape, tables in specs.items():
        path = place / f"{shape}.tier"
        if shape == "parts":
            pytest.importorskip("torch")
            made = tierstore.distributed.create(path, tables, partitions=3)
        else:
            made = tierstore.create(path, tables)
        with made as store:
            named = [f"k{n}" for n in range(40)]
            if shape == "state":
                store.set_keys("item", named)
            store["item"].write(named if shape == "keyed" else np.arange(40), rows, "weight")
            if shape == "state":
                store["item"].by_row.write(np.arange(40), rows / 2, "exp_avg")
            store.commit()
    return {shape: place / f"{shape}.tier" for shape in SHAPES}


@pytest.fixture
def shapes(originals, tmp_path) -> dict[str, Path]:
    return {shape: shutil.copytree(path, tmp_path / path.name) for shape, path in originals.items()}
