"""Every example runs on a user's small file, goes on where it ended, and prints what it reached."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
SHARED = {"command_line", "interactions"}
SHORT = {
    "minimal": r"step 100: loss (0\.\d+), rows in minimal.npy: 10000",
    "best_version": r"best of \d+ epochs: (0\.\d+) at step",
    "from_parquet": r"\['key', 'weight'\] (1002)",
    "gnn_features": r"loss (0\.\d+); \d+% of 61,440 features",
    "hashed_clicks": r"loss (0\.\d+) over \d+ keys",
    "loader_workers": r"step 20: loss (0\.\d+), \d+% of the rows",
    "many_gpus": r"1 ranks, version \d+, loss (\d\.\d+)",
    "new_words": r"(0\.\d+|1\.00) of the last day's words are nearest",
    "server": r"nearest to row 7: \[7, \d+, \d+\]; served (\d+) versions",
    "three_tiers": r"loss (0\.\d+)",
    "with_accelerate": r"back at the first of (\d) versions",
    "with_lightning": r"loss (0\.\d+) in \S*checkpoints",
}
"""What each short example prints last: less than 60 lines to copy, without arguments."""
SCRIPTS = {path.stem for path in (ROOT / "examples").glob("*.py")} - SHARED
FIGURES = {
    "click_model": r"held-out impressions: (0\.\d+)",
    "knowledge_graph": r'"MRR": ([01]\.\d+)',
    "light_gcn": r'"recall@20": ([01]\.\d+)',
    "matrix_factorization": r'"recall@20": ([01]\.\d+)',
    "ngram_memory": r'"bits a byte": (\d+\.\d+)',
    "word2vec": r"held-out words: (\d+\.\d+)",
}


def file_for(name: str, folder: Path) -> Path:
    """Write data of the kind that an example reads."""
    rng = np.random.default_rng(1)
    path = folder / "data.txt"
    if name == "word2vec":
        words = [f"word{rank}" for rank in rng.zipf(1.6, 4000) if rank < 50]
        path.write_text(" ".join(words))
    elif name == "ngram_memory":
        path.write_bytes(
            b"".join(part.read_bytes() for part in sorted(Path(ROOT, "docs").glob("*.md")))[:40_000]
        )
    elif name in ("matrix_factorization", "light_gcn"):
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


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return `run` without a process: each night every example runs in one of its own."""

    def run(name: str, *given: object) -> str:
        path = str(ROOT / "examples" / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *map(str, given)])
        monkeypatch.syspath_prepend(ROOT / "examples")
        names = runpy.run_path(path, run_name="__main__")
        for each in names.values():
            if isinstance(each, tempfile.TemporaryDirectory):
                each.cleanup()  # as the end of the process does
        printed: str = capsys.readouterr().out
        return printed

    return run


def test_every_example_is_here() -> None:
    assert set(FIGURES) | set(SHORT) == SCRIPTS
    for name in SHORT:
        lines = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()
        assert len(lines) <= (25 if name == "minimal" else 60)


IMPORTED = {"with_accelerate", "with_lightning"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(SHORT))
def test_the_short_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in IMPORTED:
        pytest.importorskip(name.removeprefix("with_"), reason="the library is not installed")
    monkeypatch.chdir(tmp_path)
    found = re.search(SHORT[name], run(name).splitlines()[-1])
    assert found
    assert float(found[1]) > 0


@pytest.mark.slow
def test_the_minimal_example_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [run_here("minimal").split(":")[0] for _ in range(2)] == ["step 100", "step 200"]


@pytest.mark.nightly
def test_two_ranks_run_the_short_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command = [*torchrun, str(ROOT / "examples/many_gpus.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout


@pytest.mark.slow
def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells, in order, in one namespace; they print what the file shows."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples/tour.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells)
    drawn = [cell for cell in notebook["cells"] if "attachments" in cell]
    assert ["hits.svg" in cell["attachments"] for cell in drawn] == [True]
    for cell in (cells[0], cells[0], cells[1], *cells):  # a cell can be run again, in one kernel
        capsys.readouterr()
        exec(compile("".join(cell["source"]), "cell", "exec"), names)
        shown = [
            "".join(each["text"]) for each in cell["outputs"] if each["output_type"] == "stream"
        ]
        labels = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
        assert labels == [line.partition(":")[0] for line in "".join(shown).splitlines()]
    assert (tmp_path / "hits.svg").exists()
    assert np.load("tour.npy").shape == (50_000, 32)


# 3,400 rows of 128 bytes, a sixth of which fit into memory.
CLICKS = ["--scale", "1e-4", "--batch", "64", "--budget", "100kB", "--every", "2"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(FIGURES))
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    data = file_for(name, tmp_path)
    given: list[object] = ["--data", data, "--device", "cpu"]
    if name == "word2vec":
        given += ["--store", tmp_path / "demo/words.tier", "--epochs", 1]
    elif name == "click_model":
        given += CLICKS
    else:
        given += ["--store", tmp_path / "kept.tier", "--epochs", 1]
    printed = run(name, *given)
    found = re.search(FIGURES[name], printed.splitlines()[-1])
    assert found, printed
    assert float(found[1]) > 0


@pytest.mark.nightly
def test_ranks_train_the_model_of_one_process(tmp_path: Path) -> None:
    data, stores = file_for("click_model", tmp_path), [tmp_path / name for name in ("one", "two")]
    given = ["--data", str(data), "--device", "cpu", *CLICKS]
    one = run("click_model", *given, "--store", stores[0])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    script = str(ROOT / "examples" / "click_model.py")
    for again in (False, True):
        command = [*torchrun, script, *given, "--store", str(stores[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        found = [re.findall(FIGURES["click_model"], printed) for printed in (one, done.stdout)]
        assert len(found[1]) == 1
        assert float(found[0][0]) == pytest.approx(float(found[1][0]), abs=0.02)
        if not again:
            assert "committed" in done.stdout
    with tierstore.open(stores[0]) as plain, tierstore.open(stores[1]) as ranks:
        assert plain.step == ranks.step
        for name in plain:
            np.testing.assert_allclose(plain[name][:], ranks[name][:], atol=2e-3)


def published(name: str, folder: Path) -> Path:
    """Write a folder of the files that a benchmark is published in."""
    rng = np.random.default_rng(2)
    if name == "knowledge_graph":
        facts = np.unique(rng.integers(0, [40, 3, 40], (600, 3)), axis=0)
        lines = [f"/m/{head}\t/r#{by}\t/m/{tail}\n" for head, by, tail in rng.permutation(facts)]
        ends = {"train": slice(400), "valid": slice(400, 450), "test": slice(450, None)}
        parts = {part: lines[end] for part, end in ends.items()}
    else:
        clicks = rng.permuted(np.tile(np.arange(40), (50, 1)), axis=1)
        parts = {"train": [], "test": []}
        for user, items in enumerate(clicks):
            for part, those in (
                ("train", items[: 3 + user % 9]),
                ("test", items[12 : 12 + user % 5]),
            ):
                parts[part].append(" ".join(map(str, [user, *those])) + "\n")
    for part, lines in parts.items():
        (folder / f"{part}.txt").write_text("".join(lines))
    return folder


def figures(printed: str) -> tuple[list[str], dict[str, Any]]:
    """Return the lines of the epochs and the figures at the end, without what a clock says."""
    *lines, last = printed.splitlines()
    found = json.loads(last)
    del found["minutes"], found["budget"]
    return [re.sub(r"[\d.]+ min", "", line) for line in lines], found


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["knowledge_graph", "light_gcn", "matrix_factorization"])
def test_a_tenth_of_the_rows_in_memory_gives_the_same_figures(name: str, tmp_path: Path) -> None:
    data = published(name, tmp_path)
    given = ["--data", data, "--device", "cpu", "--dim", 8, "--batch", 64]
    given += ["--epochs", 3, "--every", 1]
    tenth, all_of_them = (figures(run(name, *given, "--budget", each)) for each in ("10%", "100%"))
    assert tenth == all_of_them
    assert len(tenth[0]) == 3


NGRAMS = ["--device", "cpu", "--rows", 5000, "--width", 32, "--layers", 1, "--every", 5]


@pytest.mark.nightly
def test_an_ngram_memory_helps_and_its_budget_changes_nothing(tmp_path: Path) -> None:
    data = file_for("ngram_memory", tmp_path)
    given = ["--data", data, *NGRAMS, "--epochs", 2]
    tenth, whole, plain = (
        figures(run("ngram_memory", *given, *more))
        for more in (["--budget", "5%"], ["--budget", "100%"], ["--without-memory"])
    )
    assert tenth == whole
    assert tenth[1]["steps"] == plain[1]["steps"] > 30
    assert tenth[1]["bits a byte"] < plain[1]["bits a byte"]


@pytest.mark.nightly
@pytest.mark.parametrize("tokens", [[], ["--words", 500, "--context", 8, "--deterministic"]])
def test_an_ngram_memory_goes_on_after_a_kill(tmp_path: Path, tokens: list[object]) -> None:
    data = file_for("ngram_memory", tmp_path)
    given = ["--data", data, *NGRAMS, *tokens, "--state-dtype", "bfloat16"]
    expected = figures(run("ngram_memory", *given))
    given += ["--store", tmp_path / "kept.tier"]
    script = str(ROOT / "examples" / "ngram_memory.py")
    command = [sys.executable, script, *map(str, given)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            if line.startswith("step 10 "):
                killed.kill()
    lines, found = figures(run("ngram_memory", *given))
    assert re.fullmatch(r"continues from step \d+", lines[0])
    assert found == expected[1]
    assert lines[1:] == expected[0][-len(lines[1:]) :]


def shared(name: str) -> Any:
    """Return a module that examples share."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def interactions() -> Any:
    """Return the module that recommenders share."""
    return shared("interactions")


COMMON = {"data", "store", "epochs", "budget", "seed", "device"}


def test_the_long_examples_share_a_command_line() -> None:
    parser = shared("command_line").options("A text.", data="a file", epochs=3, budget="10%")
    assert set(vars(parser.parse_args([]))) == COMMON
    assert all(action.help for action in parser._actions)
    for name in FIGURES:
        text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        assert "command_line.options(" in text
        assert not COMMON & set(re.findall(r'add_argument\("--([\w-]+)"', text)), name
        assert sorted(each for each in COMMON if f"given.{each}" not in text) == [], name


def test_a_budget_is_a_size_or_a_share_of_the_rows() -> None:
    memory = shared("command_line").memory
    assert memory("64MiB", {"item": 7}) == "64MiB"
    kept = {"item": 1, "user": 101}
    expected = tierstore.Budget(host_rows=kept, gpu_rows=kept)
    assert memory("10%", {"item": 7, "user": 1001}) == expected


def test_recall_is_what_a_loop_over_users_finds(interactions: Any, tmp_path: Path) -> None:
    data = interactions.read(published("light_gcn", tmp_path))
    scores = torch.randn(data.users, data.items, generator=torch.Generator().manual_seed(1))
    found = []
    for user in range(data.users):
        known, wanted = (
            set(each[each[:, 0] == user, 1].tolist()) for each in (data.train, data.test)
        )
        assert not known & wanted
        best = [
            item for item in scores[user].argsort(descending=True).tolist() if item not in known
        ]
        if wanted:
            found.append(len(wanted & set(best[:5])) / len(wanted))
    recall = data.recall(lambda users: scores[users], k=5, users_at_once=7)
    assert recall == pytest.approx(np.mean(found))
    assert 0 < recall < 1


def test_negatives_are_not_known(interactions: Any) -> None:
    rng = np.random.default_rng(3)
    torch.manual_seed(3)
    data = interactions.Interactions(rng.integers(0, [30, 500], (900, 2)), np.array([[0, 499]]))
    users = data.train[:, :1].expand(-1, 50)
    drawn = data.negatives(users)
    known = set(map(tuple, data.train.tolist()))
    pairs = torch.stack([users, drawn], 2).reshape(-1, 2).tolist()
    assert not known & set(map(tuple, pairs))
    assert len(drawn.unique()) == data.items


def test_users_are_drawn_uniformly_and_their_items_too(interactions: Any) -> None:
    torch.manual_seed(4)
    train = np.array([[0, 0], [1, 0], [1, 1], [1, 2], [2, 2]])
    data = interactions.Interactions(train, np.array([[3, 1]]))
    drawn = torch.cat([data.of_users() for _ in range(2000)])
    pairs, counts = drawn.unique(dim=0, return_counts=True)
    assert pairs.tolist() == train.tolist()
    share = counts / len(drawn)
    torch.testing.assert_close(
        share, torch.tensor([3.0, 1.0, 1.0, 1.0, 3.0]) / 9, atol=0.02, rtol=0
    )


def test_filtered_ranks_are_what_a_loop_over_facts_finds(tmp_path: Path, run_here: Any) -> None:
    data, path = published("knowledge_graph", tmp_path), tmp_path / "kept.tier"
    given = ["--data", data, "--store", path, "--device", "cpu", "--dim", 8, "--epochs", 2]
    found = figures(run_here("knowledge_graph", *given, "--negatives", 0))[1]
    parts = [np.loadtxt(data / f"{part}.txt", np.str_, comments=None) for part in ("train", "test")]
    parts.append(np.loadtxt(data / "valid.txt", np.str_, comments=None))
    with tierstore.open(path) as store:
        entities, links = (
            np.asarray(store[name].read(np.arange(store[name].rows))).view(np.complex64)
            for name in ("entity", "relation")
        )
    names = np.unique(np.concatenate(parts)[:, [0, 2]])
    relations = np.unique(np.concatenate(parts)[:, 1])
    both = []
    for part in parts:
        head, tail = (np.searchsorted(names, part[:, column]) for column in (0, 2))
        by = np.searchsorted(relations, part[:, 1])
        both.append(
            np.concatenate(
                [np.stack([head, by, tail], 1), np.stack([tail, by + len(relations), head], 1)]
            )
        )
    every, ranks = np.concatenate(both), []
    for one, by, other in both[1]:
        scores = ((entities[one] * links[by]) * entities.conj()).sum(1).real
        score = scores[other]
        scores[every[(every[:, :2] == (one, by)).all(1), 2]] = -np.inf
        ranks.append(1 + (scores > score).sum() + (scores == score).sum() / 2)
    assert found["MRR"] == pytest.approx(np.mean(1 / np.array(ranks)), rel=1e-3)
