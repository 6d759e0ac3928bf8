"""The project around the code: workflows, lowest versions, and what CONTRIBUTING.md says."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from tests.mutants import MUTANTS
from tests.test_packaging import EXTRAS, PROJECT, name_of

ROOT = Path(__file__).parents[1]
INSTALLED = ("torch", "parquet", "hdf5", "s3")
"""The extras that the Makefile installs."""
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())


def loaded(path: Path):
    return pytest.importorskip("yaml").safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(path):
    jobs = loaded(path)["jobs"]
    called = set()
    for job in jobs.values():
        assert job["runs-on"] and job["timeout-minutes"] <= 90
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            called |= set(re.findall(r"^make ([\w-]+)", step.get("run", ""), re.MULTILINE))
    assert called and called <= make_targets()


def pythons_of(workflow, job):
    jobs = loaded(ROOT / ".github/workflows" / workflow)["jobs"]
    return jobs[job]["strategy"]["matrix"]["python"]


def test_the_workflows_run_every_python_that_is_supported():
    versions = pythons_of("nightly.yml", "pythons")
    assert f">={versions[0]}" == PROJECT["requires-python"]
    minors = [int(version.removeprefix("3.")) for version in versions]
    assert minors == list(range(minors[0], 15))
    assert pythons_of("ci.yml", "test") == [versions[0], versions[-1]]
    assert pythons_of("wheel.yml", "wheel") == versions


def test_every_part_of_the_mutants_is_tried_each_night():
    text = (ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8")
    first = [int(number) for number in re.findall(r'--part (\d+)/8"', text)]
    jobs = loaded(ROOT / ".github/workflows/nightly.yml")["jobs"]
    parts = first + jobs["mutants"]["strategy"]["matrix"]["part"]
    assert parts == list(range(1, 9)) and "matrix.part }}/8" in text


def test_every_mutant_can_be_made(tmp_path):
    """Each line to change stands once in the library, and the tests to run are there."""
    for mutant in MUTANTS:
        path = tmp_path / mutant.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((ROOT / mutant.path).read_bytes())
        mutant.apply(tmp_path)
        assert path.read_bytes() != (ROOT / mutant.path).read_bytes()
        for test in mutant.tests.split():
            file, _, name = test.partition("::")
            assert (ROOT / file).exists(), test
            if name:
                text = (ROOT / file).read_text(encoding="utf-8")
                assert f"def {name.partition('[')[0]}(" in text, test


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_are_complete(path):
    form = loaded(path)
    assert form["name"] and form["description"] and form["body"]
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"].get("label") or field["type"] == "markdown"


def test_the_lowest_versions_are_those_of_pyproject():
    wanted = {}
    extras = [each for extra in INSTALLED for each in EXTRAS[extra]]
    for each in [*PROJECT["dependencies"], *extras]:
        wanted[name_of(each)] = re.search(r">=([\d.]+)", each)[1]
    lines = (ROOT / "tests/lowest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pinned.keys() == wanted.keys()
    for name, version in pinned.items():
        assert re.fullmatch(rf"{re.escape(wanted[name])}(\.0)*", version), name


@pytest.mark.slow
def test_the_layers_in_contributing_are_those_that_lint_checks():
    spec = importlib.util.spec_from_file_location("layers", ROOT / "docs/generate_layers.py")
    generate_layers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate_layers)
    assert "`errors`" in generate_layers.layers()
    assert generate_layers.page() == CONTRIBUTING, "run make docs"


def test_contributing_names_files_and_tests_that_exist():
    for path in re.findall(
        r"`((?:tierstore|cli|tests|benchmarks|docs)/[\w./*{}-]*)`", CONTRIBUTING
    ):
        found = list(ROOT.glob(path)) if "{" not in path else [path]
        assert found, path
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", CONTRIBUTING):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), name


def test_contributing_names_every_target_and_marker():
    pytest_options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = pytest_options["tool"]["pytest"]["ini_options"]["markers"]
    assert all(f"make {target}" in CONTRIBUTING for target in make_targets() - {"clean"})
    assert all(f"`{each.partition(':')[0].partition('(')[0]}`" in CONTRIBUTING for each in markers)
