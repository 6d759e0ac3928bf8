"""Write into docs/benchmarks.md at which commit each figure was taken: `make docs`."""

import json
import re
from pathlib import Path
from typing import Any

from tierstore._disk.manifest import FORMAT

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks.md"
SECTION = re.compile(r"(<!-- taken: .*? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
OUT_OF_DATE = "before two changes of format"


def page() -> str:
    """Return the whole page, with the results that are committed now."""
    text = PAGE.read_text(encoding="utf-8")
    return SECTION.sub(lambda match: f"{match[1]}{table(results(), FORMAT)}{match[3]}", text)


def results() -> dict[str, dict[str, Any]]:
    """Return what each result was taken of, by name."""
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8"))["taken"] for file in files}


def table(taken: dict[str, dict[str, Any]], newest: int) -> str:
    """Return a line for each result; those of two formats before the newest are marked."""
    lines = ["| result | commit | format | compiled core | |\n|---|---|---|---|---|\n"]
    for name, each in taken.items():
        mark = OUT_OF_DATE if newest - each["format"] >= 2 else ""
        commit, _, changed = (each["commit"] or "unknown").partition(" + ")
        commit = f"`{commit[:10]}`" + (" with changes" if changed else "")
        core = f"`{each['core']}`" if each["core"] else "none"
        lines.append(f"| `{name}` | {commit} | {each['format']} | {core} | {mark} |\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
