"""The comparison of two trees: what it calls slower, and how it runs them."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
ROUNDS = 9
FAKE = """
import sys
from pathlib import Path
import tierstore
from figures import Figure, give
from common import arguments
options = arguments("fake", rows=1).parse_args()
seconds = float((Path(tierstore.__file__).parent / "seconds").read_text())
with open(Path(__file__).with_name("runs"), "a") as runs:
    print(tierstore.__file__, file=runs)
give(options, {"read": Figure(seconds * options.rows), "launch": Figure(seconds, "cuda")})
"""


@pytest.fixture(scope="module")
def tool() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("compare_trees")


def series(seed: int, ratio: float, noise: float, drift: float = 0) -> dict[str, np.ndarray]:
    """Return rounds of a machine with noise and with a speed that drifts."""
    rng = np.random.default_rng(seed)
    speed = 1 + drift * np.linspace(0, 1, ROUNDS)
    found = {
        name: 0.01 * speed * (1 + noise * rng.standard_normal(ROUNDS))
        for name in ("old", "new", "again")
    }
    found["new"] *= ratio
    return found


def test_eight_percent_are_found_where_the_machine_is_steady(tool: Any) -> None:
    for seed in range(30):
        verdict = tool.judged(series(seed, 1.08, 0.01))
        assert verdict.slower and str(verdict) == "SLOWER"
        assert verdict.spread[0] < 1.08 < verdict.spread[1] or abs(verdict.ratio - 1.08) < 0.03
        assert 1 <= verdict.equal < tool.ALLOWED


@pytest.mark.slow
def test_equal_trees_are_rarely_called_slower(tool: Any) -> None:
    """Whatever the noise: 2.5 % of the ratios of equal trees lie above the spread of the old."""
    for noise in (0.01, 0.05, 0.2):
        called = [tool.judged(series(seed, 1.0, noise)).slower for seed in range(60)]
        assert sum(called) <= 5, noise


def test_a_drift_of_the_machine_is_no_slowdown(tool: Any) -> None:
    for seed in range(30):
        assert not tool.judged(series(seed, 1.0, 0.01, drift=0.8)).slower


def test_a_spread_that_hides_a_slowdown_is_named(tool: Any) -> None:
    verdict = tool.judged(series(3, 1.0, 0.3))
    assert verdict.equal > tool.ALLOWED and "spread" in str(verdict)


def test_the_same_rounds_have_the_same_verdict(tool: Any) -> None:
    rounds = series(5, 1.03, 0.1)
    assert tool.judged(rounds) == tool.judged(rounds)


@pytest.fixture
def fakes(tmp_path: Path) -> dict[str, Path]:
    """Return two trees whose library only knows how slow it is, and a folder of benchmarks."""
    for name, seconds in (("old", 1.0), ("new", 1.5)):
        package = tmp_path / name / "tierstore"
        package.mkdir(parents=True)
        rest = f"__path__.append({str(ROOT / 'tierstore')!r})\n"
        (package / "__init__.py").write_text(rest)
        (package / "seconds").write_text(str(seconds))
    benchmarks = tmp_path / "benchmarks"
    benchmarks.mkdir()
    for name in ("figures", "common", "trees"):
        (benchmarks / f"{name}.py").write_bytes((ROOT / f"benchmarks/{name}.py").read_bytes())
    (benchmarks / "bench_fake.py").write_text(FAKE)
    return {"old": tmp_path / "old", "new": tmp_path / "new", "benchmarks": benchmarks}


@pytest.mark.slow
def test_trees_take_turns_and_their_figures_are_told_apart(
    tool: Any, fakes: dict[str, Path]
) -> None:
    benchmarks = fakes.pop("benchmarks")
    found, clocks = tool.compared(["fake --rows 3"], fakes, 2, benchmarks)
    assert found["fake: read"] == {"old": [3.0] * 2, "new": [4.5] * 2, "again": [3.0] * 2}
    assert found["fake: launch"] == {"old": [1.0] * 2, "new": [1.5] * 2, "again": [1.0] * 2}
    assert clocks == {"fake: read": "processor", "fake: launch": "cuda"}
    ran = [Path(line).parents[1].name for line in (benchmarks / "runs").read_text().split()]
    assert sorted(ran[:2]) == ["new", "old"]  # discarded
    assert ran[2:].count("old") == 2 * ran[2:].count("new") == 4
    printed = tool.table({name: tool.judged(each) for name, each in found.items()}, clocks)
    assert printed.count("SLOWER") == 2 and "1.500" in printed


@pytest.mark.slow
def test_a_library_of_elsewhere_is_not_measured(tool: Any, fakes: dict[str, Path]) -> None:
    (fakes["new"] / "tierstore/__init__.py").unlink()
    (fakes["new"] / "tierstore").rename(fakes["new"] / "gone")
    (fakes["new"] / "tierstore").symlink_to(fakes["old"] / "tierstore")
    benchmarks = fakes.pop("benchmarks")
    with pytest.raises(tool.CannotRunError, match="not that of"):
        tool.compared(["fake"], fakes, 1, benchmarks)


def test_a_benchmark_that_fails_or_gives_no_figures_is_named(
    tool: Any, fakes: dict[str, Path]
) -> None:
    benchmarks = fakes.pop("benchmarks")
    with pytest.raises(tool.CannotRunError, match="unrecognized arguments: --nonsense"):
        tool.compared(["fake --nonsense"], fakes, 1, benchmarks)
    (benchmarks / "bench_mute.py").write_text("")
    with pytest.raises(tool.CannotRunError, match=r"bench_mute\.py gives no figures"):
        tool.compared(["mute"], fakes, 1, benchmarks)


def test_commits_are_checked_out_and_go_again(tool: Any, tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        names = ["-c", "user.name=n", "-c", "user.email=e@localhost"]
        command = ["git", "-C", str(tmp_path / "r"), *names, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    package = tmp_path / "r/tierstore"
    package.mkdir(parents=True)
    git("init", "-q")
    for text in ("first", "second"):
        (package / "__init__.py").write_text(f"# {text}\n")
        git("add", ".")
        git("commit", "-qm", text)
    wanted = {"old": "HEAD~1", "new": str(tmp_path / "r")}
    with tool.checked_out(wanted, tmp_path / "r") as trees:
        assert (trees["old"] / "tierstore/__init__.py").read_text() == "# first\n"
        assert trees["new"] == tmp_path / "r"
        assert tool.commit_of(trees["old"]) == git("rev-parse", "HEAD~1").strip()
        (package / "__init__.py").write_text("# third\n")
        assert tool.commit_of(trees["new"]) == git("rev-parse", "HEAD").strip() + " + changes"
    assert not trees["old"].exists() and package.exists()
    assert len(git("worktree", "list").splitlines()) == 1
    with (
        pytest.raises(tool.CannotRunError, match="no-such-commit"),
        tool.checked_out({"old": "HEAD", "new": "no-such-commit"}, tmp_path / "r"),
    ):
        pass
    assert len(git("worktree", "list").splitlines()) == 1


def test_too_few_rounds_and_unknown_benchmarks_are_refused(
    tool: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in (["--rounds", "8"], ["no_such_thing"]):
        with pytest.raises(SystemExit) as stopped:
            tool.main(["HEAD", "HEAD", *wrong])
        assert stopped.value.code == 2 and wrong[-1] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["commit", "host_read", "cold_reads", "recovery", "small_steps"])
@pytest.mark.nightly
def test_the_benchmarks_of_the_host_give_figures(name: str, tmp_path: Path, tool: Any) -> None:
    from tests.test_benchmarks import TINY

    assert name in tool.HOST
    found = tool.measured(
        ROOT / f"benchmarks/bench_{name}.py", [*TINY[f"bench_{name}"], "--repeat", "2"], ROOT
    )
    assert found
    assert all(each["seconds"] > 0 and each["clock"] == "processor" for each in found.values())


def taken_table() -> Any:
    spec = importlib.util.spec_from_file_location("taken", ROOT / "docs/generate_benchmarks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_says_when_each_result_was_taken() -> None:
    module = taken_table()
    assert module.page() == module.PAGE.read_text(encoding="utf-8"), "run make docs"
    assert len(module.pictures()) == 5
    for path, picture in module.pictures().items():
        assert path.read_text(encoding="utf-8") == picture, "run make docs"
        assert picture.count("<rect") == len(re.findall(r'class="(ours|peer|limit)"', picture)) > 2
    for name, each in module.results().items():
        assert len(each["commit"].split()[0]) == 40, name
        assert 1 <= each["format"] <= module.FORMAT, name


def test_results_from_before_two_changes_of_format_are_marked() -> None:
    module = taken_table()
    each = {"commit": "0" * 40, "format": 3, "core": None}
    assert module.OUT_OF_DATE not in module.table({"a": each}, 4)
    assert module.OUT_OF_DATE in module.table({"a": each}, 5)
    changed = each | {"commit": "0" * 40 + " + changes", "core": "abc"}
    assert "with changes" in module.table({"a": changed}, 4)


def test_an_answer_carries_what_it_was_taken_of() -> None:
    code = "import sys, json; sys.path.insert(0, 'benchmarks'); import common; "
    code += "print(json.dumps(common.taken()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout).keys() == {"commit", "format", "core"}
