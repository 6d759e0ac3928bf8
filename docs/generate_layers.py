"""Write the layers of the library into CONTRIBUTING.md: `make docs`."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
SECTION = re.compile(r"(<!-- layers: .*? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def page() -> str:
    """Return the whole page, with the layers of today."""
    text = PAGE.read_text(encoding="utf-8")
    return SECTION.sub(lambda match: f"{match[1]}{layers()}{match[3]}", text)


def layers() -> str:
    """Return the layers of pyproject.toml's import contract as a table, the lowest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each.get("containers") == ["tierstore"])
    lines = [
        f"| {number} | `{module}` | {first_line(module)} |\n"
        for number, layer in enumerate(reversed(contract["layers"]), start=1)
        for module in sorted(re.findall(r"\w+", layer))
    ]
    return "| layer | module | |\n|---|---|---|\n" + "".join(lines)


def first_line(module: str) -> str:
    """Return the first line of the docstring of a module of the library."""
    path = ROOT / "tierstore" / module
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
