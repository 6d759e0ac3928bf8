"""Every example runs on a user's small file, goes on where it ended, and prints what it reached."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tierstore

pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
SCRIPTS = {path.stem for path in (ROOT / "examples").glob("*.py")}
FIGURES = {
    "click_model": r"held-out impressions: (0\.\d+)",
    "knowledge_graph": r"MRR on \d+ held-out facts: (0\.\d+)",
    "matrix_factorization": r"held-out clicks, model: ([01]\.\d+)",
    "word2vec": r"held-out words: (\d+\.\d+)",
}


def file_for(name: str, folder: Path) -> Path:
    """Write data of the kind that an example reads."""
    rng = np.random.default_rng(1)
    path = folder / "data.txt"
    if name == "word2vec":
        words = [f"word{rank}" for rank in rng.zipf(1.6, 4000) if rank < 50]
        path.write_text(" ".join(words))
    elif name == "matrix_factorization":
        clicks = {(user, item) for user, item in rng.integers(0, 30, (600, 2)).tolist()}
        path.write_text("".join(f"u{user},i{item}\n" for user, item in sorted(clicks)))
    elif name == "click_model":
        path = folder / "train.txt.gz"
        path.write_bytes(gzip.compress(impressions(800).encode()))
    else:
        facts = [f"e{a}\tr{a % 3}\te{(a + b) % 40}\n" for a in range(40) for b in (1, 2, 5)]
        path.write_text("".join(facts))
    return path


def impressions(count: int) -> str:
    """Lines as Criteo publishes them, in which one field of five is missing."""
    rng = np.random.default_rng(2)
    lines = []
    for label in rng.integers(0, 2, count):
        numbers = [str(number) for number in rng.integers(-3, 5000, 13)]
        texts = [f"{text:08x}" for text in rng.zipf(1.3, 26) % 2**32]
        missing = rng.random(39) < 0.2
        fields = np.where(missing, "", numbers + texts)
        lines.append("\t".join([str(label), *fields]) + "\n")
    return "".join(lines)


def run(name: str, *given: object) -> str:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_here() -> None:
    assert set(FIGURES) == SCRIPTS


# 3,400 rows of 128 bytes, a sixth of which fit into memory.
CLICKS = ["--scale", "1e-4", "--batch", "64", "--host-bytes", "100kB", "--commit-every", "2"]

LONGEST = pytest.param("word2vec", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [LONGEST, *sorted(FIGURES.keys() - {"word2vec"})])
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    data = file_for(name, tmp_path)
    given: list[object] = ["--data", data, "--device", "cpu"]
    if name == "word2vec":
        given += [tmp_path / "demo", "--steps", 5]
    elif name == "click_model":
        given += CLICKS
    else:
        given += ["--store", tmp_path / "kept.tier", "--epochs", 1]
    printed = run(name, *given)
    found = re.search(FIGURES[name], printed.splitlines()[-1])
    assert found, printed
    assert float(found[1]) > 0


def test_a_file_of_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(impressions(2) + "1\t2\n")
    with pytest.raises(AssertionError, match="line 3: 2 columns, not 40"):
        run("click_model", "--data", path, "--device", "cpu", *CLICKS)


def test_the_click_model_is_that_of_plain_torch() -> None:
    printed = run("click_model", "--samples", 1200, "--compare", "--device", "cpu", *CLICKS)
    assert re.search(
        r"^plain torch: 0\.0 less AUC, 0 of [\d,]+ rows differ$", printed, re.MULTILINE
    )


@pytest.mark.slow
def test_a_killed_click_model_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    given = ["--samples", "2000", "--device", "cpu", *CLICKS]
    whole = run("click_model", "--store", tmp_path / "whole.tier", *given)
    given += ["--store", str(tmp_path / "killed.tier")]
    command = [sys.executable, str(ROOT / "examples/click_model.py"), *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step 8:"))
        process.kill()
    resumed = run("click_model", *given, "--resume")
    steps = {line for line in whole.splitlines() if line.startswith("step")}
    gone_on = {line for line in resumed.splitlines() if line.startswith("step")}
    assert gone_on < steps
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]
    assert contents(tmp_path / "killed.tier") == contents(tmp_path / "whole.tier")
    again = run("click_model", *given, "--resume")
    assert again.splitlines()[1:] == resumed.splitlines()[-1:]


def contents(path: Path) -> dict[str, bytes]:
    """Return what a store holds: every field of its tables, and the model in its payload."""
    with tierstore.open(path) as store:
        rows = {
            f"{name}.{field}": store[name].read(np.arange(store[name].rows), field).tobytes()
            for name in store
            for field in store[name].fields
        }
        model = store.payload["model"].state_dict()
        return rows | {name: tensor.numpy().tobytes() for name, tensor in model.items()}
