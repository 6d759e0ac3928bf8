"""docs/cli.md says what the commands' help says."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate_cli", ROOT / "docs/generate_cli.py")
    generate_cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate_cli)
    assert generate_cli.PAGE.read_text(encoding="utf-8") == generate_cli.page(), "run make docs"
