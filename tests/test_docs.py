"""Every example in the documentation runs, and every page it links to is there.

A block stands by itself: it runs with no names but its own, in an empty directory, and (each night)
in a process of its own. Those of a page in SAME_DIRECTORY find the files of the blocks before
them, as these pages say. Libraries of others that are not installed have stand-ins, or the block is
left out. `sh` blocks of commands alone run in this process; those that need a
shell, whose every command is a process, run at night. Blocks without a language are not run: what
is printed, and what one types to install.
"""

import ast
import asyncio
import contextlib
import doctest
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tierstore
from tests import s3, stand_ins
from tests.every import every
from tierstore_cli.main import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SAME_DIRECTORY = {
    "docs/attach.md",
    "docs/file-format.md",
    "docs/from-speedtorch.md",
    "docs/how-to/fastapi.md",
    "docs/how-to/nightly.md",
    "docs/how-to/row-memory.md",
    "docs/many-gpus.md",
    "docs/python.md",
    "docs/quickstart.md",
}
WITH_BUCKET = {"docs/how-to/nightly.md"}
LONG = ["row-memory.md", "many-gpus.md", "python.md", "frameworks.md"]
"""Pages whose blocks train."""
AT_NIGHT = ["docs/how-to/nightly.md"]
"""Pages whose blocks need the files of blocks that need a shell."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
FRAMEWORK = re.compile(r"^(?:import|from) (lightning|accelerate)\b", re.MULTILINE)
"""Libraries that only `make test-all` installs, and that use what others deprecate."""
LAZY = "ignore:rows that are not in a batch stay"
"""Blocks train rows as a reader would, who sees the warning once."""
FRAMES = re.compile(r"^(?:import|from) (pandas|polars|duckdb|pyarrow)\b", re.MULTILINE)
"""Libraries that only `make test-all` installs, and that stay quiet."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@dataclass
class Block:
    """A fenced block: its language, its text and the line it starts at."""

    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 1)
        for match in FENCE.finditer(text)
    ]


def lacks_libraries(block: Block) -> bool:
    """Whether a block, and not the others of its page, needs a library that is not installed."""
    names = FRAMEWORK.findall(block.text) + FRAMES.findall(block.text)
    names += ["pyarrow"] * (".parquet" in block.text) + ["torch"] * ("torch" in block.text)
    return any(importlib.util.find_spec(name) is None for name in names)


def run_python(block: Block, page: Path) -> None:
    padding = "\n" * block.line  # so that a traceback names the line of the page
    with (
        warnings.catch_warnings(),
        stand_ins.standing_in(block.text),
    ):
        if FRAMEWORK.search(block.text):
            warnings.simplefilter("ignore")
        exec(compile(padding + block.text, str(page), "exec"), fresh_module(page))


def commands_in(text: str) -> list[list[str]] | None:
    """Return the arguments of the commands of a block; None where a shell has more to do."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        if re.search(r"[$`*?~]", line) or any(set(word) <= set("();<>|&") for word in words):
            return None
        if words and words[0] != "tierstore":
            return None
        found.extend([words[1:]] if words else [])
    return found


def run_commands(block: Block, page: Path) -> None:
    """Run a block in this process if it has commands of the library alone."""
    for arguments in commands_in(block.text) or ():
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, f"{page.name}, line {block.line}: {result.output}"


def run_sh(block: Block, page: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, f"{page.name}, line {block.line}: {done.stderr}"


def fresh_module(page: Path) -> dict[str, Any]:
    """Return the names of a module of its own, where pickle finds the classes of a block."""
    module = ModuleType("__main__")
    module.__file__ = str(page)
    return vars(module)


@pytest.fixture
def bucket(monkeypatch):
    """Serve s3://bucket to blocks, which are left out where the packages for it are missing."""
    with contextlib.ExitStack() as stack:
        try:
            served = stack.enter_context(s3.serving())
        except pytest.skip.Exception:
            served = None
        for name, value in served.env.items() if served else ():
            monkeypatch.setenv(name, value)
        yield served


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.relative_to(ROOT).as_posix() not in AT_NIGHT],
    ids=lambda page: page.name,
)
@pytest.mark.slow(*LONG)
def test_the_examples_run(page, tmp_path, monkeypatch):
    where = page.relative_to(ROOT).as_posix()
    for number, block in enumerate(blocks_of(page)):
        directory = tmp_path / ("one" if where in SAME_DIRECTORY else str(number))
        directory.mkdir(exist_ok=True)
        monkeypatch.chdir(directory)
        if block.language in ("python", "sh") and "s3://" in block.text:
            continue
        if block.language == "python" and lacks_libraries(block):
            continue
        if block.language == "python":
            run_python(block, page)
        elif block.language == "sh":
            run_commands(block, page)
        else:
            directive = block.language == "" or block.text.startswith((":", ".. "))
            assert directive, f"{page.name}, line {block.line}: {block.language}?"


def test_the_server_of_fastapi_answers(tmp_path, monkeypatch):
    """By a stand-in for FastAPI: what its routes return, and that it follows a trainer."""
    page = ROOT / "docs/how-to/fastapi.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "fastapi", stand_ins.fastapi())
    commands, server = (block for block in blocks_of(page) if block.language)
    run_commands(commands, page)
    names = fresh_module(page)
    exec(compile(server.text, str(page), "exec"), names)
    routes = names["app"].routes

    async def ask():
        async with names["app"].lifespan(names["app"]):
            ann = routes["/user/{key}"]("ann")
            assert ann["vector"] == [1, 2, 3, 4, 5, 6, 7, 8]
            near = routes["/near/{key}"]("ann")  # of ten, two are there
            assert near["keys"] == ["ann", "bob"]
            assert near["scores"][0] == pytest.approx(1)
            json.dumps(near, allow_nan=False)
            for route in ("/user/{key}", "/near/{key}"):
                with pytest.raises(stand_ins.HTTPException) as missing:
                    routes[route]("zoe")
                assert missing.value.status_code == 404
            with tierstore.open("people.tier", "r+") as trainer:
                trainer["user"].write(["ann"], np.ones((1, 8), np.float32))
                trainer.commit(step=5)
            for _ in range(200):
                if routes["/ready"]()["step"] == 5:
                    break
                await asyncio.sleep(0.05)
            assert routes["/user/{key}"]("ann")["vector"] == [1] * 8
            assert routes["/ready"]()["version"] > ann["version"]
            routes["/metrics"]()

    asyncio.run(ask())


def test_the_dashboard_asks_for_figures_that_there_are():
    text = (ROOT / "docs/_static/grafana.json").read_text(encoding="utf-8")
    with tierstore.create(None, {"item": tierstore.TableSpec(10, 2)}) as store:
        there = tierstore.stats.prometheus(store)
    asked = [each["expr"] for panel in json.loads(text)["panels"] for each in panel["targets"]]
    names = {name for each in asked for name in re.findall(r"tierstore_\w+", each)}
    assert len(names) >= 8
    assert [name for name in names if f"# TYPE {name} " not in there] == []


@pytest.mark.nightly
@every_page
def test_the_examples_need_nothing_of_another_process(page, tmp_path, monkeypatch, request):
    """What an earlier test has imported is there in this process, and not in that of a reader."""
    where = page.relative_to(ROOT).as_posix()
    bucket = request.getfixturevalue("bucket") if where in WITH_BUCKET else None
    blocks = [block for block in blocks_of(page) if block.language in ("python", "sh")]
    for number, block in enumerate(blocks):
        if ("s3://" in block.text and not bucket) or lacks_libraries(block):
            continue
        if stand_ins.missing(block.text):
            continue
        directory = tmp_path / (str(number) if where not in SAME_DIRECTORY else "one")
        directory.mkdir(exist_ok=True)
        monkeypatch.chdir(directory)
        if block.language == "sh":
            run_sh(block, page)
        else:
            run_script(block, page)


def run_script(block: Block, page: Path) -> None:
    """Run a block as a file, where processes that it spawns find it."""
    Path("block.py").write_text(block.text, encoding="utf-8")
    noted = "ignore" if FRAMEWORK.search(block.text) else "error"
    command = [sys.executable, "-W", noted, "-W", LAZY, "block.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{page.name}, line {block.line}: {done.stderr}"


def test_the_options_in_shells_are_those_of_the_commands():
    """Also of the pages that only slow tests run, and behind pipes and in loops."""
    for page in PAGES:
        for block in blocks_of(page):
            text = block.text.replace("\\\n", " ") if block.language == "sh" else ""
            for name, given in re.findall(r"\btierstore ([a-z][\w-]*)([^|;&\n#]*)", text):
                command = cli.get_command(None, name)
                known = {option for each in command.params for option in each.opts}
                unknown = set(re.findall(r"(?<= )--[\w-]+", given.split("--exec")[0])) - known
                assert not unknown, f"{page.name}: {name} {unknown}"


def test_no_block_draws_the_same_batch_again_and_again():
    """A generator that is made within a loop: what is measured with it shows nothing."""
    for page in PAGES:
        for block in blocks_of(page):
            tree = ast.parse(block.text if block.language == "python" else "")
            for loop in (node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))):
                body = "\n".join(map(ast.unparse, loop.body))
                made = re.findall(r"default_rng\(\d+\)|manual_seed\(\d+\)", body)
                assert not made, f"{page.name}, line {block.line}: {made}"


def test_a_page_whose_blocks_use_files_of_others_says_so():
    for page in PAGES:
        text = " ".join(page.read_text(encoding="utf-8").split())
        where = page.relative_to(ROOT).as_posix()
        assert ("in one empty directory" in text) == (where in SAME_DIRECTORY), where


@every(page=PAGES)
def test_lists_and_emphasis_are_not_run_together(page):
    """As an editor that fills paragraphs leaves them: `… the new one. 5. The tables …`."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.DOTALL)
    assert not re.findall(r"^.*[.!?] \d\. [A-Z].*$", text, re.MULTILINE)
    assert not re.findall(r"^(?!\|).*\*{4}.*$", text, re.MULTILINE)


@every(page=PAGES)
def test_the_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_a_table_of_contents():
    named = set()
    for index in (ROOT / "docs/index.md", ROOT / "docs/api/index.md", ROOT / "docs/cli.md"):
        for block in blocks_in_braces(index, "toctree"):
            lines = [line for line in block.splitlines() if line and not line.startswith(":")]
            found = [each for line in lines for each in index.parent.glob(f"{line}.md")]
            assert len(found) >= len(lines)
            named |= set(found)
    pages = set((ROOT / "docs").rglob("*.md"))
    assert pages - named == {ROOT / "docs/index.md"}


def blocks_in_braces(page: Path, directive: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{{{directive}}}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_every_public_module_is_in_the_reference():
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    modules = [name for name in dir(tierstore) if name not in tierstore.__all__]
    modules.remove("__version__")
    assert len(modules) > 10
    assert [name for name in modules if f"`tierstore.{name}" not in text] == []


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs/api/tierstore.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. (?:auto\w+|py:function):: (\w+)(?:\(.*\))?$", text, re.MULTILINE)
    assert sorted(named) == sorted(tierstore.__all__)


def test_troubleshooting_names_every_error_and_warning():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    names = set(tierstore.errors.__all__) - {"TierStoreWarning"}
    assert sorted(name for name in names if f"`{name}`" not in text and name not in text) == []


WORDS = {
    "docker": "how-to/docker-kubernetes",
    "kubernetes": "how-to/docker-kubernetes",
    "gdpr": "how-to/erase-a-person",
    "fastapi": "how-to/fastapi",
    "pandas": "how-to/data-frames",
    "polars": "how-to/data-frames",
    "duckdb": "how-to/data-frames",
    "jupyter": "how-to/notebooks",
    "colab": "how-to/notebooks",
    "tqdm": "how-to/notebooks",
    "wsl": "how-to/notebooks",
    "ddp": "many-gpus",
    "upgrade": "how-to/upgrade",
    "tensorboard": "how-to/watch-a-run",
    "wandb": "how-to/watch-a-run",
    "mlflow": "how-to/watch-a-run",
    "prometheus": "how-to/watch-a-run",
    "grafana": "how-to/watch-a-run",
    "faiss": "how-to/search-indexes",
    "usearch": "how-to/search-indexes",
    "pgvector": "how-to/search-indexes",
    "qdrant": "how-to/search-indexes",
    "milvus": "how-to/search-indexes",
    "slurm": "how-to/slurm",
    "snapshot": "glossary",
    "fp16": "glossary",
}
"""What users type into the search of the site, and the page that answers."""


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_in_the_text_of_its_page(word):
    """Beside the blocks of code, which the search does not know."""
    text = (ROOT / f"docs/{WORDS[word]}.md").read_text(encoding="utf-8")
    assert re.search(rf"\b{word}\b", FENCE.sub("", text), re.IGNORECASE)


@pytest.mark.nightly
def test_the_search_of_the_site_finds_the_pages(tmp_path):
    pytest.importorskip("myst_parser")
    build = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(ROOT / "docs")]
    subprocess.run([*build, str(tmp_path / "site")], check=True, timeout=600)
    text = (tmp_path / "site/searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    stem = importlib.import_module("sphinx.search.en").SearchEnglish({}).stem
    for word, page in WORDS.items():
        found = [index[kind].get(stem(word), []) for kind in ("terms", "titleterms")]
        pages = {each for one in found for each in (one if isinstance(one, list) else [one])}
        assert page in {index["docnames"][each] for each in pages}, word


def modules_with_examples() -> list[str]:
    sources = sorted((ROOT / "tierstore").rglob("*.py"))
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sources
        if ">>>" in path.read_text(encoding="utf-8")
    ]


@pytest.fixture
def stage(tmp_path, monkeypatch) -> Iterator[dict[str, Any]]:
    """What the examples in docstrings take for granted: an open store, layers, a loader."""
    monkeypatch.chdir(tmp_path)
    torch = pytest.importorskip("torch")
    spec = tierstore.TableSpec(100, 16, init=tierstore.normal(seed=1))
    with tierstore.create(tmp_path / "stage.tier", {"item": spec, "user": spec}) as store:
        emb, users = (tierstore.nn.TieredEmbedding(store[name]) for name in ("item", "user"))
        model = torch.nn.Linear(16, 1)
        dense = torch.optim.Adam(model.parameters())
        opt = tierstore.optim.TieredOptimizer(torch.optim.Adam, [users])
        names = {"np": np, "torch": torch, "tierstore": tierstore, "path": tmp_path / "emb.tier"}
        names |= {
            "store": store,
            "table": store["item"],
            "emb": emb,
            "users": users,
            "model": model,
            "opt": opt,
        }
        names |= {"dense_optimizer": dense, "steps": 3, "train": lambda step: None}
        names["schedule"] = torch.optim.lr_scheduler.ConstantLR(dense)
        names["loss"] = SimpleNamespace(backward=lambda: emb(torch.tensor([1, 2])).sum().backward())
        names["loader"] = [{key: torch.tensor([3, 4]) for key in ("item", "user")}] * 3
        names["step"] = lambda batch: None
        yield names
        store.rollback()


@pytest.mark.variants(2)
@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_in_docstrings_run(name, stage):
    """Each docstring starts from what is committed."""
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in doctest.DocTestFinder().find(module, extraglobs=stage):
        runner.run(test)
        stage["store"].rollback()
    assert runner.tries
    assert not runner.failures
