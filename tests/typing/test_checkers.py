"""Type checkers on the public modules: nothing that a user meets is of an unknown type."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

pytest.importorskip("torch")  # whose classes are the bases of some of ours
if shutil.which("pyright", path=PATH) is None:
    pytest.skip("pyright is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow


def pyright(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["pyright", *arguments],
        env={**os.environ, "PATH": PATH, "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


def unknown(package: str, root: Path) -> tuple[int, dict[str, list[str]]]:
    """Return the number of public names, and what pyright says of those it does not know."""
    done = pyright("--verifytypes", package, "--ignoreexternal", "--outputjson", root=root)
    found = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    return sum(one["isExported"] for one in found), {
        one["name"]: [each["message"] for each in one["diagnostics"]]
        for one in found
        if not one["isTypeKnown"] or one["isTypeAmbiguous"]
    }


UNTYPED_BASES = {
    "tierstore.integrations.geometric.TableFeatures",
    "tierstore.integrations.graphbolt.TableFeature",
}
"""Classes whose base is one of a library that has no types, installed or not."""


def test_the_types_of_all_public_names_are_known():
    names, wrong = unknown("tierstore", ROOT)
    assert names > 1000
    assert wrong.keys() <= UNTYPED_BASES


def test_a_name_without_a_type_is_found(tmp_path):
    package = tmp_path / "typed"
    package.mkdir()
    (package / "py.typed").touch()
    (package / "__init__.py").write_text("def known() -> int: ...\ndef unknown(a): ...\n")
    names, wrong = unknown("typed", tmp_path)
    assert (names, list(wrong)) == (2, ["typed.unknown"])


def test_pyright_sees_the_types_of_rows():
    done = pyright("--pythonpath", sys.executable)
    assert done.returncode == 0, done.stdout
