"""Scripts written for SpeedTorch run with one line changed, and train as plain torch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

SCRIPTS = Path(__file__).with_name("scripts")
ORIGINAL, CHANGED = "import SpeedTorch\n", "import tierstore.speedtorch as SpeedTorch\n"

pytestmark = pytest.mark.filterwarnings("ignore:.*are copies of others", "ignore:.*Sparse inv")


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    """Scripts train on the GPU where they find one."""
    return str(request.param)


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str) -> dict[str, Any]:
    """Run a script with its import changed; return its variables."""
    path = SCRIPTS / f"{name}.py"
    text = path.read_text()
    assert text.count("SpeedTorch\n") == 1
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text.replace(ORIGINAL, CHANGED), str(path), "exec"), names)
    return names


def plain_losses(names: dict[str, Any], model: Any, optimizer: Any, steps: Any) -> list[float]:
    """Train whole embeddings on the same batches."""
    losses = []
    for batch in steps:
        loss = model(*(torch.from_numpy(ids).to(names["device"]) for ids in batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "rows", "model", "optimizer"),
    [("lit2vec2", "books", "Books", "Adagrad"), ("research2vec2", "papers", "Papers", "SGD")],
)
def test_the_notebooks_loops(where: str, name: str, rows: str, model: str, optimizer: str) -> None:
    names = run(name)
    assert names["device"] == where
    whole = names[model](names[rows]).to(names["device"])
    for key, values in names["start"].items():
        getattr(whole, key).weight.data.copy_(torch.tensor(values))
    plain = getattr(torch.optim, optimizer)(whole.parameters(), lr=0.1)
    expected = plain_losses(names, whole, plain, names["batches"])
    np.testing.assert_allclose(names["losses"], expected, rtol=1e-4)
    assert np.mean(expected[-5:]) < 0.9 * np.mean(expected[:5])


@pytest.mark.slow
def test_word2vec_with_adamax(where: str, rng: np.random.Generator) -> None:
    """Words come from hidden topics that change slowly, so that neighbours tell of each other."""
    topics = np.repeat(rng.integers(0, 20, 2000), 10)
    np.save("corpus.npy", topics * 5 + rng.integers(0, 5, topics.size))
    names = run("word2vec")
    assert names["device"] == where
    words = np.load("u_embeddings.npy")
    assert words.shape == (100, 16)
    whole = names["SkipGram"](100).to(names["device"])
    torch.nn.init.uniform_(whole.u_embeddings.weight, -0.5 / 16, 0.5 / 16)
    torch.nn.init.zeros_(whole.v_embeddings.weight)
    names["random"].bit_generator.state = np.random.default_rng(7).bit_generator.state
    batches = (names["generate_batch"]() for _ in range(names["steps"]))
    adamax = torch.optim.Adamax(whole.parameters(), lr=names["learning_rate"])
    expected = plain_losses(names, whole, adamax, batches)
    assert abs(names["losses"][0] - expected[0]) < 1e-3
    last, plain = np.mean(names["losses"][-60:]), np.mean(expected[-60:])
    assert plain < 0.6 * expected[0]
    assert abs(last - plain) < 0.03 * plain
