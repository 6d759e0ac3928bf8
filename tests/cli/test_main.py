"""The group: help, lazy imports, exit codes of errors, signals."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import click
import numpy as np
import pytest
from click.testing import CliRunner

import tierstore
from tests.every import every
from tierstore import errors
from tierstore._door import interrupts_deferred
from tierstore.machine import core
from tierstore_cli import entry
from tierstore_cli.command import Command
from tierstore_cli.commands import load_command, summaries
from tierstore_cli.failure import exit_code
from tierstore_cli.main import ELSEWHERE, Group, cli, raising_interrupt

HEAVY = ("torch", "cupy", "zarr", "pyarrow", "safetensors", "matplotlib")


def loaded(code: str) -> set[str]:
    """Return the top-level modules that are loaded after running `code` in a new interpreter."""
    report = "import sys; print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


@pytest.mark.fault(56)
def test_import_loads_nothing_heavy():
    assert not loaded("import tierstore").intersection(HEAVY)


def test_help_imports_no_command_and_not_even_numpy():
    code = """
import sys
from tierstore_cli.main import cli
try:
    cli(["--help"])
except SystemExit:
    pass
assert not [name for name in sys.modules if name.startswith("tierstore_cli.commands.")]
"""
    assert not loaded(code).intersection({*HEAVY, "numpy", "tierstore"})


@pytest.mark.fault(64)
def test_no_arguments_name_the_commands_to_begin_with_and_mean_usage(run):
    result = run(code=2)
    assert result.stdout == ""
    named = [line.split()[:2] for line in result.stderr.splitlines() if line.startswith("  ")]
    assert named == [["tierstore", each] for each in ("load", "inspect", "export")]
    assert "--help" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "args",
    [
        ["frobnicate"],
        ["init"],
        ["init", "x.tier", "--rows", "-5", "--dim", "4"],
        ["init", "x.tier", "--rows", "1.5", "--dim", "4"],
        ["init", "x.tier", "--rows", "10", "--dim", "4", "--dtype", "object"],
        ["inspect", "x.tier", "--range", "5:3"],
        ["verify", "x.tier", "--sample", "some"],
        ["doctor", "--frobnicate"],
    ],
)
@pytest.mark.fault(64)
def test_usage_errors_end_with_2_and_make_nothing(run, tmp_path, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    assert "Usage:" in run(*args, code=2).output
    assert not list(tmp_path.iterdir())


@every(name=summaries())
def test_every_command_has_help_with_examples(run, name):
    for flag in ("-h", "--help"):
        text = run(name, flag).output
        assert "Examples:" in text and f"tierstore {name} " in text
        assert "--json" in text
    assert "--debug" in run("--help").output and run(name, "--debug", "--help").output == text
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, Command)
    assert all(p.help for p in command.params if isinstance(p, click.Option))


def test_the_line_of_a_command_is_its_modules_docstring():
    for name, line in summaries().items():
        module = sys.modules[load_command(name).callback.__module__]
        assert module.__name__ == f"tierstore_cli.commands.{name.replace('-', '_')}"
        assert line == module.__doc__.splitlines()[0]
        assert 10 < len(line) <= 72 and line.endswith(".")


def test_no_command_has_an_unknown_name():
    assert load_command("no-such-command") is None
    assert load_command("__init__") is None


def test_group_help_has_examples_and_every_command(run):
    text = run("-h").output
    assert "Examples:" in text
    assert all(f"  {name} " in text and line in text for name, line in summaries().items())


def test_version(run):
    for flag in ("--version", "-V"):
        assert tierstore.__version__ in run(flag).output


def test_words_in_place_of_options(run):
    assert run("version").stdout == run("-V").stdout
    assert run("help").stdout == run("--help").stdout
    assert run("help", "load").stdout == run("load", "--help").stdout
    run("help", "nothing", code=2)


def test_python_runs_the_package_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "tierstore", "-V"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"tierstore, version {tierstore.__version__}, core {core()}\n"


def test_a_misspelt_command_is_named_as_it_should_be(run):
    assert "Did you mean inspect?" in run("insepct", code=2).stderr


def test_a_name_of_other_tools_is_answered_with_the_command(run):
    assert "Did you mean log?" in run("versions", code=2).stderr
    assert set(ELSEWHERE.values()) <= set(summaries())
    assert not set(ELSEWHERE) & set(summaries())


@pytest.mark.parametrize(
    ("args", "kind", "code"),
    [
        (["inspect", "nope.tier"], "NotAStoreError", 3),
        (["init", "x.tier", "--rows", "many", "--dim", "4"], "BadParameter", 2),
        (["load", "x.tier", "nope.npy"], "MissingFileError", 3),
        (["insepct", "x.tier"], "UsageError", 2),
        (["quantise", "x.tier"], "UsageError", 2),
        (["inspect", "x.tier", "--nope"], "NoSuchOption", 2),
        (["--nope"], "NoSuchOption", 2),
        (["inspect"], "MissingParameter", 2),
    ],
)
def test_a_failure_is_one_object_with_json(run_json, tmp_path, monkeypatch, args, kind, code):
    monkeypatch.chdir(tmp_path)
    error = run_json(*args, code=code)["error"]
    assert (error["type"], error["exit_code"]) == (kind, code)
    assert error["message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ExistsError("x"), 1),
        (errors.RowIndexError("x"), 1),
        (errors.InvalidInputError("x"), 1),
        (errors.VersionError("x"), 1),
        (errors.UnknownNameError("x"), 1),
        (errors.MissingExtraError("x"), 1),
        (MemoryError(), 1),
        (ZeroDivisionError("x"), 1),
        (errors.NotAStoreError("x"), 3),
        (errors.FormatError("x"), 3),
        (errors.MissingFileError("x"), 3),
        (errors.CorruptStoreError("x"), 4),
        (errors.CorruptRowError("x"), 4),
        (errors.LockedError("x"), 5),
        (errors.ConcurrentWriterError("x"), 5),
        (errors.StoreFullError("x"), 6),
        (errors.StoreIOError("x"), 6),
        (errors.CommitFailedError("x"), 6),
        (OSError(errno.ENOSPC, "No space left on device"), 6),
    ],
)
def test_exit_code_of_each_error(error, code):
    assert exit_code(error) == code
    result = CliRunner().invoke(failing(error), ["fail"])
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")


def test_debug_shows_the_traceback_and_keeps_the_code():
    result = CliRunner().invoke(failing(errors.LockedError("taken")), ["fail", "--debug"])
    assert result.exit_code == 5
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("Error: taken\n")


def test_an_unexpected_error_is_a_line_that_asks_for_debug():
    result = CliRunner().invoke(failing(ZeroDivisionError("by what?")), ["fail"])
    assert "unexpected ZeroDivisionError: by what?" in result.stderr
    assert "--debug" in result.stderr


def test_messages_cannot_steer_the_terminal():
    result = CliRunner().invoke(failing(errors.FormatError("name \x1b[2J\u202e")), ["fail"])
    assert result.stderr == "Error: name \\x1b[2J\\u202e\n"


def test_interrupted_ends_with_130():
    result = CliRunner().invoke(failing(KeyboardInterrupt()), ["fail"])
    assert result.exit_code == 130
    assert result.stderr.strip() == "Interrupted."


def test_a_command_interrupted_after_its_commit_says_that_this_is_done(tmp_path, monkeypatch):
    path = tmp_path / "S.tier"
    tierstore.create(path, {"e": tierstore.TableSpec(9, 2)}).close()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tierstore._store.commit.clean_up", interrupt)
    result = CliRunner().invoke(cli, ["put", str(path), "--id", "1", "1,2", "--json"])
    done = f"nterrupted; version 2 of {path} is committed"
    assert (result.exit_code, result.stderr) == (130, f"\nI{done}.\n")
    assert json.loads(result.stdout)["error"]["message"] == f"i{done}"
    monkeypatch.setattr("tierstore._store.commit.seal", interrupt)
    result = CliRunner().invoke(cli, ["put", str(path), "--id", "1", "3,4"])
    assert (result.exit_code, result.stderr) == (130, "\nInterrupted.\n")
    with tierstore.open(path) as store:
        assert (store.version, store["e"].read([1]).tolist()) == (2, [[1, 2]])


@pytest.mark.parametrize("command", ["load", "init", "save", "repair"])
def test_a_command_interrupted_after_it_made_a_store_says_that_this_is_done(
    tmp_path, monkeypatch, command
):
    from tierstore._io import atomic

    source, path = tmp_path / "old.tier", tmp_path / "S.tier"
    tierstore.create(source, {"e": tierstore.TableSpec(9, 2)}).close()
    np.save(tmp_path / "rows.npy", np.ones((3, 2), "f4"))
    args = {
        "load": [path, tmp_path / "rows.npy"],
        "init": [path, "--rows", 3, "--dim", 2],
        "save": [source, path],
        "repair": [source, path],
    }[command]
    publish = atomic._give_name

    def interrupted(*given, **options):
        publish(*given, **options)
        if given[2] == path.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "_give_name", interrupted)
    result = CliRunner().invoke(cli, [command, *map(str, args)])
    assert (result.exit_code, result.stderr) == (130, f"\nInterrupted; {path} is complete.\n")
    with tierstore.open(path) as store:
        assert len(store) == 1


def test_a_load_interrupted_after_its_commit_says_that_this_is_done(tmp_path, monkeypatch):
    path = tmp_path / "S.tier"
    tierstore.create(path, {"e": tierstore.TableSpec(3, 2)}).close()
    np.save(tmp_path / "rows.npy", np.ones((3, 2), "f4"))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tierstore._store.commit.clean_up", interrupt)
    result = CliRunner().invoke(cli, ["load", str(path), str(tmp_path / "rows.npy")])
    done = f"version 2 of {path} is committed"
    assert (result.exit_code, result.stderr) == (130, f"\nInterrupted; {done}.\n")


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.fault(28, 68)
def test_signals_end_with_130_and_clean_up(number, tmp_path):
    """What a command has half made must go, whichever way one ends it."""
    half = tmp_path / "half made"
    code = f"""
import time, click
from pathlib import Path
from tierstore_cli.command import Command
from tierstore_cli.main import cli
@click.command(cls=Command)
def slow(out):
    half = Path({str(half)!r})
    try:
        half.touch()
        time.sleep(60)
    finally: half.unlink()
cli.get_command = lambda ctx, name: slow
cli(["slow"])
"""
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not half.exists():
        assert child.poll() is None
        time.sleep(0.01)
    os.kill(child.pid, number)
    _, said = child.communicate(timeout=600)
    assert child.returncode == 130
    assert "Traceback" not in said
    assert not half.exists()


@pytest.mark.fault(68)
def test_a_closed_pipe_is_quiet(program):
    code = "from tierstore_cli.main import cli; cli(['doctor'])"
    child = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.close(0)\n{code}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        child.stdout.close()  # before it can have written anything
        assert child.stderr.read() == ""
    assert child.returncode == 141


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.fault(68)
def test_a_full_disk_behind_stdout_is_an_io_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from tierstore_cli.main import cli; cli(['doctor', '--json'])"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 6
    assert "No space left" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_options_can_come_from_the_environment(program, tmp_path):
    done = program("doctor", TIERSTORE_DOCTOR_JSON="1")
    assert done.stdout.startswith("{")


def failing(error: BaseException) -> Group:
    """Return the group with one command, `fail`, that raises `error`."""

    @click.command(cls=Command)
    def fail(out: object) -> None:
        raise error

    class OneCommand(Group):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
            return fail

    return OneCommand("tierstore")


def test_notes_of_an_error_are_lines_of_its_message(run_json, monkeypatch):
    """Such as that of a store that was made, could not be opened and is still there."""
    error = errors.StoreIOError("no memory to open it")
    error.add_note("/x.tier was created and still exists")
    result = CliRunner().invoke(failing(error), ["fail"])
    assert result.stderr == "Error: no memory to open it\n/x.tier was created and still exists\n"


@pytest.mark.fault(28)
def test_interrupted_before_and_after_the_command(monkeypatch, capsys):
    class Pressed:
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "tierstore_cli.main", Pressed())
    with pytest.raises(SystemExit) as ended:
        entry.run()
    assert (ended.value.code, capsys.readouterr().err) == (130, "\nInterrupted.\n")

    def interrupted(prog_name):
        sys.exit(130)

    monkeypatch.setitem(sys.modules, "tierstore_cli.main", SimpleNamespace(cli=interrupted))
    monkeypatch.setattr(logging.root.manager, "disable", 0)
    with pytest.raises(SystemExit):
        entry.run()
    logging.getLogger("asyncio").error("Task was destroyed but it is pending!")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.fault(28)
def test_a_change_is_not_halved_by_other_signals_either(number):
    done = []
    with pytest.raises(KeyboardInterrupt), raising_interrupt(number), interrupts_deferred():
        os.kill(os.getpid(), number)
        done.append("first half")
        time.sleep(0)
        done.append("second half")
    assert done == ["first half", "second half"]
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.fault(28)
def test_a_background_job_of_a_shell_is_ended_by_sigterm():
    """A shell without job control has such jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), raising_interrupt(signal.SIGTERM):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    finally:
        signal.signal(signal.SIGINT, before)
