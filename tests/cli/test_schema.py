"""What --json prints of stores of four shapes is what docs/json.md says, whatever is in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore_cli.commands import summaries

SHAPES = ("plain", "state", "keyed", "parts")
PAGE = Path(__file__).parents[2] / "docs/json.md"
WORDS = {"text": str, "bool": bool, "integer": int, "number": (int, float)}

RUNS = [
    "inspect S",
    "inspect S --stats --table item",
    "inspect S --range 0:2 --table item",
    "get S 0 7 --table item",
    "near S --id 3 --table item",
    "near S --id 3 --id 4 --table item",
    "keep S before",
    "put S --id 3 1 2 3 4 5 6 --table item",
    "log S",
    "load S rows.npy --dry-run",
    "diff S before --changed",
    "diff S before --out a.patch",
    "save S copy.tier",
    "save S copy.tier --incremental",
    "publish S serving",
    "export S out.npy --table item",
    "restore S before",
    "load S rows.npy --table other",
    "add-field S --table other extra",
    "drop-field S --table other extra",
    "grow S --table other --rows 50",
    "alter S --table other --dtype float16",
    "copy-table copy.tier S --table item --as third",
    "rename S third fourth",
    "keys set S keys.txt --table other",
    "verify S",
    "report S page.html",
    "drop S other",
    "release S before",
    "fold S",
    "init S --table more --rows 3 --dim 2",
    "repair S fixed.tier",
    "top S --count 1",
    "doctor S",
    "plan S --table fourth",
    "inspect nothing.tier",
    "get S 999 --table fourth",
    "keep S",
]
"""One after another, on a store of each shape; those without a section in the page are objects."""
ELSEWHERE = {"bench", "expire", "follow", "mend", "patch", "remove", "simulate"}
"""Commands whose objects other tests look at, as they need another store or none."""


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


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_command_prints_what_the_page_says(run, shapes, tmp_path, monkeypatch, shape):
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", np.random.default_rng(1).normal(size=(30, 4)).astype("f4"))
    Path("keys.txt").write_text("".join(f"x{n}\n" for n in range(50)))
    page, found = sections(), []
    for line in RUNS:
        words = [str(shapes[shape]) if word == "S" else word for word in line.split()]
        code = {"inspect nothing.tier": 3, "get S 999 --table fourth": 1, "keep S": 2}.get(line, 0)
        (printed,) = run(*words, "--json", code=code).stdout.splitlines()
        data = json.loads(printed, parse_constant=pytest.fail)
        options = sorted(word for word in words if f"{words[0]} {word}" in page)
        if words.count("--id") > 1:
            options = ["of several rows"]
        title = "error" if code else f"{words[0]} {' '.join(options)}".strip()
        if line.startswith(("plan", "top", "doctor")):
            assert isinstance(data, dict) and "error" not in data
            continue
        assert title in page, line
        found += [f"{line}: {each}" for each in differences(page[title], data)]
    assert found == []


def test_every_command_is_tried():
    assert {line.split()[0] for line in RUNS} | ELSEWHERE == set(summaries())


def test_a_value_of_another_shape_is_seen():
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


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_home_and_on_40_columns_numbers_are_whole(program, shapes, tmp_path, shape):
    for command in (["inspect"], ["log"], ["top", "--count", "1"], ["get", "3", "--table", "item"]):
        name, *more = command
        done = program(name, shapes[shape], *more, HOME="", COLUMNS="40", XDG_CACHE_HOME="")
        assert done.returncode == 0, done.stderr
        assert "…" not in done.stdout and done.stderr == ""
