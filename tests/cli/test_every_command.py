"""Every command on stores of four shapes: what it prints, what it changes, and how it ends.

A command without a case fails `test_every_command_has_a_case`. What a command prints with --json is
compared with docs/json.md, and what it leaves on the disk with NumPy arrays.
"""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tierstore
from tests.cli.conftest import COMMAND, SHAPES
from tierstore_cli.commands import summaries
from tierstore_cli.main import cli

PAGE = Path(__file__).parents[2] / "docs/json.md"
WORDS = {"text": str, "bool": bool, "integer": int, "number": (int, float)}
LIBRARY = str(Path(tierstore.__file__).parent)

Rows = dict[Any, np.ndarray]
Contents = dict[str, dict[str, Rows]]
"""The rows of each field of each table, by key, or by id where there are no keys."""

ITEM = np.random.default_rng(1).normal(size=(40, 6)).astype("f4")
OTHER = np.random.default_rng(2).normal(size=(30, 4)).astype("f4")
USED = np.arange(20, dtype="f4").reshape(10, 2)


def rows_of(values: np.ndarray, keys: Any = None) -> Rows:
    return dict(zip(range(len(values)) if keys is None else keys, values, strict=True))


def contents(path: Path) -> Contents:
    """Read everything in a store, with the library."""
    found: Contents = {}
    with tierstore.open(path) as store:
        for name, table in store.items():
            every = np.arange(table.rows)
            keys = None if table.keys is None else list(table.keys[:])
            found[name] = {
                field: rows_of(np.asarray(table.by_row.read(every, field), "f4"), keys)
                for field in table.fields
                if field != "uses"
            }
    return found


def is_same(one: Contents, other: Contents) -> bool:
    def plain(each: Contents) -> Any:
        return {
            table: {
                field: {key: np.asarray(row, "f4").tobytes() for key, row in rows.items()}
                for field, rows in fields.items()
            }
            for table, fields in each.items()
        }

    return bool(plain(one) == plain(other))


def prepared(shape: str) -> Contents:
    """Return what the store of a shape holds once it is prepared; see `places`."""
    named = [f"k{n}" for n in range(40)] if shape in ("state", "keyed") else None
    item = ITEM.copy()
    item[3] = np.arange(1, 7)
    made: Contents = {"item": {"weight": rows_of(item, named)}}
    if shape == "state":
        halves = (ITEM / 2).view(np.uint32).astype(np.uint64)  # rounded to bfloat16, half to even
        halves = (halves + 0x7FFF + ((halves >> 16) & 1)) & 0xFFFF0000
        made["item"]["exp_avg"] = rows_of(halves.astype(np.uint32).view("f4"), named)
        made["user"] = {"weight": rows_of(np.zeros((5, 2), "f4"))}
    made["other"] = {"weight": rows_of(OTHER), "extra": rows_of(np.zeros((30, 4), "f4"))}
    made["used"] = {"weight": rows_of(USED, range(10))}
    return made


@pytest.fixture(scope="session")
def places(originals: Mapping[str, Path], tmp_path_factory: Any) -> Callable[[str], Path]:
    """Make the directory of a shape, once: the store S, copies of it, a patch, and files."""

    @functools.cache
    def make(shape: str) -> Path:
        place = Path(tmp_path_factory.mktemp(f"prepared-{shape}"))
        store = shutil.copytree(originals[shape], place / "S")
        np.save(place / "rows.npy", OTHER)
        np.save(place / "ids.npy", np.random.default_rng(3).integers(0, 50, 200))
        (place / "keys.txt").write_text("".join(f"x{n}\n" for n in range(30)))
        for name, numbers in (("used", range(10)), ("again", range(5))):
            lines = [f"{n},{USED[n, 0]},{USED[n, 1]}\n" for n in numbers]
            (place / f"{name}.csv").write_text("".join(["id,a,b\n", *lines]))
        for line in (
            f"load {store} {place}/rows.npy --table other",
            f"add-field {store} --table other extra",
            f"init {store} --table used --by-key int64 --track-uses --dim 2",
            f"load {store} {place}/used.csv --table used --key-column id --upsert",
            f"load {store} {place}/again.csv --table used --key-column id --upsert",
            f"keep {store} before",
            f"save {store} {place}/early.tier",
            f"put {store} --table item --id 3 1 2 3 4 5 6",
            f"save {store} {place}/copy.tier",
            f"diff {store} before --out {place}/a.patch",
        ):
            done = CliRunner().invoke(cli, line.split())
            assert done.exit_code == 0, (line, done.output)
        return place

    return make


@pytest.fixture
def place(
    places: Callable[[str], Path], shape: str, command: Case, tmp_path: Path, monkeypatch: Any
) -> Path:
    """A copy of the directory of a shape, which is the current one, ready for a command."""
    copy = shutil.copytree(places(shape), tmp_path / "here")
    monkeypatch.chdir(copy)
    if command.first:
        assert CliRunner().invoke(cli, command.first.split()).exit_code == 0
    return copy


# -- what commands are to change and to show


def weights(model: Contents, table: str = "item", field: str = "weight") -> np.ndarray:
    return np.array(list(model[table][field].values()))


def add_field(model: Contents) -> None:
    model["other"]["more"] = rows_of(np.zeros((30, 4), "f4"))


def alter(model: Contents) -> None:
    for field, rows in model["other"].items():
        model["other"][field] = {key: row.astype("f2") for key, row in rows.items()}


def copy_table(model: Contents) -> None:
    model["third"] = model["item"]


def expire(model: Contents) -> None:
    model["used"]["weight"] = {n: USED[n] for n in range(5)}


def grow(model: Contents) -> None:
    for rows in model["other"].values():
        rows |= {n: np.zeros(4, "f4") for n in range(30, 50)}


def set_keys(model: Contents) -> None:
    for field, rows in model["other"].items():
        model["other"][field] = {f"x{n}": row for n, row in rows.items()}


def put(model: Contents) -> None:
    key = list(model["item"]["weight"])[5]
    model["item"]["weight"][key] = np.arange(6, 0, -1)


def restore(model: Contents) -> None:
    key = list(model["item"]["weight"])[3]
    model["item"]["weight"][key] = ITEM[3]


def shows_rows(model: Contents, data: Any) -> None:
    assert [each["id"] for each in data["rows"]] == [0, 7]
    shown = [each["values"] for each in data["rows"]]
    np.testing.assert_array_equal(np.float32(shown), weights(model)[[0, 7]])


def shows_neighbours(model: Contents, data: Any) -> None:
    rows = weights(model) / np.linalg.norm(weights(model), axis=1, keepdims=True)
    cosines = rows @ rows[3]
    best = np.argsort(-cosines)[: len(data["near"]) + 1]
    assert {each["id"] for each in data["near"]} <= {3, *best.tolist()}
    for each in data["near"]:
        assert each["score"] == pytest.approx(cosines[each["id"]], abs=1e-5)


def shows_norms(model: Contents, data: Any) -> None:
    norms = np.linalg.norm(weights(model), axis=1)
    (stats,) = [each["stats"] for each in data["tables"]]
    assert stats["rows_read"] == 40 and stats["zero_rows"] == 0
    assert stats["norm"]["max"] == pytest.approx(norms.max(), rel=1e-5)
    assert stats["norm"]["min"] == pytest.approx(norms.min(), rel=1e-5)


def shows_log(model: Contents, data: Any) -> None:
    assert data["versions"][0]["tables"] == {"item": 1}


def shows_difference(model: Contents, data: Any) -> None:
    assert data["tables"] == {"item": 1} and data["rows"]["item"]["ids"] == [3]


def shows_hits(model: Contents, data: Any) -> None:
    """An LRU list of ten rows, as long as a tenth of the batches is left out."""
    ids, slots, hits, asked = np.load("ids.npy").reshape(-1, 10), [], 0, 0
    size = 10
    for number, batch in enumerate(ids):
        distinct = dict.fromkeys(batch.tolist())
        if number >= len(ids) - data["measured_batches"]:
            hits += sum(each in slots for each in batch.tolist())
            asked += batch.size
        slots = [*(each for each in slots if each not in distinct), *distinct][-size:]
    (found,) = [p for p in data["points"] if (p["policy"], p["slots"]) == ("lru", size)]
    assert found["hit_rate"] == pytest.approx(hits / asked, abs=0.1)


def wrote_rows(model: Contents, data: Any) -> None:
    np.testing.assert_array_equal(np.load("out.npy"), weights(model))


def published(model: Contents, data: Any) -> None:
    np.testing.assert_array_equal(np.load("serving/current/item.npy"), weights(model))


def made(name: str) -> Callable[[Contents, Any], None]:
    """Return a check that another store holds the same."""

    def check(model: Contents, data: Any) -> None:
        assert is_same(contents(Path(name)), model)

    return check


@dataclass(frozen=True)
class Case:
    """A command line, and what it does to the prepared store S.

    Attributes:
        line: the words after `tierstore`.
        change: makes the same change to what S holds.
        shows: checks the object that is printed, and files that are written.
        code: the exit code.
        codes: those of some shapes, if they are others.
        first: a command that is run before.
    """

    line: str
    change: Callable[[Contents], object]
    shows: Callable[[Contents, Any], object]
    code: int
    codes: Mapping[str, int]
    first: str


def nothing(*_: object) -> None:
    """Change or show nothing."""


def case(
    line: str,
    change: Any = nothing,
    shows: Any = nothing,
    code: int = 0,
    first: str = "",
    **codes: int,
) -> Case:
    return Case(line, change, shows, code, codes, first)


CASES = [
    case("add-field S --table other more", add_field),
    case("alter S --table other --dtype float16", alter),
    case("bench --size 2MiB --seconds 0.01"),
    case("copy-table copy.tier S --table item --as third", copy_table),
    case("diff S before --changed", shows=shows_difference),
    case("doctor S"),
    case("drop S other", lambda model: model.pop("other")),
    case("drop-field S --table other extra", lambda model: model["other"].pop("extra")),
    case("expire S --table used --fewer-than 2", expire),
    case("export S out.npy --table item", shows=wrote_rows),
    case("fold S", first="release S before"),
    case("follow S --count 1 --every 0.01 --timeout 60"),
    case("get S 0 7 --table item", shows=shows_rows),
    case("grow S --table other --rows 50", grow),
    case(
        "init S --table more --rows 3 --dim 2",
        lambda model: model.update(more={"weight": rows_of(np.zeros((3, 2)))}),
    ),
    case("inspect S --table item --stats", shows=shows_norms),
    case("keep S now"),
    case("keys set S keys.txt --table other", set_keys),
    case(
        "load S rows.npy --table new",
        lambda model: model.update(new={"weight": rows_of(OTHER)}),
    ),
    case("log S", shows=shows_log),
    case("mend S", parts=2),
    case("near S --id 3 --table item", shows=shows_neighbours),
    case("patch early.tier a.patch", shows=made("early.tier")),
    case("plan S --table item"),
    case("publish S serving --table item", shows=published),
    case("put S --table item --id 5 6 5 4 3 2 1", put),
    case("release S before"),
    case("remove S --table used --key 3", lambda model: model["used"]["weight"].pop(3)),
    case("rename S other thing", lambda model: model.update(thing=model.pop("other"))),
    case("repair S fixed.tier", shows=made("fixed.tier")),
    case("report S page.html"),
    case("restore S before", restore),
    case("save S new.tier", shows=made("new.tier")),
    case("simulate ids.npy --rows 50 --batch 10", shows=shows_hits),
    case("top S --count 1"),
    case("verify S"),
]
"""One for each command."""
OTHERS = [
    case("inspect S"),
    case("inspect S --range 0:2 --table item"),
    case("inspect nothing.tier", code=3),
    case("get S 999 --table item", code=1),
    case("get S 0 --field weight,extra --table other"),
    case("near S --id 3 --id 4 --table item"),
    case("near S --id 3", code=2),
    case("keep S", code=2),
    case("load S rows.npy --table new --dry-run"),
    case("load S rows.npy --table new --key-column none --nonsense", code=2),
    case("load S again.csv --table used --key-column id --upsert"),
    case("diff S before --removed"),
    case("diff S before --out b.patch"),
    case("save S early.tier --incremental", shows=made("early.tier")),
    case("save S copy.tier", code=1),
    case("publish S serving --table nothing", code=1),
    case("plan --rows 50 --dim 4 --trace ids.npy --batch 10"),
]
"""With other options, and failures."""
NAMES = [each.line.split()[0] for each in CASES]


def test_every_command_has_a_case() -> None:
    assert sorted(NAMES) == sorted(summaries())
    assert {each.line.split()[0] for each in OTHERS} <= set(NAMES)


# -- the shape of what is printed


def sections() -> dict[str, Any]:
    """Return the shape of the object in each section, and of a failure under "error"."""
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"^## ([^\n]*)\n\n```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (error,) = re.findall(r'^```\n(\{\n  "error".*?)^```$', text, re.MULTILINE | re.DOTALL)
    return {title: json.loads(body) for title, body in [*named, ("error", error)]}


def differences(shape: Any, value: Any, at: str = "") -> list[str]:
    """Return where a value is not of a shape; null, and what a `?` stands for, may be anything."""
    if value is None or shape in ("?", [], {}):
        return []
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{at}: {value!r} is no object"]
        if "<name>" in shape:
            shape = dict.fromkeys(value, shape["<name>"])
        keys = [f"{at}.{key}: only on one side" for key in shape.keys() ^ value.keys()]
        both = shape.keys() & value.keys()
        return keys + [
            each for key in both for each in differences(shape[key], value[key], f"{at}.{key}")
        ]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{at}: {value!r} is no list"]
        return [each for item in value for each in differences(shape[0], item, f"{at}[]")]
    good = isinstance(value, WORDS[shape]) and (shape == "bool") == isinstance(value, bool)
    return [] if good else [f"{at}: {value!r} is no {shape}"]


def section(line: str, page: Mapping[str, Any]) -> str:
    """Return the title of what a command line prints."""
    name, *words = line.split()
    options = sorted(word for word in words if f"{name} {word}" in page)
    if words.count("--id") > 1:
        options = ["of several rows"]
    return f"{name} {' '.join(options)}".strip()


def test_a_value_of_another_shape_is_seen() -> None:
    shape = {"a": "integer", "rows": [{"n": "number"}], "of": {"<name>": "text"}}
    good = {"a": 1, "rows": [{"n": 1.5}, {"n": 2}], "of": {"x": "y"}}
    assert differences(shape, good) == []
    for key, wrong in (
        ("a", 1.5),
        ("a", True),
        ("rows", [{"m": 1}]),
        ("of", {"x": 1}),
        ("rows", 3),
    ):
        assert differences(shape, {**good, key: wrong}), key
    assert differences(shape, {"a": 1, "of": {}}) and differences(shape, {**good, "more": 1})


# -- the tests


@contextmanager
def beside(line: str) -> Iterator[None]:
    """Commit to S, the same rows, while `follow` waits for a version."""
    ended = threading.Event()

    def commit() -> None:
        with tierstore.open("S", "r+") as store:
            while not ended.wait(0.05):
                store.commit()

    def commit_in_parts() -> None:
        with tierstore.distributed.open("S") as store:
            while not ended.wait(0.05):
                store.commit()

    if not line.startswith("follow"):
        yield
        return
    thread = threading.Thread(target=commit_in_parts if Path("S/partitions").exists() else commit)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.variants(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("command", [*CASES, *OTHERS], ids=lambda each: each.line)
def test_what_it_prints_and_changes(place: Path, shape: str, command: Case) -> None:
    page, expected = sections(), prepared(shape)
    assert is_same(contents(place / "S"), expected)
    with beside(command.line):
        done = CliRunner().invoke(cli, [*command.line.split(), "--json"])
    code = command.codes.get(shape, command.code)
    assert done.exit_code == code, done.output
    (printed,) = done.stdout.splitlines()
    data = json.loads(printed, parse_constant=pytest.fail)
    if code:
        assert differences(page["error"], data) == []
    elif command.line.startswith("doctor"):
        assert data["problems"] == [] and not data["store"]["damage"]
    else:
        assert differences(page[section(command.line, page)], data) == []
        command.change(expected)
        command.shows(expected, data)
    assert is_same(contents(place / "S"), expected)
    assert tierstore.verify("S").ok


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["state"])
@pytest.mark.parametrize("command", CASES, ids=NAMES)
def test_a_closed_pipe_ends_it_without_a_word(place: Path, command: Case) -> None:
    if command.line.startswith("follow"):
        return  # prints nothing until there is a version: see test_follow
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, *command.line.split()], stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)
    assert done.returncode == 141, done.stderr
    assert b"Traceback" not in done.stderr and b"Error" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["state"])
@pytest.mark.parametrize("command", CASES, ids=NAMES)
def test_a_narrow_terminal_and_no_home(place: Path, command: Case) -> None:
    line = command.line.replace("--timeout 60", "--timeout 0.1")
    main, other = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key != "HOME"}
    process = subprocess.Popen(
        [*COMMAND, *line.split()],
        stdin=subprocess.DEVNULL,
        stdout=other,
        stderr=other,
        env={**env, "COLUMNS": "40", "TERM": "dumb", "XDG_CACHE_HOME": ""},
    )
    os.close(other)
    shown = b""
    try:
        while block := os.read(main, 1 << 16):
            shown += block
    except OSError:  # the last one has closed it
        pass
    finally:
        os.close(main)
    assert process.wait(timeout=600) == 0, shown
    assert b"Traceback" not in shown and "…".encode() not in shown.replace(b"\xe2\x80\xa6 and", b"")


def interrupted(line: str, share: float) -> int:
    """Run a command; Ctrl-C after a share of the calls that it makes in all. Returns its code."""
    seen, limit = 0, sys.maxsize

    def note(frame: Any, event: str, _: object) -> None:
        nonlocal seen
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            seen += 1
            if seen == limit:
                signal.raise_signal(signal.SIGINT)

    def run(words: list[str]) -> Any:
        nonlocal seen
        seen = 0
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            return CliRunner().invoke(cli, words)
        finally:
            sys.setprofile(before)

    words = line.split()
    here = Path.cwd()
    trial = shutil.copytree(here, here.with_name("trial"))
    os.chdir(trial)
    assert run(words).exit_code == 0
    os.chdir(here)
    limit = max(1, int(seen * share))
    done = run(words)
    assert "Traceback" not in done.output
    if done.exit_code:
        assert done.stderr.rstrip().endswith(".") and "nterrupted" in done.stderr
    return int(done.exit_code)


@pytest.mark.variants(2)
@pytest.mark.parametrize("shape", ["state"])
@pytest.mark.parametrize("command", CASES, ids=NAMES)
def test_ctrl_c_leaves_the_store_as_it_was_or_is_to_be(
    place: Path, shape: str, command: Case
) -> None:
    share = (0.1, 0.5, 0.7, 0.95)[CASES.index(command) % 4]
    line = command.line.replace("--timeout 60", "--timeout 0.1")
    before, after = prepared(shape), prepared(shape)
    command.change(after)
    assert interrupted(line, share) == 130
    found = contents(place / "S")
    assert is_same(found, before) or is_same(found, after)
    assert tierstore.verify("S").ok
