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


MISTAKES = """\
import numpy as np
import numpy.typing as npt

import tierstore

tierstore.opne("a.tier")
tierstore.open_or_create("a.tier", {}, bugdet="1MiB")


def rows_of(lease: tierstore.Leese) -> None: ...


def use(store: tierstore.Store, lease: tierstore.Lease, ids: npt.NDArray[np.int64]) -> None:
    store["item"].reed(ids)
    store["item"].append(ids)
    store.commit(step="one")
    store.fold(progress=tierstore)
    report: tierstore.VerifyReport = store.verify()
    report.okay
    pending: tierstore.PendingCommit = store.commit_async()
    rows: npt.NDArray[np.floating] = store["item"].read(ids, ["weight", "sum"])
"""
"""One mistake in each of the lines 6, 7, 10, 14 to 17, 19 and 21."""
WRONG = [6, 7, 10, 14, 15, 16, 17, 19, 21]


def test_pyright_finds_mistakes(tmp_path):
    (tmp_path / "mine.py").write_text(MISTAKES)
    done = pyright("--pythonpath", sys.executable, "--outputjson", str(tmp_path / "mine.py"))
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}
    assert sorted(errors) == WRONG, found


def test_mypy_finds_mistakes(tmp_path):
    (tmp_path / "mine.py").write_text(MISTAKES)
    options = ("--config-file=", "--follow-imports=silent", "--ignore-missing-imports")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(tmp_path / "mine.py")],
        env={**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    assert sorted({*map(int, found)}) == WRONG, done.stdout
