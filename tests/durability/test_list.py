"""Every number of docs/faults.md has a test, named `test_row_n_…` or marked `fault(n)`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LIST = TESTS.parent / "docs" / "faults.md"


def numbers_of(function: ast.FunctionDef) -> set[int]:
    """Return the numbers that a test says it covers."""
    found = {int(number) for number in re.findall(r"^test_row_(\d+)_", function.name)}
    for decorator in function.decorator_list:
        name = ast.unparse(decorator.func) if isinstance(decorator, ast.Call) else ""
        if name in ("pytest.mark.fault", "fault"):
            found |= {ast.literal_eval(argument) for argument in decorator.args}  # type: ignore[attr-defined]
    return found


def covered() -> dict[int, list[str]]:
    """Return the tests by number."""
    found: dict[int, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "fault" not in text and "def test_row_" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in numbers_of(node):
                    found.setdefault(number, []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def test_the_list_counts_to_78() -> None:
    numbers = re.findall(r"^\| (\d+) \|", LIST.read_text(encoding="utf-8"), re.MULTILINE)
    assert list(map(int, numbers)) == list(range(1, 79))


@pytest.mark.slow
def test_every_number_has_a_test() -> None:
    assert set(covered()) == set(range(1, 79))


def test_a_number_that_is_not_named_is_missed() -> None:
    """A negative control of the collector."""
    source = (
        "@pytest.mark.fault(3, 4)\ndef test_a(): ...\ndef test_row_5_b(): ...\ndef test_c(): ..."
    )
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert [numbers_of(function) for function in functions] == [{3, 4}, {5}, set()]
