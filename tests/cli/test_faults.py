"""What goes wrong around a command: full disks, interrupts, closed pipes, odd environments."""

import json
import os
import re
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from tierstore._dtypes import ELEMENT_TYPES
from tierstore_cli.commands import summaries
from tierstore_cli.main import cli
from tierstore_cli.printing import printable

COMMANDS = {
    "export": ["export", "single.tier", "out.vec"],
    "save": ["save", "single.tier", "out.tier"],
    "init": ["init", "out.tier", "--rows", "300000", "--dim", "64", "--init", "normal(0,1)"],
    "load": ["load", "out.tier", "rows.npy"],
    "load into": ["load", "single.tier", "rows.npy", "--table", "new"],
    "verify": ["verify", "single.tier"],
}


def run_until(number, args, cwd):
    """Run a command that sends itself a signal when it first reports progress."""
    code = f"""
import os
from tierstore_cli.main import cli
from tierstore_cli.bars import Progress
Progress.__call__ = lambda self, done, total: os.kill(os.getpid(), {int(number)})
cli()
"""
    child = [sys.executable, "-c", code, *args]
    return subprocess.run(child, cwd=cwd, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture
def place(single, tmp_path):
    """A folder with a store and a file to load; nothing else may be in it after a failure."""
    np.save(tmp_path / "rows.npy", np.random.default_rng(1).normal(size=(50_000, 32)))
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.fault(28, 68)
@pytest.mark.slow
@pytest.mark.nightly("15")
def test_interrupted_in_the_middle_leaves_nothing(place, files, run, name, number):
    before = files(place)
    done = run_until(number, COMMANDS[name], place)
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip() == "Interrupted."
    assert sorted(os.listdir(place)) == ["rows.npy", "single.tier"]
    run("verify", place / "single.tier")
    found = files(place)
    for each in (before, found):  # it names the last writer
        each.pop("single.tier/LOCK", None)
    assert found == before


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.fault(66, 70)
def test_killed_in_the_middle_leaves_no_result_and_a_sound_store(place, run, monkeypatch, name):
    """What a kill leaves behind bears no name that anyone would take for a result."""
    done = run_until(signal.SIGKILL, COMMANDS[name], place)
    assert done.returncode == -signal.SIGKILL
    seen = [entry for entry in os.listdir(place) if not entry.startswith(".")]
    assert sorted(seen) == ["rows.npy", "single.tier"]
    run("verify", place / "single.tier")
    monkeypatch.chdir(place)
    run(*COMMANDS[name])


@pytest.mark.variants(1)
@pytest.mark.parametrize("name", ["export", "save", "init", "load", "load into"])
@pytest.mark.fault(43, 68)
def test_a_full_disk(run, tmp_path, monkeypatch, name):
    """A file-size limit fails writes as a full disk does."""
    run("init", tmp_path / "single.tier", "--rows", 50_000, "--dim", 16, "--init", "normal(0,1)")
    np.save(tmp_path / "rows.npy", np.random.default_rng(1).normal(size=(50_000, 32)))
    before = sorted(os.listdir(tmp_path))
    monkeypatch.chdir(tmp_path)
    limit, action = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limit[1]))
    try:
        done = run(*COMMANDS[name], code=6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, action)
    assert re.match("Error: .*(large|space|quota)", done.stderr)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.slow
def test_a_reader_that_goes_away_early(single):
    """`tierstore inspect … | head -1` says nothing about the closed pipe."""
    pipe = f"{sys.executable} -c 'from tierstore_cli.main import cli; cli()' inspect {single}"
    done = subprocess.run(
        ["bash", "-c", f"{pipe} --range : | head -1"], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


ODD = {
    "no locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "narrow": {"COLUMNS": "20"},
    "no color": {"NO_COLOR": "1"},
    "optimized": {"PYTHONOPTIMIZE": "2"},
    "warnings": {"PYTHONWARNINGS": "error"},
    "hash": {"PYTHONHASHSEED": "123"},
    "dumb": {"TERM": "dumb"},
}
ODD["ascii and warnings"] = ODD["ascii"] | ODD["warnings"]
ODD["all others"] = {
    name: each
    for kind in ("narrow", "no color", "optimized", "hash", "dumb")
    for name, each in ODD[kind].items()
}


@pytest.mark.parametrize("env", ODD.values(), ids=ODD)
@pytest.mark.fault(71, 74)
@pytest.mark.slow
@pytest.mark.nightly("ascii", "narrow", "no color", "optimized", "warnings", "hash", "dumb")
def test_odd_environments(program, pair, env):
    done = program("inspect", pair, "--stats", "--versions", **env)
    assert done.returncode == 0, done.stderr
    assert "item" in done.stdout and "\x1b" not in done.stdout
    done = program("inspect", pair, "--stats", "--json", **env)
    assert json.loads(done.stdout)["version"] == 3
    done = program("inspect", pair, "--table", "é\x1b", **env)
    assert done.returncode == 1 and "\x1b" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.fault(51)
def test_odd_names_of_stores(run, run_json, tmp_path):
    for name in ("with space", "é", "new\nline", "x" * 200, "-dash"):
        path = tmp_path / name
        assert run_json("init", path, "--rows", 3, "--dim", 4)["store"] == str(path)
        assert run_json("inspect", path)["store"] == str(path)
    path = tmp_path / "new\nline"
    assert "new\\nline" in run("inspect", path).stdout
    assert "new\\nline.npy" in run("export", path, f"{path}.npy").stdout
    said = run("load", path, f"{path}.none.npy", code=3).stderr
    assert "new\\nline.none.npy" in said and said.count("\n") == 1


MEASURED = """
import atexit, re, sys, threading
peak = 0
def watch():
    global peak
    while not done.wait(0.01):
        peak = max(peak, int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]))
done = threading.Event()
threading.Thread(target=watch, daemon=True).start()
atexit.register(lambda: print(peak // 1024, file=sys.stderr))
from tierstore_cli.main import cli
for arguments in eval(sys.argv[1]):
    cli(arguments, "tierstore", standalone_mode=False)
"""


@pytest.mark.slow
@pytest.mark.fault(73)
def test_a_huge_sparse_table(run, tmp_path):
    """10^9 rows: looking at them takes memory for what is looked at, not for what there is."""
    path = tmp_path / "huge.tier"
    run("init", path, "--rows", 10**9, "--dim", 64, "--sparse")
    commands = [
        ["inspect", str(path), "--stats"],
        ["verify", str(path), "--sample", "1000"],
        ["export", str(path), str(tmp_path / "few.npy"), "--range", "999999000:"],
    ]
    child = [sys.executable, "-c", MEASURED, repr(commands)]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) < 300  # MB
    assert np.load(tmp_path / "few.npy").shape == (1000, 64)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("tierstore ", set(summaries())),
        ("tierstore in", {"init", "inspect"}),
        ("tierstore export PAIR out.npy --table ", {"item", "user"}),
        ("tierstore export PAIR out.npy --table i", {"item"}),
        ("tierstore export nowhere out.npy --table ", set()),
        (
            "tierstore init PAIR --dtype f",
            {name for name in ELEMENT_TYPES if name.startswith("f")},
        ),
    ],
)
def test_completion(pair, words, offered):
    env = {
        "_TIERSTORE_COMPLETE": "bash_complete",
        "COMP_WORDS": words.replace("PAIR", str(pair)),
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = CliRunner().invoke(cli, prog_name="tierstore", env=env)
    assert (done.exit_code, done.stderr) == (0, "")
    assert {line.split(",")[1] for line in done.stdout.splitlines() if line} == offered


@pytest.mark.slow
@pytest.mark.fault(71)
def test_a_traceback_steers_no_terminal(program, single, tmp_path):
    """What a file supplies stands in messages, and in tracebacks with --debug."""
    name = "\x1b[2J\u202e.npy"
    (tmp_path / name).write_bytes(b"\x93NUMPY\x1b]0;title\x07")
    done = program("load", single, tmp_path / name, "--debug")
    assert done.returncode == 3, done.stderr
    assert "Traceback" in done.stderr and "\\x1b[2J" in done.stderr
    assert printable(done.stderr, keep="\n") == done.stderr


@pytest.mark.fault(17)
def test_a_store_that_cannot_be_opened_is_not_left(tmp_path):
    code = (
        "import tierstore._store.opening as module\n"
        "def fail(*_): raise MemoryError\n"
        "module.Store = fail\n"
        "from tierstore_cli.main import cli; cli()"
    )
    command = [sys.executable, "-c", code, "init", "s.tier", "--rows", "9", "--dim", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "Error: out of memory\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "wrong",
    [
        ["--keys", "none.txt"],
        ["--field", "no/name"],
        ["--table", "no/name"],
    ],
)
@pytest.mark.fault(17)
def test_wrong_options_of_load_leave_nothing(place, wrong):
    before = sorted(os.listdir(place))
    given = ["load", str(place / "new.tier"), str(place / "rows.npy"), *wrong]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code in (1, 2, 3), done.output
    assert sorted(os.listdir(place)) == before


@pytest.mark.fault(51)
def test_a_current_directory_that_was_removed(run, single, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    assert run("log", single).exit_code == 0
    for line in (["log", "s.tier"], ["export", single, "out.npy"], ["doctor"]):
        assert "the current directory was removed" in run(*line, code=6).stderr
