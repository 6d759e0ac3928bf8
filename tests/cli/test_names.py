"""Names of options: one meaning each, old ones for one release, and their environment variables."""

from collections import defaultdict
from pathlib import Path

import click
import numpy as np
import pytest

import tierstore
from tierstore.stats import History
from tierstore_cli.command import variables
from tierstore_cli.commands import load_command, summaries
from tierstore_cli.main import BEGIN

COMMANDS = {name: load_command(name) for name in summaries()}
BEFORE = [
    (name, old, new) for name, command in COMMANDS.items() for old, new in command.was.items()
]


_KINDS = {"N": "number", "SIZE": "bytes", "A:B": "range", "integer": "number", "float": "number"}
"""What values of types with these names are; others are text: names, files and choices."""


def _kind(name: str) -> str:
    return _KINDS.get(name.removesuffix(" range"), "text")


def shown(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option) and not each.hidden]


def test_an_option_of_several_commands_takes_one_kind_of_value():
    kinds = defaultdict(lambda: defaultdict(list))
    for name, command in COMMANDS.items():
        for option in shown(command):
            kind = "flag" if option.is_flag else _kind(option.type.name)
            for each in option.opts:
                kinds[each][kind].append(name)
    assert {option: dict(found) for option, found in kinds.items() if len(found) > 1} == {}


RUNS = {
    ("diff", "--ids"): ("diff STORE 2 3 --ids", "diff STORE 2 3 --changed"),
    ("export", "--fields"): (
        "export STORE - --format csv --table item --fields weight --range 0:2",
        "export STORE - --format csv --table item --field weight --range 0:2",
    ),
    ("export", "--ids"): (
        "export STORE - --format csv --table item --ids IDS",
        "export STORE - --format csv --table item --ids-from IDS",
    ),
    ("export", "--name"): (
        "export STORE - --format csv --table user --name key=who",
        "export STORE - --format csv --table user --rename key=who",
    ),
    ("export", "--rows"): (
        "export STORE - --format csv --table item --rows 3:5",
        "export STORE - --format csv --table item --range 3:5",
    ),
    ("follow", "--ids"): ("follow STORE --timeout 0 --ids", "follow STORE --timeout 0 --changed"),
    ("get", "--ids"): ("get STORE --table item --ids IDS", "get STORE --table item --ids-from IDS"),
    ("init", "--keys"): (
        "init STORE --table a --dim 2 --keys text --dry-run",
        "init STORE --table a --dim 2 --by-key text --dry-run",
    ),
    ("inspect", "--rows"): (
        "inspect STORE --table item --rows 1:3",
        "inspect STORE --table item --range 1:3",
    ),
    ("inspect", "--versions"): ("inspect STORE --versions", None),
    ("plan", "--depth"): ("plan STORE --table item --depth 4", "plan STORE --table item"),
    ("plan", "--on"): ("plan STORE --table item --on .", "plan STORE --table item"),
    ("publish", "--keep"): ("publish STORE A --keep 1", "publish STORE B --last 1"),
    ("report", "--hits"): ("report STORE a.html --hits HITS", "report STORE b.html --history HITS"),
    ("restore", "--name"): ("restore STORE --name first", None),
    ("simulate", "--depth"): (
        "simulate TRACE --rows 50 --batch 5 --slots 9 --depth 4",
        "simulate TRACE --rows 50 --batch 5 --slots 9",
    ),
    ("simulate", "--no-optimum"): (
        "simulate TRACE --rows 50 --batch 5 --slots 9 --no-optimum",
        None,
    ),
    ("simulate", "--size"): (
        "simulate TRACE --rows 50 --batch 5 --size 9",
        "simulate TRACE --rows 50 --batch 5 --slots 9",
    ),
}
"""A command by an old name, and the same by the new one."""


def test_each_old_name_is_tried():
    assert set(RUNS) == {(name, old) for name, old, _ in BEFORE}


@pytest.fixture
def place(tmp_path: Path, pair: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.txt").write_text("4\n2\n")
    np.save(tmp_path / "trace.npy", np.random.default_rng(1).integers(0, 50, 200))
    with tierstore.open(pair, budget=tierstore.Budget(host_rows=20)) as store:
        history = History(store["item"])
        for step in range(9):
            store["item"].read(np.arange(step, step + 9))
            history.sample(step)
        history.save("hits.jsonl")
    with tierstore.open(pair, "r+") as store:
        store.keep(3, "first")
    return tmp_path


@pytest.mark.parametrize(("name", "old", "new"), BEFORE)
def test_an_old_name_does_the_same_and_says_the_new_one(run, place, pair, name, old, new):
    files = {"STORE": pair, "IDS": "ids.txt", "TRACE": "trace.npy", "HITS": "hits.jsonl"}
    results = []
    for line in RUNS[name, old]:
        words = [] if line is None else [files.get(word, word) for word in line.split()]
        results.append(run(*words) if words else None)
    before, now = results
    what = f"is called {new} now" if new.startswith("--") else f"will go: {new}"
    assert before.stderr.splitlines()[0].startswith(f"Deprecated: {name}: {old} {what}; ")
    assert "next release" in before.stderr
    if now is not None:
        assert "Deprecated" not in now.stderr
        same = [each.stdout.replace("B/", "A/").replace("b.html", "a.html") for each in results]
        assert same[0] == same[1]
    assert old not in [word for option in shown(COMMANDS[name]) for word in option.opts]
    assert f"{old} " not in run(name, "--help").stdout.replace(f"{old}-", "")


def test_an_old_name_beside_the_new_one_is_refused(run, pair):
    said = run("inspect", pair, "--rows", "0:1", "--range", "0:2", code=2).stderr
    assert "--rows is the old name of --range" in said


def test_an_old_name_checks_its_value_as_the_new_one(run, pair):
    said = run("inspect", pair, "--rows", "5:3", code=2).stderr
    assert "3 is not after 5" in said and "--rows" in said


def test_options_are_those_of_the_environment(run, pair, monkeypatch):
    monkeypatch.setenv("TIERSTORE_TABLE", "user")
    assert run("get", pair, 2).stdout.split("\t")[1] == "name_2"
    assert run("near", pair, "--id", 2, "-k", 1).stdout.split()[1] == "KEY"
    monkeypatch.setenv("TIERSTORE_GET_TABLE", "item")  # that of a command goes first
    assert len(run("get", pair, 2).stdout.split("\t")) == 9
    assert len(run("get", pair, 2, "--table", "user").stdout.split("\t")) == 5
    monkeypatch.setenv("TIERSTORE_EXPORT_RANGE", "1:3")
    assert len(run("export", pair, "-", "--format", "csv", "--no-header").stdout.split()) == 2


def test_a_table_of_the_environment_is_no_option_where_none_goes(run, place, pair, monkeypatch):
    monkeypatch.setenv("TIERSTORE_TABLE", "item")
    run("report", pair, "page.html")
    run("diff", pair, 2, 3, "--out", "some.patch")
    run("simulate", "trace.npy", "--rows", 50)
    run("export", pair, "whole.npy", "--part", "0/1")
    run("export", pair, "whole.npy", "--finish")
    assert "<td>user</td>" in Path("page.html").read_text()
    run("report", pair, "other.html", "--table", "item")
    one = Path("other.html").read_text()
    assert "<td>item</td>" in one and "user" not in one
    run("report", pair, "third.html", "--table", "items", code=1)


def test_unknown_variables_are_named_with_the_nearest(run, pair, monkeypatch):
    assert run("log", pair).stderr == ""
    monkeypatch.setenv("TIERSTORE_EXPORT_TABEL", "x")
    monkeypatch.setenv("TIERSTORE_TABLES", "x")
    monkeypatch.setenv("TIERSTORE_ADD_FIELD_DIM", "3")  # an option of another command
    monkeypatch.setenv("TIERSTORE_BUDGET", "1GiB")
    assert run("log", pair).stderr.splitlines() == [
        f"Warning: {name} in the environment sets nothing; did you mean {near}?"
        for name, near in (
            ("TIERSTORE_EXPORT_TABEL", "TIERSTORE_EXPORT_TABLE"),
            ("TIERSTORE_TABLES", "TIERSTORE_TABLE"),
        )
    ]


def test_each_option_has_a_variable_of_its_own():
    for name, command in COMMANDS.items():
        named = [variables(name, each)[0] for each in shown(command)]
        assert len(set(named)) == len(named), name


def test_the_commands_to_begin_with_are_commands():
    assert {line.split()[1] for line in BEGIN.values()} <= set(COMMANDS)
