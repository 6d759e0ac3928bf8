"""Commands of a user who may not read or write everything; of root, without its capabilities."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

CHILD = """
import json, os, sys
from click.testing import CliRunner
from tierstore_cli.main import cli
for asked in sys.stdin:
    place, lines = json.loads(asked)
    os.chdir(place)
    done = [CliRunner().invoke(cli, line) for line in lines]
    print(json.dumps([(each.exit_code, each.stderr) for each in done]), flush=True)
"""
WITHOUT_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"]


@pytest.fixture(scope="module")
def user():
    """A process of a user, which runs the command lines of every test."""
    is_root = os.geteuid() == 0
    if is_root and shutil.which("setpriv") is None:
        pytest.skip("root may do everything, and there is no setpriv")
    child = [*(WITHOUT_CAPABILITIES if is_root else []), sys.executable, "-c", CHILD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(child, text=True, **pipes) as process:
        yield process


@pytest.fixture
def as_user(user, tmp_path):
    """Run command lines in `tmp_path`; return the exit code and stderr of each."""

    def as_user(*lines):
        print(json.dumps([str(tmp_path), [line.split() for line in lines]]), file=user.stdin)
        user.stdin.flush()
        found = json.loads(user.stdout.readline())
        return [(line, *each) for line, each in zip(lines, found, strict=True)]

    return as_user


@pytest.fixture
def only(request):
    """Leave a path only some rights for the rest of the test."""

    def only(path, mode):
        before = path.stat().st_mode
        request.addfinalizer(lambda: path.chmod(before))
        path.chmod(mode)

    return only


def refused(found):
    for line, code, said in found:
        assert code == 6, (line, code, said)
        assert "Permission denied" in said and said.count("\n") == 1, (line, said)
        assert ".partial" not in said, (line, said)


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("what", ["rows.npy", "item", "manifest-*", "."])
@pytest.mark.fault(75)
def test_what_may_not_be_read_is_not_damaged(as_user, only, pair, tmp_path, files, what):
    """A repair would fill such rows with zeros, while they are intact."""
    before = files(pair)
    (place,) = [pair] if what == "." else list(pair.rglob(what))[-1:]
    only(place, 0)
    lines = ["verify pair.tier", "repair pair.tier new.tier", "doctor pair.tier"]
    refused(as_user(*lines, "save pair.tier new.tier", "get pair.tier --table item 1"))
    assert os.listdir(tmp_path) == ["pair.tier"]
    place.chmod(0o700)
    assert files(pair) == before


@pytest.mark.fault(75)
def test_directories_that_may_not_be_written(as_user, only, single, tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(1).random((3, 4), np.float32))
    closed = tmp_path / "closed"
    closed.mkdir()
    only(closed, 0o500)
    found = as_user(
        "init closed/s.tier --rows 3 --dim 2",
        "load closed/s.tier rows.npy",
        "save single.tier closed/s.tier",
        "save single.tier closed/s.tier --incremental",
        "repair single.tier closed/s.tier",
        "export single.tier closed/rows.npy",
        "export single.tier closed/rows.zarr",
        "report single.tier closed/page.html",
        "publish single.tier closed",
        "publish single.tier closed/served",
    )
    refused(found)
    assert os.listdir(closed) == []


@pytest.mark.fault(75)
def test_a_store_that_may_only_be_read(as_user, only, single, files, tmp_path):
    before = files(single)
    for each in [*single.rglob("*"), single]:
        only(each, 0o500 if each.is_dir() else 0o400)
    put = "put single.tier --id 1 " + " ".join(["1"] * 16)
    refused(as_user(put, "keep single.tier best", "fold single.tier"))
    read = as_user("get single.tier 1", "verify single.tier", "save single.tier copy.tier")
    assert [code for _, code, _ in read] == [0, 0, 0], read
    assert files(single) == before


def test_a_directory_whose_files_have_to_be_known(as_user, only, tmp_path):
    """Others may open files in most home directories of a cluster, but not list them."""
    home = tmp_path / "home"
    home.mkdir()
    np.save(home / "rows.npy", np.random.default_rng(2).random((3, 4), np.float32))
    only(home, 0o100)
    found = as_user("load s.tier home/rows.npy", "get home/rows.npy 1", "get s.tier 1")
    assert [code for _, code, _ in found] == [0, 0, 0], found
