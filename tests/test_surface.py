"""The public names in a fresh process, with and without the optional packages."""

import ast
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import tierstore

ROOT = Path(__file__).parents[1]
MODULES = sorted(tierstore._MODULES)
WITHOUT_TORCH = sorted({*MODULES} - {"distributed", "nn", "optim", "speedtorch"})

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCK:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""

RESOLVE = """
import contextlib, importlib, json, os, sys

for name in ("numpy", "zarr", "torch"):  # once, and not in every fork: they take seconds
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

def found(dotted):
    import tierstore
    value = tierstore
    for part in dotted.split(".")[1:]:
        kinds = getattr(value, "__mro__", ())
        if any(part in vars(kind).get("__annotations__", ()) for kind in kinds):
            return
        value = getattr(value, part)

wrong = {}
for dotted in json.load(sys.stdin):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # each name in a process that has not imported tierstore
        error = b""
        try:
            found(dotted)
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}".encode()
        os.write(write, error)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        error = answer.read().decode()
    os.waitpid(child, 0)
    if error:
        wrong[dotted] = error
print(json.dumps(wrong))
"""

EXTRAS = ("torch", "cupy", "pyarrow", "safetensors")


def run(code: str, given: object = None, block: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"BLOCK = {block!r}\n{BLOCKED}\n{code}"],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def missing(names: list[str], block: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the dotted names that a fresh process does not have, and why."""
    return json.loads(run(RESOLVE, names, block))


@pytest.mark.nightly
@pytest.mark.slow
def test_public_names_are_there_in_a_fresh_process():
    pytest.importorskip("torch")
    assert missing([f"tierstore.{name}" for name in (*MODULES, *tierstore.__all__)]) == {}


@pytest.mark.nightly
@pytest.mark.slow
def test_without_the_extras_what_needs_none_is_there():
    names = [f"tierstore.{name}" for name in (*WITHOUT_TORCH, *tierstore.__all__)]
    assert missing(names, EXTRAS) == {}
    wrong = missing(["tierstore.nn", "tierstore.optim", "tierstore.speedtorch"], EXTRAS)
    assert len(wrong) == 3
    for error in wrong.values():
        assert re.fullmatch(r"AttributeError: .*pip install 'tierstore\[torch\]'", error)


@pytest.mark.slow
def test_without_the_extras_python_can_look_at_the_package():
    run(
        """
import inspect, pydoc, tierstore
assert not hasattr(tierstore, "nn")
assert {"create", "policy", "nn"} <= set(dir(tierstore))
assert "TableSpec" in dict(inspect.getmembers(tierstore))
assert "import_table" in pydoc.render_doc(tierstore)
from tierstore import *
assert TableSpec is tierstore.TableSpec
try:
    import tierstore.optim
except tierstore.errors.MissingExtraError as error:
    assert "tierstore[torch]" in str(error)
else:
    raise SystemExit("optim was imported without torch")
""",
        block=EXTRAS,
    )


def test_importing_the_package_imports_nothing_else():
    run(
        """
import tierstore
for name in ("numpy", "torch", "zarr", "click"):
    assert name not in sys.modules, name
"""
    )


@pytest.mark.slow
def test_a_step_of_training_imports_little_beyond_torch():
    """A new process takes little longer to its first step than with torch alone."""
    pytest.importorskip("torch")
    run(
        """
import tempfile, torch
torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # which imports torch's compiler
before = {*sys.modules}
import tierstore
spec = tierstore.TableSpec(1000, 8, init=tierstore.normal(seed=1))
with (
    tempfile.TemporaryDirectory() as directory,
    tierstore.create(directory + "/s", {"item": spec}, device="cpu") as store,
):
    layer = tierstore.nn.TieredEmbedding(store["item"])
    optimizer = tierstore.optim.TieredOptimizer(torch.optim.Adam, [layer], lr=0.01)
    layer(torch.arange(64)).sum().backward()
    optimizer.step()
    store.commit()
new = {*sys.modules} - before
others = {name.partition(".")[0] for name in new} - {*sys.stdlib_module_names}
assert others <= {"tierstore", "numpy", "torch"}, others
assert not [name for name in new if name.startswith("torch._")], new
public = {name.split(".")[1] for name in new if name.startswith("tierstore.")}
used = {"budget", "distributed", "errors", "initializers", "nn", "optim", "policy", "spec", "stats"}
assert {name for name in public if name[0] != "_"} == used, public
assert "_formats" not in public
"""
    )


def test_no_module_bears_the_name_of_what_its_package_exports():
    pytest.importorskip("torch")
    seen = 0
    for found in pkgutil.walk_packages(tierstore.__path__, "tierstore."):
        package, _, name = found.name.rpartition(".")
        if found.name.startswith("tierstore.integrations."):
            continue  # each imports a library that may not be installed
        __import__(found.name)
        if "columns_child" not in name:
            assert inspect.ismodule(getattr(sys.modules[package], name)), found.name
            seen += 1
    assert seen > 100


NAME = re.compile(r"(?<![\w./-])tierstore((?:\.[A-Za-z_]\w*)+)")
FILES = {"tierstore.prom"}


def dotted_names(text: str) -> set[str]:
    return {f"tierstore{match[1]}" for match in NAME.finditer(text)} - FILES


def docstrings(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n".join(found)


@pytest.mark.slow
@pytest.mark.nightly
def test_every_name_of_documents_and_docstrings_exists():
    """Those that are not public by themselves, which the first test looks for."""
    pytest.importorskip("torch")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    sources = [path for top in ("tierstore", "cli") for path in (ROOT / top).rglob("*.py")]
    in_pages = {name for page in pages for name in dotted_names(page.read_text(encoding="utf-8"))}
    in_docstrings = {name for path in sources for name in dotted_names(docstrings(path))}
    assert {"tierstore.create", "tierstore.policy"} <= in_pages
    assert "tierstore.open" in in_docstrings
    public = {f"tierstore.{name}" for name in (*MODULES, *tierstore.__all__)}
    others = (in_pages | in_docstrings) - public
    integrations = {name for name in others if name.startswith("tierstore.integrations.")}
    for name in integrations:  # each imports a library that may not be installed
        assert (ROOT / f"{name.replace('.', '/')}.py").exists()
    assert missing(sorted(others - integrations)) == {}


@pytest.mark.slow
def test_a_name_that_is_not_there_is_found():
    names = ["tierstore.policy.lru", "tierstore.policy.fifth"]
    assert list(missing(names, EXTRAS)) == ["tierstore.policy.fifth"]


def public(module: typing.Any) -> typing.Iterator[tuple[str, typing.Any]]:
    """Yield the functions and methods that a module makes public, with their names."""
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if inspect.isfunction(value):
            yield f"{module.__name__}.{name}", value
        elif inspect.isclass(value):
            protocol = getattr(value, "_is_protocol", False)
            for attribute, member in vars(value).items():
                plain = (attribute == "__init__" and not protocol) or not attribute.startswith("_")
                member = getattr(member, "__func__", member)
                member = member.fget if isinstance(member, property) else member
                if plain and inspect.isfunction(member):
                    yield f"{module.__name__}.{name}.{attribute}", member


@pytest.mark.parametrize("name", ["", *MODULES])
def test_every_parameter_and_result_has_a_type(name):
    if name not in WITHOUT_TORCH:
        pytest.importorskip("torch")
    module = getattr(tierstore, name) if name else tierstore
    bare = []
    for dotted, function in public(module):
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        if parameters and parameters[0].name in ("self", "cls"):
            del parameters[0]
        untyped = [each.name for each in parameters if each.annotation is each.empty]
        generated = function.__code__.co_filename == "<string>"  # by dataclasses
        if untyped or (signature.return_annotation is signature.empty and not generated):
            bare.append((dotted, untyped))
    assert not bare
