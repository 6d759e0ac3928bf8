"""Every example runs on a user's small file, goes on where it ended, and prints what it reached."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
SHARED = {"interactions"}
SCRIPTS = {path.stem for path in (ROOT / "examples").glob("*.py")} - SHARED
FIGURES = {
    "knowledge_graph": r'"MRR": ([01]\.\d+)',
    "light_gcn": r'"recall@20": ([01]\.\d+)',
    "matrix_factorization": r'"recall@20": ([01]\.\d+)',
    "word2vec": r"held-out words: (\d+\.\d+)",
}


def file_for(name: str, folder: Path) -> Path:
    """Write data of the kind that an example reads."""
    rng = np.random.default_rng(1)
    path = folder / "data.txt"
    if name == "word2vec":
        words = [f"word{rank}" for rank in rng.zipf(1.6, 4000) if rank < 50]
        path.write_text(" ".join(words))
    elif name in ("matrix_factorization", "light_gcn"):
        clicks = {(user, item) for user, item in rng.integers(0, 30, (600, 2)).tolist()}
        path.write_text("".join(f"u{user},i{item}\n" for user, item in sorted(clicks)))
    else:
        facts = [f"e{a}\tr{a % 3}\te{(a + b) % 40}\n" for a in range(40) for b in (1, 2, 5)]
        path.write_text("".join(facts))
    return path


def run(name: str, *given: object) -> str:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_here() -> None:
    assert set(FIGURES) == SCRIPTS


LONGEST = pytest.param("word2vec", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [LONGEST, *sorted(FIGURES.keys() - {"word2vec"})])
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    data = file_for(name, tmp_path)
    given: list[object] = ["--data", data, "--device", "cpu"]
    if name == "word2vec":
        given += [tmp_path / "demo", "--steps", 5]
    else:
        given += ["--store", tmp_path / "kept.tier", "--epochs", 1]
    printed = run(name, *given)
    found = re.search(FIGURES[name], printed.splitlines()[-1])
    assert found, printed
    assert float(found[1]) > 0
