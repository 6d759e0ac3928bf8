"""The documentation site: Sphinx over the Markdown of this folder and the docstrings.

`make docs-site` builds it into build/site; a warning is an error.
"""

import posixpath
import re
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tierstore import errors  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = PROJECT["urls"]["Source"] + "/blob/main"

project = "tierstore"
author = copyright = "tierstore contributors"
release = re.search(
    r'^__version__ = "(.*)"', (ROOT / "tierstore/__init__.py").read_text(encoding="utf-8"), re.M
)[1]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
suppress_warnings = ["myst.strikethrough"]

html_theme = "furo"
html_title = f"tierstore {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "source_repository": PROJECT["urls"]["Source"],
    "source_branch": "main",
    "source_directory": "docs/",
}

# `make links` visits other sites only: the project's own addresses exist from the first release on.
linkcheck_ignore = [re.escape(url) for url in PROJECT["urls"].values()]
linkcheck_anchors = False

myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Docstrings are plain text with `code` in backticks, and sections as Google writes them.
default_role = "code"
napoleon_numpy_docstring = False
autosummary_generate = False  # a table of names on the page that describes them
autodoc_mock_imports = ["accelerate", "lightning", "torch_geometric", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in ("DTypeName", "IntegerArrayLike")}
autodoc_default_options = {
    "members": True,
    "special-members": "__getitem__, __setitem__, __array__, __bool__",
}
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# Types in signatures are internal, or of Python, NumPy and torch, whose pages are not fetched.
nitpicky = True
nitpick_ignore_regex = [("py:(class|obj)", ".*")]


def link_to_the_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """Let a link to a file outside of this folder lead to the repository."""

    def absolute(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match[1]))
        outside = not path.startswith("docs/") or path.endswith(".py")
        return f"]({SOURCE}/{path})" if outside else match[0]

    source[0] = re.sub(r"\]\((?!https?:|#)([^)#]+)\)", absolute, source[0])


def mark_examples(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Make an indented paragraph of a docstring a block: of text for a drawing, else of code."""
    marked: list[str] = []
    inside = False
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        if line and not indented:
            inside = False
        elif indented and not inside and number and not lines[number - 1]:
            inside = True
            drawing = any("├" in each or "│" in each for each in lines[number:])
            marked += [f".. code-block:: {'text' if drawing else 'python'}", ""]
        marked.append(line)
    if what in ("property", "attribute", "data"):  # whose first colon ends a type, for napoleon
        marked[:0] = [".. A comment that ends in the first colon:", ""]
    lines[:] = marked


def link_errors(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Let the name of an error in a docstring lead to the page of errors."""
    names = "|".join(errors.__all__)
    for number, line in enumerate(lines):
        if not line.startswith(("    ", ":raises")):  # code, and what is a link already
            lines[number] = re.sub(
                rf"(?<![\w.`])({names})(?![\w`:])", r":exc:`~tierstore.errors.\1`", line
            )


_FROM_FUNCTIONS = ("Store", "Table", "KeyedTable", "Attached")
"""Public classes whose objects functions make, as they do those of private modules."""
_PLAINER = (
    (r"[~\w.]*TypeAliasForwardRef\('(\w+)'\)", r"\1"),
    (r"[~\w.]*ndarray\[tuple\[[^][]*\], [~\w.]*dtype\[([^][]*(?:\[[^][]*\])?)\]\]", r"NDArray[\1]"),
    (r"\brows: int = None\b", "rows: int | None = None"),
    (r" ?= ?<factory>", " = …"),
    (r"~tierstore\.(?:\w+\.)*", ""),
)
"""What Python makes of an annotation or a default, and what was written."""


def simplify_signature(
    app: Sphinx,
    what: str,
    name: str,
    thing: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Show types as the source names them, and no arguments of what users do not construct."""
    module, _, own = name.rpartition(".")
    if what == "class" and (own in _FROM_FUNCTIONS or "._" in module):
        return "", None
    for made, written in _PLAINER:
        signature = signature and re.sub(made, written, signature)
        returns = returns and re.sub(made, written, returns)
    return signature, returns


def forget_attributes_named_as_types(app: Sphinx, env: BuildEnvironment) -> None:
    """Let `bytes` in a signature be the type, which has no page, and not an attribute."""
    objects = env.domaindata["py"]["objects"]
    for name in [name for name in objects if name.endswith(".bytes")]:
        del objects[name]


def setup(app: Sphinx) -> None:
    """Connect what is done to pages and docstrings before they are read."""
    app.connect("source-read", link_to_the_repository)
    app.connect("autodoc-process-signature", simplify_signature)
    app.connect("env-updated", forget_attributes_named_as_types)
    app.connect("autodoc-process-docstring", mark_examples, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", link_errors, priority=900)
