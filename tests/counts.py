"""What the library weighs, in numbers that only fall.

    python -m tests.counts                     what is above its number in tests/counts.json
    python -m tests.counts --write             lower the numbers to what is there now
    python -m tests.counts --raise "WHY"       raise those that are above, with the reason

Counted are lines of code without comments, docstrings and blank lines, by package; modules in
circles of imports, those for types alone included; private names of other modules that are reached,
by package and from the tests; numeric constants of modules and classes, which no benchmark may have
chosen; and the files in which the questions of `QUESTIONS` are asked anew.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import itertools
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
NUMBERS = Path(__file__).with_name("counts.json")
NATIVE = (".c", ".h", ".cu", ".cuh")
QUESTIONS = {
    "by key?": r"ByKey|KeyedTable|\bis_keyed|_?keyed is|by_key",
    "which library?": r"is_torch|is_cupy|isinstance\([^)]*Tensor|\.is_nested|is_sparse",
    "in partitions?": r"[Pp]artition(?!\()",
    "writable?": r"writable|mode (==|!=)|read_only|\br\+",
    "a slot for each row?": r"\bdirect\b|\bfits_whole\b",
    "a GPU?": r"gpu is|device is|GpuTier|on_device|\.gpu\b",
    "scaled?": r"\bscale[ds]?\b",
    "compiled, functorch?": r"is_compiling|functorch|is_tracing",
    "ranks?": r"\branks?\b|Distributed",
    "averaged?": r"average",
    "joint?": r"\bJoint|WholeSpace",
    "objects?": r"_io\.Objects|is_url|\bremote\b|fsspec",
}
"""What is decided by an `if` in many files; each should be decided in one. Patterns of tests."""

_FOREIGN = ("os", "sys", "np", "threading")
_OF_NAMED_TUPLES = ("_asdict", "_fields", "_make", "_replace")
_OF_NOTEBOOKS = ("_repr_html_", "_ipython_key_completions_")
"""Methods that Python and Jupyter document for everybody; their names only differ from others."""


Nodes = Sequence[ast.AST]
"""Of a syntax tree: walking it takes most of the time, so this is done once."""


class Module(NamedTuple):
    """A Python file: its dotted name, its package, its text and its nodes."""

    name: str
    package: str
    text: str
    nodes: Nodes


def counted(root: Path = ROOT) -> dict[str, int]:
    """Return every number of the tree at `root`, by name."""
    modules = list(_modules(root))
    found: Counter[str] = Counter()
    for module in modules:
        found[f"code of {module.package}"] += code_lines(module.text, module.nodes)
        found[f"private names reached from {module.package}"] += len(reaches(module.nodes))
        found["numeric constants"] += sum(1 for _ in constants(module.nodes))
        found["files that ask a question"] += len(asked(module.nodes))
    for folder in ("tierstore", "cli"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in NATIVE:
                package = _package(path.relative_to(root))
                found[f"code of {package}"] += native_lines(path.read_text(encoding="utf-8"))
    groups = circles(imports({module.name: module.nodes for module in modules}))
    found["circles of imports"] = len(groups)
    found["modules in circles of imports"] = sum(map(len, groups))
    for path in sorted((root / "tests").rglob("*.py")):
        if path.name != "inside.py":
            text = path.read_text(encoding="utf-8")
            if re.search(r"(?<!\bself)\._(?!_)", text):
                nodes = list(ast.walk(ast.parse(text)))
                found["private names reached from tests"] += len(reaches(nodes))
    return {name: found[name] for name in sorted(found)}


def code_lines(text: str, nodes: Nodes) -> int:
    """Return how many lines of a Python file hold code: no comment, docstring or blank line."""
    quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*quiet, tokenize.ENDMARKER):
            code.update(range(token.start[0], token.end[0] + 1))
    for node in nodes:
        for item in (
            getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []
        ):
            match item:
                case ast.Expr(value=ast.Constant(value=str())):
                    code.difference_update(range(item.lineno, (item.end_lineno or 0) + 1))
    return len(code)


def native_lines(text: str) -> int:
    """Return how many lines of C or CUDA hold code."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return sum(1 for line in text.splitlines() if line.split("//")[0].strip())


def reaches(nodes: Nodes) -> list[str]:
    """Return the private attributes that a module takes of what is not its own."""
    own = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                own.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
            if node.attr in (*_OF_NAMED_TUPLES, *_OF_NOTEBOOKS):
                continue
            of = ast.unparse(node.value)
            mine = of in ("self", "cls") or node.attr in own
            if not mine and "torch" not in of and of.split(".")[0] not in _FOREIGN:
                found.append(ast.unparse(node))
    return found


def constants(nodes: Nodes) -> Iterator[str]:
    """Return the names that modules and classes give to numbers."""
    bodies = [node.body for node in nodes if isinstance(node, ast.Module | ast.ClassDef)]
    for item in itertools.chain(*bodies):
        if isinstance(item, ast.Assign | ast.AnnAssign) and _is_number(item.value):
            name = ast.unparse(item.targets[0] if isinstance(item, ast.Assign) else item.target)
            if re.fullmatch(r"_?[A-Z][A-Z_0-9]*", name):
                yield name


def asked(nodes: Nodes) -> set[str]:
    """Return the questions that a module asks in a condition."""
    conditions = []
    for node in nodes:
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            conditions.append(ast.unparse(node.test))
        elif isinstance(node, ast.comprehension):
            conditions += map(ast.unparse, node.ifs)
    text = "\n".join(conditions)
    return {name for name, pattern in QUESTIONS.items() if re.search(pattern, text)}


def imports(trees: Mapping[str, Nodes]) -> dict[str, set[str]]:
    """Return which modules each imports, anywhere in it and for types alone too."""
    edges: dict[str, set[str]] = {}
    for name, nodes in trees.items():
        wanted: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                wanted |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for each in node.names:
                    inner = f"{node.module}.{each.name}"
                    wanted.add(inner if inner in trees else node.module)
        edges[name] = {each for each in wanted if each in trees} - {name, "tierstore"}
    return edges


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules of which each imports all others, directly or not."""

    @functools.cache
    def reached(start: str) -> frozenset[str]:
        seen: set[str] = set()
        ahead = list(edges[start])
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += edges[name]
        return frozenset(seen)

    groups: dict[str, set[str]] = {}
    for name in edges:
        if name in reached(name) and name not in groups:
            group = {each for each in reached(name) if name in reached(each)}
            groups.update(dict.fromkeys(group, group))
    return list({id(group): group for group in groups.values()}.values())


def above(now: Mapping[str, int], numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return what is above its number, and by how much; what has no number may be none."""
    most = defaultdict(int, {name: each["most"] for name, each in numbers.items()})
    return {name: f"{n}, at most {most[name]}" for name, n in now.items() if n > most[name]}


def renewed(
    now: Mapping[str, int], numbers: Mapping[str, Mapping[str, Any]], why: str | None
) -> dict[str, dict[str, Any]]:
    """Return the numbers as they may be: lowered, and raised where there is a reason."""
    found: dict[str, dict[str, Any]] = {}
    for name, n in now.items():
        old = dict(numbers.get(name, {"most": 0}))
        if n < old["most"] or (n == 0 and name not in numbers):
            found[name] = {"most": n}
        elif n > old["most"] and why:
            found[name] = {"most": n, "why": why}
        elif name in numbers:
            found[name] = old
    return found


def numbers_of(path: Path = NUMBERS) -> dict[str, dict[str, Any]]:
    """Return the numbers that are checked in."""
    content: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return content


def main(arguments: list[str], root: Path = ROOT, path: Path = NUMBERS) -> int:
    """Print what is above its number; return 1 if anything is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="lower the numbers")
    parser.add_argument("--raise", dest="why", metavar="WHY", help="raise numbers for a reason")
    options = parser.parse_args(arguments)
    if options.why is not None and not options.why.strip():
        parser.error("--raise needs a reason")
    now = counted(root)
    numbers = numbers_of(path) if path.exists() else {}
    if options.write or options.why:
        numbers = renewed(now, numbers, options.why)
        lines = (f" {json.dumps(name)}: {json.dumps(each)}" for name, each in numbers.items())
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    risen = above(now, numbers)
    for name, what in risen.items():
        print(f"{name}: {what}")
    return bool(risen)


def _modules(root: Path) -> Iterator[Module]:
    for folder, top in (("tierstore", root), ("cli", root / "cli")):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            yield Module(
                name, _package(path.relative_to(root)), text, list(ast.walk(ast.parse(text)))
            )


def _package(path: Path) -> str:
    if path.parts[0] == "cli":
        return "cli"
    return path.parts[1] if len(path.parts) > 2 else "the top level"


def _is_number(node: ast.expr | None) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
        case ast.Tuple(elts=elements):
            return bool(elements) and all(map(_is_number, elements))
    return False


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
