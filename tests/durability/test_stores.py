"""Stores of every format there was, each opened by this version (row 42)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.durability.crash import change
from tests.durability.stores import STORES, described
from tests.pairs import pairs
from tierstore._disk.manifest import FORMAT
from tierstore.budget import Budget

NONE = Budget(host=0)
KEPT = sorted(path.with_suffix("") for path in STORES.glob("*/*.json"))


def test_this_format_has_stores() -> None:
    assert {path.name for path in KEPT if path.parent.name == str(FORMAT)} == {
        "whole",
        "folding",
        "counted",  # whose manifests say what each version wrote
    }


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
@pytest.mark.fault(42)
def test_every_version_reads_as_it_was_written(kept: Path) -> None:
    contents = json.loads(kept.with_suffix(".json").read_text())
    with tierstore.open(kept, budget=NONE) as reader:
        assert [str(each.version) for each in reader.versions()] == list(contents)
        assert reader.verify().ok
    for version, content in contents.items():
        with tierstore.open(kept, version=int(version), budget=NONE) as reader:
            assert described(reader) == content


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_writer_goes_on(kept: Path, tmp_path: Path) -> None:
    newest = list(json.loads(kept.with_suffix(".json").read_text()).values())[-1]
    shutil.copytree(kept, tmp_path / "s")
    with tierstore.open(tmp_path / "s", "r+", budget=NONE) as writer:
        assert described(writer) == newest
        writer.fold()
        assert described(writer) == newest
        change(writer)
        assert writer.commit() == newest["version"] + 1
        assert writer.verify().ok
    with tierstore.open(tmp_path / "s") as reader:
        assert described(reader) != newest


@pytest.mark.variants(3)
@pytest.mark.parametrize("slots", [None, 1, 4])
@pytest.mark.parametrize("number", [path.parent.name for path in KEPT if path.name == "whole"])
def test_tables_of_a_kept_store_share_tiers(number: str, slots: int | None, tmp_path: Path) -> None:
    kept = STORES / number / "whole"
    newest = list(json.loads(kept.with_suffix(".json").read_text()).values())[-1]
    shutil.copytree(kept, tmp_path / "s")
    rng = np.random.default_rng(4)
    with tierstore.open(tmp_path / "s", "r+", budget=Budget(host_rows=slots)) as writer:
        assert [len(space.tables) for space in writer.info().spaces] == [3, 1]
        assert described(writer) == newest
        written = {}
        for name, table in writer.items():
            rows = rng.standard_normal(table.shape).astype(np.float32)
            table.write(np.arange(table.rows), rows)
            written[name] = table.read(np.arange(table.rows))
        writer.commit()
        assert writer.verify().ok
    with tierstore.open(tmp_path / "s") as reader:
        for name, rows in written.items():
            assert np.array_equal(reader[name].read(np.arange(len(rows))), rows)


@pytest.mark.variants(1, 3)
@pairs(together=1, kept=KEPT, slots=[1, 4, 16])
def test_tables_of_a_kept_store_train_as_one(kept: Path, slots: int, tmp_path: Path) -> None:
    """A collection trains them to the bits of a layer a table; both restart from what is kept."""
    torch = pytest.importorskip("torch")
    from tierstore.nn import TieredEmbedding, TieredEmbeddingCollection
    from tierstore.optim import TieredOptimizer

    result = []
    for together in (True, False):
        path = tmp_path / f"{together}"
        shutil.copytree(kept, path)
        rng = torch.Generator().manual_seed(slots)
        for _ in range(2):
            with tierstore.open(path, "r+", budget=Budget(host_rows=slots)) as store:
                names = [name for name, table in store.items() if table.dtype == np.float32]
                if together:
                    layers: list[torch.nn.Module] = [
                        TieredEmbeddingCollection(store, {n: n for n in names})
                    ]
                else:
                    layers = [TieredEmbedding(store[name]) for name in names]
                opt = TieredOptimizer(torch.optim.Adagrad, layers, lr=0.1)
                for _ in range(3):
                    ids = {n: torch.randint(store[n].rows, (8,), generator=rng) for n in names}
                    if together:
                        found = list(layers[0](ids).values())
                    else:
                        found = [layer(ids[n]) for layer, n in zip(layers, names, strict=True)]
                    sum(each.float().square().sum() for each in found).backward()
                    opt.step()
                    opt.zero_grad()
                store.commit()
        with tierstore.open(path) as reader:
            assert reader.verify().ok
            result.append({name: reader[name].read(np.arange(reader[name].rows)) for name in names})
    for name, rows in result[0].items():
        assert rows.tobytes() == result[1][name].tobytes(), name
