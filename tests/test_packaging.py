"""What pip is told."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import tierstore

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-")


def test_the_installed_version_is_that_of_the_module():
    assert importlib.metadata.version("tierstore") == tierstore.__version__


def test_the_base_is_small():
    assert sorted(map(name_of, PROJECT["dependencies"])) == ["click", "crc32c", "numpy", "zarr"]


def test_all_is_every_extra_that_needs_no_gpu():
    named = set(re.search(r"\[(.*)\]", EXTRAS["all"][0])[1].split(","))
    assert named == set(EXTRAS) - {
        "all",
        "bench",
        "dev",
        "formats",
        "integrations",
        "cuda12x",
        "cuda13x",
    }


@pytest.mark.parametrize("extra", [None, *sorted(set(EXTRAS) - {"all", "cuda12x", "cuda13x"})])
def test_what_the_tests_install_is_pinned(extra):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name_of(line) for line in lines if line[0] != "#"}
    wanted = EXTRAS[extra] if extra else PROJECT["dependencies"]
    assert {name_of(each) for each in wanted} <= pinned
