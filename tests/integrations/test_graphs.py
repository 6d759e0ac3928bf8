"""PyG and GraphBolt: tables as features of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierstore
from tierstore.errors import InvalidInputError, UnknownNameError
from tierstore.integrations.graphbolt import TableFeature

NODES, DIM = 300, 6


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tierstore.Store]:
    fields = {
        "x": tierstore.Field(DIM, init=tierstore.normal(std=1, seed=1)),
        "y": tierstore.Field(2, init=tierstore.normal(std=1, seed=2)),
    }
    spec = tierstore.TableSpec(NODES, fields=fields)
    budget = tierstore.Budget(host_rows=50)
    with tierstore.create(tmp_path / "g", {"node": spec}, budget=budget) as made:
        yield made
        made.rollback()


def test_a_field_is_a_graphbolt_feature(store: tierstore.Store) -> None:
    feature = TableFeature(store["node"], "y")
    ids = torch.tensor([5, 3, 5])
    assert torch.equal(feature.read(ids), store["node"].read(ids, "y"))
    assert feature.read().shape == (NODES, 2)
    assert (feature.size(), feature.count()) == (torch.Size([2]), NODES)
    feature.update(torch.ones(2, 2), torch.tensor([1, 2]))
    assert store["node"].read([1, 2], "y").all()
    assert feature.metadata() == {"table": "node", "field": "y"}
    assert TableFeature(store["node"]).size() == torch.Size([DIM])
    with pytest.raises(UnknownNameError):
        TableFeature(store["node"], "z")


def graph() -> tuple[object, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return torch.randint(0, NODES, (2, 3000), generator=made)


@pytest.mark.variants(0, 1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_neighbor_loader_reads_the_rows_of_sampled_nodes(
    store: tierstore.Store, workers: int
) -> None:
    pytest.importorskip("torch_geometric", reason="PyG is not installed")
    from torch_geometric import typing
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    from tierstore.integrations.geometric import TableFeatures

    with tierstore.open(store.path, budget=tierstore.Budget(host_rows=50)) as reader:
        features = TableFeatures({(None, "x"): reader["node"], (None, "y"): (reader["node"], "y")})
        rows = reader["node"].read(torch.arange(NODES), "x")
        assert torch.equal(features.get_tensor(None, "x", index=None), rows)
        assert torch.equal(features.get_tensor(None, "x", index=slice(3, 9)), rows[3:9])
        assert features.get_tensor_size(None, "x") == (NODES, DIM)
        assert features.get_tensor_size(None, "y", index=slice(3, 9)) == (6, 2)
        assert len(features.get_all_tensor_attrs()) == 2
        if not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE):
            pytest.skip("PyG samples neighbors with pyg-lib or torch-sparse; neither is installed")
        whole = Data(edge_index=graph(), num_nodes=NODES)
        loader = NeighborLoader(
            (features, whole), [5, 3], input_nodes=torch.arange(40), batch_size=20,
            num_workers=workers,
        )  # fmt: skip
        for batch in loader:
            assert torch.equal(batch.x, rows[batch.n_id])


def test_features_are_written_and_not_removed(store: tierstore.Store) -> None:
    pytest.importorskip("torch_geometric", reason="PyG is not installed")
    from tierstore.integrations.geometric import TableFeatures

    features = TableFeatures({("node", "x"): store["node"]})
    assert features.put_tensor(torch.ones(2, DIM), "node", "x", index=torch.tensor([4, 5]))
    assert features.update_tensor(torch.zeros(1, DIM), "node", "x", index=torch.tensor([5]))
    assert store["node"].read([4, 5]).sum() == DIM
    with pytest.raises(InvalidInputError, match=r"store\.drop"):
        features.remove_tensor("node", "x", index=None)
    assert features.get_tensor_size("edge", "x") is None
