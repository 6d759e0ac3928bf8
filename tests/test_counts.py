"""The numbers of tests/counts.json: that they hold, and that what is counted is what they say."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests import counts

LIBRARY = {
    "tierstore/__init__.py": "from tierstore.a import b\n",
    "tierstore/a/__init__.py": '"""Not code."""\n',
    "tierstore/a/b.py": """
        '''Two

        lines.'''
        from __future__ import annotations
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from tierstore.c import Kind  # a circle, for types alone
        _FEW, OTHER = 3, 4
        _MANY: int = 1 << 20
        NAME = "no number"
        class Table:
            '''What it is.'''
            LIMIT = (1, -2)
            def read(self, store: Kind) -> str:
                # A comment.
                return '''text
        in two lines''' + self._own + store._state + store._state.x.__dict__
        def other(table, partition):
            return table._own if 'a'.partition(':') else [1 for _ in [] if partition]
    """,
    "tierstore/c.py": "import tierstore.a.b\nfrom tierstore import d\n",
    "tierstore/d.py": "import os\nos._exit\n",
    "tierstore/a/kernel.cu": "// words\n/* more\n   words */\nint one; // and\n\nint two;\n",
    "cli/tierstore_cli/main.py": "import tierstore\nprint(tierstore._gone)\n",
    "tests/test_a.py": "def test(store):\n    assert store._state and store._state.x\n",
    "tests/inside.py": "def state(store):\n    return store._state\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in LIBRARY.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line.removeprefix("        ") for line in text.splitlines()]
        path.write_text("\n".join(lines).rstrip() + "\n")
    return tmp_path


def test_numbers_are_those_of_a_tree(tree: Path) -> None:
    found = counts.counted(tree)
    assert found == {
        "circles of imports": 1,
        "modules in circles of imports": 2,
        "code of a": 14 + 2,
        "code of the top level": 5,
        "code of cli": 2,
        "files that ask a question": 1,
        "numeric constants": 2,
        "private names reached from a": 3,
        "private names reached from cli": 1,
        "private names reached from the top level": 0,
        "private names reached from tests": 2,
    }


def test_circles_are_told_apart() -> None:
    edges = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}, "f": {"a"}}
    assert sorted(map(sorted, counts.circles(edges))) == [["a", "b"], ["c", "d", "e"]]
    assert counts.circles({"a": {"b"}, "b": set()}) == []


def test_a_number_falls_by_itself_and_rises_for_a_reason(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    assert counts.main([], tree, file) == 1  # nothing may be where there is no number
    assert counts.main(["--write"], tree, file) == 1
    assert counts.main(["--raise", "the beginning"], tree, file) == 0
    numbers = counts.numbers_of(file)
    assert numbers["code of cli"] == {"most": 2, "why": "the beginning"}

    path = tree / "cli/tierstore_cli/main.py"
    path.write_text("one = two = 3\n")
    assert counts.main([], tree, file) == 0
    assert counts.numbers_of(file) == numbers
    assert counts.main(["--write"], tree, file) == 0
    numbers = counts.numbers_of(file)
    assert numbers["code of cli"] == {"most": 1}
    assert numbers["code of a"]["why"] == "the beginning"

    path.write_text("one = 1\ntwo = 2\n")
    assert counts.main(["--write"], tree, file) == 1
    assert counts.numbers_of(file) == numbers
    with pytest.raises(SystemExit):
        counts.main(["--raise", " "], tree, file)
    assert counts.main(["--raise", "two words are clearer"], tree, file) == 0
    assert counts.numbers_of(file)["code of cli"] == {"most": 2, "why": "two words are clearer"}


def test_a_package_that_is_gone_has_no_number(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    counts.main(["--raise", "the beginning"], tree, file)
    (tree / "cli/tierstore_cli/main.py").unlink()
    assert counts.main(["--write"], tree, file) == 0
    assert not any("cli" in name for name in counts.numbers_of(file))


def test_what_is_reached_is_of_another() -> None:
    text = (
        "class A:\n    def f(self, other):\n        self._a = other._a, other._b, other.__dict__\n"
    )
    assert counts.reaches(list(ast.walk(ast.parse(text)))) == ["other._b"]


@pytest.mark.slow
def test_no_number_has_risen() -> None:
    numbers = counts.numbers_of()
    assert counts.NUMBERS.read_text(encoding="utf-8").count("\n") == len(numbers) + 2  # a line each
    assert all(each.keys() <= {"most", "why"} for each in numbers.values())
    risen = counts.above(counts.counted(), numbers)
    assert not risen, (
        "these numbers of tests/counts.json have risen. Look for another shape first; else give "
        'the reason with  python -m tests.counts --raise "WHY"\n' + json.dumps(risen, indent=1)
    )
