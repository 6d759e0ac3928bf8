"""What pip is told, and what the page on the package index shows."""

import importlib.metadata
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote

import pytest

import tierstore

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
GROUPS = PYPROJECT["dependency-groups"]
GPU = {"cuda12x", "cuda13x"}
TEXTS = {".md", ".py", ".yml", ".ipynb"}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_the_installed_version_is_that_of_the_module():
    assert importlib.metadata.version("tierstore") == tierstore.__version__


def test_the_base_is_small():
    assert sorted(map(name_of, PROJECT["dependencies"])) == ["click", "numpy", "zarr"]


def test_extras_are_what_users_need():
    """What developers need is in groups, which are not in the metadata."""
    files = {"parquet", "hdf5"}
    assert set(EXTRAS) == {"all", "torch", "formats", "s3"} | files | GPU
    assert set(re.search(r"\[(.*)\]", EXTRAS["formats"][0])[1].split(",")) == files
    everything = set(re.search(r"\[(.*)\]", EXTRAS["all"][0])[1].split(","))
    assert everything == set(EXTRAS) - {"all"} - files - GPU
    groups = {"dev", "checker", "coverage", "docs", "release", "bench", "integrations", "writers"}
    assert set(GROUPS) == groups


def test_every_package_of_an_extra_is_imported_somewhere():
    """torch and CuPy by their names in code, one of a format where it is read."""
    names = {"cupy-cuda12x": "cupy", "cupy-cuda13x": "cupy"}
    sources = [*(ROOT / "tierstore").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for extra, packages in EXTRAS.items():
        for package in map(name_of, packages):
            name = names.get(package, package)
            imported = rf"^\s*(?:import|from) {name}\b|import_module\(\W{name}\W"
            assert name in {"tierstore", "s3fs"} or re.search(imported, code, re.M), (extra, name)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/quickstart.md"])
def test_what_one_installs_first_is_there(page):
    """Nothing is on the package index before the first release: the clone comes first."""
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = re.findall(r"pip install\s+'?(\.|\w+)", text)
    assert commands[0] == ".", page
    assert "tierstore" not in commands or "first release" in text


def test_a_missing_package_names_an_extra_that_exists():
    named = set()
    for path in [*(ROOT / "tierstore").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        for extras in re.findall(r"tierstore\[([\w,]+)\]", text):
            named |= set(extras.split(","))
        named |= set(re.findall(r'needs\("\w+", "(\w+)"', text))
    assert named - {"extra"} <= set(EXTRAS)  # {extra}, in the message that names any
    assert {"torch", "cuda13x"} <= named


def pinned() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {name_of(line) for line in lines if line[0] != "#"}


@pytest.mark.parametrize("extra", [None, *sorted(set(EXTRAS) - {"all", "formats", "s3"} - GPU)])
def test_what_the_tests_install_is_pinned(extra):
    wanted = EXTRAS[extra] if extra else PROJECT["dependencies"]
    assert {name_of(each) for each in wanted} <= pinned()


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_what_developers_install_is_pinned(group):
    assert {name_of(each) for each in GROUPS[group]} <= pinned()


def test_the_pages_of_the_project_are_named():
    assert set(PROJECT["urls"]) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url.startswith("https://") for url in PROJECT["urls"].values())
    supported = [each for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert f">={supported[0].rpartition(' ')[2]}" == PROJECT["requires-python"]


def targets_of(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


def path_of(url: str) -> Path | None:
    """Return the file of this tree that a link to the project shows; None for other pages."""
    url = url.partition("#")[0]
    source, site = PROJECT["urls"]["Source"], PROJECT["urls"]["Documentation"]
    raw = source.replace("github.com", "raw.githubusercontent.com")
    if url.startswith(f"{site}/"):
        return ROOT / "docs" / url.removeprefix(f"{site}/").replace(".html", ".md")
    for start in (f"{source}/blob/main/", f"{raw}/main/"):
        if url.startswith(start):
            return ROOT / url.removeprefix(start)
    return None


def test_the_wheel_installs_the_library_and_its_command_line():
    """No package called `cli`, which other projects have as well."""
    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [path.rpartition("/")[2] for path in packages] == ["tierstore", "tierstore_cli"]
    assert all((ROOT / path / "__init__.py").exists() for path in packages)


def test_an_editable_install_works_from_the_directory_above_the_clone(tmp_path):
    """To Python there, the clone itself is a namespace package `tierstore`; mypy asks no hook."""
    assert "dev-mode-exact" not in PYPROJECT["tool"]["hatch"]["build"]
    site, above = tmp_path / "site", tmp_path / "above"
    site.mkdir()
    above.mkdir()
    (above / "tierstore").symlink_to(ROOT)
    lines = [
        str(above / "tierstore" / each)
        for each in PYPROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]
    ]
    (site / "_tierstore.pth").write_text("\n".join(lines))  # as hatchling writes it
    program = (
        f"import site; site.addsitedir({str(site)!r}); import tierstore, tierstore_cli;"
        "print(tierstore.__version__, tierstore_cli.__file__)"
    )
    command = [sys.executable, "-S", "-E", "-c", program]
    done = subprocess.run(command, cwd=above, capture_output=True, text=True, check=True)
    version, path = done.stdout.split()
    assert version == tierstore.__version__
    assert Path(path).resolve() == ROOT / "cli/tierstore_cli/__init__.py"


def test_every_link_of_the_readme_works_in_the_tree_and_on_the_package_index():
    """Where a page of the tree is a path, as no site is needed to read it."""
    elsewhere = runpy.run_path(str(ROOT / "hatch_build.py"))["readme_elsewhere"]
    shown = targets_of(elsewhere(README, PROJECT["urls"]["Source"]))
    assert all(target.startswith("https://") for target in shown)
    here = [target for target in targets_of(README) if not target.startswith("https://")]
    found = [path for path in map(path_of, shown) if path is not None]
    assert found == [ROOT / target.partition("#")[0] for target in here]
    assert len(here) >= 8 and all(path.exists() for path in found)
    pictures = [target for target in shown if target.endswith(".svg")]
    assert pictures and all("raw.githubusercontent.com" in target for target in pictures)


def test_the_badges_say_what_the_metadata_say():
    badges = [unquote(each) for each in re.findall(r"img\.shields\.io/badge/(\S+?)\)", README)]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert f"Python-{pythons[0]} to {pythons[-1]}-blue" in badges
    assert any("Alpha" in each for each in PROJECT["classifiers"]) == (
        "status-alpha-orange" in badges
    )
    assert f"licence-{PROJECT['license']}-blue" in badges


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {tierstore.__version__}\n" in text
    assert f"repository-code: {PROJECT['urls']['Source']}\n" in text
    assert f"version = {{{tierstore.__version__}}}" in README
    title = re.search(r'^title: "(.*)"$', text, re.MULTILINE)[1]
    assert f"title = {{{title}}}" in README.replace("{GPU}", "GPU").replace("{RAM}", "RAM")


def test_the_first_version_is_dated_in_all_places_or_in_none():
    """As long as the changes of this version stand under Unreleased, the citation has no date."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    dated = re.search(rf"^## {re.escape(tierstore.__version__)} [-–(] ?([\d-]+)", changes, re.M)
    if dated is None:
        assert "## Unreleased" in changes and "date-released" not in citation
        assert f"Unreleased: {tierstore.__version__}" in changes
    else:
        assert f"date-released: {dated[1]}" in citation


def test_the_recipe_for_conda_has_this_version_and_these_dependencies():
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == tierstore.__version__
    needed = {each.replace(" ", "") for each in recipe["requirements"]["run"]}
    assert needed == {f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]}
    host = {each.replace(" ", "") for each in recipe["requirements"]["host"]}
    assert set(PYPROJECT["build-system"]["requires"]) <= host
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["license_file"] == PROJECT["license-files"]


def test_the_site_is_built_with_what_there_is():
    yaml = pytest.importorskip("yaml")
    site = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text(encoding="utf-8"))
    assert (ROOT / site["sphinx"]["configuration"]).exists()
    commands = "\n".join(site["build"]["jobs"]["install"])
    assert set(re.findall(r"--group (\w+)", commands)) <= set(GROUPS)
    assert set(re.findall(r"'\.\[(\w+)\]'", commands)) <= set(EXTRAS)


def test_the_files_that_a_contributor_looks_for_are_there():
    for name in ("CODE_OF_CONDUCT", "CONTRIBUTING", "ROADMAP", "SECURITY", "SUPPORT"):
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        for target in targets_of(text):
            path = target.partition("#")[0]
            assert target.startswith("https://") or (ROOT / path).exists(), (name, target)
        assert not re.search(r"[\w.]+@[\w.]+\.\w+", text), "an address of a person"
    assert "## Governance" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_one_address_is_given_for_the_project_and_one_for_its_site():
    """Both are wherever `project.urls` says; no page has another."""
    source, site = PROJECT["urls"]["Source"], PROJECT["urls"]["Documentation"]
    raw = source.replace("github.com", "raw.githubusercontent.com")
    paths = [*ROOT.glob("*.md"), ROOT / "CITATION.cff", ROOT / "pyproject.toml"]
    for folder in ("docs", "examples", ".github", "tierstore", "cli"):
        paths += [path for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    for path in paths:
        for url in re.findall(
            r"https?://[^\s)>\]\"'`]*tierstore[^\s)>\]\"'`]*", path.read_text("utf-8")
        ):
            assert url.startswith((source, site, raw)), f"{path}: {url}"


def test_the_readme_is_one_screen():
    """A program of a screen, six figures with a number each."""
    program = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert len(program.strip().splitlines()) <= 20
    assert "TieredEmbedding" in program
    figures = re.search(r"## Measured\n(.*?)\n## ", README, re.DOTALL)[1]
    lines = [line for line in figures.splitlines() if line.startswith("|")][2:]
    assert len(lines) == 6
    assert all(len(re.findall(r"\*\*[\d.]+\*\*", line)) == 1 for line in lines)
    assert len(README.splitlines()) <= 110


@pytest.mark.slow
def test_the_program_of_the_readme_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """A cell or a script that is run again, and what it prints is what stands below it."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    program, printed = re.search(
        r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL
    ).groups()
    for first in (0, 100):
        exec(compile(program, "README.md", "exec"), {})
        out = capsys.readouterr().out
        assert re.sub(r"[\d.,]+", "0", out) == re.sub(r"[\d.,]+", "0", printed)
        assert out.startswith(f"step {first + 100}: ")
        evicted = re.search(r"([\d,]+) rows were evicted", out)[1]
        assert int(evicted.replace(",", "")) > 10_000
    with tierstore.open("shop.tier") as store:
        assert store.step == store["item"].scalars["step"] == 200  # of Adam's state as well
