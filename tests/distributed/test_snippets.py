"""What docs/many-gpus.md gives to schedulers parses."""

import re
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "many-gpus.md"


def block(start: str) -> str:
    """Return the fenced block that begins with a text."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    (found,) = [each for each in blocks if each.startswith(start)]
    return found


def test_the_batch_script_is_one_of_bash() -> None:
    subprocess.run(["bash", "-n"], input=block("#!/bin/bash"), text=True, check=True)


def test_the_job_is_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(block("apiVersion"))
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["template"]["spec"]["containers"][0]["command"][0] == "torchrun"
